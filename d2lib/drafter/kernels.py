"""Batch-invariant kernels: a row's result has the same bits whatever rows are computed beside it.

A library picks the order of its floating-point operations by the shape of a call, by where an element falls in a
vector register and by the number of threads. So every operation here is one of

- elementwise arithmetic that IEEE 754 rounds correctly, hence the same everywhere (+, -, ×, ÷, square root, maximum);
- a sum in a fixed order, written as such additions (`fold`);
- a matrix product on tiles of a fixed number of rows (`linear`, `paired_products`), padded where rows are missing;
- `exp`, `log1p`, `cos` and `sin`, which torch evaluates by the same code in the body and in the tail of a tensor.
  (`torch.sigmoid`, `silu` and `softplus` use another code for the tail; they are composed of the former here.)

The last two rest on the library rather than on a standard: `batched.self_check` tests them on the machine at hand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional as F

TILE = 32
"""Rows of a matrix product's tile."""

_ALIGNMENT = 64
"""Bytes; a library may also pick its kernel by an operand's address."""

_NARROW = 16
"""Outputs; a narrower product may go through a kernel in which a row's place counts, so it is widened."""

_EXP_LIMIT = 80.0
"""exp of ±this is a normal fp32 number, so that neither a value nor a gradient becomes inf or NaN."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch on one thread, and on as many as before afterwards; also a decorator.

    The reference computes so. Its products and sums are too small to share: two threads would meet after each of them,
    and beside a busy process each such meeting may last a scheduler's time slice. And a library orders a product by
    the number of threads too. What is independent (requests, splits) is computed by several processes instead.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x·Wᵀ, tile by tile.

    Args:
        x: [..., in].
        weight: [out, in].

    Returns:
        [..., out].
    """
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    count, width = rows.shape[0], weight.shape[0]
    if missing := -count % TILE:
        rows = F.pad(rows, (0, 0, 0, missing))
    elif rows.data_ptr() % _ALIGNMENT:
        rows = rows.clone()
    if width < _NARROW:
        weight = align(weight, 0)
    transposed = weight.t()
    if rows.shape[0] == TILE:
        product = rows.mm(transposed)
    elif count:
        product = torch.cat([tile.mm(transposed) for tile in torch.split(rows, TILE)])
    else:
        product = rows.new_zeros(0, weight.shape[0])
    return product[:count, :width].reshape(*x.shape[:-1], width)


def align(x: Tensor, dim: int = -1) -> Tensor:
    """Zeros appended along an axis up to a multiple of 16, so that fp32 slices start at an aligned address."""
    missing = -x.shape[dim] % (_ALIGNMENT // 4)
    if not missing:
        return x
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat([x, x.new_zeros(shape)], dim)


def paired_products(left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
    """Left[b]·right[b] for every b, one product of a fixed shape at a time: B of [m, n] by B of [n, p] → [B, m, p].

    The innermost axes must be aligned (`align`), and strides the same from one b to another.
    """
    if torch.is_grad_enabled():
        return torch.stack([a @ b for a, b in zip(left, right, strict=True)])
    products = left[0].new_empty(len(left), left[0].shape[0], right[0].shape[1])
    for a, b, product in zip(left, right, products.unbind(), strict=True):
        torch.mm(a, b, out=product)
    return products


def fold(x: Tensor, dim: int = -1, *, keepdim: bool = False) -> Tensor:
    """Sum along an axis: add the second half to the first until one is left (pairwise summation)."""
    while (size := x.shape[dim]) > 1:
        if size % 2:
            first, second, rest = torch.split(x, [size // 2, size // 2, 1], dim)
            x = torch.cat([first + second, rest], dim)
        else:
            first, second = x.chunk(2, dim)
            x = first + second
    return x if keepdim else x.squeeze(dim)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x / sqrt(mean x² + eps) · weight over the last axis (Zhang and Sennrich, arXiv 1910.07467)."""
    normed = x / torch.sqrt(fold(x * x, keepdim=True) / x.shape[-1] + eps)
    return normed if weight is None else normed * weight


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x))."""
    return 1 / (1 + torch.exp(-x.clamp(min=-_EXP_LIMIT)))


def silu(x: Tensor) -> Tensor:
    """x·σ(x)."""
    return x * sigmoid(x)


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)); x itself beyond 20, where the two agree in fp32."""
    return torch.where(x > 20, x, torch.log1p(torch.exp(x.clamp(min=-_EXP_LIMIT, max=20))))
