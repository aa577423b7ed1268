"""REF of the dense drafter: Qwen3-style blocks over a target's hidden states.

Sources: the DSpark paper (arXiv 2607.05147), DFlash, and the trainers DeepSpec, SpecForge and speculators, which agree
in what is computed here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from d2lib.drafter.batch import Context
from d2lib.drafter.dense.config import DenseConfig
from d2lib.drafter.dense.rotary import rotary_angles, rotate
from d2lib.drafter.heads import ConfidenceHead, MarkovHead
from d2lib.drafter.kernels import align, fold, paired_products, silu
from d2lib.drafter.reference import Reference

Turn: TypeAlias = tuple[Tensor, Tensor]


class DenseReference(Reference):
    """A dense drafter that computes one round at a time; arguments as `Reference`.

    A round has N query rows r at positions a+r, N = K or K+1 by the layout: the anchor's token, then masks.
    """

    config: DenseConfig

    sliding_rule: Literal["served", "trainer"] = "served"
    """What a sliding layer of width w sees: rows j >= a + r - (w - 1), as SpecForge and the servers have it, or
    j >= a - w for every r, as speculators trains; the second is for comparisons with that trainer alone."""

    def context(self, taps: Tensor, positions: Tensor) -> list[Tensor]:
        """Every layer's keys and values (`_key_value`) of z = RMSNorm(fc · raw taps).

        Context rows pass through no layer: z is every layer's input to its key and value projections.
        """
        z = self._norm(self._project("fc", taps.float()), "hidden_norm")
        turn = self._turn(positions)
        return [part for layer in range(self.config.n_layers) for part in self._key_value(layer, z, turn)]

    def backbone(self, anchor_token: Tensor, anchor: Tensor, context: Context) -> Tensor:
        """The parallel pass: y [B, K, dim], the slots' rows after the last layer and the final norm; see Reference."""
        c = self.config
        rounds, device = anchor.shape[0], anchor.device
        ids = torch.full((rounds, c.n_rows), c.mask_token_id, device=device)
        ids[:, 0] = anchor_token
        positions = (anchor.unsqueeze(1) + torch.arange(c.n_rows, device=device)).flatten()
        turn = self._turn(positions)
        x = self.embed[ids.flatten()]
        for layer in range(c.n_layers):
            name = f"layers.{layer}"
            h = self._norm(x, f"{name}.input_layernorm")
            x = x + self._attention(layer, h, turn, context)
            m = self._norm(x, f"{name}.post_attention_layernorm")
            gate, up = self._project(f"{name}.mlp.gate_proj", m), self._project(f"{name}.mlp.up_proj", m)
            x = x + self._project(f"{name}.mlp.down_proj", silu(gate) * up)
        slots = x.view(rounds, c.n_rows, c.dim)[:, c.n_rows - c.block_size :]
        return self._norm(slots, "norm")

    def head_rows(self, hidden: Tensor) -> Tensor:
        """Hidden rows are normed already; every head reads them so."""
        return hidden

    def markov_head(self) -> MarkovHead | None:
        """See Reference; none at rank 0, which is DFlash."""
        c, w = self.config, self.weights
        if not c.markov_rank:
            return None
        w1, w2 = w["markov_head.markov_w1.weight"], w["markov_head.markov_w2.weight"]
        if c.markov_head_type == "vanilla":
            return MarkovHead("vanilla", w1, w2)
        mix = f"markov_head.{'gate_proj' if c.markov_head_type == 'gated' else 'joint_proj'}"
        return MarkovHead(c.markov_head_type, w1, w2, w[f"{mix}.weight"], w[f"{mix}.bias"])

    def confidence_head(self) -> ConfidenceHead | None:
        """See Reference."""
        if not self.config.confidence:
            return None
        weight, bias = (self.weights[f"confidence_head.proj.{name}"] for name in ("weight", "bias"))
        return ConfidenceHead(weight, bias, self.config.confidence_with_markov)

    # Their parts.

    def seen(self, layer: int, valid: Tensor) -> Tensor:
        """Which context rows each query row sees: valid [B, W] to [B, N, W] bool."""
        c, width = self.config, valid.shape[1]
        rows = valid.unsqueeze(1).expand(-1, c.n_rows, -1)
        if c.layer_types[layer] == "full_attention" or c.sliding_window is None:
            return rows
        row = torch.arange(c.n_rows, device=valid.device).unsqueeze(1)
        before = width - torch.arange(width, device=valid.device)  # a - j
        return rows & (before <= (c.sliding_window - 1 - row if self.sliding_rule == "served" else c.sliding_window))

    def block(self, layer: int, device: torch.device) -> Tensor:
        """Which query rows each query row sees: [N, N] bool."""
        n_rows = self.config.n_rows
        everything = torch.ones(n_rows, n_rows, dtype=torch.bool, device=device)
        return everything.tril() if self.config.causal[layer] else everything

    def _key_value(self, layer: int, x: Tensor, turn: Turn) -> tuple[Tensor, Tensor]:
        """Keys, normed and rotated, and values of rows [M, dim]: [M, n_kv_heads, head_dim] each, with
        zeros up to a multiple of 16 channels."""
        c, name = self.config, f"layers.{layer}.self_attn"
        keys = self._project(f"{name}.k_proj", x).view(-1, c.n_kv_heads, c.head_dim)
        values = self._project(f"{name}.v_proj", x).view(-1, c.n_kv_heads, c.head_dim)
        return align(rotate(self._norm(keys, f"{name}.k_norm"), *turn)), align(values)

    def _turn(self, positions: Tensor) -> Turn:
        """Cosine and sine [M, 1, head_dim / 2] of rows at positions [M]: the same for every head and layer."""
        cos, sin = rotary_angles(positions, self.config)
        return cos.unsqueeze(1), sin.unsqueeze(1)

    def _attention(self, layer: int, h: Tensor, turn: Turn, context: Context) -> Tensor:
        c, name = self.config, f"layers.{layer}.self_attn"
        q = self._project(f"{name}.q_proj", h).view(-1, c.n_heads, c.head_dim)
        q = rotate(self._norm(q, f"{name}.q_norm"), *turn).view(-1, c.n_rows, c.n_heads, c.head_dim)
        keys, values = (context.windows(part) for part in context.parts[2 * layer : 2 * layer + 2])
        slots = [part.view(len(q), c.n_rows, *part.shape[1:]) for part in self._key_value(layer, h, turn)]
        seen, block = self.seen(layer, context.valid), self.block(layer, h.device)
        out = grouped_attention(q, keys, values, seen, slots[0], slots[1], block)
        return self._project(f"{name}.o_proj", out.reshape(-1, c.n_heads * c.head_dim))


