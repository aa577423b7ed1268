"""REF: the drafter's arithmetic, literally, fp32, one round at a time with no reuse between rounds.

Slow on purpose; every verdict is computed with it. A round that has fewer context rows than the window is padded in
front with masked rows, so that every round goes through products and sums of the same shapes and `batched` can give
the same bits for many rounds at once.

Sources: the DSpark paper (arXiv 2607.05147) and the published forward of the DeepSeek-V4.1-Flash draft head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from d2lib.drafter.batch import Round
from d2lib.drafter.deepseek.config import DrafterConfig
from d2lib.drafter.deepseek.layers import (
    Mixes,
    expert,
    mixes,
    normed_projection,
    quantize_kv,
    read_streams,
    rms_norm,
    route,
    sink_attention,
    swiglu,
    write_streams,
)
from d2lib.drafter.deepseek.rotary import rotary_angles, rotate
from d2lib.drafter.deepseek.weights import check_weights
from d2lib.drafter.kernels import fold, linear, sigmoid
from d2lib.drafter.lora import adapter_rank
from d2lib.errors import Refused


@dataclass(frozen=True)
class RoundOutput:
    """One round, teacher-forced.

    hidden: [K, dim] y, the streams after the last stage. logits: [K, V]; slot i is about token a+1+i.
    confidence: [K] logits of the chance that the slot is accepted.
    """

    hidden: Tensor
    logits: Tensor
    confidence: Tensor


def teacher_logits(head: Tensor, hidden: Tensor) -> Tensor:
    """The target's logits from its final hidden states: [V, dim] and [..., dim] of any float dtype to [..., V] fp32."""
    return linear(hidden.float(), head)


