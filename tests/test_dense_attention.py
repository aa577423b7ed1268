"""Attention to shared rows against a plain masked softmax over copies, forward and backward; its memory; its bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from d2lib.drafter.dense import attention
from d2lib.drafter.dense.attention import SeenRows, block_attention


def plain_attention(
    q: Tensor, keys: Tensor, values: Tensor, row_keys: Tensor, row_values: Tensor, seen: SeenRows, causal: bool
) -> Tensor:
    """The same with a copy of every row for every block and of every KV head for every query head."""
    blocks, slots, heads, width = q.shape
    row = torch.arange(len(row_keys))
    context = (row >= seen.first[:, :, None]) & (row < seen.last[:, None, None])
    own = torch.ones(slots, slots, dtype=torch.bool)
    own = own.tril() if causal else own
    visible = torch.cat([context.expand(blocks, slots, -1), own.expand(blocks, -1, -1)], -1)

    def bank(rows: Tensor, slots: Tensor) -> Tensor:
        return torch.cat([rows.expand(blocks, -1, -1, -1), slots], 1).repeat_interleave(heads // keys.shape[2], 2)

    scores = torch.einsum("bnhd,bkhd->bhnk", q, bank(row_keys, keys)) / width**0.5
    weights = scores.masked_fill(~visible.unsqueeze(1), float("-inf")).softmax(-1)
    return torch.einsum("bhnk,bkhd->bnhd", weights, bank(row_values, values))


def case(
    *,
    stretches: tuple[int, ...],
    blocks: int,
    slots: int = 3,
    groups: int = 2,
    shared: int = 2,
    width: int = 4,
    window: int | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> tuple[list[Tensor], SeenRows]:
    """Blocks anywhere in stretches of rows, one stretch a sequence, in no order; some see nothing."""
    g = torch.Generator().manual_seed(seed)
    rows = sum(stretches)
    begin = torch.tensor([0, *stretches]).cumsum(0)
    which = torch.randint(len(stretches), (blocks,), generator=g)
    share = torch.rand(blocks, generator=g)
    first, last = begin[which], begin[which] + (share * (torch.tensor(stretches)[which] + 1)).long()
    first = first.unsqueeze(1)
    if window is not None:
        first = torch.maximum(first, last.unsqueeze(1) + torch.arange(slots) - (window - 1))
    shapes = [(blocks, slots, groups * shared), *[(blocks, slots, groups)] * 2, *[(rows, groups)] * 2]
    tensors = [torch.randn(*shape, width, generator=g, dtype=dtype).requires_grad_() for shape in shapes]
    return tensors, SeenRows(first, last)


def both(function: Callable[..., Tensor], tensors: list[Tensor], seen: SeenRows, causal: bool) -> list[Tensor]:
    """The result and its gradients by all five tensors."""
    out = function(*tensors, seen, causal=causal)
    probe = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    return [out.detach(), *torch.autograd.grad(out, tensors, probe)]


@settings(max_examples=40, deadline=None)
@given(
    stretches=st.lists(st.integers(0, 90), min_size=1, max_size=3),
    blocks=st.integers(1, 9),
    slots=st.integers(1, 4),
    groups=st.integers(1, 3),
    shared=st.integers(1, 3),
    window=st.none() | st.integers(4, 70),
    causal=st.booleans(),
    scores=st.sampled_from([1, 700, 1 << 19]),
    seed=st.integers(0, 99),
)
def test_it_is_a_masked_softmax_over_copies(
    stretches: list[int],
    blocks: int,
    slots: int,
    groups: int,
    shared: int,
    window: int | None,
    causal: bool,
    scores: int,
    seed: int,
) -> None:
    tensors, seen = case(
        stretches=tuple(stretches),
        blocks=blocks,
        slots=slots,
        groups=groups,
        shared=shared,
        window=window,
        seed=seed,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "SCORES", scores)
        found = both(block_attention, tensors, seen, causal)
    for one, other in zip(found, both(plain_attention, tensors, seen, causal), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("window", [None, 200])
def test_tiles_join_without_a_seam(window: int | None) -> None:
    tensors, seen = case(stretches=(1300, 700), blocks=40, window=window)
    assert len(seen.tiles(2, 6, attention.SCORES)) > 3
    found, expected = (both(f, tensors, seen, False) for f in (block_attention, plain_attention))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_large_scores_do_not_overflow() -> None:
    tensors, seen = case(stretches=(300,), blocks=6, dtype=torch.float32)
    loud = [(40 * tensor).detach().requires_grad_() for tensor in tensors]
    found, expected = (both(f, loud, seen, True) for f in (block_attention, plain_attention))
    for one, other in zip(found, expected, strict=True):
        assert torch.isfinite(one).all()
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3 * float(other.abs().max()))


def test_a_row_that_a_block_does_not_see_leaves_its_bits() -> None:
    tensors, seen = case(stretches=(150,), blocks=12, dtype=torch.float32)
    before = both(block_attention, tensors, seen, False)
    assert all(torch.equal(*pair) for pair in zip(before, both(block_attention, tensors, seen, False), strict=True))
    row = int(seen.last.sort().values[6])
    with torch.no_grad():
        tensors[3][row] += 1
        tensors[4][row] -= 1
    after = block_attention(*tensors, seen, causal=False).detach()
    sees = seen.last > row
    same = (before[0] == after).flatten(1).all(1)
    assert sees.any()
    assert torch.equal(same, ~sees)


def test_bf16_products_keep_the_softmax_in_fp32() -> None:
    tensors, seen = case(stretches=(400,), blocks=8, width=16, dtype=torch.float32)
    narrow = [tensor.detach().bfloat16().requires_grad_() for tensor in tensors]
    wide = [tensor.detach().float().requires_grad_() for tensor in narrow]
    found, expected = (both(block_attention, given, seen, False) for given in (narrow, wide))
    assert found[0].dtype == torch.float32
    for one, other in zip(found, expected, strict=True):
        assert 1e-4 < float((one - other).norm() / other.norm()) < 2e-2


class Held(TorchDispatchMode):
    """The most bytes held at once by what operations made while this was on."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        self._alive = {key: held for key, held in self._alive.items() if not held[0].expired()}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in given:
                storage = leaf.untyped_storage()
                self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.most = max(self.most, sum(size for _, size in self._alive.values()))
        return result


def held_by_attention(function: Callable[..., Tensor], rows: int, blocks: int) -> int:
    tensors, _ = case(stretches=(rows,), blocks=blocks, groups=1, width=8, dtype=torch.float32)
    last = torch.linspace(rows // 2, rows, blocks).long()
    seen = SeenRows(torch.zeros(blocks, 1, dtype=torch.int64), last)
    with Held() as held:
        both(function, tensors, seen, False)
    return held.most


def test_memory_grows_with_rows_plus_blocks_not_with_their_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "SCORES", 1 << 13)

    def together(function: Callable[..., Tensor]) -> float:
        """Bytes a row and block that more of both take beyond what more of each takes: the product's share."""
        a, b, c, d = (held_by_attention(function, rows, blocks) for rows in (256, 768) for blocks in (8, 24))
        return (d - c - b + a) / (512 * 16)

    assert together(plain_attention) > 100  # a copy of key and value for every block, and scores, are seen
    assert together(block_attention) < 1
    # 128 blocks over 4,096 rows: one copy of keys and values is 2 · 4,096 · 8 · 4 bytes
    assert held_by_attention(block_attention, 4096, 128) < 8 * 2 * 4096 * 8 * 4
