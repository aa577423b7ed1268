"""What a verdict's numbers are numbers of, in words and rows: for pages and cards."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping
from typing import Any

from d2lib.gates.g2 import TOKENS, SplitPart, SplitVerdict
from d2lib.gates.journal import ScoredSplit
from d2lib.show import table_html

TRAJECTORY = (
    "Both drafters are scored on the same rounds: those that the live run began (K2), from the tokens that were "
    "committed there. This stands for live decoding and is not the same: an adapted drafter would begin its rounds "
    "elsewhere. Bonus tokens are excluded."
)


def signed(value: float) -> str:
    """A gain with its sign and three decimals, or as many as show three significant digits."""
    decimals = 3 if value == 0 else min(max(3, 2 - math.floor(math.log10(abs(value)))), 9)
    return f"{value:+.{decimals}f}"


def headline(judgement: SplitVerdict) -> str:
    """A split's result in one sentence: the gain, what it is, its interval, and what it was measured on."""
    boot = judgement.bootstrap
    return (
        f"gain {signed(boot['estimate'])} {TOKENS}, {boot['level']:.0%} interval "
        f"[{signed(boot['lower'])}, {signed(boot['upper'])}], {_population(judgement)}"
    )


def summary(judged: Mapping[ScoredSplit, SplitVerdict]) -> str:
    """The splits' results in one sentence, which says once what the numbers are."""
    level = next(iter(judged.values())).bootstrap["level"]
    splits = [
        f"{split} {one.verdict} {signed(one.bootstrap['estimate'])} "
        f"[{signed(one.bootstrap['lower'])}, {signed(one.bootstrap['upper'])}], {_population(one)}"
        for split, one in judged.items()
    ]
    return f"Gains in {TOKENS}, each with its {level:.0%} interval: {'; '.join(splits)}"


def _population(judgement: SplitVerdict) -> str:
    return f"{judgement.totals['requests']:,} requests, {judgement.totals['rounds']:,} rounds"


def judged_on(parts: Mapping[ScoredSplit, SplitPart], target: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What the parts of a verdict were judged on.

    Args:
        parts: split → its part.
        target: what the captured model was, from the manifest (d2lib.data.manifest), where it is at hand.

    Returns: measure and trajectory in words; per split its requests, rounds and K2 file; the digests of data, drafter
        and code, which are the same in all parts; the target.
    """
    identities = next(iter(parts.values())).contract.identities.model_dump()
    return {
        "measure": TOKENS,
        "trajectory": TRAJECTORY,
        "splits": {
            split: {
                "requests": part.judgement.totals["requests"],
                "rounds": part.judgement.totals["rounds"],
                "k2": part.contract.k2,
            }
            for split, part in parts.items()
        },
        "identities": identities,
        "target": None if target is None else dict(target),
    }


def judged_on_rows(facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """`judged_on` as the rows of one table: what, and which."""
    rows = [
        {"judged on": split, "which": f"{row['requests']:,} requests, {row['rounds']:,} rounds; K2 {row['k2']}"}
        for split, row in facts["splits"].items()
    ]
    target = facts["target"] or {"manifest": "the data's manifest names it"}
    rows.append({"judged on": "target", "which": "; ".join(f"{name} {value}" for name, value in target.items())})
    labels = {"manifest": "data (manifest)", "native": "baseline (native drafter)", "adapter": "candidate (adapter)"}
    rows += [{"judged on": labels.get(name, name), "which": str(value)} for name, value in facts["identities"].items()]
    return rows


def judged_on_html(facts: Mapping[str, Any]) -> str:
    """`judged_on` for a page: the trajectory in words, the rest a click away."""
    return (
        f"<p>{html.escape(facts['trajectory'])}</p><details><summary>What it was judged on</summary>"
        f"{table_html(judged_on_rows(facts), label='Judged on')}</details>"
    )
