"""REF against drafters of another implementation: speculators' own checkpoints, hidden rows, logits and confidence.

What stands under golden/dense was made once by golden/dense/make.py, which says how. speculators trains a sliding layer
with one window for all of a block's rows; REF has that rule as an option for this comparison alone.
`python tests/test_dense_golden.py` prints the largest differences.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from d2lib.drafter.batch import Round
from d2lib.drafter.dense.checkpoint import DenseCheckpoint, read_dense
from d2lib.drafter.dense.reference import DenseReference
from d2lib.drafter.kernels import rms_norm
from d2lib.drafter.reference import teacher_logits

GOLDEN = Path(__file__).parent / "golden" / "dense"
CASES = sorted(path.parent.name for path in GOLDEN.glob("*/golden.safetensors"))
TOLERANCE = 1e-5


@cache
def case(name: str) -> tuple[DenseCheckpoint, dict[str, Tensor]]:
    return read_dense(GOLDEN / name, GOLDEN / "target"), load_file(GOLDEN / name / "golden.safetensors")


def round_at(found: DenseCheckpoint, golden: dict[str, Tensor], anchor: int, *, rows: int | None = None) -> Round:
    """The round of an anchor with `rows` context rows, all by default; teacher rows are normed as the target would."""
    k = found.config.block_size
    tokens = golden["tokens"].long()
    first = 0 if rows is None else max(0, anchor - rows)
    norm = load_file(GOLDEN / "target" / "model.safetensors")["model.norm.weight"].float()
    return Round(
        taps=golden["taps"][first:anchor],
        positions=torch.arange(first, anchor),
        anchor=anchor,
        anchor_token=int(tokens[anchor]),
        previous=tokens[anchor : anchor + k],
        target=tokens[anchor + 1 : anchor + 1 + k],
        valid=torch.ones(k, dtype=torch.bool),
        teacher_hidden=rms_norm(golden["last_hidden"][anchor : anchor + k].float(), norm, 1e-6),
    )


def differences(
    name: str, *, change: Any = lambda found: found, rule: Any = "trainer", shift: int = 0
) -> dict[str, float]:
    """The largest absolute difference of each output over all anchors and slots."""
    found, golden = case(name)
    found = change(found)
    drafter = DenseReference(found.config, found.weights)
    drafter.sliding_rule = rule
    k = found.config.block_size
    slots = slice(golden["hidden"].shape[1] - k, None)
    largest: dict[str, float] = {}
    for index, anchor in enumerate(golden["anchors"].tolist()):
        round = round_at(found, golden, anchor)
        round = replace(round, previous=golden["tokens"].long()[anchor + shift : anchor + shift + k])
        out = drafter.forward(round)
        ours = {
            "hidden": out.hidden,
            "logits": out.logits,
            "teacher": teacher_logits(drafter.head, round.teacher_hidden),
        }
        assert (out.confidence is not None) is ("confidence" in golden)
        if out.confidence is not None:
            ours["confidence"] = out.confidence
        for output, value in ours.items():
            gap = float((value - golden[output][index, slots]).abs().max())
            largest[output] = max(largest.get(output, 0.0), gap)
    return largest


def test_the_cases_are_there() -> None:
    configs = [case(name)[0].config for name in CASES]
    assert len(configs) == 8
    assert {config.layout for config in configs} == {"anchor_first", "one_plus_n"}
    assert {config.markov_head_type if config.markov_rank else "none" for config in configs} == {
        "none",
        "vanilla",
        "gated",
        "rnn",
    }
    assert {config.rope.type for config in configs} == {"default", "linear", "llama3", "yarn"}
    assert any(config.attention_bias for config in configs)
    assert {(kind, causal) for c in configs for kind, causal in zip(c.layer_types, c.causal, strict=True)} == {
        ("full_attention", False),
        ("sliding_attention", True),
        ("sliding_attention", False),
    }


@pytest.mark.parametrize("name", CASES)
def test_ref_computes_what_speculators_computes(name: str) -> None:
    largest = differences(name)
    assert set(largest) >= {"hidden", "logits", "teacher"}
    assert max(largest.values()) < TOLERANCE, largest


@pytest.mark.parametrize("name", CASES)
def test_the_comparison_feels_what_is_wrong(name: str) -> None:
    """Controls: a previous token one too late, another layout, mask, rope or gain must each be far from the golden."""
    config = case(name)[0].config

    def differs(output: str, **options: Any) -> None:
        assert differences(name, **options)[output] > 100 * TOLERANCE, (output, options)

    def configured(**changes: Any) -> Any:
        return lambda found: replace(found, config=type(config).model_validate(found.config.model_dump() | changes))

    def scaled(tensor: str) -> Any:
        return lambda found: replace(found, weights=found.weights | {tensor: found.weights[tensor] * 1.01})

    if config.markov_rank:
        differs("logits", shift=1)
    if config.confidence_with_markov:
        differs("confidence", shift=1)
    if "sliding_attention" in config.layer_types:
        differs("hidden", rule="served")
    differs("hidden", change=configured(causal=[not causal for causal in config.causal]))
    differs("hidden", change=configured(rope={"type": "linear", "theta": 1e4, "factor": 3.0}))
    for tensor in ("hidden_norm.weight", "layers.0.self_attn.k_norm.weight", "layers.1.input_layernorm.weight"):
        differs("hidden", change=scaled(tensor))
    if config.attention_bias:
        for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
            differs("hidden", change=scaled(f"layers.0.self_attn.{part}.bias"))


@pytest.mark.parametrize("name", [name for name in CASES if "sliding" in name])
def test_a_served_window_holds_every_row_that_counts(name: str) -> None:
    """By the served rule, a round of `context_rows` rows is the round of all rows."""
    found, golden = case(name)
    drafter = DenseReference(found.config, found.weights)
    for anchor in golden["anchors"].tolist():
        rows = found.config.context_rows(anchor)
        assert rows == min(anchor, 6)
        few, all_rows = (drafter.forward(round_at(found, golden, anchor, rows=count)) for count in (rows, None))
        torch.testing.assert_close(few.logits, all_rows.logits, rtol=0, atol=TOLERANCE)


def table() -> str:
    """Largest differences, a line for each case."""
    outputs = ("hidden", "logits", "confidence", "teacher")
    lines = [f"{'case':<38}" + "".join(f"{output:>12}" for output in outputs)]
    for name in CASES:
        largest = differences(name)
        cells = (f"{largest[output]:12.1e}" if output in largest else f"{'none':>12}" for output in outputs)
        lines.append(f"{name:<38}" + "".join(cells))
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
