"""Sidecars: what is written is what is read, a wrong header is refused, and opening reads no rows."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from data_case import write_dataset
from tiny import tiny_config

from d2lib.data.manifest import FileEntry, Manifest, SequenceEntry
from d2lib.data.sidecar import Sidecar, sidecar_shapes, write_sidecar
from d2lib.errors import Refused


@pytest.fixture
def dataset(tmp_path: Path) -> tuple[Path, Manifest]:
    return tmp_path, write_dataset(tmp_path, tiny_config())


def tensors(rows: int = 9, dim: int = 4, taps: int = 2) -> dict[str, torch.Tensor]:
    return {
        "tokens": torch.arange(rows),
        "taps": torch.randn(rows, taps * dim),
        "hidden": torch.randn(rows, dim),
        "top20_ids": torch.arange(20).repeat(rows, 1),
        "top20_logprobs": torch.randn(rows, 20),
    }


def test_rows_come_back_in_the_stored_types(tmp_path: Path) -> None:
    given = tensors()
    write_sidecar(tmp_path / "a.safetensors", **given)
    entry = SequenceEntry(
        id="a", split="dev", family="f", rows=9, gen_start=3, file=FileEntry.of(tmp_path, "a.safetensors")
    )
    sidecar = Sidecar.open(tmp_path, entry, _Sizes(4, 2))
    for name in sidecar_shapes(9, _Sizes(4, 2)):
        stored = sidecar.tensor(name)
        assert torch.equal(stored, given[name].to(stored.dtype)), name
        assert torch.equal(sidecar.rows(name, 2, 5), stored[2:5])
        assert torch.equal(sidecar.gather(name, torch.tensor([8, 0, 8])), stored[[8, 0, 8]])
    assert [sidecar.tensor(name).dtype for name in ("tokens", "taps", "hidden", "top20_ids", "top20_logprobs")] == [
        torch.int32,
        torch.bfloat16,
        torch.bfloat16,
        torch.int32,
        torch.float32,
    ]
    for wrong in (lambda: sidecar.rows("taps", 5, 10), lambda: sidecar.gather("taps", torch.tensor([-1]))):
        with pytest.raises(Refused, match="rows outside a sequence"):
            wrong()


class _Sizes:
    def __init__(self, dim: int, n_taps: int) -> None:
        self.dim, self.n_taps = dim, n_taps


def test_writing_to_what_was_read_leaves_the_file_alone(dataset: tuple[Path, Manifest]) -> None:
    folder, manifest = dataset
    Sidecar.open(folder, manifest.sequences[0], manifest).tensor("taps").zero_()
    manifest.verify_files(folder)


@pytest.mark.parametrize("name", ["taps", "hidden", "top20_ids", "top20_logprobs"])
def test_tensors_that_do_not_fit_together_are_not_written(name: str, tmp_path: Path) -> None:
    given = tensors()
    given[name] = given[name][:-1]
    with pytest.raises(Refused, match="wrong shape"):
        write_sidecar(tmp_path / "a.safetensors", **given)
    assert not list(tmp_path.iterdir())


def edit(change: Callable[[dict[str, Any]], None]) -> Callable[[bytes], bytes]:
    """A file with another header, as long as before."""

    def apply(data: bytes) -> bytes:
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        change(header)
        text = json.dumps(header, separators=(",", ":")).encode()
        return data[:8] + text.ljust(length) + data[8 + length :]

    return apply


def shift(header: dict[str, Any]) -> None:
    header["tokens"]["data_offsets"] = [offset - 4 for offset in header["tokens"]["data_offsets"]]


SPOILT: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "cut off": (lambda data: data[:-1], "another size"),
    "longer": (lambda data: data + b"x", "another size"),
    "another type": (edit(lambda h: h["taps"].update(dtype="F16")), "taps has a wrong type or shape"),
    "another shape": (edit(lambda h: h["tokens"].update(shape=[1, 31])), "tokens has a wrong type or shape"),
    "a tensor missing": (edit(lambda h: h.pop("hidden")), "other tensors"),
    "a tensor renamed": (edit(lambda h: h.update(hiddem=h.pop("hidden"))), "other tensors"),
    "an overlap": (edit(shift), "overlap or leave gaps|not aligned"),
    "offsets too short": (edit(lambda h: h["tokens"].update(data_offsets=[0, 4])), "wrong offsets"),
    "offsets as text": (edit(lambda h: h["tokens"].update(data_offsets="0")), "wrong offsets"),
    "no header": (lambda data: data[:8] + b"x" * (len(data) - 8), "not a safetensors file"),
    "a tensor twice": (
        lambda data: data[:8] + data[8:].replace(b'{"', b'{"tokens":{},"', 1)[: len(data) - 8],
        "not a safetensors file; expected: a JSON header; found: .*(twice|valid)",
    ),
    "a header of another kind": (lambda data: data[:8] + b"[]".ljust(len(data) - 8), "not a safetensors file"),
    "an endless header": (lambda data: b"\xff" * 8 + data[8:], "not a safetensors file"),
    "another order of lengths": (lambda data: data[:8][::-1] + data[8:], "not a safetensors file"),
}


@pytest.mark.parametrize("name", SPOILT)
def test_a_wrong_file_is_refused(name: str, dataset: tuple[Path, Manifest]) -> None:
    folder, manifest = dataset
    spoil, message = SPOILT[name]
    path = folder / manifest.sequences[0].file.path
    path.chmod(0o600)
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(Refused, match=message) as caught:
        Sidecar.open(folder, manifest.sequences[0], manifest)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_refused(dataset: tuple[Path, Manifest]) -> None:
    folder, manifest = dataset
    (folder / manifest.sequences[0].file.path).unlink()
    with pytest.raises(Refused, match="cannot be opened"):
        Sidecar.open(folder, manifest.sequences[0], manifest)


_OPEN_EVERYTHING = """
import ctypes, json, mmap, os, resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from data_case import production_rows
from d2lib.data.blocks import D2Blocks
from d2lib.data.manifest import FileEntry, Manifest, SequenceEntry
from d2lib.data.sidecar import DTYPES, sidecar_shapes
from tiny import tiny_config

