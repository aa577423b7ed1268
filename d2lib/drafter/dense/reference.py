"""REF of the dense drafter: Qwen3-style blocks over a target's hidden states.

Sources: the DSpark paper (arXiv 2607.05147), DFlash, and the trainers DeepSpec, SpecForge and speculators, which agree
in what is computed here.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from d2lib.drafter.dense.config import DenseConfig
from d2lib.drafter.dense.rotary import rotary_angles, rotate
from d2lib.drafter.heads import ConfidenceHead, MarkovHead
from d2lib.drafter.kernels import align, fold, paired_products, silu
from d2lib.drafter.reference import Reference


class DenseReference(Reference):
    """A dense drafter that computes one round at a time; arguments as `Reference`.

    A round has N query rows r at positions a+r, N = K or K+1 by the layout: the anchor's token, then masks.
    """

    config: DenseConfig

    sliding_rule: Literal["served", "trainer"] = "served"
    """What a sliding layer of width w sees: rows j >= a + r - (w - 1), as SpecForge and the servers have it, or
    j >= a - w for every r, as speculators trains; the second is for comparisons with that trainer alone."""

    def context(self, taps: Tensor, positions: Tensor) -> list[Tensor]:
        """Every layer's keys and values, [R, n_kv_heads, head_dim] each, of z = RMSNorm(fc · raw taps).

        Context rows pass through no layer: z is every layer's input to its key and value projections.
        """
        z = self._norm(self._project("fc", taps.float()), "hidden_norm")
        return [part for layer in range(self.config.n_layers) for part in self._key_value(layer, z, positions)]

    def backbone(self, anchor_token: Tensor, anchor: Tensor, context: list[Tensor], context_valid: Tensor) -> Tensor:
        """The parallel pass: y [B, K, dim], the slots' rows after the last layer and the final norm; see Reference."""
        c = self.config
        rounds, device = anchor.shape[0], anchor.device
        ids = torch.full((rounds, c.n_rows), c.mask_token_id, device=device)
        ids[:, 0] = anchor_token
        positions = (anchor.unsqueeze(1) + torch.arange(c.n_rows, device=device)).flatten()
        x = self.embed[ids.flatten()]
        for layer in range(c.n_layers):
            name = f"layers.{layer}"
            h = self._norm(x, f"{name}.input_layernorm")
            keys, values = context[2 * layer : 2 * layer + 2]
            x = x + self._attention(layer, h, positions, keys, values, context_valid)
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

    def visible(self, layer: int, context_valid: Tensor) -> Tensor:
        """Which context rows, then which query rows, each query row sees: [B, W] to [B, N, W + N] bool."""
        c = self.config
        rounds, width = context_valid.shape
        row = torch.arange(c.n_rows, device=context_valid.device).unsqueeze(1)
        seen = context_valid.unsqueeze(1).expand(-1, c.n_rows, -1)
        if c.layer_types[layer] == "sliding_attention" and c.sliding_window is not None:
            before = width - torch.arange(width, device=context_valid.device)  # a - j
            reach = c.sliding_window - 1 - row if self.sliding_rule == "served" else c.sliding_window
            seen = seen & (before <= reach)
        block = row >= row.T if c.causal[layer] else torch.ones_like(row, dtype=torch.bool)
        return torch.cat([seen, block.expand(rounds, -1, c.n_rows)], dim=2)

    def _key_value(self, layer: int, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys, normed and rotated, and values of rows [M, dim] at positions [M]: [M, n_kv_heads, head_dim] each."""
        c, name = self.config, f"layers.{layer}.self_attn"
        keys = self._project(f"{name}.k_proj", x).view(-1, c.n_kv_heads, c.head_dim)
        values = self._project(f"{name}.v_proj", x).view(-1, c.n_kv_heads, c.head_dim)
        return self._turned(keys, f"{name}.k_norm", positions), values

    def _turned(self, x: Tensor, norm: str, positions: Tensor) -> Tensor:
        cos, sin = (part.unsqueeze(1) for part in rotary_angles(positions, self.config))
        return rotate(self._norm(x, norm), cos, sin)

    def _attention(
        self, layer: int, h: Tensor, positions: Tensor, keys: Tensor, values: Tensor, context_valid: Tensor
    ) -> Tensor:
        c, name = self.config, f"layers.{layer}.self_attn"
        q = self._project(f"{name}.q_proj", h).view(-1, c.n_heads, c.head_dim)
        q = self._turned(q, f"{name}.q_norm", positions).view(-1, c.n_rows, c.n_heads, c.head_dim)
        slots = [part.view(-1, c.n_rows, *part.shape[1:]) for part in self._key_value(layer, h, positions)]
        values = values.masked_fill(~context_valid[:, :, None, None], 0.0)
        out = grouped_attention(
            q,
            torch.cat([keys, slots[0]], dim=1),
            torch.cat([values, slots[1]], dim=1),
            self.visible(layer, context_valid),
        )
        return self._project(f"{name}.o_proj", out.reshape(-1, c.n_heads * c.head_dim))


def grouped_attention(q: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """Softmax attention in which query head h reads KV head ⌊h / (heads / groups)⌋ (arXiv 2305.13245).

    Args:
        q: [B, N, heads, width]. keys, values: [B, n, groups, width]. visible: [B, N, n] bool, one at least in each row.

    Returns:
        [B, N, heads, width].
    """
    rounds, rows, heads, width = q.shape
    groups = keys.shape[2]
    shape = (rounds, groups, rows, heads // groups)
    left = align(q).view(rounds, rows, groups, heads // groups, -1).transpose(1, 2)
    left = left.reshape(rounds * groups, rows * (heads // groups), -1)
    keys, values = (align(align(bank), 1).transpose(1, 2).flatten(0, 1) for bank in (keys, values))
    scores = paired_products(left, keys.transpose(1, 2)) * width**-0.5
    scores = scores.view(*shape, -1).masked_fill(~align(visible)[:, None, :, None], float("-inf"))
    exponent = torch.exp(scores - scores.amax(-1, keepdim=True).detach())
    attended = exponent / fold(exponent, keepdim=True)
    out = paired_products(attended.flatten(2, 3).flatten(0, 1), values)[..., :width]
    return out.reshape(*shape, width).transpose(1, 2).reshape(q.shape)
