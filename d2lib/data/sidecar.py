"""Sidecars: one memory-mapped safetensors file per sequence. Opening one reads its header and no row."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from numpy.typing import NDArray
from safetensors.torch import save
from torch import Tensor

from d2lib.data.manifest import SequenceEntry
from d2lib.errors import Refused
from d2lib.files import inside, write_exclusive
from d2lib.strict import parse_json

TensorName = Literal["tokens", "taps", "hidden", "top20_ids", "top20_logprobs"]
TOP = 20
"""How many of the target's most likely next tokens are kept with each row."""

DTYPES: dict[TensorName, torch.dtype] = {
    "tokens": torch.int32,
    "taps": torch.bfloat16,
    "hidden": torch.bfloat16,
    "top20_ids": torch.int32,
    "top20_logprobs": torch.float32,
}
_STORED = {torch.int32: "I32", torch.bfloat16: "BF16", torch.float32: "F32"}
_BITS = {2: torch.int16, 4: torch.int32}
_LONGEST_HEADER = 1 << 16


class Sizes(Protocol):
    """What a sidecar's shapes depend on beside its rows (a Manifest has them)."""

    @property
    def dim(self) -> int: ...
    @property
    def n_taps(self) -> int: ...


def sidecar_shapes(rows: int, sizes: Sizes) -> dict[TensorName, tuple[int, ...]]:
    """Every tensor of a sequence of L rows: the tensors' names and shapes, in the order in which they are described.

    tokens [L] int32, t_j. taps [L, n_taps·dim] bf16, raw. hidden [L, dim] bf16: softmax(lm_head · hidden_j) is the
    target's distribution of t_{j+1}. top20_ids [L, 20] int32 and top20_logprobs [L, 20] fp32 of that distribution,
    likeliest first.
    """
    return {
        "tokens": (rows,),
        "taps": (rows, sizes.n_taps * sizes.dim),
        "hidden": (rows, sizes.dim),
        "top20_ids": (rows, TOP),
        "top20_logprobs": (rows, TOP),
    }


def write_sidecar(
    path: Path, *, tokens: Tensor, taps: Tensor, hidden: Tensor, top20_ids: Tensor, top20_logprobs: Tensor
) -> None:
    """Create one sequence's sidecar; never overwrites. Integers and floats are converted to the stored types.

    Args: as in `sidecar_shapes`. Raises Refused when the row counts or widths do not fit together.
    """
    given: dict[TensorName, Tensor] = {
        "tokens": tokens,
        "taps": taps,
        "hidden": hidden,
        "top20_ids": top20_ids,
        "top20_logprobs": top20_logprobs,
    }
    rows = int(tokens.shape[0]) if tokens.ndim == 1 else -1
    dim = int(hidden.shape[-1]) if hidden.ndim == 2 else -1
    n_taps = int(taps.shape[-1]) // dim if taps.ndim == 2 and dim > 0 else -1
    for name, shape in sidecar_shapes(rows, _Sizes(dim, n_taps)).items():
        if tuple(given[name].shape) != shape:
            raise Refused(
                f"a sidecar's {name} has a wrong shape", expected=list(shape), found=list(given[name].shape), where=path
            )
    write_exclusive(
        path, save({name: value.detach().cpu().to(DTYPES[name]).contiguous() for name, value in given.items()})
    )


@dataclass(frozen=True)
class _Sizes:
    dim: int
    n_taps: int


