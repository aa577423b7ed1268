"""The dense drafter served live, in numpy, without a line of the reference's: see `decode`.

It keeps each layer's keys and values of every row that the target has run, a full layer's in a table that grows with
the request, a sliding layer's in a ring of the rows that its width can still reach.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from d2lib.data.k2 import DRAFTS
from d2lib.drafter.dense.config import DenseConfig
from d2lib.lab.singles import Floats, Integers, floats, logistic, scaled

_EMPTY = -1


@dataclass(frozen=True)
class _Memory:
    """What one layer keeps of each stream's rows, S places a stream; row j stands at place j mod S.

    keys, values: [streams, S, n_kv_heads, head_dim]. held: [streams, S], the row that stands there.
    width: of a sliding layer.
    """

    keys: Floats
    values: Floats
    held: Integers
    width: int | None


class LiveDense:
    """A drafter that serves `streams` requests of up to `rows` rows side by side."""

    def __init__(self, config: DenseConfig, weights: Mapping[str, Tensor], streams: int, rows: int) -> None:
        self.config = config
        self.w = {name: np.ascontiguousarray(value.float().numpy()) for name, value in weights.items()}
        self.pace, self.gain = _pace(config)
        self.memory = []
        for kind in config.layer_types:
            width = config.sliding_window if kind == "sliding_attention" else None
            places = rows if width is None else max(1, width - 1)
            shape = (streams, places, config.n_kv_heads, config.head_dim)
            keys, values = np.zeros(shape, dtype=np.float32), np.zeros(shape, dtype=np.float32)
            self.memory.append(_Memory(keys, values, np.full((streams, places), _EMPTY, dtype=np.int64), width))

    def push(self, stream: int, first: int, taps: Floats) -> None:
        """The target has run rows first … of a stream: keep what every layer needs of them.

        Args:
            taps: [n, n_taps·dim] of those rows.
        """
        shown = self._norm(taps @ self.w["fc.weight"].T, "hidden_norm")
        for layer, memory in enumerate(self.memory):
            places = memory.held.shape[1]
            kept = shown[-places:]
            rows = np.arange(first + len(shown) - len(kept), first + len(shown))
            keys, values = self._keys_values(layer, kept, rows)
            memory.keys[stream, rows % places] = keys
            memory.values[stream, rows % places] = values
            memory.held[stream, rows % places] = rows

    def propose(self, streams: Integers, tokens: Integers, anchors: Integers) -> Integers:
        """Two drafts for each of these streams: [n, 2].

        Args:
            streams: [n] which. tokens: [n] their last committed tokens. anchors: [n] the rows of those.
        """
        c = self.config
        ids = np.full((len(streams), c.n_rows), c.mask_token_id)
        ids[:, 0] = tokens
        where = anchors[:, None] + np.arange(c.n_rows)
        flow = self.w["embed_tokens.weight"][ids]
        for layer, memory in enumerate(self.memory):
            name = f"layers.{layer}"
            flow = flow + self._attend(layer, self._norm(flow, f"{name}.input_layernorm"), where, memory, streams)
            h = self._norm(flow, f"{name}.post_attention_layernorm")
            gate = self._linear(h, f"{name}.mlp.gate_proj")
            inner = gate * logistic(gate) * self._linear(h, f"{name}.mlp.up_proj")
            flow = flow + self._linear(inner, f"{name}.mlp.down_proj")
        final = self._norm(flow[:, c.n_rows - c.block_size :], "norm")
        drafts = np.empty((len(streams), DRAFTS), dtype=np.int64)
        before, state = tokens, np.zeros((len(streams), c.markov_rank), dtype=np.float32)
        for slot in range(DRAFTS):
            score = final[:, slot] @ self.w["lm_head.weight"].T
            if c.markov_rank:
                latent, state = self._markov(final[:, slot], before, state)
                score = score + latent @ self.w["markov_head.markov_w2.weight"].T
            before = drafts[:, slot] = score.argmax(axis=1)
        return drafts

    def _attend(self, layer: int, h: Floats, where: Integers, memory: _Memory, streams: Integers) -> Floats:
        """h [n, rows, dim] at positions [n, rows], over what is kept of these streams and over each other."""
        c, name = self.config, f"layers.{layer}.self_attn"
        count, rows = where.shape
        query = self._linear(h, f"{name}.q_proj").reshape(count, rows, c.n_heads, c.head_dim)
        query = self._turn(self._norm(query, f"{name}.q_norm"), where)
        fresh_keys, fresh_values = self._keys_values(layer, h, where)
        reach = min(memory.held.shape[1], int(where[:, 0].max()))
        keys = np.concatenate([memory.keys[streams, :reach], fresh_keys], axis=1)
        values = np.concatenate([memory.values[streams, :reach], fresh_values], axis=1)

        held = memory.held[streams, :reach][:, None, :]
        past = np.broadcast_to(held != _EMPTY, (count, rows, reach))
        if memory.width is not None:
            past = past & (held > where[:, :, None] - memory.width)
        block = np.ones((rows, rows), dtype=bool)
        if c.causal[layer]:
            block = np.tril(block)
        visible = np.concatenate([past, np.broadcast_to(block, (count, rows, rows))], axis=2)

        shared = c.n_heads // c.n_kv_heads
        query = query.reshape(count, rows, c.n_kv_heads, shared, c.head_dim).transpose(0, 2, 3, 1, 4)
        score = query @ keys.transpose(0, 2, 3, 1)[:, :, None] / np.float32(math.sqrt(c.head_dim))
        score = np.where(visible[:, None, None], score, np.float32(-np.inf))
        share = np.exp(score - score.max(axis=-1, keepdims=True))
        share /= share.sum(axis=-1, keepdims=True)
        seen = share @ values.transpose(0, 2, 1, 3)[:, :, None]
        return self._linear(seen.transpose(0, 3, 1, 2, 4).reshape(count, rows, -1), f"{name}.o_proj")

    def _keys_values(self, layer: int, h: Floats, where: Integers) -> tuple[Floats, Floats]:
        """Of h [..., dim] at positions [...]: [..., n_kv_heads, head_dim] each."""
        c, name = self.config, f"layers.{layer}.self_attn"
        keys, values = (
            self._linear(h, f"{name}.{part}").reshape(*where.shape, c.n_kv_heads, c.head_dim)
            for part in ("k_proj", "v_proj")
        )
        return self._turn(self._norm(keys, f"{name}.k_norm"), where), values

    def _turn(self, x: Floats, where: Integers) -> Floats:
        """Turn heads [..., heads, head_dim] at positions [...]: channels m and m + head_dim/2 are a complex number."""
        phase = (self.gain * np.exp(1j * where[..., None, None] * self.pace)).astype(np.complex64)
        real, imaginary = np.split(x, 2, axis=-1)
        turned = (real + 1j * imaginary).astype(np.complex64) * phase
        return np.concatenate([turned.real, turned.imag], axis=-1)

    def _markov(self, final: Floats, before: Integers, state: Floats) -> tuple[Floats, Floats]:
        """What the second Markov matrix multiplies, [n, rank], and the state for the next slot."""
        bigram = self.w["markov_head.markov_w1.weight"][before]
        if self.config.markov_head_type == "gated":
            gate = self._linear(np.concatenate([final, bigram], axis=1), "markov_head.gate_proj")
            return logistic(gate) * bigram, state
        if self.config.markov_head_type == "rnn":
            joint = self._linear(np.concatenate([state, bigram, final], axis=1), "markov_head.joint_proj")
            keep, new, out = np.split(joint, 3, axis=1)
            keep = logistic(keep)
            return np.tanh(out), floats(keep * state + (1 - keep) * np.tanh(new))
        return bigram, state

    def _linear(self, x: Floats, name: str) -> Floats:
        y = x @ self.w[f"{name}.weight"].T
        return floats(y + self.w[f"{name}.bias"]) if f"{name}.bias" in self.w else floats(y)

    def _norm(self, x: Floats, name: str) -> Floats:
        return scaled(x, self.w[f"{name}.weight"], self.config.norm_eps)


def _pace(config: DenseConfig) -> tuple[NDArray[np.float64], float]:
    """Radians a row of each channel pair, [head_dim/2], and the gain on cosine and sine."""
    rope, width = config.rope, config.head_dim
    pair = np.arange(width // 2)
    pace = rope.theta ** (-2 * pair / width)
    if rope.type == "llama3":
        cycles = config.rope_original * pace / (2 * np.pi)
        kept = (cycles - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    elif rope.type == "yarn":
        turns = np.array([rope.beta_fast, rope.beta_slow])
        bounds = width * np.log(config.rope_original / (2 * np.pi * turns)) / (2 * math.log(rope.theta))
        if rope.truncate:
            bounds = np.array([np.floor(bounds[0]), np.ceil(bounds[1])])
        first, last = max(bounds[0], 0), min(bounds[1], width - 1)
        kept = 1 - (pair - first) / (last - first if last != first else 0.001)
    else:
        return pace / rope.factor, 1.0
    kept = np.clip(kept, 0, 1)
    return pace * (kept + (1 - kept) / rope.factor), _gain(config) if rope.type == "yarn" else 1.0


def _gain(config: DenseConfig) -> float:
    rope = config.rope
    if rope.attention_factor is not None:
        return rope.attention_factor
    growth = 0.1 * math.log(rope.factor)
    if rope.mscale and rope.mscale_all_dim:
        return (rope.mscale * growth + 1) / (rope.mscale_all_dim * growth + 1)
    return growth + 1
