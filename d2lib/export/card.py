"""The card of an exported adapter: the verdict first, then what it hangs on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from d2lib import __version__
from d2lib.drafter.family import family_of
from d2lib.drafter.lora import initialization_sha256 as tensors_sha256
from d2lib.drafter.lora import lora_targets
from d2lib.export.candidate import Candidate, Entry
from d2lib.files import FileRecord
from d2lib.gates.words import TRAJECTORY, judged_on, judged_on_rows

Kind = Literal["peft adapter", "merged projections"]

GAIN = "accepted draft tokens per round, bonus excluded, candidate minus baseline on the same rounds"


def statement(candidate: Candidate) -> str:
    """The verdict in words."""
    if candidate.qualified:
        return "PASS: every gate of G2 held on all three splits"
    return f"UNQUALIFIED: the verdict of G2 is {candidate.g2.verdict}"


def build_card(candidate: Candidate, kind: Kind, files: Mapping[str, FileRecord]) -> dict[str, Any]:
    """The card as data.

    Args:
        candidate: what is exported.
        kind: as what.
        files: name → record of the files beside the card.
    """
    return {
        "schema_version": 1,
        "statement": statement(candidate),
        "verdict": candidate.g2.verdict,
        "qualified": candidate.qualified,
        "kind": kind,
        "namespace": candidate.finish.receipt.namespace,
        "finish": _receipt(candidate.finish),
        "train": _receipt(candidate.train),
        "gain": GAIN,
        "judged_on": judged_on(candidate.splits, candidate.target),
        "splits": {split: _split(candidate, split) for split in candidate.splits},
        "recipe": candidate.recipe.model_dump(mode="json"),
        "base": candidate.g2.identities.model_dump(mode="json"),
        "drafter": candidate.config.model_dump(mode="json"),
        "targets": lora_targets(candidate.config),
        "adapter_tensors_sha256": str(tensors_sha256(candidate.adapter)),
        "files": {name: {"bytes": record.size, "sha256": str(record.sha256)} for name, record in files.items()},
        "d2": __version__,
    }


def render_readme(candidate: Candidate, card: Mapping[str, Any]) -> str:
    """The card as a page."""
    kind: Kind = card["kind"]
    notes = family_of(candidate.config).notes
    lines = [f"# {card['statement']}", ""]
    if not candidate.qualified:
        lines += ["This adapter did not pass its gates. It is here for study; nothing shows that it is better.", ""]
        for split, row in card["splits"].items():
            lines += [f"- {split}: {gate} does not hold" for gate in row["failed_gates"]]
        lines.append("")
    lines += [
        f"A LoRA of the native drafter of run `{card['namespace']}`, as {kind}. Development evidence on the "
        "committed-K2 trajectory; it promotes nothing by itself.",
        "",
        "| split | verdict | gain | 95% interval | requests | rounds |",
        "|---|---|---|---|---|---|",
    ]
    for split, row in card["splits"].items():
        interval = f"[{row['lower']:+.4f}, {row['upper']:+.4f}]"
        numbers = f"{row['gain']:+.4f} | {interval} | {row['requests']} | {row['rounds']:,}"
        lines.append(f"| {split} | {row['verdict']} | {numbers} |")
    resamples, seed = (next(iter(card["splits"].values()))[name] for name in ("resamples", "seed"))
    lines += [
        "",
        f"Gain: {GAIN}; the interval is the percentile interval of {resamples:,} resamples of requests, seed {seed}.",
        "",
        "## Judged on",
        "",
        TRAJECTORY,
        "",
        *_bullets({row["judged on"]: row["which"] for row in judged_on_rows(card["judged_on"])}),
        "",
        "## Evidence",
        "",
        *_bullets({"receipt of finish": card["finish"]["receipt_json_sha256"]}),
        *_bullets({"receipt of train": card["train"]["receipt_json_sha256"]}),
        "",
        "## Recipe",
        "",
        *_bullets(card["recipe"]),
        "",
        "## Use",
        "",
        notes.adapter if kind == "peft adapter" else notes.merged,
        "",
        f"Adapted: {notes.adapted}",
        "",
    ]
    return "\n".join(lines)


def _split(candidate: Candidate, split: Any) -> dict[str, Any]:
    judgement = candidate.splits[split].judgement
    boot, totals = judgement.bootstrap, judgement.totals
    return {
        "verdict": judgement.verdict,
        "gain": boot["estimate"],
        **{name: boot[name] for name in ("lower", "upper", "level", "resamples", "seed", "requests", "rounds")},
        "baseline_accepted_per_round": totals["baseline"]["accepted_per_round"],
        "candidate_accepted_per_round": totals["candidate"]["accepted_per_round"],
        "failed_gates": [gate.name for gate in judgement.gates if not gate.holds],
    }


def _receipt(entry: Entry) -> dict[str, Any]:
    return {
        "name": entry.line.name,
        "attempt": entry.line.attempt,
        "ledger_line": entry.line.seq,
        "ended": entry.receipt.ended,
        "receipt_json_sha256": entry.line.receipt_json_sha256,
        "receipt_sha256": entry.line.receipt_sha256,
    }


def _bullets(values: Mapping[str, Any]) -> list[str]:
    return [f"- {name}: `{value}`" for name, value in values.items()]
