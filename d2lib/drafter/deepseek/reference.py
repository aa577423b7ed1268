"""REF of the DeepSeek-V4/V4.1 drafter: three stages of multi-query attention with a sink and a mixture of experts,
over several residual streams that hyper-connections read and write.

Sources: the DSpark paper (arXiv 2607.05147) and the published forward of the DeepSeek-V4.1-Flash draft head.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from d2lib.drafter.batch import Context
from d2lib.drafter.deepseek.config import DeepseekConfig
from d2lib.drafter.deepseek.layers import (
    Mixes,
    expert,
    mixes,
    normed_projection,
    quantize_kv,
    read_streams,
    route,
    sink_attention,
    swiglu,
    write_streams,
)
from d2lib.drafter.deepseek.rotary import rotary_angles, rotate
from d2lib.drafter.heads import ConfidenceHead, MarkovHead
from d2lib.drafter.kernels import fold, rms_norm, sigmoid
from d2lib.drafter.reference import Reference


class DeepseekReference(Reference):
    """A DeepSeek drafter that computes one round at a time; arguments as `Reference`."""

    config: DeepseekConfig

    @property
    def last(self) -> str:
        """The last stage, which holds the heads."""
        return f"mtp.{self.config.n_stages - 1}"

    def context(self, taps: Tensor, positions: Tensor) -> list[Tensor]:
        """Every stage's key-value rows [R, head_dim] of main_x = RMSNorm(main_proj · raw taps)."""
        main_x = self._norm(self._project("mtp.0.main_proj", taps.float()), "mtp.0.main_norm")
        return [self._kv(f"mtp.{stage}.attn", main_x, positions) for stage in range(self.config.n_stages)]

    def backbone(self, anchor_token: Tensor, anchor: Tensor, context: Context) -> Tensor:
        """The parallel pass: y [B, K, dim] of every slot, the streams after the last stage; see Reference."""
        c = self.config
        rounds, device = anchor.shape[0], anchor.device
        ids = torch.full((rounds, c.block_size), c.noise_token_id, device=device)
        ids[:, 0] = anchor_token
        positions = (anchor.unsqueeze(1) + torch.arange(c.block_size, device=device)).flatten()
        x = self.embed[ids.flatten()].unsqueeze(1).expand(-1, c.hc_mult, -1)
        pre = F.one_hot(torch.zeros_like(positions), c.hc_mult).to(x.dtype)
        for stage, kv in enumerate(context.gathered()):
            prefix = f"mtp.{stage}"

            def attention(h: Tensor, prefix: str = prefix, kv: Tensor = kv) -> Tensor:
                return self._attention(f"{prefix}.attn", h, positions, kv, context.valid)

            def experts(h: Tensor, prefix: str = prefix) -> Tensor:
                return self._experts(f"{prefix}.ffn", h)

            x, pre = self._motion(prefix, "attn", x, pre, attention)
            x, pre = self._motion(prefix, "ffn", x, pre, experts)
        return self._read(x, self._final_pre(x, pre)).view(rounds, c.block_size, c.dim)

    def head_rows(self, hidden: Tensor) -> Tensor:
        """RMSNorm(y); the confidence head reads y itself."""
        return self._norm(hidden, f"{self.last}.norm")

    def markov_head(self) -> MarkovHead:
        """Always there, vanilla."""
        w1, w2 = (self.weights[f"{self.last}.markov_head.{name}.weight"] for name in ("embed", "head"))
        return MarkovHead("vanilla", w1, w2)

    def confidence_head(self) -> ConfidenceHead:
        """Always there; reads the Markov embedding and has no bias."""
        return ConfidenceHead(self.weights[f"{self.last}.confidence_head.proj.weight"], None, with_markov=True)

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

    def _project_groups(self, name: str, x: Tensor) -> Tensor:
        """Each group of channels by its own rows of W, and of B: [N, groups·in] to [N, groups·out]."""
        groups = self.config.o_groups
        weight = self.weights[f"{name}.weight"].chunk(groups)
        parts = x.chunk(groups, dim=-1)
        y = torch.cat([self._linear(part, w) for part, w in zip(parts, weight, strict=True)], dim=-1)
        if self.adapter:
            a, rows = self.adapter[f"{name}.lora_A"], self.adapter[f"{name}.lora_B"].chunk(groups)
            y = y + torch.cat(
                [self._linear(self._linear(part, a), b) for part, b in zip(parts, rows, strict=True)], dim=-1
            )
        return y
