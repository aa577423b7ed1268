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
from d2lib.drafter.dense.attention import SeenRows, block_attention
from d2lib.drafter.dense.config import DenseConfig
from d2lib.drafter.head_loss import HeadLoss, fused_head_loss
from d2lib.drafter.objectives import Objective
from d2lib.errors import Refused


class FastDense:
    """A dense drafter over batches of blocks, differentiable by its adapter and by any weight that asks for a gradient.

    Args:
        config: sizes and switches.
        weights: tensors under their release names.
        adapter: LoRA of those weights, or None.
        compute_dtype: of the large products and of the projections that are held for them; norms, softmax, heads and
            loss stay fp32.
    """

    def __init__(
        self,
        config: DenseConfig,
        weights: Mapping[str, Tensor],
        adapter: Mapping[str, Tensor] | None = None,
        compute_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.config = config
        self.weights = weights
        self.adapter: Mapping[str, Tensor] = adapter or {}
        self.compute_dtype = compute_dtype
        # A projection that no gradient asks for is held in the products' dtype, cast once.
        self._cast = {
            name: value.to(compute_dtype)
            for name, value in weights.items()
            if name.startswith(("fc.", "layers.")) and value.ndim == 2 and not value.requires_grad
        }

    def hidden(self, batch: BlockBatch) -> Tensor:
        """y [B, K, dim] of every slot of the batch, after the final norm."""
        c = self.config
        first, last = context_spans(batch)
        order = torch.argsort(last, stable=True)  # blocks that share rows side by side
        back = torch.argsort(order)
        first, last = first[order], last[order]
        row = torch.arange(c.n_rows, device=last.device)
        seen = {"full_attention": SeenRows(first.unsqueeze(1), last)}
        if c.sliding_window is not None:
            reach = last.unsqueeze(1) + row - (c.sliding_window - 1)
            seen["sliding_attention"] = SeenRows(torch.maximum(first.unsqueeze(1), reach), last)

        z = self._norm(self._project("fc", batch.taps), "hidden_norm")
        by_row = self._rotary(batch.positions)
        by_query = self._rotary((batch.anchor[order].unsqueeze(1) + row).flatten())
        ids = torch.full((len(batch), c.n_rows), c.mask_token_id, device=row.device)
        ids[:, 0] = batch.anchor_token[order]
        x = self.weights["embed_tokens.weight"][ids.flatten()]
        for layer, (kind, causal) in enumerate(zip(c.layer_types, c.causal, strict=True)):
            name = f"layers.{layer}"
            h = self._norm(x, f"{name}.input_layernorm")
            q = self._heads(f"{name}.self_attn.q", h, by_query)
            keys, row_keys = (
                self._heads(f"{name}.self_attn.k", rows, angles) for rows, angles in ((h, by_query), (z, by_row))
            )
            values, row_values = (self._heads(f"{name}.self_attn.v", rows, None) for rows in (h, z))
            q, keys, values = (part.view(len(batch), c.n_rows, -1, c.head_dim) for part in (q, keys, values))
            out = block_attention(q, keys, values, row_keys, row_values, seen[kind], causal=causal)
            x = x + self._project(f"{name}.self_attn.o_proj", out.flatten(2).flatten(0, 1))
            m = self._norm(x, f"{name}.post_attention_layernorm")
            gate, up = (self._project(f"{name}.mlp.{part}_proj", m) for part in ("gate", "up"))
            x = x + self._project(f"{name}.mlp.down_proj", F.silu(gate) * up)
        slots = x.view(len(batch), c.n_rows, c.dim)[:, c.n_rows - c.block_size :]
        return self._norm(slots.index_select(0, back), "norm")

    def logits(self, hidden: Tensor, batch: BlockBatch) -> Tensor:
        """Teacher-forced logits [B, K, V] in full: for small vocabularies and for tests."""
        base = self.base_logits(hidden)
        if not self.config.markov_rank:
            return base
        return base + F.linear(self.latent(hidden, batch.previous), self.weights["markov_head.markov_w2.weight"])

    def base_logits(self, hidden: Tensor) -> Tensor:
        """lm_head · y: [..., dim] to [..., V]."""
        return F.linear(hidden, self.weights["lm_head.weight"])

    def latent(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """What the Markov head's output matrix reads: [B, K, dim] and [B, K] to [B, K, markov_rank]."""
        c, w = self.config, self.weights
        if not c.markov_rank:
            return hidden.new_zeros(*previous.shape, 0)
        e = w["markov_head.markov_w1.weight"][previous]
        if c.markov_head_type == "vanilla":
            return e
        if c.markov_head_type == "gated":
            gate = F.linear(
                torch.cat([hidden, e], -1), w["markov_head.gate_proj.weight"], w["markov_head.gate_proj.bias"]
            )
            return torch.sigmoid(gate) * e
        joint, bias = w["markov_head.joint_proj.weight"], w["markov_head.joint_proj.bias"]
        by_input = F.linear(torch.cat([e, hidden], -1), joint[:, c.markov_rank :], bias)  # all slots at once
        state, found = torch.zeros_like(e[:, 0]), []
        for slot in range(c.block_size):
            g, candidate, out = torch.addmm(by_input[:, slot], state, joint[:, : c.markov_rank].t()).chunk(3, -1)
            keep = torch.sigmoid(g)
            state = keep * state + (1 - keep) * torch.tanh(candidate)
            found.append(torch.tanh(out))
        return torch.stack(found, 1)

    def confidence(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Logit of the chance that a slot is accepted: [B, K, dim] and [B, K] to [B, K]."""
        w = self.weights
        if self.config.confidence_with_markov:
            hidden = torch.cat([hidden, w["markov_head.markov_w1.weight"][previous]], -1)
        return F.linear(hidden, w["confidence_head.proj.weight"], w["confidence_head.proj.bias"]).squeeze(-1)

    def loss(self, batch: BlockBatch, objective: Objective) -> HeadLoss:
        """The batch's loss: mean over blocks, differentiable by the adapter (the heads stay frozen)."""
        return self.head_loss(self.hidden(batch), batch, objective)

    def head_loss(self, hidden: Tensor, batch: BlockBatch, objective: Objective) -> HeadLoss:
        """The same from y [B, K, dim]; differentiable by it and by the Markov tables and projections."""
        w = self.weights
        head = w["lm_head.weight"]
        return fused_head_loss(
            hidden,
            head,
            self.latent(hidden, batch.previous),
            w["markov_head.markov_w2.weight"] if self.config.markov_rank else head.new_zeros(len(head), 0),
            batch.teacher_hidden[batch.teacher],
            batch.target,
            batch.valid,
            objective,
        )

    def _heads(self, name: str, rows: Tensor, angles: tuple[Tensor, Tensor] | None) -> Tensor:
        """Queries, keys or values of rows [n, dim], [n, heads, D] in the products' dtype; the first two are normed and
        turned."""
        x = self._project(f"{name}_proj", rows)
        x = x.view(len(rows), x.shape[1] // self.config.head_dim, self.config.head_dim)
        if angles is not None:
            x = self._norm(x, f"{name}_norm", angles)
        return x.to(self.compute_dtype)

    def _project(self, name: str, x: Tensor) -> Tensor:
        """x·Wᵀ + bias, plus (x·Aᵀ)·Bᵀ where the module is adapted; fp32."""
        dtype = self.compute_dtype
        x = x.to(dtype)
        weight, bias = f"{name}.weight", self.weights.get(f"{name}.bias")
        y = F.linear(x, self._cast[weight] if weight in self._cast else self.weights[weight].to(dtype))
        if self.adapter:
            low = F.linear(x, self.adapter[f"{name}.lora_A"].to(dtype))
            y = torch.addmm(y, low, self.adapter[f"{name}.lora_B"].to(dtype).t())
        return y.float() if bias is None else y.float() + bias

    def _norm(self, x: Tensor, name: str, angles: tuple[Tensor, Tensor] | None = None) -> Tensor:
        normed: Tensor = _NormThenTurn.apply(  # type: ignore[no-untyped-call]
            x, self.weights[f"{name}.weight"], self.config.norm_eps, angles
        )
        return normed

    def _rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return rotary_angles(positions, self.config)


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


def rotary_angles(positions: Tensor, config: DenseConfig) -> tuple[Tensor, Tensor]:
    """Stand-in."""
    pairs = torch.arange(0, config.head_dim, 2, dtype=torch.float64, device=positions.device)
    angles = positions.double().unsqueeze(-1) * config.rope.theta ** (-pairs / config.head_dim)
    return torch.cos(angles).float(), torch.sin(angles).float()
