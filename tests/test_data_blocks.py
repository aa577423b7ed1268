"""D2Blocks: index arithmetic against a loop written from the definition, over random shapes and sequence ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from data_case import GEN_START, LENGTHS, manifest_of, write_dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_config
from tiny_dense import dense_config

from d2lib.data.blocks import D2Blocks, Ranges
from d2lib.data.manifest import Manifest
from d2lib.data.sidecar import Sidecar
from d2lib.drafter.batch import Round
from d2lib.drafter.config import DrafterConfig
from d2lib.drafter.deepseek.config import DeepseekConfig
from d2lib.errors import Refused


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Manifest, DeepseekConfig]:
    folder, config = tmp_path_factory.mktemp("blocks"), tiny_config()
    return folder, write_dataset(folder, config), config


def slow_round(sidecar: Sidecar, config: DrafterConfig, anchor: int, window: int) -> Round:
    """One round, row by row; the drafter sees `window` rows before the anchor."""
    rows, slots = sidecar.entry.rows, range(config.block_size)
    tokens, hidden = sidecar.tensor("tokens").tolist(), sidecar.tensor("hidden")
    seen = list(range(max(0, anchor - window), anchor))
    return Round(
        taps=torch.stack([sidecar.tensor("taps")[j] for j in seen]),
        positions=torch.tensor(seen),
        anchor=anchor,
        anchor_token=tokens[anchor],
        previous=torch.tensor([tokens[anchor + i] if anchor + i < rows else tokens[-1] for i in slots]),
        target=torch.tensor([tokens[anchor + 1 + i] if anchor + 1 + i < rows else -1 for i in slots]),
        valid=torch.tensor([anchor + 1 + i < rows for i in slots]),
        teacher_hidden=torch.stack([hidden[min(anchor + i, rows - 1)] for i in slots]),
    )


def same_round(found: Round, wanted: Round) -> None:
    assert torch.equal(found.valid, wanted.valid)
    for name in ("taps", "positions", "previous"):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name
    assert (found.anchor, found.anchor_token) == (wanted.anchor, wanted.anchor_token)
    assert torch.equal(found.target[found.valid], wanted.target[found.valid])
    assert torch.equal(found.teacher_hidden[found.valid], wanted.teacher_hidden[found.valid])


def test_blocks_are_the_anchors_in_order(dataset: tuple[Path, Manifest, DeepseekConfig]) -> None:
    folder, manifest, config = dataset
    blocks = D2Blocks(manifest, folder, "train", config)
    wanted = [(s, a) for s, rows in enumerate(LENGTHS["train"]) for a in range(GEN_START, rows - 1)]
    assert len(blocks) == len(wanted) == manifest.counts().blocks
    assert [blocks.locate(index) for index in range(len(blocks))] == wanted
    for index in (-1, len(blocks)):
        with pytest.raises(Refused, match="out of range"):
            blocks.locate(index)
        with pytest.raises(Refused, match="out of range"):
            blocks.batch(torch.tensor([0, index]))


def test_every_block_is_the_round_at_its_anchor(dataset: tuple[Path, Manifest, DeepseekConfig]) -> None:
    folder, manifest, config = dataset
    for split in LENGTHS:
        blocks = D2Blocks(manifest, folder, split, config)
        batch = blocks.batch(torch.arange(len(blocks)))
        for index in range(len(blocks)):
            sequence, anchor = blocks.locate(index)
            same_round(batch.round(index), slow_round(blocks.sidecars[sequence], config, anchor, config.window))


@settings(max_examples=25, deadline=None)
@given(data=st.data(), window=st.integers(1, 15), slots=st.integers(1, 9))
def test_any_batch_in_any_order_with_repeats(
    dataset: tuple[Path, Manifest, DeepseekConfig], data: st.DataObject, window: int, slots: int
) -> None:
    folder, manifest, _ = dataset
    config = tiny_config(window=window, block_size=slots)
    blocks = D2Blocks(manifest, folder, "train", config)
    last = len(blocks) - 1
    number = st.integers(0, last) | st.sampled_from([0, last, LENGTHS["train"][0] - GEN_START - 2])  # and sequence ends
    indices = data.draw(st.lists(number, min_size=1, max_size=12))
    batch = blocks.batch(torch.tensor(indices))
    assert batch.taps.dtype == batch.teacher_hidden.dtype == torch.bfloat16
    for name in ("positions", "context", "anchor", "anchor_token", "previous", "target", "teacher"):
        assert getattr(batch, name).dtype == torch.int64, name

    places = [blocks.locate(index) for index in indices]
    context = {(s, j) for s, a in places for j in range(max(0, a - window), a)}
    ends = [blocks.entries[s].rows - 1 for s, _ in places]
    teacher = {(s, a + i) for (s, a), end in zip(places, ends, strict=True) for i in range(slots) if a + i < end}
    assert len(batch.taps) == len(batch.positions) == len(context)  # each distinct row once, and no other
    assert len(batch.teacher_hidden) == len(teacher)
    assert torch.equal(batch.valid.sum(1), torch.tensor([min(slots, end - a) for (_, a), end in zip(places, ends)]))  # noqa: B905
    assert not batch.context[~batch.context_valid].any()
    for at, (sequence, anchor) in enumerate(places):
        same_round(batch.round(at), slow_round(blocks.sidecars[sequence], config, anchor, config.window))


@pytest.mark.parametrize(
    ("switches", "window"),
    [
        ({}, 1000),
        ({"layer_types": ("sliding_attention",) * 2, "sliding_window": 9}, 8),
        ({"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 9}, 1000),
        ({"layout": "one_plus_n", "block_size": 7}, 1000),
    ],
    ids=["full", "sliding", "mixed", "one plus n"],
)
def test_a_dense_drafter_sees_every_row_or_what_its_sliding_layers_see(
    dataset: tuple[Path, Manifest, DeepseekConfig], switches: dict[str, Any], window: int
) -> None:
    folder, manifest, _ = dataset
    config = dense_config(dim=24, vocab_size=53, **switches)
    for split in LENGTHS:
        blocks = D2Blocks(manifest, folder, split, config)
        batch = blocks.batch(torch.arange(len(blocks)).flip(0))
        for at, index in enumerate(reversed(range(len(blocks)))):
            sequence, anchor = blocks.locate(index)
            same_round(batch.round(at), slow_round(blocks.sidecars[sequence], config, anchor, window))


def test_rounds_of_a_request_are_its_blocks(dataset: tuple[Path, Manifest, DeepseekConfig]) -> None:
    folder, manifest, config = dataset
    blocks = D2Blocks(manifest, folder, "dev", config)
    rows = LENGTHS["dev"][1]
    anchors = [rows - 2, GEN_START, GEN_START + 3]
    batch = blocks.rounds_batch("dev-01", anchors)
    assert batch.anchor.tolist() == anchors
    for at, anchor in enumerate(anchors):
        same_round(batch.round(at), slow_round(blocks.sidecars[1], config, anchor, config.window))
    for wrong in ([GEN_START - 1], [rows - 1], []):
        with pytest.raises(Refused, match="outside the generated span"):
            blocks.rounds_batch("dev-01", wrong)
    with pytest.raises(Refused, match="not in this split"):
        blocks.rounds_batch("train-00", anchors)


def test_an_epoch_is_a_permutation_of_its_own(dataset: tuple[Path, Manifest, DeepseekConfig]) -> None:
    folder, manifest, config = dataset
    blocks = D2Blocks(manifest, folder, "train", config)
    order = blocks.epoch_order(23, 0)
    assert order.dtype == torch.int64
    assert order.sort().values.equal(torch.arange(len(blocks)))
    assert order.equal(D2Blocks(manifest, folder, "train", config).epoch_order(23, 0))
    torch.manual_seed(1)
    assert order.equal(blocks.epoch_order(23, 0))
    others = [blocks.epoch_order(seed, epoch) for seed, epoch in ((23, 1), (24, 0), (2, 30), (230, 0))]
    assert len({tuple(found.tolist()) for found in [order, *others]}) == 5
    assert order[:6].tolist() == [34, 14, 43, 4, 36, 35]  # a resumed run must find the order of the run before it


def test_other_sizes_and_empty_splits_are_refused(dataset: tuple[Path, Manifest, DeepseekConfig]) -> None:
    folder, manifest, _ = dataset
    for changed in ({"dim": 32}, {"vocab_size": 54}, {"target_layer_ids": (1,)}):
        with pytest.raises(Refused, match="drafter and the manifest disagree"):
            D2Blocks(manifest, folder, "train", tiny_config(**changed))
    without = manifest_of({"train": [200]}, dim=24, vocab_size=53, n_taps=2)
    with pytest.raises(Refused, match="no sequences"):
        D2Blocks(without, folder, "dev", tiny_config())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), min_size=1, max_size=12))
def test_ranges_are_the_union_laid_end_to_end(intervals: list[tuple[int, int]]) -> None:
    start = torch.tensor([first for first, _ in intervals])
    length = torch.tensor([size for _, size in intervals])
    ranges = Ranges(start, start + length)
    union = sorted({address for first, size in intervals for address in range(first, first + size)})
    assert ranges.total == len(union)
    assert ranges.lay(ranges.start).tolist() == union
    assert ranges.place(torch.tensor(union)).tolist() == list(range(len(union)))
    assert bool((ranges.start[1:] > ranges.stop[:-1]).all())
