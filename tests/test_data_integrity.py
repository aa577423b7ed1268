"""G1(a): a good capture holds in every row, and every kind of damage makes exactly its own rows say no."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from data_case import LENGTHS, write_dataset, write_trajectory
from safetensors.torch import load_file, save
from tiny import tiny_config

from d2lib.data.integrity import coverage_rows, integrity_rows
from d2lib.data.manifest import FileEntry, Manifest, SequenceEntry
from d2lib.drafter.deepseek.config import DeepseekConfig

CONFIG = tiny_config()
HEAD = torch.randn(CONFIG.vocab_size, CONFIG.dim, generator=torch.Generator().manual_seed(3))
Tensors = dict[str, torch.Tensor]


def dataset(folder: Path, config: DeepseekConfig = CONFIG) -> Manifest:
    return write_dataset(folder, config, head=HEAD)


def failing(manifest: Manifest, folder: Path, head: torch.Tensor | None = HEAD, **options: int) -> dict[str, str]:
    return {row.name: row.found for row in integrity_rows(manifest, folder, head, **options) if not row.holds}


def rewrite(manifest: Manifest, folder: Path, change: Callable[[Tensors], None], *, number: int = 1) -> Manifest:
    """Change one sequence's tensors and record the new bytes, so that only the contents can be wrong."""
    old = manifest.sequences[number]
    path = folder / old.file.path
    tensors = load_file(path)
    change(tensors)
    path.unlink()
    path.write_bytes(save(tensors))
    entry = SequenceEntry(**dict(old) | {"file": FileEntry.of(folder, old.file.path)})
    entries = [*manifest.sequences[:number], entry, *manifest.sequences[number + 1 :]]
    return Manifest(**dict(manifest) | {"sequences": tuple(entries)})


def test_a_good_capture_holds_everywhere(tmp_path: Path) -> None:
    manifest = dataset(tmp_path)
    hashed: list[int] = []
    rows = integrity_rows(manifest, tmp_path, HEAD, progress=hashed.append)
    assert [row.name for row in rows if not row.holds] == []
    assert len(rows) == 2 + 4 * 7
    assert len({row.name for row in rows}) == len(rows)
    assert sum(hashed) == sum(entry.file.size for entry in manifest.sequences)
    assert failing(manifest, tmp_path, head_rows=3) == {}


def put(name: str, row: int, value: float, column: int | None = None) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        if column is None:
            tensors[name][row] = value
        else:
            tensors[name][row, column] = value

    return change


def swap_ids(tensors: Tensors) -> None:
    ids = tensors["top20_ids"]
    ids[5, 0], ids[5, 19] = ids[5, 19].item(), ids[5, 0].item()


def least_likely(tensors: Tensors) -> None:
    """The 20 ids of row 6 become the least likely ones, with the right log-probabilities of those."""
    logp = (tensors["hidden"][6].float() @ HEAD.T).log_softmax(-1)
    low = logp.topk(20, largest=False)
    tensors["top20_ids"][6] = low.indices.flip(0)
    tensors["top20_logprobs"][6] = low.values.flip(0)


def one_off(tensors: Tensors) -> None:
    """The off-by-one that G1 is for: the distributions of one row later."""
    for name in ("top20_ids", "top20_logprobs"):
        tensors[name] = tensors[name].roll(-1, 0).contiguous()