class Reference:
    """A drafter that computes one round at a time.

    The methods up to `confidence` are the steps of a round. They take a leading axis of rounds B, which here is always
    one; `BatchedReference` runs the same steps over many.

    Args:
        config: sizes and switches.
        weights: fp32 tensors under their release names.
        adapter: LoRA of those weights, or None for the native drafter.
    """

    def __init__(
        self, config: DrafterConfig, weights: Mapping[str, Tensor], adapter: Mapping[str, Tensor] | None = None
    ) -> None:
        check_weights(weights, config)
        if adapter is not None:
            adapter_rank(adapter, config)
        self.config = config
        self.weights = weights
        self.adapter: Mapping[str, Tensor] = adapter or {}
        self.last = f"mtp.{config.n_stages - 1}"

    def forward(self, round: Round) -> RoundOutput:
        """The round's slots, each given the true previous token."""
        hidden = self._hidden(round)
        logits = self.base_logits(hidden) + self.markov_bias(round.previous)
        return RoundOutput(hidden, logits, self.confidence(hidden, round.previous))

    @torch.no_grad()
    def draft(self, round: Round, k: int | None = None) -> Tensor:
        """The first k (all by default) drafted tokens, greedy: [k] int64. The lowest index wins a tie."""
        base = self.base_logits(self._hidden(round))
        return self.greedy(base.unsqueeze(0), torch.tensor([round.anchor_token], device=base.device), k).squeeze(0)

    def _hidden(self, round: Round) -> Tensor:
        missing = self.config.window - len(round.positions)
        taps = F.pad(round.taps.float(), (0, 0, missing, 0))
        positions = F.pad(round.positions, (missing, 0))
        valid = torch.arange(self.config.window, device=taps.device) >= missing
        context = [kv.unsqueeze(0) for kv in self.context_kv(self.main_x(taps), positions)]
        anchor = torch.tensor([round.anchor], device=taps.device)
        token = torch.tensor([round.anchor_token], device=taps.device)
        return self.backbone(token, anchor, context, valid.unsqueeze(0)).squeeze(0)

    # The steps of a round.

    def main_x(self, taps: Tensor) -> Tensor:
        """RMSNorm(main_proj · raw taps): [R, n_taps·dim] to [R, dim], given to every stage."""
        return self._norm(self._project("mtp.0.main_proj", taps.float()), "mtp.0.main_norm")

    def context_kv(self, main_x: Tensor, positions: Tensor) -> list[Tensor]:
        """Every stage's key-value rows [R, head_dim] of context rows [R, dim] at positions [R]."""
        return [self._kv(f"mtp.{stage}.attn", main_x, positions) for stage in range(self.config.n_stages)]

    def backbone(self, anchor_token: Tensor, anchor: Tensor, context: list[Tensor], context_valid: Tensor) -> Tensor:
        """The parallel pass: y [B, K, dim] of every slot.

        Args:
            anchor_token, anchor: [B] int64.
            context: per stage [B, window, head_dim]. context_valid: [B, window] bool.
        """
        c = self.config
        rounds, device = anchor.shape[0], anchor.device
        ids = torch.full((rounds, c.block_size), c.noise_token_id, device=device)
        ids[:, 0] = anchor_token
        positions = (anchor.unsqueeze(1) + torch.arange(c.block_size, device=device)).flatten()
        x = self.weights["embed.weight"][ids.flatten()].unsqueeze(1).expand(-1, c.hc_mult, -1)
        pre = F.one_hot(torch.zeros_like(positions), c.hc_mult).to(x.dtype)
        for stage, kv in enumerate(context):
            prefix = f"mtp.{stage}"

            def attention(h: Tensor, prefix: str = prefix, kv: Tensor = kv) -> Tensor:
                return self._attention(f"{prefix}.attn", h, positions, kv, context_valid)

            def experts(h: Tensor, prefix: str = prefix) -> Tensor:
                return self._experts(f"{prefix}.ffn", h)

            x, pre = self._motion(prefix, "attn", x, pre, attention)
            x, pre = self._motion(prefix, "ffn", x, pre, experts)
        return self._read(x, self._final_pre(x, pre)).view(rounds, c.block_size, c.dim)

    def base_logits(self, hidden: Tensor) -> Tensor:
        """lm_head · RMSNorm(y): [..., dim] to [..., V]."""
        return linear(self._norm(hidden, f"{self.last}.norm"), self.weights["head.weight"])

    def markov_bias(self, previous: Tensor) -> Tensor:
        """What the previous token adds to the logits: [...] int64 to [..., V]."""
        return linear(self._markov_embed(previous), self.weights[f"{self.last}.markov_head.head.weight"])

    def confidence(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """proj · [y; Markov embedding of the previous token]: [..., dim] and [...] to [...]."""
        features = torch.cat([hidden, self._markov_embed(previous)], dim=-1)
        return fold(features * self.weights[f"{self.last}.confidence_head.proj.weight"][0])

    def greedy(self, base: Tensor, anchor_token: Tensor, k: int | None) -> Tensor:
        """Draft slot after slot, each given the one before: base logits [B, K, V], tokens [B] to [B, k]."""
        slots = self.config.block_size if k is None else k
        if not 1 <= slots <= self.config.block_size:
            raise Refused("a round has no such number of slots", expected=f"1 … {self.config.block_size}", found=k)
        drafts: list[Tensor] = []
        previous = anchor_token.to(base.device)
        for slot in range(slots):
            previous = (base[:, slot] + self.markov_bias(previous)).argmax(-1)
            drafts.append(previous)
        return torch.stack(drafts, dim=1)

    # Their parts, by module name.

    def _motion(
        self, prefix: str, motion: str, x: Tensor, pre: Tensor, sublayer: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Read the streams, apply a sublayer, write it back; returns the streams and this motion's pre."""
        mix = self._mixes(f"{prefix}.hc_{motion}", x)
        h = self._read(x, mix.pre if self.config.hc_form == "per_motion" else pre)
        h = sublayer(self._norm(h, f"{prefix}.{motion}_norm"))
        return self._write(x, h, mix), mix.pre

    def _mixes(self, name: str, x: Tensor) -> Mixes:
        c, w = self.config, self.weights
        return mixes(
            x,
            w[f"{name}_fn"],
            w[f"{name}_base"],
            w[f"{name}_scale"],
            sinkhorn_iters=c.hc_sinkhorn_iters,
            hc_eps=c.hc_eps,
            norm_eps=c.norm_eps,
        )

    def _normed_projection(self, x: Tensor, name: str) -> Tensor:
        return normed_projection(x, self.weights[name], self.config.norm_eps)

    def _read(self, x: Tensor, pre: Tensor) -> Tensor:
        return read_streams(x, pre)

    def _write(self, x: Tensor, h: Tensor, mix: Mixes) -> Tensor:
        return write_streams(x, h, mix.post, mix.comb)

    def _final_pre(self, x: Tensor, pre: Tensor) -> Tensor:
        """The weights of the last collapse: the last motion's pre, or in the per-motion form its own."""
        if self.config.hc_form == "single_pass":
            return pre
        scale, base = self.weights[f"{self.last}.hc_head_scale"], self.weights[f"{self.last}.hc_head_base"]
        m = self._normed_projection(x, f"{self.last}.hc_head_fn")
        return sigmoid(m * scale + base) + self.config.hc_eps

    def _attention(self, name: str, h: Tensor, positions: Tensor, context: Tensor, context_valid: Tensor) -> Tensor:
        c = self.config
        rounds = context.shape[0]
        cos, sin = (part.unsqueeze(1) for part in rotary_angles(positions, c))
        q = self._project(f"{name}.wq_b", self._norm(self._project(f"{name}.wq_a", h), f"{name}.q_norm"))
        q = q.view(-1, c.n_heads, c.head_dim)
        if c.q_head_norm:
            q = rms_norm(q, None, c.norm_eps)
        q = rotate(q, cos, sin).view(rounds, c.block_size, c.n_heads, c.head_dim)

        slots = self._kv(name, h, positions).view(rounds, c.block_size, c.head_dim)
        bank = torch.cat([context.masked_fill(~context_valid.unsqueeze(-1), 0.0), slots], dim=1)
        bank_valid = F.pad(context_valid, (0, c.block_size), value=True)
        out = sink_attention(q, bank, bank_valid, self.weights[f"{name}.attn_sink"])

        out = rotate(out.view(-1, c.n_heads, c.head_dim), cos, sin, inverse=True)
        return self._project(f"{name}.wo_b", self._project_groups(f"{name}.wo_a", out.reshape(-1, c.head_inner)))

    def _kv(self, name: str, h: Tensor, positions: Tensor) -> Tensor:
        kv = self._norm(self._project(f"{name}.wkv", h), f"{name}.kv_norm")
        kv = rotate(kv, *rotary_angles(positions, self.config))
        return kv if self.config.kv_quant == "off" else quantize_kv(kv, self.config.rope_head_dim)

    def _experts(self, name: str, h: Tensor) -> Tensor:
        c, w = self.config, self.weights
        picked, weight = route(
            h,
            w[f"{name}.gate.weight"],
            w[f"{name}.gate.bias"],
            n_activated=c.n_activated,
            norm_topk_prob=c.norm_topk_prob,
            scaling=c.routed_scaling_factor,
        )
        places, outputs = [], []
        for index in torch.unique(picked).tolist():
            place = (picked.flatten() == index).nonzero().squeeze(1)
            w1, w2, w3 = (w[f"{name}.experts.{index}.{part}.weight"] for part in ("w1", "w2", "w3"))
            outputs.append(expert(h.index_select(0, place // c.n_activated), w1, w2, w3, c.swiglu_limit))
            places.append(place)
        routed = torch.cat(outputs).index_select(0, torch.cat(places).argsort()).view(*picked.shape, c.dim)
        return fold(weight.unsqueeze(-1) * routed, 1) + self._shared_expert(f"{name}.shared_experts", h)

    def _shared_expert(self, name: str, h: Tensor) -> Tensor:
        gate, up = self._project(f"{name}.w1", h), self._project(f"{name}.w3", h)
        return self._project(f"{name}.w2", swiglu(gate, up, self.config.swiglu_limit))

    def _markov_embed(self, tokens: Tensor) -> Tensor:
        return self.weights[f"{self.last}.markov_head.embed.weight"][tokens]

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, self.weights[f"{name}.weight"], self.config.norm_eps)

    def _project(self, name: str, x: Tensor) -> Tensor:
        """x·Wᵀ, plus (x·Aᵀ)·Bᵀ where the module is adapted."""
        y = linear(x, self.weights[f"{name}.weight"])
        if self.adapter:
            y = y + linear(linear(x, self.adapter[f"{name}.lora_A"]), self.adapter[f"{name}.lora_B"])
        return y

    def _project_groups(self, name: str, x: Tensor) -> Tensor:
        """Each group of channels by its own rows of W, and of B: [N, groups·in] to [N, groups·out]."""
        groups = self.config.o_groups
        weight = self.weights[f"{name}.weight"].chunk(groups)
        parts = x.chunk(groups, dim=-1)
        y = torch.cat([linear(part, w) for part, w in zip(parts, weight, strict=True)], dim=-1)
        if self.adapter:
            a, rows = self.adapter[f"{name}.lora_A"], self.adapter[f"{name}.lora_B"].chunk(groups)
            y = y + torch.cat([linear(linear(part, a), b) for part, b in zip(parts, rows, strict=True)], dim=-1)
        return y
