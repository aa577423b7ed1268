"""A second dense drafter, written from the formulas as scalar loops in plain Python floats (fp64). Slow, an oracle.

It shares no code with the library: vectors are lists, a round is a `Round`, and every sum is spelt out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor

from d2lib.drafter.batch import Round
from d2lib.drafter.dense.config import DenseConfig

Vector = list[float]


def sigma(z: float) -> float:
    return 1.0 / (1.0 + math.exp(-z)) if z >= 0 else math.exp(z) / (1.0 + math.exp(z))


def dot(a: Vector, b: Vector) -> float:
    return sum(p * q for p, q in zip(a, b, strict=True))


def plus(a: Vector, b: Vector) -> Vector:
    return [p + q for p, q in zip(a, b, strict=True)]


def frequencies(c: DenseConfig) -> tuple[Vector, float]:
    """ω_m of every channel pair m < D/2, and the factor that multiplies cosine and sine."""
    rope, width = c.rope, c.head_dim
    plain = [rope.theta ** (-2.0 * m / width) for m in range(width // 2)]
    if rope.type == "default":
        return plain, 1.0
    f = rope.factor
    if rope.type == "linear":
        return [w / f for w in plain], 1.0
    if rope.type == "llama3":
        low, high, first = rope.low_freq_factor, rope.high_freq_factor, rope.original_max_position_embeddings
        found = []
        for w in plain:
            wavelength = 2 * math.pi / w
            if wavelength > first / low:
                found.append(w / f)
            elif wavelength < first / high:
                found.append(w)
            else:
                s = (first / wavelength - low) / (high - low)
                found.append((1 - s) * w / f + s * w)
        return found, 1.0
    first = rope.original_max_position_embeddings or c.max_position_embeddings

    def turns(n: float) -> float:
        """The channel that turns n times over the original length."""
        return width * math.log(first / (2 * math.pi * n)) / (2 * math.log(rope.theta))

    low, high = turns(rope.beta_fast), turns(rope.beta_slow)
    if rope.truncate:
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, width - 1.0)
    if low == high:
        high += 0.001
    found = []
    for m, w in enumerate(plain):
        g = min(max((m - low) / (high - low), 0.0), 1.0)
        found.append((1 - g) * w + g * w / f)

    def gain(s: float) -> float:
        return 0.1 * s * math.log(f) + 1.0 if f > 1 else 1.0

    if rope.attention_factor is not None:
        return found, rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return found, gain(rope.mscale) / gain(rope.mscale_all_dim)
    return found, gain(1.0)


class SlowDense:
    """The drafter; `forward` and `draft` are what a test compares, the other methods are the formulas."""

    def __init__(
        self,
        config: DenseConfig,
        weights: Mapping[str, Tensor],
        adapter: Mapping[str, Tensor] | None = None,
        *,
        sliding_rule: Literal["served", "trainer"] = "served",
    ) -> None:
        self.c = config
        self.sliding_rule = sliding_rule
        self.w: dict[str, Any] = {name: tensor.double().tolist() for name, tensor in weights.items()}
        self.a: dict[str, Any] = {name: tensor.double().tolist() for name, tensor in (adapter or {}).items()}
        self.omega, self.gain = frequencies(config)
        self.anchor_first = config.layout == "anchor_first"
        self.rows = config.block_size if self.anchor_first else config.block_size + 1

    def norm(self, x: Vector, name: str) -> Vector:
        size = math.sqrt(sum(v * v for v in x) / len(x) + self.c.norm_eps)
        return [w * v / size for w, v in zip(self.w[f"{name}.weight"], x, strict=True)]

    def linear(self, name: str, x: Vector) -> Vector:
        """W·x + bias + B·(A·x), the last two where there are such."""
        y = [dot(row, x) for row in self.w[f"{name}.weight"]]
        if f"{name}.bias" in self.w:
            y = plus(y, self.w[f"{name}.bias"])
        if f"{name}.lora_A" in self.a:
            low = [dot(row, x) for row in self.a[f"{name}.lora_A"]]
            y = plus(y, [dot(row, low) for row in self.a[f"{name}.lora_B"]])
        return y

    def rope(self, u: Vector, position: int) -> Vector:
        half, y = len(u) // 2, list(u)
        for m in range(half):
            cos, sin = (self.gain * turn(position * self.omega[m]) for turn in (math.cos, math.sin))
            y[m] = u[m] * cos - u[m + half] * sin
            y[m + half] = u[m + half] * cos + u[m] * sin
        return y

    def heads(self, x: Vector) -> list[Vector]:
        width = self.c.head_dim
        return [x[start : start + width] for start in range(0, len(x), width)]

    def keys(self, layer: int, x: Vector, position: int) -> list[Vector]:
        """One key for each KV head."""
        attn = f"layers.{layer}.self_attn"
        heads = self.heads(self.linear(f"{attn}.k_proj", x))
        return [self.rope(self.norm(key, f"{attn}.k_norm"), position) for key in heads]

    def values(self, layer: int, x: Vector) -> list[Vector]:
        return self.heads(self.linear(f"layers.{layer}.self_attn.v_proj", x))

    def sees_row(self, layer: int, anchor: int, r: int, j: int) -> bool:
        """Whether query row r sees context row j."""
        c = self.c
        if j >= anchor:
            return False
        if c.layer_types[layer] == "full_attention":
            return True
        if self.sliding_rule == "trainer":
            return j >= anchor - c.sliding_window
        return j >= anchor + r - (c.sliding_window - 1)

    def sees_slot(self, layer: int, r: int, other: int) -> bool:
        """Whether query row r sees query row `other`."""
        return other <= r or not self.c.causal[layer]

    def attention(
        self, layer: int, h: list[Vector], anchor: int, context: list[tuple[int, list[Vector], list[Vector]]]
    ) -> list[Vector]:
        """Args: context: of each row its position, keys and values."""
        c, attn = self.c, f"layers.{layer}.self_attn"
        slots = [(self.keys(layer, row, anchor + r), self.values(layer, row)) for r, row in enumerate(h)]
        outputs = []
        for r, row in enumerate(h):
            bank = [(keys, values) for j, keys, values in context if self.sees_row(layer, anchor, r, j)]
            bank += [slot for other, slot in enumerate(slots) if self.sees_slot(layer, r, other)]
            joined: Vector = []
            for head, raw in enumerate(self.heads(self.linear(f"{attn}.q_proj", row))):
                query = self.rope(self.norm(raw, f"{attn}.q_norm"), anchor + r)
                shared = head // (c.n_heads // c.n_kv_heads)
                score = [dot(query, keys[shared]) / math.sqrt(c.head_dim) for keys, _ in bank]
                mass = [math.exp(s - max(score)) for s in score]
                joined += [
                    sum(m * values[shared][d] for m, (_, values) in zip(mass, bank, strict=True)) / sum(mass)
                    for d in range(c.head_dim)
                ]
            outputs.append(self.linear(f"{attn}.o_proj", joined))
        return outputs

    def mlp(self, layer: int, x: Vector) -> Vector:
        mlp = f"layers.{layer}.mlp"
        gate, up = self.linear(f"{mlp}.gate_proj", x), self.linear(f"{mlp}.up_proj", x)
        return self.linear(f"{mlp}.down_proj", [g * sigma(g) * u for g, u in zip(gate, up, strict=True)])

    def hidden(self, round: Round) -> list[Vector]:
        """y of every slot, after the final norm."""
        c = self.c
        z = [self.norm(self.linear("fc", row), "hidden_norm") for row in round.taps.double().tolist()]
        ids = [round.anchor_token] + [c.mask_token_id] * (self.rows - 1)
        x = [list(self.w["embed_tokens.weight"][token]) for token in ids]
        for layer in range(c.n_layers):
            context = [
                (j, self.keys(layer, row, j), self.values(layer, row))
                for j, row in zip(round.positions.tolist(), z, strict=True)
            ]
            h = [self.norm(row, f"layers.{layer}.input_layernorm") for row in x]
            x = [plus(*pair) for pair in zip(x, self.attention(layer, h, round.anchor, context), strict=True)]
            x = [plus(row, self.mlp(layer, self.norm(row, f"layers.{layer}.post_attention_layernorm"))) for row in x]
        slots = x if self.anchor_first else x[1:]
        return [self.norm(row, "norm") for row in slots]

    def latents(self, y: list[Vector], previous: list[int]) -> list[Vector]:
        """What W2 multiplies, of every slot: [slots][markov_rank]."""
        rank = self.c.markov_rank
        state = [0.0] * rank
        found = []
        for slot, token in zip(y, previous, strict=True):
            e = self.w["markov_head.markov_w1.weight"][token]
            if self.c.markov_head_type == "vanilla":
                found.append(list(e))
            elif self.c.markov_head_type == "gated":
                gate = self.linear("markov_head.gate_proj", slot + e)
                found.append([sigma(g) * v for g, v in zip(gate, e, strict=True)])
            else:
                joint = self.linear("markov_head.joint_proj", state + e + slot)
                g, candidate, out = joint[:rank], joint[rank : 2 * rank], joint[2 * rank :]
                state = [
                    sigma(gate) * old + (1 - sigma(gate)) * math.tanh(new)
                    for gate, old, new in zip(g, state, candidate, strict=True)
                ]
                found.append([math.tanh(v) for v in out])
        return found

    def base(self, y: Vector) -> Vector:
        return [dot(row, y) for row in self.w["lm_head.weight"]]

    def logits(self, y: list[Vector], previous: list[int]) -> list[Vector]:
        """Of as many leading slots as there are previous tokens."""
        y = y[: len(previous)]
        found = [self.base(slot) for slot in y]
        if not self.c.markov_rank:
            return found
        w2 = self.w["markov_head.markov_w2.weight"]
        latents = self.latents(y, previous)
        return [plus(base, [dot(row, low) for row in w2]) for base, low in zip(found, latents, strict=True)]

    def confidences(self, y: list[Vector], previous: list[int]) -> Vector | None:
        if not self.c.confidence:
            return None
        found = []
        for slot, token in zip(y, previous, strict=True):
            seen = slot + self.w["markov_head.markov_w1.weight"][token] if self.c.confidence_with_markov else slot
            found += self.linear("confidence_head.proj", seen)
        return found

    def forward(self, round: Round) -> tuple[list[Vector], list[Vector], Vector | None]:
        """y, logits and confidence of every slot, teacher-forced; confidence is None where there is no such head."""
        y, previous = self.hidden(round), round.previous.tolist()
        return y, self.logits(y, previous), self.confidences(y, previous)

    def draft(self, round: Round) -> list[int]:
        y = self.hidden(round)
        drafts: list[int] = []
        for _ in y:
            last = self.logits(y, [round.anchor_token, *drafts])[-1]
            drafts.append(last.index(max(last)))
        return drafts
