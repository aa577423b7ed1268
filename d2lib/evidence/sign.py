"""Signed receipts: an in-toto statement in a DSSE envelope, Ed25519, offline; and a policy that says who must sign.

A signature covers bytes, not meaning. Checking one therefore derives the whole statement anew from the receipt and its
ledger line and compares bytes: payload type, statement type, predicate type, subjects and predicate all have to be the
ones that this receipt gives, and nothing may be added.

Formats: DSSE v1 (https://github.com/secure-systems-lab/dsse), in-toto Statement v1
(https://github.com/in-toto/attestation/blob/main/spec/v1/statement.md).
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from d2lib.errors import Refused
from d2lib.evidence.layout import NOTEBOOK, RECEIPT, SIGNATURE
from d2lib.evidence.ledger import LedgerLine, read_ledger
from d2lib.evidence.receipts import Receipt, parse_receipt, to_bytes
from d2lib.files import Record, canonical_json, parse_json, sha256_bytes, write_exclusive, write_json
from d2lib.strict import read_yaml

PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "urn:d2-workbench:receipt:v1"


class PublicKey(Record):
    """An Ed25519 public key; its id is the digest of its canonical form, so that one key cannot have two."""

    keytype: Literal["ed25519"] = "ed25519"
    scheme: Literal["ed25519"] = "ed25519"
    public: str = Field(pattern=r"^[0-9a-f]{64}$")
    """The 32 bytes in hexadecimal."""

    @property
    def keyid(self) -> str:
        """SHA-256 over the key's canonical JSON, as securesystemslib computes it."""
        form = {"keytype": self.keytype, "keyval": {"public": self.public}, "scheme": self.scheme}
        return sha256_bytes(canonical_json(form)).digest


class Requirement(Record):
    """Who signs a phase's receipts: any `threshold` of these keys."""

    keys: tuple[str, ...] = Field(min_length=1)
    threshold: int = Field(default=1, ge=1)

    def met(self, held: Collection[str]) -> bool:
        """Whether enough of the keys have signed; held: ids of the keys whose signatures hold."""
        return len(set(held) & set(self.keys)) >= self.threshold


class Policy(Record):
    """Which keys exist, and which phases' done receipts need whose signatures."""

    keys: tuple[PublicKey, ...] = Field(min_length=1)
    phases: dict[str, Requirement]
    """Phase, or PHASE-JOB for one job only, → requirement. A phase that is not named needs no signature."""

    @property
    def by_id(self) -> dict[str, PublicKey]:
        """Key id → key."""
        return {key.keyid: key for key in self.keys}

    def requirement(self, receipt: Receipt) -> Requirement | None:
        """What a receipt needs, or None."""
        if receipt.status != "done":
            return None
        return self.phases.get(receipt.name) or self.phases.get(receipt.phase)


def read_policy(path: Path) -> Policy:
    """A policy from a YAML or JSON file.

    Raises:
        Refused: unreadable, an unknown or doubled key, a requirement that names a key that is not listed, or a
            threshold that its keys cannot reach.
    """
    policy = Policy.parse(read_yaml(path, what="a policy"), path, message="a policy is malformed")
    if len(policy.by_id) != len(policy.keys):
        raise Refused("a policy lists a key twice", where=path)
    for phase, requirement in policy.phases.items():
        strange = sorted(set(requirement.keys) - policy.by_id.keys())
        if strange:
            raise Refused("a policy requires a key that it does not list", found=strange[0], where=f"{path}: {phase}")
        if requirement.threshold > len(set(requirement.keys)):
            raise Refused(
                "a policy's threshold is out of reach",
                expected=f"at most {len(set(requirement.keys))}",
                found=requirement.threshold,
                where=f"{path}: {phase}",
            )
    return policy


def make_key(private: Path, public: Path) -> PublicKey:
    """Make an Ed25519 key pair; neither file may exist.

    Args:
        private: the private key, PKCS #8 in PEM, mode 0600; it belongs outside every run and repository.
        public: the public key as JSON, as a policy lists it.
    """
    from securesystemslib.signer import CryptoSigner  # type: ignore[attr-defined]

    signer = CryptoSigner.generate_ed25519()
    key = PublicKey(public=signer.public_key.keyval["public"])
    write_exclusive(private, signer.private_bytes, mode=0o600)
    write_json(public, key.model_dump(mode="json"), mode=0o644)
    return key