FORM, AGREE = "top 20, train", "top 20 and hidden, train"
DAMAGE: dict[str, tuple[Callable[[Tensors], None], dict[str, str]]] = {
    "a token past the vocabulary": (put("tokens", 7, 53), {"tokens, train": "row 7 is 53"}),
    "a token below zero": (put("tokens", 7, -1), {"tokens, train": "row 7 is -1"}),
    "a NaN tap": (put("taps", 4, float("nan"), 2), {"taps, train": "row 4 is not finite"}),
    "an infinite tap": (put("taps", 4, float("inf"), 0), {"taps, train": "row 4 is not finite"}),
    "a row of taps that was never captured": (put("taps", 9, 0.0), {"taps, train": "row 9 is all zero"}),
    "an infinite hidden state": (
        put("hidden", 3, float("-inf"), 2),
        {"hidden, train": "row 3 is not finite", AGREE: "row 3 differs from the hidden state"},
    ),
    "a rising log-probability": (
        put("top20_logprobs", 8, 0.0, 19),
        {FORM: "row 8 rises", AGREE: "row 8 differs from the hidden state"},
    ),
    "a NaN log-probability": (
        put("top20_logprobs", 8, float("nan"), 0),
        {FORM: "row 8 is not finite", AGREE: "row 8 differs from the hidden state by nan"},
    ),
    "more than all probability": (
        put("top20_logprobs", 8, 0.0),
        {FORM: "row 8 sums to more than one", AGREE: "row 8 differs from the hidden state"},
    ),
    "an id outside the vocabulary": (
        put("top20_ids", 2, 53, 19),
        {FORM: "row 2 has an id outside the vocabulary", AGREE: "row 2"},
    ),
    "ids in another order": (swap_ids, {AGREE: "row 5 differs from the hidden state"}),
    "a small difference": (put("top20_logprobs", 2, -9.0, 19), {AGREE: "row 2 differs from the hidden state"}),
    "ids that are not the likeliest": (least_likely, {AGREE: "row 6 holds a token that is not among the likeliest"}),
    "distributions one row off": (one_off, {AGREE: "differs from the hidden state"}),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found_by_its_own_checks_alone(name: str, tmp_path: Path) -> None:
    change, wanted = DAMAGE[name]
    found = failing(rewrite(dataset(tmp_path), tmp_path, change), tmp_path)
    assert set(found) == set(wanted)
    for check, text in wanted.items():
        assert text in found[check]
        assert found[check].startswith("1 of 3 sequences are wrong; the first: train-01: ")


def test_a_doubled_id_is_found(tmp_path: Path) -> None:
    def double(tensors: Tensors) -> None:
        tensors["top20_ids"][4, 1] = tensors["top20_ids"][4, 0]

    assert "row 4 has an id twice" in failing(rewrite(dataset(tmp_path), tmp_path, double), tmp_path)[FORM]


def test_the_tolerance_is_the_stated_one(tmp_path: Path) -> None:
    def shift(tensors: Tensors) -> None:
        tensors["top20_logprobs"] -= 0.05

    manifest = rewrite(dataset(tmp_path), tmp_path, shift)
    assert failing(manifest, tmp_path) == {}
    strict = [row for row in integrity_rows(manifest, tmp_path, HEAD, tolerance=0.04) if not row.holds]
    assert [row.name for row in strict] == [AGREE]
    assert "within 0.04 nats, every row" in strict[0].expected


def test_other_bytes_missing_and_unlisted_files(tmp_path: Path) -> None:
    manifest = dataset(tmp_path)
    path = tmp_path / manifest.sequences[0].file.path
    path.chmod(0o600)
    data = bytearray(path.read_bytes())
    data[-1] ^= 64
    path.write_bytes(data)
    assert "files, train" in failing(manifest, tmp_path)
    path.unlink()
    found = failing(manifest, tmp_path)
    assert set(found) == {
        f"{name}, train" for name in ("files", "headers", "tokens", "taps", "hidden", "top 20", "top 20 and hidden")
    }
    data[-1] ^= 64
    path.write_bytes(data)
    (tmp_path / "shards/more.safetensors").write_bytes(b"x")
    assert failing(manifest, tmp_path) == {"unlisted files": "1; the first: shards/more.safetensors"}


def test_without_a_head_nothing_is_taken_on_trust(tmp_path: Path) -> None:
    found = failing(dataset(tmp_path), tmp_path, None)
    assert set(found) == {f"top 20 and hidden, {split}" for split in LENGTHS}


def test_a_crossing_family_and_an_empty_split_do_not_hold(tmp_path: Path) -> None:
    manifest = dataset(tmp_path)
    entries = [
        entry.model_copy(update={"family": "one"} if entry.id in ("train-00", "dev-00") else {})
        for entry in manifest.sequences
    ]
    crossing = manifest.model_copy(update={"sequences": tuple(entries)})  # what `Manifest` itself would refuse
    assert failing(crossing, tmp_path) == {"families": "8 families, 1 cross: one"}
    kept = tuple(entry for entry in manifest.sequences if entry.split != "dev")
    assert "files, dev" in failing(manifest.model_copy(update={"sequences": kept}), tmp_path)


def test_coverage_of_the_trajectories(tmp_path: Path) -> None:
    manifest = dataset(tmp_path)
    splits = ("dev", "heldout_legal", "heldout_general")
    paths = {
        split: write_trajectory(tmp_path, manifest, split, tmp_path / f"k2/{split}.jsonl", block_size=5)
        for split in splits
    }
    rows = coverage_rows(manifest, tmp_path, paths)
    assert [row.name for row in rows] == [f"K2 coverage, {split}" for split in splits]
    assert all(row.holds for row in rows)
    assert "complete rounds" in rows[0].found
    short = tmp_path / "short.jsonl"
    short.write_bytes(b"".join(paths["dev"].read_bytes().splitlines(keepends=True)[:-1]))
    # a block size that no round fits in: a request without complete rounds covers nothing
    long = write_trajectory(tmp_path, manifest, "dev", tmp_path / "long.jsonl", block_size=30)
    for path, text in ((short, "ends at row"), (long, "0 complete rounds"), (tmp_path / "none", "cannot be read")):
        (row,) = coverage_rows(manifest, tmp_path, {"dev": path})
        assert not row.holds
        assert text in row.found
