"""Signed receipts, checked by raw cryptography too: fixed vectors, and every way in which a signature can mislead."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from evidence_case import make_receipt, make_run
from securesystemslib.dsse import Envelope
from securesystemslib.signer import CryptoSigner

from d2lib.errors import Refused
from d2lib.evidence.ledger import LedgerLine, read_ledger
from d2lib.evidence.receipts import Receipt, read_receipt
from d2lib.evidence.sign import (
    PAYLOAD_TYPE,
    Policy,
    PublicKey,
    check_envelope,
    make_key,
    read_policy,
    require_signatures,
    sign_receipt,
    signatures_in_words,
    statement,
)
from d2lib.evidence.verify import verify
from d2lib.files import canonical_json, sha256_bytes

# The key of the seed 00 01 … 1f, and its signature over one pre-authentication encoding, as bytes.
SEED = bytes(range(32))
PUBLIC = "03a107bff3ce10be1d70dd18e74bc09967e4d6309ba50d5f1ddc8664125531b8"
KEYID = "63d00ee3cf4f5c61ad94efa696c68f13b608fe56ecea13fb144a6fd18e9235b9"
PAE = b'DSSEv1 28 application/vnd.in-toto+json 7 {"x":1}'
SIGNATURE = bytes.fromhex(
    "8676a59908c644c1d7bddb0c660ebb1adb4a2fe6ab9f3c6c056b339ec303f371"
    "4204dd5e135a7ce038c447127386e18192a9ec1a6cb3c52ec59a7c566b48da0c"
)
KEY = PublicKey(public=PUBLIC)


def pem(key: Any) -> bytes:
    return bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


@pytest.fixture(scope="session")
def private(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "one.pem"
    path.write_bytes(pem(Ed25519PrivateKey.from_private_bytes(SEED)))
    return path


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PublicKey]:
    folder = tmp_path_factory.mktemp("other")
    return folder / "two.pem", make_key(folder / "two.pem", folder / "two.json")


@pytest.fixture(scope="session")
def sound(tmp_path_factory: pytest.TempPathFactory, private: Path) -> Path:
    root = make_run(tmp_path_factory.mktemp("signed") / "runs" / "demo")
    sign_receipt(root / "finish" / "attempt-1", [private])
    return root


@pytest.fixture
def run(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "demo"))


def parts(run: Path) -> tuple[bytes, Receipt, LedgerLine]:
    folder = run / "finish" / "attempt-1"
    return (folder / "receipt.dsse.json").read_bytes(), read_receipt(folder / "receipt.json"), read_ledger(run)[-1]


def sign_payload(payload: bytes, payload_type: str = PAYLOAD_TYPE) -> bytes:
    """An envelope whose signature holds, over any payload."""
    envelope = Envelope(payload, payload_type, {})
    envelope.sign(CryptoSigner(Ed25519PrivateKey.from_private_bytes(SEED)))
    return canonical_json(envelope.to_dict()) + b"\n"


POLICY = Policy.model_validate_json(json.dumps({"keys": [{"public": PUBLIC}], "phases": {"finish": {"keys": [KEYID]}}}))


# --------------------------------------------------------------------------------------------------- vectors


def test_the_fixed_vector_is_what_the_library_and_raw_cryptography_make() -> None:
    raw = Ed25519PrivateKey.from_private_bytes(SEED)
    assert raw.public_key().public_bytes_raw().hex() == PUBLIC
    assert raw.sign(PAE) == SIGNATURE
    envelope = Envelope(b'{"x":1}', "application/vnd.in-toto+json", {})
    assert envelope.pae() == PAE
    assert bytes.fromhex(envelope.sign(CryptoSigner(raw)).signature) == SIGNATURE
    assert KEY.keyid == KEYID == CryptoSigner(raw).public_key.keyid


def test_an_envelope_is_verified_by_raw_cryptography_from_the_formats_text_alone(run: Path) -> None:
    value = json.loads(parts(run)[0])
    payload, kind = base64.b64decode(value["payload"]), value["payloadType"].encode()
    message = b" ".join([b"DSSEv1", str(len(kind)).encode(), kind, str(len(payload)).encode(), payload])
    key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(PUBLIC))
    signature = base64.b64decode(value["signatures"][0]["sig"])
    key.verify(signature, message)
    with pytest.raises(InvalidSignature):
        key.verify(signature, message + b" ")
    said = json.loads(payload)
    assert said["_type"] == "https://in-toto.io/Statement/v1"
    assert said["predicateType"] == "urn:d2-workbench:receipt:v1"
    digests = {one["name"]: one["digest"]["sha256"] for one in said["subject"]}
    for name, digest in digests.items():
        assert sha256_bytes((run / name).read_bytes()).digest == digest
    assert set(digests) == {"finish/attempt-1/receipt.json", "finish/attempt-1/receipt.ipynb"}
    predicate = said["predicate"]
    assert (predicate["phase"], predicate["status"], predicate["verdict"]) == ("finish", "done", "FAIL")
    assert predicate["ledger"]["line_sha256"] == verify(run).head


def test_the_subjects_of_a_receipt_are_its_files_and_its_outputs(run: Path) -> None:
    line = read_ledger(run)[2]
    names = [one["name"] for one in statement(read_receipt(run / "g2-dev/attempt-2/receipt.json"), line)["subject"]]
    assert names == [
        "g2-dev/attempt-2/receipt.json",
        "g2-dev/attempt-2/receipt.ipynb",
        "full/dev.json",
        "full/log.txt",
    ]


# -------------------------------------------------------------------------------------------------- checking


def test_a_signed_run_holds_with_and_without_its_policy(run: Path) -> None:
    report = verify(run, policy=POLICY)
    assert report.holds, report.render_text()
    assert any(row.message == f"signed by {KEYID}" for row in report.rows)
    report = verify(run)
    assert report.holds
    assert [row.found for row in report.rows if row.state == "unchecked"] == [KEYID]


def test_any_flipped_byte_of_an_envelope_is_found(run: Path) -> None:
    path = run / "finish/attempt-1/receipt.dsse.json"
    data = path.read_bytes()
    path.chmod(0o644)
    for position in [*range(0, len(data), 97), *range(len(data) - 130, len(data), 3), len(data) - 1]:
        path.write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
        assert not verify(run, policy=POLICY).holds, position


def edit(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(said: dict[str, Any]) -> None:
        said[name] = value

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (edit("_type", "https://in-toto.io/Statement/v0.1"), "a statement's _type is another"),
        (edit("predicateType", "urn:another"), "a statement's predicateType is another"),
        (edit("extra", 1), "a statement has other fields"),
        (lambda said: said.pop("predicate"), "a statement has other fields"),
        (lambda said: said["subject"].pop(), "is about other files"),
        (lambda said: said["subject"][0]["digest"].update(sha256="0" * 64), "is about other files"),
        (lambda said: said["subject"][0]["digest"].update(sha512="0" * 128), "is about other files"),
        (lambda said: said["subject"].append(said["subject"][0]), "is about other files"),
        (lambda said: said["predicate"].update(verdict="PASS"), "says something else"),
        (lambda said: said["predicate"].update(remark="fine"), "says something else"),
        (lambda said: said["predicate"]["ledger"].update(seq=1), "says something else"),
    ],
)
def test_a_statement_whose_signature_holds_but_that_says_something_else_is_refused(
    run: Path, change: Callable[[dict[str, Any]], None], words: str
) -> None:
    _, receipt, line = parts(run)
    said = json.loads(canonical_json(statement(receipt, line)))
    change(said)
    with pytest.raises(Refused, match=words):
        check_envelope(sign_payload(canonical_json(said)), receipt, line, {KEYID: KEY})


def test_another_payload_type_is_refused_although_the_signature_holds(run: Path) -> None:
    _, receipt, line = parts(run)
    data = sign_payload(canonical_json(statement(receipt, line)), "application/json")
    with pytest.raises(Refused, match="payload has another type"):
        check_envelope(data, receipt, line, {KEYID: KEY})


def test_a_payload_in_another_form_is_refused(run: Path) -> None:
    _, receipt, line = parts(run)
    said = statement(receipt, line)
    for payload, words in (
        (json.dumps(said, indent=1).encode(), "not in canonical form"),
        (canonical_json(said).replace(b'{"_type"', b'{"_type":1,"_type"', 1), "twice"),
        (b"[]", "other fields"),
        (b"", "not valid JSON"),
    ):
        with pytest.raises(Refused, match=words):
            check_envelope(sign_payload(payload), receipt, line, {KEYID: KEY})


def test_another_receipts_envelope_is_refused(run: Path, private: Path) -> None:
    sign_receipt(run / "g2-dev" / "attempt-2", [private])
    data = (run / "g2-dev/attempt-2/receipt.dsse.json").read_bytes()
    _, receipt, line = parts(run)
    with pytest.raises(Refused, match="is about other files"):
        check_envelope(data, receipt, line, {KEYID: KEY})


@pytest.mark.parametrize(
    "change",
    [
        lambda value: value.update(more=1),
        lambda value: value.pop("payloadType"),
        lambda value: value.update(signatures=[]),
        lambda value: value.update(signatures={}),
        lambda value: value["signatures"][0].update(cert="x"),
        lambda value: value["signatures"][0].update(sig=value["signatures"][0]["sig"][:-4] + "===="),
        lambda value: value["signatures"][0].update(sig="AA=="),
        lambda value: value["signatures"][0].update(sig=None),
        lambda value: value["signatures"][0].update(keyid=1),
        lambda value: value["signatures"].append(value["signatures"][0]),
        lambda value: value.update(payload=value["payload"] + "\n"),
        lambda value: value.update(payload=value["payload"].replace("e", "*")),
    ],
)
def test_an_envelope_that_is_not_exactly_one_is_refused(run: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    data, receipt, line = parts(run)
    value = json.loads(data)
    change(value)
    with pytest.raises(Refused, match="an envelope"):
        check_envelope(canonical_json(value) + b"\n", receipt, line, {KEYID: KEY})
    with pytest.raises(Refused, match="canonical form"):
        check_envelope(json.dumps(json.loads(data), indent=1).encode(), receipt, line, {KEYID: KEY})


def test_a_signature_by_another_key_under_this_keys_id_is_refused(run: Path) -> None:
    data, receipt, line = parts(run)
    wrong = Ed25519PrivateKey.generate().sign(b"something else")
    value = json.loads(data)
    value["signatures"][0]["sig"] = base64.b64encode(wrong).decode()
    with pytest.raises(Refused, match="a signature does not hold"):
        check_envelope(canonical_json(value) + b"\n", receipt, line, {KEYID: KEY})


# --------------------------------------------------------------------------------------------------- signing


def test_a_receipt_is_signed_once_and_only_as_the_ledger_has_it(
    run: Path, private: Path, other: tuple[Path, PublicKey], tmp_path: Path
) -> None:
    with pytest.raises(Refused, match="exists already"):
        sign_receipt(run / "finish" / "attempt-1", [private])
    with pytest.raises(Refused, match="no key"):
        sign_receipt(run / "g2-dev" / "attempt-2", [])
    made = sign_receipt(run / "g2-dev" / "attempt-2", [private, other[0]])
    assert len(json.loads(made.read_bytes())["signatures"]) == 2
    strange, _ = make_receipt(tmp_path / "runs" / "other", "cost_sheet", 1, result={})
    assert strange.namespace == "other"
    shutil.copytree(tmp_path / "runs/other/cost_sheet/attempt-1", run / "cost_sheet/attempt-2")
    with pytest.raises(Refused, match="not in the ledger"):
        sign_receipt(run / "cost_sheet" / "attempt-2", [private])


def test_keys_that_are_none_are_refused(run: Path, tmp_path: Path) -> None:
    (tmp_path / "ec.pem").write_bytes(pem(generate_private_key(SECP256R1())))
    (tmp_path / "text.pem").write_text("no key")
    for name, words in (("ec.pem", "not an Ed25519 key"), ("text.pem", "cannot be read"), ("none", "cannot be read")):
        with pytest.raises(Refused, match=words):
            sign_receipt(run / "g2-dev" / "attempt-2", [tmp_path / name])


def test_a_made_key_is_private_and_new(other: tuple[Path, PublicKey]) -> None:
    private, key = other
    assert private.stat().st_mode & 0o777 == 0o600
    assert PublicKey.model_validate_json(private.with_name("two.json").read_bytes()) == key
    with pytest.raises(Refused, match="exists already"):
        make_key(private, private.with_name("three.json"))


# ---------------------------------------------------------------------------------------------------- policy


def write_policy(path: Path, phases: str, keys: str = f"- public: {PUBLIC}\n") -> Path:
    path.write_text(f"keys:\n{keys}phases:\n{phases}")
    return path


def test_a_policy_says_who_must_sign(run: Path, tmp_path: Path, private: Path, other: tuple[Path, PublicKey]) -> None:
    second = other[1]
    keys = f"- public: {PUBLIC}\n- {{public: {second.public}}}\n"
    both = f"  g2-dev:\n    keys: [{KEYID}, {second.keyid}]\n    threshold: 2\n"
    policy = read_policy(write_policy(tmp_path / "policy.yaml", both, keys))
    rows = [row for row in verify(run, policy=policy).rows if not row.holds]
    assert [(row.state, row.where) for row in rows] == [("unsigned", "g2-dev/attempt-2/receipt.dsse.json")]
    sign_receipt(run / "g2-dev" / "attempt-2", [private])
    assert not verify(run, policy=policy).holds
    (run / "g2-dev/attempt-2/receipt.dsse.json").unlink()
    sign_receipt(run / "g2-dev" / "attempt-2", [private, other[0]])
    assert verify(run, policy=policy).holds


def test_a_signature_by_a_key_that_the_phase_does_not_name_does_not_count(
    run: Path, other: tuple[Path, PublicKey]
) -> None:
    value = {
        "keys": [{"public": PUBLIC}, {"public": other[1].public}],
        "phases": {"finish": {"keys": [other[1].keyid]}},
    }
    policy = Policy.model_validate_json(json.dumps(value))
    assert {row.state for row in verify(run, policy=policy).rows if not row.holds} == {"unsigned"}
    unlisted = Policy.model_validate_json(json.dumps({**value, "keys": [{"public": other[1].public}]}))
    assert {row.state for row in verify(run, policy=unlisted).rows if row.state != "holds"} == {"unsigned"}


def test_what_admission_asks_of_signatures(run: Path, other: tuple[Path, PublicKey]) -> None:
    """Signed as asked; by nobody; by a key that the policy does not list; changed afterwards; no receipt at all."""

    def policy(phase: str, *keys: PublicKey) -> Policy:
        value = {"keys": [{"public": key.public} for key in keys], "phases": {phase: {"keys": [keys[0].keyid]}}}
        return Policy.model_validate_json(json.dumps(value))

    assert require_signatures(run, policy("finish", KEY), ("cost_sheet", "finish")) == {"finish": [KEYID]}
    assert require_signatures(run, policy("train", KEY), ("cost_sheet", "finish")) == {}
    with pytest.raises(Refused, match="cost_sheet is not signed by whom the policy names"):
        require_signatures(run, policy("cost_sheet", KEY), ("cost_sheet", "finish"))
    with pytest.raises(Refused, match="finish is not signed by whom the policy names"):
        require_signatures(run, policy("finish", other[1], KEY), ("finish",))
    with pytest.raises(Refused, match="signed with a key that the policy does not list"):
        require_signatures(run, policy("finish", other[1]), ("finish",))
    with pytest.raises(Refused, match="pilot has no receipt"):
        require_signatures(run, policy("pilot", KEY), ("pilot",))
    for named in ("g2", "g2-dev"):  # a phase's requirement holds for the newest receipt of each of its jobs
        with pytest.raises(Refused, match="g2-dev is not signed by whom the policy names"):
            require_signatures(run, policy(named, KEY), ("g2",))
    assert require_signatures(run, policy("g2-legal", KEY), ("g2",)) == {}
    assert signatures_in_words(run, None, ("finish",)) == "no policy is given, so no signature is required"
    receipt = run / "finish" / "attempt-1" / "receipt.json"
    receipt.chmod(0o644)
    receipt.write_bytes(receipt.read_bytes() + b" ")
    with pytest.raises(Refused, match="not the one in the ledger"):
        require_signatures(run, policy("finish", KEY), ("finish",))


@pytest.mark.parametrize(
    ("phases", "words"),
    [
        (f"  finish: {{keys: [{'a' * 64}]}}\n", "does not list"),
        (f"  finish: {{keys: [{KEYID}], threshold: 2}}\n", "out of reach"),
        (f"  finish: {{keys: [{KEYID}, {KEYID}], threshold: 2}}\n", "out of reach"),
        (f"  finish: {{keys: [{KEYID}], threshold: 0}}\n", "malformed"),
        ("  finish: {keys: []}\n", "malformed"),
        (f"  finish: {{keys: [{KEYID}], who: me}}\n", "malformed"),
        (f"  finish: {{keys: [{KEYID}]}}\n  finish: {{keys: [{KEYID}]}}\n", "twice"),
        ("  - finish\n", "malformed"),
        ("  {", "not valid YAML"),
    ],
)
def test_a_policy_that_is_not_exactly_one_is_refused(tmp_path: Path, phases: str, words: str) -> None:
    with pytest.raises(Refused, match=words):
        read_policy(write_policy(tmp_path / "policy.yaml", phases))


@pytest.mark.parametrize("keys", [f"- public: {PUBLIC}\n- public: {PUBLIC}\n", "- public: abc\n", f"- key: {PUBLIC}\n"])
def test_a_policys_keys_are_exact_too(tmp_path: Path, keys: str) -> None:
    with pytest.raises(Refused, match=r"twice|malformed"):
        read_policy(write_policy(tmp_path / "policy.yaml", f"  finish: {{keys: [{KEYID}]}}\n", keys))
    with pytest.raises(Refused, match="cannot be read"):
        read_policy(tmp_path / "none.yaml")