def statement(receipt: Receipt, line: LedgerLine) -> dict[str, Any]:
    """The in-toto statement of a receipt: a function of the receipt and its ledger line, and of nothing else.

    Subjects are the receipt's two files and every output; the predicate says what ran, with what, on what.
    """
    where = f"{receipt.name}/attempt-{receipt.attempt}"
    digests = {
        f"{where}/{RECEIPT}": line.receipt_json_sha256,
        f"{where}/{NOTEBOOK}": receipt.notebook.receipt_sha256,
        **{output.path: output.sha256 for output in receipt.outputs},
    }
    return {
        "_type": STATEMENT_TYPE,
        "subject": [
            {"name": name, "digest": {"sha256": digest.removeprefix("sha256:")}} for name, digest in digests.items()
        ],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "namespace": receipt.namespace,
            "phase": receipt.phase,
            "job": receipt.job,
            "attempt": receipt.attempt,
            "status": receipt.status,
            "verdict": receipt.verdict,
            "ended": receipt.ended,
            "parameters": receipt.parameters,
            "inputs": [
                {"label": one.label, "path": one.path, "size": one.size, "sha256": one.sha256} for one in receipt.inputs
            ],
            "notebook_sha256": receipt.notebook.source_sha256,
            "d2lib_sha256": receipt.d2lib_sha256,
            "environment_sha256": receipt.environment_sha256,
            "ledger": {"seq": line.seq, "line_sha256": str(sha256_bytes(to_bytes(line)))},
        },
    }


def sign_receipt(folder: Path, private_keys: Sequence[Path]) -> Path:
    """Sign an attempt's receipt as it stands in the ledger; writes receipt.dsse.json beside it, once.

    Args:
        folder: the attempt's folder.
        private_keys: one PEM file (PKCS #8, Ed25519) a signature.

    Raises:
        Refused: the receipt is not the ledger's, a key is none, or the receipt is signed already.
    """
    from securesystemslib.dsse import Envelope

    receipt, line = _recorded(folder)
    envelope = Envelope(canonical_json(statement(receipt, line)), PAYLOAD_TYPE, {})
    if not private_keys:
        raise Refused("no key to sign with", expected="at least one private key")
    for path in private_keys:
        envelope.sign(_signer(path))
    path = folder / SIGNATURE
    write_json(path, envelope.to_dict())
    return path


def _recorded(folder: Path) -> tuple[Receipt, LedgerLine]:
    try:
        data = (folder / RECEIPT).read_bytes()
    except OSError as error:
        raise Refused(
            "no receipt here", expected="an attempt's folder", found=error.strerror, where=folder / RECEIPT
        ) from None
    receipt = parse_receipt(data, where=folder / RECEIPT)
    digest = str(sha256_bytes(data))
    for line in read_ledger(folder.absolute().parent.parent):
        if line.receipt_json_sha256 == digest:
            return receipt, line
    raise Refused("the receipt is not in the ledger", expected=digest, where=folder / RECEIPT)


def _signer(path: Path) -> Any:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key
    from securesystemslib.signer import CryptoSigner  # type: ignore[attr-defined]

    try:
        key = load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise Refused("a private key cannot be read", expected="PKCS #8 in PEM", found=str(error), where=path) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise Refused("not an Ed25519 key", expected="an Ed25519 private key", found=type(key).__name__, where=path)
    return CryptoSigner(key)


def check_envelope(
    data: bytes, receipt: Receipt, line: LedgerLine, keys: Mapping[str, PublicKey]
) -> tuple[set[str], set[str]]:
    """Check a receipt's envelope.

    Args:
        data: the bytes of receipt.dsse.json.
        receipt: the receipt beside it.
        line: the receipt's line in the ledger.
        keys: key id → public key: those that can be checked.

    Returns: the ids whose signatures hold, and those that no given key answers to.
    Raises:
        Refused: the envelope's form, types, subjects or predicate are not exactly this receipt's, or a signature by a
            given key does not hold.
    """
    from securesystemslib.dsse import Envelope
    from securesystemslib.exceptions import UnverifiedSignatureError
    from securesystemslib.signer import SSlibKey  # type: ignore[attr-defined]

    value = _strict_envelope(data)
    if value["payloadType"] != PAYLOAD_TYPE:
        raise Refused("an envelope's payload has another type", expected=PAYLOAD_TYPE, found=value["payloadType"])
    _check_statement(_base64(value["payload"]), statement(receipt, line))
    envelope = Envelope.from_dict(value)
    message = envelope.pae()
    held, unknown = set[str](), set[str]()
    for keyid, signature in envelope.signatures.items():
        key = keys.get(keyid)
        if key is None:
            unknown.add(keyid)
            continue
        try:
            SSlibKey(keyid, key.keytype, key.scheme, {"public": key.public}).verify_signature(signature, message)
        except UnverifiedSignatureError:
            raise Refused("a signature does not hold", expected=f"one by {keyid}", found="another") from None
        held.add(keyid)
    return held, unknown


