"""A second drafter, written from the formulas as scalar loops in plain Python floats (fp64). Slow; an oracle only.

It shares no code with the library: vectors are lists, a round is a `Round`, and every sum is spelt out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from d2lib.drafter.batch import Round
from d2lib.drafter.deepseek.config import DeepseekConfig

Vector = list[float]


def sigma(z: float) -> float:
    return 1.0 / (1.0 + math.exp(-z))


def dot(a: Vector, b: Vector) -> float:
    return sum(p * q for p, q in zip(a, b, strict=True))


def e4m3(value: float) -> float:
    """The nearest FP8 E4M3 number: 4 exponent bits (bias 7), 3 mantissa bits, ties to even, at most 448."""
    if value == 0:
        return 0.0
    exponent = max(math.floor(math.log2(abs(value))), -6)
    step = 2.0 ** (exponent - 3)
    return math.copysign(min(round(abs(value) / step) * step, 448.0), value)


class SlowDrafter:
    def __init__(
        self, config: DeepseekConfig, weights: Mapping[str, Tensor], adapter: Mapping[str, Tensor] | None = None
    ) -> None:
        self.c = config
        self.w: dict[str, Any] = {name: tensor.double().tolist() for name, tensor in weights.items()}
        self.a: dict[str, Any] = {name: tensor.double().tolist() for name, tensor in (adapter or {}).items()}

    def norm(self, x: Vector, weight: Vector | None) -> Vector:
        size = math.sqrt(sum(v * v for v in x) / len(x) + self.c.norm_eps)
        return [v / size * (1.0 if weight is None else weight[i]) for i, v in enumerate(x)]

    def linear(self, name: str, x: Vector, first: int = 0, last: int | None = None) -> Vector:
        """Rows first … last of W·x + B·(A·x)."""
        rows = self.w[f"{name}.weight"][first:last]
        y = [dot(row, x) for row in rows]
        if f"{name}.lora_A" in self.a:
            low = [dot(row, x) for row in self.a[f"{name}.lora_A"]]
            y = [v + dot(row, low) for v, row in zip(y, self.a[f"{name}.lora_B"][first:last], strict=True)]
        return y

    def rope(self, x: Vector, position: int) -> Vector:
        width = self.c.rope_head_dim
        start = len(x) - width
        y = list(x)
        for pair in range(width // 2):
            angle = position / self.c.rope_theta ** (2 * pair / width)
            real, imaginary = x[start + 2 * pair], x[start + 2 * pair + 1]
            y[start + 2 * pair] = real * math.cos(angle) - imaginary * math.sin(angle)
            y[start + 2 * pair + 1] = real * math.sin(angle) + imaginary * math.cos(angle)
        return y

    def kv(self, attn: str, h: Vector, position: int) -> Vector:
        row = self.rope(self.norm(self.linear(f"{attn}.wkv", h), self.w[f"{attn}.kv_norm.weight"]), position)
        if self.c.kv_quant == "e4m3_ue8m0_64":
            for start in range(0, self.c.head_dim - self.c.rope_head_dim, 64):
                largest = max(1e-4, *(abs(v) for v in row[start : start + 64]))
                scale = 2.0**-60
                while largest / scale > 448.0:
                    scale *= 2.0
                row[start : start + 64] = [e4m3(v / scale) * scale for v in row[start : start + 64]]
        return row

    def mixes(self, name: str, x: list[Vector]) -> tuple[Vector, Vector, list[Vector]]:
        c = self.c
        hc = c.hc_mult
        f = [v for stream in x for v in stream]
        inverse = 1.0 / math.sqrt(sum(v * v for v in f) / len(f) + c.norm_eps)
        m = [dot(row, f) * inverse for row in self.w[f"{name}_fn"]]
        base, scale = self.w[f"{name}_base"], self.w[f"{name}_scale"]
        pre = [sigma(m[s] * scale[0] + base[s]) + c.hc_eps for s in range(hc)]
        post = [2 * sigma(m[hc + s] * scale[1] + base[hc + s]) for s in range(hc)]
        comb = []
        for source in range(hc):
            at = [2 * hc + source * hc + destination for destination in range(hc)]
            exponent = [math.exp(m[i] * scale[2] + base[i]) for i in at]
            comb.append([v / sum(exponent) + c.hc_eps for v in exponent])
        for iteration in range(c.hc_sinkhorn_iters):
            if iteration:
                for source in range(hc):
                    total = sum(comb[source]) + c.hc_eps
                    comb[source] = [v / total for v in comb[source]]
            for destination in range(hc):
                total = sum(comb[source][destination] for source in range(hc)) + c.hc_eps
                for source in range(hc):
                    comb[source][destination] /= total
        return pre, post, comb

    def attention(self, stage: int, h: list[Vector], anchor: int, context: list[Vector]) -> list[Vector]:
        c, attn = self.c, f"mtp.{stage}.attn"
        bank = context + [self.kv(attn, row, anchor + i) for i, row in enumerate(h)]
        inner, group = c.n_heads * c.head_dim // c.o_groups, c.o_lora_rank
        outputs = []
        for i, row in enumerate(h):
            low = self.norm(self.linear(f"{attn}.wq_a", row), self.w[f"{attn}.q_norm.weight"])
            q = self.linear(f"{attn}.wq_b", low)
            joined: Vector = []
            for head in range(c.n_heads):
                query = q[head * c.head_dim : (head + 1) * c.head_dim]
                if c.q_head_norm:
                    query = self.norm(query, None)
                query = self.rope(query, anchor + i)
                mass = [math.exp(dot(query, key) / math.sqrt(c.head_dim)) for key in bank]
                total = sum(mass) + math.exp(self.w[f"{attn}.attn_sink"][head])
                value = [sum(m / total * key[d] for m, key in zip(mass, bank, strict=True)) for d in range(c.head_dim)]
                joined += self.rope(value, -(anchor + i))
            grouped: Vector = []
            for g in range(c.o_groups):
                part = joined[g * inner : (g + 1) * inner]
                grouped += self.linear(f"{attn}.wo_a", part, g * group, (g + 1) * group)
            outputs.append(self.linear(f"{attn}.wo_b", grouped))
        return outputs

    def expert(self, name: str, h: Vector) -> Vector:
        limit = self.c.swiglu_limit
        gate, up = self.linear(f"{name}.w1", h), self.linear(f"{name}.w3", h)
        hidden = []
        for g, u in zip(gate, up, strict=True):
            g = min(g, limit)
            hidden.append(g * sigma(g) * max(-limit, min(limit, u)))
        return self.linear(f"{name}.w2", hidden)

    def experts(self, stage: int, h: Vector) -> Vector:
        c, ffn = self.c, f"mtp.{stage}.ffn"
        score = [math.sqrt(math.log1p(math.exp(dot(row, h)))) for row in self.w[f"{ffn}.gate.weight"]]
        bias = self.w[f"{ffn}.gate.bias"]
        picked = sorted(range(c.n_routed_experts), key=lambda e: (-(score[e] + bias[e]), e))[: c.n_activated]
        total = sum(score[e] for e in picked) + 1e-20 if c.norm_topk_prob else 1.0
        y = self.expert(f"{ffn}.shared_experts", h)
        for e in picked:
            weight = score[e] / total * c.routed_scaling_factor
            y = [v + weight * o for v, o in zip(y, self.expert(f"{ffn}.experts.{e}", h), strict=True)]
        return y

    def hidden(self, round: Round) -> list[Vector]:
        c = self.c
        main = [
            self.norm(self.linear("mtp.0.main_proj", row), self.w["mtp.0.main_norm.weight"])
            for row in round.taps.double().tolist()
        ]
        ids = [round.anchor_token] + [c.noise_token_id] * (c.block_size - 1)
        x = [[list(self.w["embed.weight"][token]) for _ in range(c.hc_mult)] for token in ids]
        pre = [[1.0] + [0.0] * (c.hc_mult - 1) for _ in ids]
        for stage in range(c.n_stages):
            context = [
                self.kv(f"mtp.{stage}.attn", row, j) for row, j in zip(main, round.positions.tolist(), strict=True)
            ]
            for motion in ("attn", "ffn"):
                mixed = [self.mixes(f"mtp.{stage}.hc_{motion}", streams) for streams in x]
                inputs = []
                for i, streams in enumerate(x):
                    read = mixed[i][0] if c.hc_form == "per_motion" else pre[i]
                    h = [sum(read[s] * streams[s][d] for s in range(c.hc_mult)) for d in range(c.dim)]
                    inputs.append(self.norm(h, self.w[f"mtp.{stage}.{motion}_norm.weight"]))
                if motion == "attn":
                    outputs = self.attention(stage, inputs, round.anchor, context)
                else:
                    outputs = [self.experts(stage, h) for h in inputs]
                for i, streams in enumerate(x):
                    _, post, comb = mixed[i]
                    x[i] = [
                        [
                            post[s] * outputs[i][d] + sum(comb[r][s] * streams[r][d] for r in range(c.hc_mult))
                            for d in range(c.dim)
                        ]
                        for s in range(c.hc_mult)
                    ]
                pre = [mix[0] for mix in mixed]
        if c.hc_form == "per_motion":
            last = f"mtp.{c.n_stages - 1}"
            scale, base = self.w[f"{last}.hc_head_scale"][0], self.w[f"{last}.hc_head_base"]
            for i, streams in enumerate(x):
                f = [v for stream in streams for v in stream]
                inverse = 1.0 / math.sqrt(sum(v * v for v in f) / len(f) + c.norm_eps)
                m = [dot(row, f) * inverse for row in self.w[f"{last}.hc_head_fn"]]
                pre[i] = [sigma(m[s] * scale + base[s]) + c.hc_eps for s in range(c.hc_mult)]
        return [
            [sum(pre[i][s] * streams[s][d] for s in range(c.hc_mult)) for d in range(c.dim)]
            for i, streams in enumerate(x)
        ]

    def slot_logits(self, y: Vector, previous: int) -> Vector:
        last = f"mtp.{self.c.n_stages - 1}"
        normed = self.norm(y, self.w[f"{last}.norm.weight"])
        low = self.w[f"{last}.markov_head.embed.weight"][previous]
        rows = zip(self.w["head.weight"], self.w[f"{last}.markov_head.head.weight"], strict=True)
        return [dot(row, normed) + dot(bias, low) for row, bias in rows]

    def slot_confidence(self, y: Vector, previous: int) -> float:
        last = f"mtp.{self.c.n_stages - 1}"
        low = self.w[f"{last}.markov_head.embed.weight"][previous]
        return dot(self.w[f"{last}.confidence_head.proj.weight"][0], y + low)

    def forward(self, round: Round) -> tuple[list[Vector], list[Vector], Vector]:
        hidden, previous = self.hidden(round), round.previous.tolist()
        logits = [self.slot_logits(y, token) for y, token in zip(hidden, previous, strict=True)]
        confidence = [self.slot_confidence(y, token) for y, token in zip(hidden, previous, strict=True)]
        return hidden, logits, confidence

    def draft(self, round: Round) -> list[int]:
        drafts, previous = [], round.anchor_token
        for y in self.hidden(round):
            logits = self.slot_logits(y, previous)
            previous = logits.index(max(logits))
            drafts.append(previous)
        return drafts