def grouped_attention(
    q: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    seen: Tensor,
    slot_keys: Tensor,
    slot_values: Tensor,
    block: Tensor,
) -> Tensor:
    """Attention of each round's query rows over its context rows and itself, one softmax over both.

    Query head h reads KV head ⌊h / (heads / groups)⌋ (grouped queries, arXiv 2305.13245). D is `width` with zeros up to
    a multiple of 16 (`kernels.align`).

    Args:
        q: [B, N, heads, width].
        keys, values: B context banks [W, groups, D]. seen: [B, N, W] bool, which rows a query row sees.
        slot_keys, slot_values: [B, N, groups, D]. block: [N, N] bool, which query rows see each other.

    Returns:
        [B, N, heads, width].
    """
    rounds, rows, heads, width = q.shape
    groups = slot_keys.shape[2]
    q = align(q * width**-0.5).view(rounds, rows, groups, heads // groups, -1).transpose(1, 2)
    left = q.reshape(rounds * groups, rows * (heads // groups), -1).unbind()
    slot_keys, slot_values = (align(bank, 1).transpose(1, 2).flatten(0, 1) for bank in (slot_keys, slot_values))

    # 1. scores of [round, group, row, head of the group] by context row, and by query row
    shape = (rounds, groups, rows, heads // groups, -1)
    far = paired_products(left, [part for bank in keys for part in bank.permute(1, 2, 0)]).view(shape)
    near = paired_products(left, slot_keys.transpose(1, 2).unbind()).view(shape)
    hidden = int((~seen).flatten(0, 1).any(0).sum())  # what some row does not see is at the front
    far[..., :hidden].masked_fill_(~seen[:, None, :, None, :hidden], float("-inf"))
    near.masked_fill_(~align(block)[:, None], float("-inf"))

    # 2. one softmax over both
    top = torch.maximum(far.detach().amax(-1, keepdim=True), near.detach().amax(-1, keepdim=True))
    far, near = far.sub_(top).exp_(), near.sub_(top).exp_()
    mass = fold(far, keepdim=True) + fold(near, keepdim=True)

    # 3. values
    far, near = (part.flatten(2, 3).flatten(0, 1) for part in (far, near))
    out = paired_products(far.unbind(), [part for bank in values for part in bank.unbind(1)])
    out = (out + paired_products(near.unbind(), slot_values.unbind())).view(shape) / mass
    return out[..., :width].transpose(1, 2).reshape(rounds, rows, heads, width)