def require_signatures(root: Path, policy: Policy, phases: Sequence[str]) -> dict[str, list[str]]:
    """The newest done receipts of these phases, one of each job, carry the signatures that a policy asks for.

    Args:
        root: the run root.
        phases: one that the policy does not name needs no signature.

    Returns: PHASE or PHASE-JOB → ids of the policy's keys whose signatures hold.
    Raises:
        Refused: a signature is missing, does not hold, or is by a key that the policy does not list.
    """
    newest = {line.name: line for line in read_ledger(root) if line.status == "done"}
    found = {}
    for phase in phases:
        lines = [line for line in newest.values() if line.phase == phase]
        if not lines and phase in policy.phases:
            raise Refused(f"{phase} has no receipt that could be signed", where=root)
        for line in lines:
            held = _signed(root, policy, line)
            if held is not None:
                found[line.name] = held
    return found


def _signed(root: Path, policy: Policy, line: LedgerLine) -> list[str] | None:
    """The keys that signed a line's receipt as the policy asks, or None where it asks for none; raises Refused."""
    folder = root / line.name / f"attempt-{line.attempt}"
    data = (folder / RECEIPT).read_bytes()
    if str(sha256_bytes(data)) != line.receipt_json_sha256:
        raise Refused("a receipt is not the one in the ledger", where=folder / RECEIPT)
    receipt, path = parse_receipt(data, where=folder / RECEIPT), folder / SIGNATURE
    needed = policy.requirement(receipt)
    if needed is None:
        return None
    held, unknown = check_envelope(path.read_bytes(), receipt, line, policy.by_id) if path.exists() else ((), ())
    if unknown:
        raise Refused("a receipt is signed with a key that the policy does not list", found=min(unknown), where=path)
    if not needed.met(held):
        raise Refused(
            f"{line.name} is not signed by whom the policy names",
            expected=f"{needed.threshold} of {', '.join(needed.keys)}",
            found=", ".join(sorted(held)) or "none of them",
            where=path,
            remedy=f"d2 sign {folder} --key KEY.pem",
        )
    return sorted(held)


def signatures_in_words(root: Path, policy: Path | None, phases: Sequence[str]) -> str:
    """`require_signatures` by a policy's file, where there is one, and what was found as one line for a page."""
    if policy is None:
        return "no policy is given, so no signature is required"
    signed = require_signatures(root, read_policy(policy), phases)
    text = "; ".join(f"{step} by {', '.join(key[:12] for key in keys)}" for step, keys in signed.items())
    return f"signed: {text}" if text else f"the policy asks for no signature of {', '.join(phases)}"


def _strict_envelope(data: bytes) -> dict[str, Any]:
    value = parse_json(data)
    text = "an envelope is malformed"
    if not isinstance(value, dict) or value.keys() != {"payload", "payloadType", "signatures"}:
        raise Refused(text, expected="payload, payloadType, signatures and nothing else", found=_keys(value))
    signatures = value["signatures"]
    if not isinstance(signatures, list) or not signatures:
        raise Refused(text, expected="at least one signature", found=signatures)
    for signature in signatures:
        if not isinstance(signature, dict) or signature.keys() != {"keyid", "sig"}:
            raise Refused(text, expected="keyid and sig and nothing else", found=_keys(signature))
        if not isinstance(signature["keyid"], str) or len(_base64(signature["sig"])) != 64:
            raise Refused(text, expected="a keyid and 64 bytes in base64", found=_keys(signature))
    ids = [signature["keyid"] for signature in signatures]
    if len(set(ids)) != len(ids):
        raise Refused("an envelope has two signatures by one key", found=max(ids, key=ids.count))
    if canonical_json(value) + b"\n" != data:
        raise Refused("an envelope is not in canonical form", expected="RFC 8785 and a newline")
    return value


def _base64(text: object) -> bytes:
    try:
        data = base64.b64decode(text, validate=True) if isinstance(text, str) else None
    except binascii.Error:
        data = None
    if data is None or base64.b64encode(data).decode("ascii") != text:  # the last digit has bits that mean nothing
        raise Refused("an envelope is malformed", expected="base64 in its one standard form", found=str(text)[:40])
    return data


def _check_statement(payload: bytes, expected: Mapping[str, Any]) -> None:
    found = parse_json(payload)
    if not isinstance(found, dict) or found.keys() != expected.keys():
        raise Refused("a statement has other fields", expected=", ".join(sorted(expected)), found=_keys(found))
    for name in ("_type", "predicateType"):
        if found[name] != expected[name]:
            raise Refused(f"a statement's {name} is another", expected=expected[name], found=found[name])
    for name, what in (("subject", "is about other files"), ("predicate", "says something else")):
        if canonical_json(found[name]) != canonical_json(expected[name]):
            raise Refused(
                f"a statement {what} than the receipt", expected=_digest(expected[name]), found=_digest(found[name])
            )
    if canonical_json(dict(expected)) != payload:
        raise Refused("a statement is not in canonical form", expected="RFC 8785")


def _keys(value: object) -> str:
    return ", ".join(sorted(map(str, value))) if isinstance(value, dict) else type(value).__name__


def _digest(value: object) -> str:
    return str(sha256_bytes(canonical_json(value)))
