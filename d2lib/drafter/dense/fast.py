"""FAST of the dense family: the reference's steps over a whole batch, with the library's fastest kernels.

What makes it fast: z, and every layer's keys and values of a context row, are computed once per batch, however many
blocks see the row; the blocks of a sequence attend to those rows in tiles (`attention`); the blocks' rows go through
each projection together; head and loss never hold a [blocks, K, vocab] tensor (`head_loss`).

It means the same as the reference (losses, logits, gradients, to rounding) and has other bits. No verdict uses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from d2lib.drafter.batch import BlockBatch
from d2lib.drafter.config import DrafterConfig
from d2lib.drafter.dense.attention import SeenRows, block_attention
from d2lib.drafter.dense.config import DenseConfig
from d2lib.drafter.dense.reference import DenseReference
from d2lib.drafter.dense.rotary import rotary_angles
from d2lib.drafter.fast import FastDrafter
from d2lib.errors import Refused


def activations(config: DenseConfig, blocks: int, seen: int) -> int:
    """See Family.activations. Counted by what each part keeps for its gradient, rounded up."""
    c = config
    slots, rows = blocks * c.n_rows, blocks * seen
    kept = seen + c.n_rows
    queries, keys = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    layer = slots * (5 * c.dim + 4 * queries + 4 * c.n_heads * kept + 4 * c.inter_dim)
    layer += (rows + slots) * 5 * keys + 6 * blocks * kept * keys
    return c.n_layers * layer + rows * (c.n_taps + 2) * c.dim + slots * 4 * c.dim


class DenseFast(FastDrafter, DenseReference):
    """The training path; arguments as `FastDrafter`. Projections that no gradient asks for are held in compute_dtype,
    cast once."""

    def __init__(
        self,
        config: DrafterConfig,
        weights: Mapping[str, Tensor],
        adapter: Mapping[str, Tensor] | None = None,
        compute_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(config, weights, adapter, compute_dtype)
        self._cast = {
            name: value.to(compute_dtype)
            for name, value in weights.items()
            if name.startswith(("fc.", "layers.")) and value.ndim == 2 and not value.requires_grad
        }

    def hidden(self, batch: BlockBatch) -> Tensor:
        """y [B, K, dim] of every slot of the batch, after the final norm."""
        c, blocks = self.config, len(batch)
        # 1. blocks that share rows side by side
        first, last = context_spans(batch)
        order = torch.argsort(last, stable=True)
        row = torch.arange(c.n_rows, device=last.device)
        seen = self._seen(first[order], last[order], row)
        # 2. what all layers read: context rows, and the angles of rows and queries
        z = self._norm(self._project("fc", batch.taps), "hidden_norm")
        by_row = rotary_angles(batch.positions, c)
        by_query = rotary_angles((batch.anchor[order].unsqueeze(1) + row).flatten(), c)
        # 3. the layers, on the query rows of all blocks
        ids = torch.full((blocks, c.n_rows), c.mask_token_id, device=row.device)
        ids[:, 0] = batch.anchor_token[order]
        x = self.embed[ids.flatten()]
        for layer, (kind, causal) in enumerate(zip(c.layer_types, c.causal, strict=True)):
            name = f"layers.{layer}"
            h = self._norm(x, f"{name}.input_layernorm")
            own = [self._heads(f"{name}.self_attn.{part}", h, by_query) for part in "qkv"]
            q, keys, values = (part.view(blocks, c.n_rows, -1, c.head_dim) for part in own)
            row_keys, row_values = (self._heads(f"{name}.self_attn.{part}", z, by_row) for part in "kv")
            out = block_attention(q, keys, values, row_keys, row_values, seen[kind], causal=causal)
            x = x + self._project(f"{name}.self_attn.o_proj", out.reshape(len(x), -1))
            m = self._norm(x, f"{name}.post_attention_layernorm")
            gate, up = (self._project(f"{name}.mlp.{part}_proj", m) for part in ("gate", "up"))
            x = x + self._project(f"{name}.mlp.down_proj", F.silu(gate) * up)
        # 4. the slots, back in the batch's order
        slots = x.view(blocks, c.n_rows, c.dim)[:, c.n_rows - c.block_size :]
        return self._norm(slots.index_select(0, torch.argsort(order)), "norm")

    def _seen(self, first: Tensor, last: Tensor, row: Tensor) -> dict[str, SeenRows]:
        """What the query rows of blocks see of the context, by layer type; first, last [B] of the rows that exist."""
        first, width = first.unsqueeze(1), self.config.sliding_window
        seen = {"full_attention": SeenRows(first, last)}
        if width is not None:
            reach = row - (width - 1) if self.sliding_rule == "served" else row.new_tensor([-width])
            seen["sliding_attention"] = SeenRows(torch.maximum(first, last.unsqueeze(1) + reach), last)
        return seen

    def _heads(self, name: str, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Queries (`…q`), keys or values of rows [n, dim]: [n, heads, D] in the products' dtype, values neither normed
        nor turned."""
        heads = self._project(f"{name}_proj", x)
        heads = heads.view(len(x), heads.shape[1] // self.config.head_dim, self.config.head_dim)
        if not name.endswith("v"):
            heads = self._norm_then_turn(heads, f"{name}_norm", angles)
        return heads.to(self.compute_dtype)

    def _project(self, name: str, x: Tensor) -> Tensor:
        dtype, weight, bias = self.compute_dtype, f"{name}.weight", self.weights.get(f"{name}.bias")
        x = x.to(dtype)
        y = F.linear(x, self._cast[weight] if weight in self._cast else self.weights[weight].to(dtype))
        if self.adapter:
            low = F.linear(x, self.adapter[f"{name}.lora_A"].to(dtype))
            y = torch.addmm(y, low, self.adapter[f"{name}.lora_B"].to(dtype).t())
        return y.float() if bias is None else y.float() + bias

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return self._norm_then_turn(x, name, None)

    def _norm_then_turn(self, x: Tensor, name: str, angles: tuple[Tensor, Tensor] | None) -> Tensor:
        normed: Tensor = _NormThenTurn.apply(  # type: ignore[no-untyped-call]
            x, self.weights[f"{name}.weight"], self.config.norm_eps, angles
        )
        return normed


def context_spans(batch: BlockBatch) -> tuple[Tensor, Tensor]:
    """First and last + 1 of the rows that each block sees: [B] int64 both, places in the batch's distinct rows.

    Raises:
        Refused: a block's rows do not stand side by side in the order of the sequence, the anchor's last.
    """
    width = batch.context.shape[1]
    count = batch.context_valid.sum(1)
    last = torch.where(count > 0, batch.context[:, -1] + 1, 0) if width else count
    column = torch.arange(width, device=count.device) - width
    valid = column >= -count.unsqueeze(1)
    place, position = last.unsqueeze(1) + column, batch.anchor.unsqueeze(1) + column
    wrong = valid != batch.context_valid
    if len(batch.positions):
        found = batch.positions[batch.context]
        wrong |= valid & ((batch.context != place) | (found != position))
    if bool(wrong.any()):
        block = int(wrong.any(1).nonzero()[0])
        raise Refused(
            "a block's context rows do not stand side by side",
            expected=f"rows {int(batch.anchor[block] - count[block])} … {int(batch.anchor[block]) - 1} of its sequence",
            found=batch.positions[batch.context[block][batch.context_valid[block]]].tolist()[:8],
            where=f"block {block} of the batch",
        )
    return last - count, last


class _NormThenTurn(torch.autograd.Function):
    """RMSNorm over the last axis with a gain, then, where angles are given, rotary by halves: (u, v) → (u·cos − v·sin,
    v·cos + u·sin). Only the input and one number a row are kept for the backward pass.

    x [..., D]; gain [D]; angles: cosine and sine [n, D/2] for x [n, heads, D].
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, eps: float, angles: tuple[Tensor, Tensor] | None) -> Tensor:
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, gain, scale)
        ctx.angles = angles
        normed = (x * scale).mul_(gain)
        return normed if angles is None else _turn(normed, *angles)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> Any:
        x, gain, scale = ctx.saved_tensors
        if ctx.angles is not None:
            cos, sin = ctx.angles
            upstream = _turn(upstream, cos, -sin)  # the transpose, whatever factor cosine and sine carry
        normed = x * scale
        by_gain = (upstream * normed).flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        slope = upstream * gain
        share = (slope * normed).mean(-1, keepdim=True)
        return slope.sub_(normed.mul_(share)).mul_(scale), by_gain, None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    u, v = x[..., :half], x[..., half:]
    out = torch.empty_like(x)
    torch.mul(u, cos, out=out[..., :half]).addcmul_(v, sin, value=-1)
    torch.mul(v, cos, out=out[..., half:]).addcmul_(u, sin)
    return out
