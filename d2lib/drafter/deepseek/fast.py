"""FAST of the DeepSeek drafter: all blocks together, hyper-connection weights laid out so that the Sinkhorn loop works
on long rows, each expert once over all of its rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from d2lib.drafter.deepseek.config import DeepseekConfig
from d2lib.drafter.deepseek.layers import Mixes
from d2lib.drafter.deepseek.reference import DeepseekReference
from d2lib.drafter.deepseek.rotary import rotary_angles, rotate
from d2lib.drafter.fast import FastDrafter, fast_rms_norm


def activations(config: DeepseekConfig, blocks: int, seen: int) -> int:
    """See Family.activations. Counted by what each part keeps for its gradient, rounded up."""
    c = config
    slots, rows = blocks * c.block_size, blocks * seen
    kept = seen + c.block_size
    motion = 2 * c.hc_mult * c.dim + 3 * c.dim + 4 * c.hc_sinkhorn_iters * c.hc_mult**2
    attention = 3 * c.q_lora_rank + 4 * c.head_inner + 3 * c.n_heads * (kept + 1) + 2 * c.o_groups * c.o_lora_rank
    experts = 3 * c.n_routed_experts + (c.n_activated + 1) * (4 * c.moe_inter_dim + 2 * c.dim)
    keys = (rows + slots) * 4 * c.head_dim + 2 * blocks * kept * c.head_dim
    stages: int = c.n_stages * (slots * (2 * motion + attention + experts) + keys)
    return stages + rows * (c.n_taps + 2) * c.dim + slots * 4 * c.dim


class DeepseekFast(FastDrafter, DeepseekReference):
    """The training path; arguments as `FastDrafter`. These are the reference's parts, with other kernels."""

    def _project_groups(self, name: str, x: Tensor) -> Tensor:
        groups, dtype = self.config.o_groups, self.compute_dtype
        parts = x.view(len(x), groups, -1).to(dtype)
        weight = self.weights[f"{name}.weight"].to(dtype)
        weight = weight.view(groups, -1, weight.shape[1])
        y = torch.einsum("ngi,goi->ngo", parts, weight).float()
        if self.adapter:
            low = F.linear(parts, self.adapter[f"{name}.lora_A"].to(dtype))
            rows = self.adapter[f"{name}.lora_B"].to(dtype)
            rows = rows.view(groups, -1, rows.shape[1])
            y = y + torch.einsum("ngr,gor->ngo", low, rows).float()
        return y.flatten(1)

    def _attention(self, name: str, h: Tensor, positions: Tensor, context: Tensor, context_valid: Tensor) -> Tensor:
        c = self.config
        rounds = context.shape[0]
        cos, sin = (part.unsqueeze(1) for part in rotary_angles(positions, c))
        q = self._project(f"{name}.wq_b", self._norm(self._project(f"{name}.wq_a", h), f"{name}.q_norm"))
        q = q.view(-1, c.n_heads, c.head_dim)
        if c.q_head_norm:
            q = fast_rms_norm(q, c.norm_eps)
        q = rotate(q, cos, sin).reshape(rounds, c.block_size * c.n_heads, c.head_dim)
        slots = self._kv(name, h, positions).view(rounds, c.block_size, c.head_dim)
        bank = torch.cat([context, slots], dim=1)
        scores = torch.bmm(q.to(self.compute_dtype), bank.transpose(1, 2).to(self.compute_dtype)).float()
        scores = scores * c.head_dim**-0.5
        hidden = F.pad(~context_valid, (0, c.block_size)).unsqueeze(1)
        sink = self.weights[f"{name}.attn_sink"].repeat(c.block_size).view(1, -1, 1).expand(rounds, -1, 1)
        weights = torch.softmax(torch.cat([scores.masked_fill(hidden, float("-inf")), sink], dim=-1), dim=-1)
        out = torch.bmm(weights[..., :-1].to(self.compute_dtype), bank.to(self.compute_dtype)).float()
        out = rotate(out.view(-1, c.n_heads, c.head_dim), cos, sin, inverse=True)
        return self._project(f"{name}.wo_b", self._project_groups(f"{name}.wo_a", out.reshape(-1, c.head_inner)))

    def _experts(self, name: str, h: Tensor) -> Tensor:
        c, w = self.config, self.weights
        score = torch.sqrt(F.softplus(F.linear(h, w[f"{name}.gate.weight"])))
        picked = torch.sort(score.detach() + w[f"{name}.gate.bias"], dim=-1, descending=True, stable=True).indices
        picked = picked[:, : c.n_activated]
        weight = score.gather(1, picked)
        if c.norm_topk_prob:
            weight = weight / (weight.sum(1, keepdim=True) + 1e-20)
        weight = weight * c.routed_scaling_factor
        out = self._shared_expert(f"{name}.shared_experts", h)
        order = picked.flatten().argsort(stable=True)
        row = order // c.n_activated
        inputs = h.index_select(0, row)
        counts = torch.bincount(picked.flatten(), minlength=c.n_routed_experts).tolist()
        parts = []
        for index, part in enumerate(torch.split(inputs, counts)):
            if len(part):
                w1, w2, w3 = (w[f"{name}.experts.{index}.{k}.weight"] for k in ("w1", "w2", "w3"))
                parts.append(self._linear(_swiglu(self._linear(part, w1), self._linear(part, w3), c.swiglu_limit), w2))
        scaled = torch.cat(parts) * weight.flatten().index_select(0, order).unsqueeze(1)
        return out.index_add(0, row, scaled)

    def _shared_expert(self, name: str, h: Tensor) -> Tensor:
        gate, up = self._project(f"{name}.w1", h), self._project(f"{name}.w3", h)
        return self._project(f"{name}.w2", _swiglu(gate, up, self.config.swiglu_limit))

    def _mixes(self, name: str, x: Tensor) -> Mixes:
        c = self.config
        m = self._normed_projection(x, f"{name}_fn").t()
        scale, base, width = self.weights[f"{name}_scale"], self.weights[f"{name}_base"].unsqueeze(1), c.hc_mult
        pre = torch.sigmoid(m[:width] * scale[0] + base[:width]) + c.hc_eps
        post = 2 * torch.sigmoid(m[width : 2 * width] * scale[1] + base[width : 2 * width])
        logits = (m[2 * width :] * scale[2] + base[2 * width :]).view(width, width, -1)
        comb = _Sinkhorn.apply(logits, c.hc_sinkhorn_iters, c.hc_eps)  # type: ignore[no-untyped-call]
        return Mixes(pre.t(), post.t(), comb.permute(2, 0, 1).contiguous())

    def _normed_projection(self, x: Tensor, name: str) -> Tensor:
        flat = x.flatten(1)
        return F.linear(flat, self.weights[name]) * torch.rsqrt(
            flat.square().mean(-1, keepdim=True) + self.config.norm_eps
        )

    def _read(self, x: Tensor, pre: Tensor) -> Tensor:
        return torch.bmm(pre.unsqueeze(1), x).squeeze(1)

    def _write(self, x: Tensor, h: Tensor, mix: Mixes) -> Tensor:
        return torch.baddbmm(mix.post.unsqueeze(-1) * h.unsqueeze(1), mix.comb.transpose(1, 2), x.contiguous())


def _swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


class _Sinkhorn(torch.autograd.Function):
    """As `layers.sinkhorn`, on [source, destination, N]; the backward pass walks back over the divisions."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, iters: int, eps: float) -> Tensor:
        shares = torch.softmax(logits, dim=1)
        comb, kept = shares + eps, [shares]
        for step in range(2 * iters - 1):
            factor = comb.sum(step % 2, keepdim=True).add_(eps).reciprocal_()
            comb = comb * factor
            kept += [comb, factor]
        ctx.save_for_backward(*kept)
        return comb

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> Any:
        shares, *kept = ctx.saved_tensors
        gradient = upstream.contiguous()  # its layout is that of what the result went into
        for step in reversed(range(len(kept) // 2)):
            comb, factor = kept[2 * step : 2 * step + 2]
            gradient = (gradient - (gradient * comb).sum(step % 2, keepdim=True)).mul_(factor)
        return shares * (gradient - (gradient * shares).sum(1, keepdim=True)), None, None
