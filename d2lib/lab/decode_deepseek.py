"""The three-stage drafter served live, in numpy, without a line of the reference's: see `decode`.

It keeps a ring of `window` key-value rows per stage instead of gathering a context, and rows are pushed once when the
target has run them instead of looked back at from every anchor.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from d2lib.data.k2 import DRAFTS
from d2lib.drafter.deepseek.config import DeepseekConfig
from d2lib.errors import Refused
from d2lib.lab.singles import Floats, Integers, floats, logistic, scaled

_EMPTY = -1


class LiveDeepSeek:
    """A drafter that serves `streams` requests side by side, with a ring of key-value rows for each.

    Args:
        config: its sizes. The e4m3 storage of key-value rows is not served here.
        weights: its tensors under their release names.
        streams: how many requests. rows: of the longest; the ring needs no more than its window.
    """

    def __init__(self, config: DeepseekConfig, weights: Mapping[str, Tensor], streams: int, rows: int) -> None:
        if config.kv_quant != "off":
            raise Refused("the live loop keeps full key-value rows", expected="kv_quant: off", found=config.kv_quant)
        self.config = config
        self.w = {name: np.ascontiguousarray(value.float().numpy()) for name, value in weights.items()}
        self.last = f"mtp.{config.n_stages - 1}"
        self.ring = [
            np.zeros((streams, config.window, config.head_dim), dtype=np.float32) for _ in range(config.n_stages)
        ]
        self.held = np.full((streams, config.window), _EMPTY, dtype=np.int64)
        self.experts = [
            [
                np.stack(
                    [self.w[f"mtp.{stage}.ffn.experts.{e}.{part}.weight"].T for e in range(config.n_routed_experts)]
                )
                for part in ("w1", "w2", "w3")
            ]
            for stage in range(config.n_stages)
        ]

    def push(self, stream: int, first: int, taps: Floats) -> None:
        """The target has run rows first … of a stream: keep their key-value rows, dropping the oldest.

        Args:
            taps: [n, n_taps·dim] of those rows.
        """
        first, taps = first + max(0, len(taps) - self.config.window), taps[-self.config.window :]
        rows = np.arange(first, first + len(taps))
        shown = self._scaled(taps @ self.w["mtp.0.main_proj.weight"].T, "mtp.0.main_norm.weight")
        for stage, ring in enumerate(self.ring):
            ring[stream, rows % self.config.window] = self._key_value(stage, shown, rows)
        self.held[stream, rows % self.config.window] = rows

    def propose(self, streams: Integers, tokens: Integers, anchors: Integers) -> Integers:
        """Two drafts for each of these streams: [n, 2].

        Args:
            streams: [n] which. tokens: [n] their last committed tokens. anchors: [n] the rows of those.
        """
        c, count = self.config, len(streams)
        ids = np.full((count, c.block_size), c.noise_token_id)
        ids[:, 0] = tokens
        where = (anchors[:, None] + np.arange(c.block_size)).ravel()
        flow = np.repeat(self.w["embed.weight"][ids.ravel()][:, None, :], c.hc_mult, axis=1)
        gather = np.zeros((len(flow), c.hc_mult), dtype=np.float32)
        gather[:, 0] = 1
        for stage in range(c.n_stages):
            for part in ("attn", "ffn"):
                own, spread, blend = self._connections(f"mtp.{stage}.hc_{part}", flow)
                merged = np.einsum("ns,nsd->nd", own if c.hc_form == "per_motion" else gather, flow)
                merged = self._scaled(merged, f"mtp.{stage}.{part}_norm.weight")
                if part == "attn":
                    change = self._attend(stage, merged, where, streams)
                else:
                    change = self._mix_experts(stage, merged)
                flow = spread[:, :, None] * change[:, None, :] + np.swapaxes(blend, 1, 2) @ flow
                gather = own
        if c.hc_form == "per_motion":
            squeezed = self._squeeze(flow, f"{self.last}.hc_head_fn")
            scale, base = self.w[f"{self.last}.hc_head_scale"], self.w[f"{self.last}.hc_head_base"]
            gather = logistic(squeezed * scale + base) + np.float32(c.hc_eps)
        final = self._scaled(np.einsum("ns,nsd->nd", gather, flow), f"{self.last}.norm.weight")
        final = final.reshape(count, c.block_size, c.dim)
        drafts = np.empty((count, DRAFTS), dtype=np.int64)
        before = tokens
        for slot in range(DRAFTS):
            bigram = self.w[f"{self.last}.markov_head.embed.weight"][before]
            score = final[:, slot] @ self.w["head.weight"].T + bigram @ self.w[f"{self.last}.markov_head.head.weight"].T
            before = drafts[:, slot] = score.argmax(axis=1)
        return drafts

    def _attend(self, stage: int, h: Floats, where: Integers, streams: Integers) -> Floats:
        c, w, name = self.config, self.w, f"mtp.{stage}.attn"
        count = len(streams)
        query = self._scaled(h @ w[f"{name}.wq_a.weight"].T, f"{name}.q_norm.weight") @ w[f"{name}.wq_b.weight"].T
        query = query.reshape(-1, c.n_heads, c.head_dim)
        if c.q_head_norm:
            query = query / np.sqrt(np.mean(query * query, axis=-1, keepdims=True) + np.float32(c.norm_eps))
        query = self._turn(query, where[:, None], +1).reshape(count, c.block_size * c.n_heads, c.head_dim)
        fresh = self._key_value(stage, h, where).reshape(count, c.block_size, c.head_dim)
        memory = np.concatenate([self.ring[stage][streams], fresh], axis=1)
        present = np.concatenate([self.held[streams] != _EMPTY, np.ones((count, c.block_size), dtype=bool)], axis=1)
        score = query @ np.swapaxes(memory, 1, 2) / np.float32(np.sqrt(c.head_dim))
        score = np.where(present[:, None, :], score, np.float32(-np.inf))
        sink = np.tile(w[f"{name}.attn_sink"], c.block_size)[None, :, None]
        peak = np.maximum(score.max(axis=2, keepdims=True), sink)
        share = np.exp(score - peak)
        share /= share.sum(axis=2, keepdims=True) + np.exp(sink - peak)
        seen = (share @ memory).reshape(-1, c.n_heads, c.head_dim)
        seen = self._turn(seen, where[:, None], -1).reshape(len(h), c.o_groups, -1)
        down = w[f"{name}.wo_a.weight"].reshape(c.o_groups, c.o_lora_rank, -1)
        low = [seen[:, group] @ down[group].T for group in range(c.o_groups)]
        return floats(np.concatenate(low, axis=1) @ w[f"{name}.wo_b.weight"].T)

    def _key_value(self, stage: int, h: Floats, where: Integers) -> Floats:
        kv = self._scaled(h @ self.w[f"mtp.{stage}.attn.wkv.weight"].T, f"mtp.{stage}.attn.kv_norm.weight")
        return self._turn(kv, where, +1)

    def _turn(self, x: Floats, where: Integers, direction: int) -> Floats:
        """Turn the last channels, as complex numbers, by their row's angles."""
        c = self.config
        pace = c.rope_theta ** (-np.arange(0, c.rope_head_dim, 2) / c.rope_head_dim)
        phase = np.exp(1j * direction * where[..., None] * pace).astype(np.complex64)
        still, moving = x[..., : -c.rope_head_dim], np.ascontiguousarray(x[..., -c.rope_head_dim :])
        turned = (moving.view(np.complex64) * phase).view(np.float32)
        return np.concatenate([still, turned], axis=-1)

    def _mix_experts(self, stage: int, h: Floats) -> Floats:
        """Every expert runs on every row and most are then weighted with nothing: plain, and quick at this size."""
        c, w, name = self.config, self.w, f"mtp.{stage}.ffn"
        score = np.sqrt(np.logaddexp(np.float32(0), h @ w[f"{name}.gate.weight"].T))
        best = np.argsort(-(score + w[f"{name}.gate.bias"]), axis=1, kind="stable")[:, : c.n_activated]
        share = np.zeros_like(score)
        np.put_along_axis(share, best, np.take_along_axis(score, best, axis=1), axis=1)
        if c.norm_topk_prob:
            share /= share.sum(axis=1, keepdims=True) + np.float32(1e-20)
        w1, w2, w3 = self.experts[stage]
        routed = self._gated(h @ w1, h @ w3) @ w2
        shared = [w[f"{name}.shared_experts.{part}.weight"].T for part in ("w1", "w2", "w3")]
        common = self._gated(h @ shared[0], h @ shared[2]) @ shared[1]
        return floats(np.einsum("ne,end->nd", share * np.float32(c.routed_scaling_factor), routed) + common)

    def _gated(self, gate: Floats, up: Floats) -> Floats:
        limit = np.float32(self.config.swiglu_limit)
        gate = np.minimum(gate, limit)
        return floats(gate * logistic(gate) * np.clip(up, -limit, limit))

    def _connections(self, name: str, flow: Floats) -> tuple[Floats, Floats, Floats]:
        """How a sublayer gathers from the residual streams, spreads over them, and blends them: [n, s], [n, s],
        [n, from, to]."""
        c, streams, eps = self.config, self.config.hc_mult, np.float32(self.config.hc_eps)
        raw = self._squeeze(flow, f"{name}_fn")
        scale, base = self.w[f"{name}_scale"], self.w[f"{name}_base"]
        gather = logistic(raw[:, :streams] * scale[0] + base[:streams]) + eps
        spread = 2 * logistic(raw[:, streams : 2 * streams] * scale[1] + base[streams : 2 * streams])
        blend = (raw[:, 2 * streams :] * scale[2] + base[2 * streams :]).reshape(-1, streams, streams)
        blend = np.exp(blend - blend.max(axis=2, keepdims=True))
        blend = blend / blend.sum(axis=2, keepdims=True) + eps
        for step in range(2 * c.hc_sinkhorn_iters - 1):
            blend = blend / (blend.sum(axis=1 + step % 2, keepdims=True) + eps)
        return floats(gather), floats(spread), floats(blend)

    def _squeeze(self, flow: Floats, name: str) -> Floats:
        wide = flow.reshape(len(flow), -1)
        size = np.sqrt(np.mean(wide * wide, axis=1, keepdims=True) + np.float32(self.config.norm_eps))
        return floats(wide @ self.w[name].T / size)

    def _scaled(self, x: Floats, name: str) -> Floats:
        return scaled(x, self.w[name], self.config.norm_eps)