class Sidecar:
    """One sequence's rows, mapped copy-on-write: whatever is done to what it returns, the file stays as it is."""

    def __init__(self, entry: SequenceEntry, path: Path, tensors: Mapping[TensorName, Tensor]) -> None:
        self.entry = entry
        self.path = path
        self._tensors = tensors
        self._raw = {name: value.view(_BITS[value.itemsize]).numpy() for name, value in tensors.items()}

    @classmethod
    def open(cls, path: Path, entry: SequenceEntry, sizes: Sizes) -> Sidecar:
        """Map a sidecar; the header is read and checked, no row is.

        Args:
            path: the file, or the manifest's folder.
            entry: the sequence.
            sizes: dim and n_taps, e.g. the manifest.

        Raises:
            Refused: the file is missing, of another size than recorded, or its header does not describe exactly the
                five tensors with their types and shapes.
        """
        if path.is_dir():
            path = inside(path, entry.file.path)
        try:
            with open(path, "rb") as stream:
                size = os.fstat(stream.fileno()).st_size
                if size != entry.file.size:
                    raise Refused("a sidecar has another size", expected=entry.file.size, found=size, where=path)
                length = int.from_bytes(stream.read(8), "little")
                header = stream.read(length) if length <= _LONGEST_HEADER else b""
            storage = torch.UntypedStorage.from_file(str(path), False, size)
        except OSError as error:
            raise Refused("a sidecar cannot be opened", found=error.strerror, where=path) from None
        places = _parse_header(header, entry, sizes, size - 8 - length, path)
        data = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[arg-type]
        tensors: dict[TensorName, Tensor] = {}
        for name, shape in sidecar_shapes(entry.rows, sizes).items():
            start, stop = (8 + length + offset for offset in places[name])
            dtype = DTYPES[name]
            if start % dtype.itemsize:
                raise Refused(f"a sidecar's {name} is not aligned", expected=dtype.itemsize, found=start, where=path)
            tensors[name] = data[start:stop].view(dtype).view(shape)
        return cls(entry, path, tensors)

    def tensor(self, name: TensorName) -> Tensor:
        """The whole tensor, mapped; rows are read when they are used."""
        return self._tensors[name]

    def raw(self, name: TensorName) -> NDArray[Any]:
        """The whole tensor as integers of its width, mapped: numpy has no bfloat16, and slices faster."""
        return self._raw[name]

    def rows(self, name: TensorName, start: int, stop: int) -> Tensor:
        """Rows start … stop-1, mapped; raises Refused outside 0 … L."""
        if not 0 <= start <= stop <= self.entry.rows:
            raise Refused(
                "rows outside a sequence",
                expected=f"0 <= start <= stop <= {self.entry.rows}",
                found=f"{start} … {stop}",
                where=self.entry.id,
            )
        return self._tensors[name][start:stop]

    def gather(self, name: TensorName, rows: Tensor) -> Tensor:
        """[N, …] copies of these rows (int64 [N]), in this order; raises Refused outside 0 … L-1."""
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < self.entry.rows:
            raise Refused(
                "rows outside a sequence",
                expected=f"0 … {self.entry.rows - 1}",
                found=f"{int(rows.min())} … {int(rows.max())}",
                where=self.entry.id,
            )
        return self._tensors[name].index_select(0, rows)


def _parse_header(
    header: bytes, entry: SequenceEntry, sizes: Sizes, data_size: int, path: Path
) -> dict[TensorName, tuple[int, int]]:
    """Name → [start, stop) in the data; refuses anything but the five tensors, packed without gaps or overlaps."""
    try:
        described: Any = parse_json(header, where=path)
    except Refused as error:
        found = error.message if error.found is None else f"{error.message}: {error.found}"
        raise Refused("not a safetensors file", expected="a JSON header", found=found, where=path) from None
    if not isinstance(described, dict):
        raise Refused("not a safetensors file", expected="a JSON object as header", where=path)
    described.pop("__metadata__", None)
    shapes = sidecar_shapes(entry.rows, sizes)
    if set(described) != set(shapes):
        raise Refused("a sidecar has other tensors", expected=sorted(shapes), found=sorted(described), where=path)
    places: dict[TensorName, tuple[int, int]] = {}
    for name, shape in shapes.items():
        dtype = _STORED[DTYPES[name]]
        size = DTYPES[name].itemsize * torch.Size(shape).numel()
        found = described[name]
        if not isinstance(found, dict) or found.get("dtype") != dtype or found.get("shape") != list(shape):
            raise Refused(
                f"a sidecar's {name} has a wrong type or shape",
                expected=f"{dtype} {list(shape)}",
                found=found,
                where=path,
            )
        match found.get("data_offsets"):
            case [int(start), int(stop)] if stop - start == size:
                places[name] = (start, stop)
            case other:
                raise Refused(
                    f"a sidecar's {name} has wrong offsets", expected=f"{size} bytes", found=other, where=path
                )
    end = 0
    for start, stop in sorted(places.values()):
        if start != end:
            raise Refused("a sidecar's tensors overlap or leave gaps", expected=end, found=start, where=path)
        end = stop
    if end != data_size:
        raise Refused("a sidecar's data has another size", expected=end, found=data_size, where=path)
    return places