folder = Path(sys.argv[1])
config = tiny_config(dim=5120, vocab_size=129280, noise_token_id=128799, target_layer_ids=(37, 38, 39), window=128,
                     block_size=5)
kinds = {"tokens": "I32", "taps": "BF16", "hidden": "BF16", "top20_ids": "I32", "top20_logprobs": "F32"}
entries = []
for split, lengths in production_rows().items():
    for number, rows in enumerate(lengths):
        header, end = {}, 0
        for name, shape in sidecar_shapes(rows, config).items():
            size = DTYPES[name].itemsize * int.__mul__(*shape) if len(shape) == 2 else 4 * rows
            header[name] = {"dtype": kinds[name], "shape": list(shape), "data_offsets": [end, end + size]}
            end += size
        text = json.dumps(header).encode()
        text = text.ljust(-(-len(text) // 8) * 8)
        name = f"{split}-{number:03}.safetensors"
        with open(folder / name, "wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            stream.truncate(8 + len(text) + end)  # a hole in the place of the rows
        entries.append(SequenceEntry(id=f"{split}-{number:03}", split=split, family=name, rows=rows, gen_start=128,
            file=FileEntry(path=name, size=8 + len(text) + end, sha256="sha256:" + "0" * 64)))
Manifest(namespace="sparse", dim=5120, vocab_size=129280, n_taps=3, target={}, sequences=tuple(entries)).write(
    folder / "MANIFEST.json")

def bytes_read():
    return int(open("/proc/self/io").read().split()[1])

before, memory = bytes_read(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
manifest = Manifest.load(folder / "MANIFEST.json")
splits = {split: D2Blocks(manifest, folder, split, config) for split in ("train", "dev", "heldout_legal",
                                                                        "heldout_general")}
order = splits["train"].epoch_order(23, 0)
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
result = {"read": bytes_read() - before, "resident": 1024 * grown,
          "blocks": {split: len(blocks) for split, blocks in splits.items()}, "order": order.numel() * order.itemsize,
          "files": sum(entry.file.size for entry in entries), "manifest": os.path.getsize(folder / "MANIFEST.json"),
          "stored": sum(os.stat(folder / entry.file.path).st_blocks * 512 for entry in entries)}

# rows in the page cache: a hole that was read stands there, one that was not does not
libc = ctypes.CDLL(None, use_errno=True)
libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
def resident(sidecar):
    start = sidecar.tensor("taps").data_ptr() + (1 << 20)
    start -= start % mmap.PAGESIZE
    pages = 1 << 12
    seen = ctypes.create_string_buffer(pages)
    assert libc.mincore(start, pages * mmap.PAGESIZE, seen) == 0, os.strerror(ctypes.get_errno())
    return sum(byte & 1 for byte in seen.raw)
train = splits["train"]
result["rows resident after opening"] = sum(resident(sidecar) for sidecar in train.sidecars)
batch = train.batch(order[:1] * 0)
result["first batch"] = [list(batch.taps.shape), list(batch.teacher_hidden.shape), len(batch)]
result["rows resident after a batch"] = sum(resident(sidecar) for sidecar in train.sidecars)
print(json.dumps(result))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's accounts of a process")
def test_opening_the_production_reads_headers_only(tmp_path: Path) -> None:
    """Files of the production's sizes with holes for rows; 41 GB that nobody could have read in passing."""
    command = [sys.executable, "-c", _OPEN_EVERYTHING, str(tmp_path), str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["files"] > 40e9
    assert found["stored"] < 131 * 16384
    assert found["blocks"] == {"train": 488_031, "dev": 229_630, "heldout_legal": 217_362, "heldout_general": 39_018}
    assert found["order"] == 8 * 488_031
    assert found["read"] < found["manifest"] + 131 * 16384
    assert found["resident"] < 100e6
    assert found["rows resident after opening"] == 0
    assert found["first batch"] == [[128, 15360], [5, 5120], 1]
    assert found["rows resident after a batch"] > 0
