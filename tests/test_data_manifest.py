"""The manifest: production figures from row counts, and everything that it must refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from data_case import manifest_of, production_rows, write_dataset
from tiny import tiny_config

from d2lib.data.manifest import FileEntry, Manifest
from d2lib.errors import Refused


def test_production_figures_follow_from_the_row_counts() -> None:
    counts = manifest_of(production_rows()).counts()
    assert counts.sequences == 131
    assert counts.rows == 990_940
    assert counts.span_positions == 974_172
    assert counts.rows - counts.span_positions == 131 * 128
    assert counts.training_positions == 488_096
    assert counts.blocks == 488_031
    assert counts.updates(epochs=3, batch=128) == 11_439
    assert counts.presented(epochs=3) == 1_464_093
    assert {name: split.rows for name, split in counts.splits.items()} == {
        "train": 496_416,
        "dev": 233_500,
        "heldout_legal": 220_458,
        "heldout_general": 40_566,
    }


@pytest.mark.parametrize(("blocks", "expected"), [(128, 1), (129, 2), (1, 1), (256, 2)])
def test_a_short_last_batch_is_an_update(blocks: int, expected: int) -> None:
    counts = manifest_of({"train": [129 + blocks]}).counts()
    assert counts.blocks == blocks
    assert counts.updates(epochs=1, batch=128) == expected
    assert counts.updates(epochs=5, batch=128) == 5 * expected


def test_no_training_without_epochs() -> None:
    with pytest.raises(Refused, match="not a training"):
        manifest_of(production_rows()).counts().updates(epochs=0, batch=128)


def test_round_trip_in_order_and_never_overwritten(tmp_path: Path) -> None:
    manifest = manifest_of(production_rows())
    manifest.write(tmp_path / "MANIFEST.json")
    found = Manifest.load(tmp_path / "MANIFEST.json")
    assert found == manifest
    assert [entry.id for entry in found.split("dev")] == sorted(entry.id for entry in found.split("dev"))
    assert found.entry("dev-003").rows == manifest.split("dev")[3].rows
    with pytest.raises(Refused, match="never overwritten"):
        manifest.write(tmp_path / "MANIFEST.json")
    with pytest.raises(Refused, match="not in the manifest"):
        found.entry("dev-999")


def change(value: dict[str, Any], number: int, **fields: Any) -> dict[str, Any]:
    value["sequences"][number].update(fields)
    return value


BAD = {
    "an id twice": (lambda v: change(v, 1, id="train-000"), "the id 'train-000' stands 2 times"),
    "a family in two splits": (lambda v: change(v, 1, family="dev-0"), "'dev-0' crosses the splits dev, train"),
    "a file twice": (lambda v: change(v, 1, file=v["sequences"][0]["file"]), "stands 2 times"),
    "no room for a block": (lambda v: change(v, 0, rows=129), r"at least gen_start \+ 2 = 130; found 129"),
    "no context": (lambda v: change(v, 0, gen_start=0), "sequences.0.gen_start"),
    "a fractional row count": (lambda v: change(v, 0, rows=400.5), "sequences.0.rows"),
    "a number as text": (lambda v: change(v, 0, rows="400"), "sequences.0.rows"),
    "an unknown split": (lambda v: change(v, 0, split="test"), "sequences.0.split"),
    "an unknown key": (lambda v: change(v, 0, weight=1), "sequences.0.weight"),
    "an id that is a path": (lambda v: change(v, 0, id="../x"), "sequences.0.id"),
    "a path that climbs out": (
        lambda v: change(v, 0, file=v["sequences"][0]["file"] | {"path": "../x"}),
        "plain and relative",
    ),
    "an absolute path": (
        lambda v: change(v, 0, file=v["sequences"][0]["file"] | {"path": "/x"}),
        "plain and relative",
    ),
    "a path in two spellings": (
        lambda v: change(v, 0, file=v["sequences"][0]["file"] | {"path": "a/./x"}),
        "plain and relative",
    ),
    "a bare digest": (
        lambda v: change(v, 0, file=v["sequences"][0]["file"] | {"sha256": "0" * 64}),
        "sequences.0.file.sha256",
    ),
    "another schema": (lambda v: v | {"schema_version": 2}, "schema_version"),
    "nothing": (lambda v: v | {"sequences": []}, "sequences"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_manifest_is_refused_by_name(name: str, tmp_path: Path) -> None:
    spoil, message = BAD[name]
    value = manifest_of({"train": [200, 300], "dev": [200]}).model_dump(mode="json")
    path = tmp_path / "MANIFEST.json"
    path.write_text(json.dumps(value))
    Manifest.load(path)
    path.write_text(json.dumps(spoil(value)))
    with pytest.raises(Refused, match=message) as caught:
        Manifest.load(path)
    assert str(path) in str(caught.value)


def test_changed_missing_and_truncated_files_are_found(tmp_path: Path) -> None:
    manifest = write_dataset(tmp_path, tiny_config())
    seen: list[int] = []
    manifest.verify_files(tmp_path, seen.append)
    assert sum(seen) == sum(entry.file.size for entry in manifest.sequences)

    first, second, third = (tmp_path / entry.file.path for entry in manifest.sequences[:3])
    first.chmod(0o600)
    data = bytearray(first.read_bytes())
    data[-1] ^= 1
    first.write_bytes(data)
    with pytest.raises(Refused, match=r"1 that differ; the first: shards/train-00\.safetensors: sha256:"):
        manifest.verify_files(tmp_path)
    second.unlink()
    third.chmod(0o600)
    third.write_bytes(third.read_bytes()[:-1])
    with pytest.raises(Refused, match="3 that differ"):
        manifest.verify_files(tmp_path)
    data[-1] ^= 1
    first.write_bytes(data)
    with pytest.raises(Refused, match=r"train-01\.safetensors: a file is missing"):
        manifest.verify_files(tmp_path)


def test_a_link_is_not_a_file(tmp_path: Path) -> None:
    manifest = write_dataset(tmp_path, tiny_config())
    path = tmp_path / manifest.sequences[0].file.path
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Refused, match="a link is not allowed here"):
        manifest.verify_files(tmp_path)
    with pytest.raises(Refused, match="a link is not allowed here"):
        FileEntry.of(tmp_path, manifest.sequences[0].file.path)
