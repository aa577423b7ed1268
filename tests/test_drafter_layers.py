"""Closed forms of the drafter's pieces, one by one."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_drafter import e4m3
from tiny import tiny_config
from torch.nn import functional as F

from d2lib.drafter import kernels
from d2lib.drafter.deepseek import layers
from d2lib.drafter.deepseek.rotary import rotary_angles, rotate


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class TestKernels:
    @given(rows=st.integers(0, 80), inner=st.integers(1, 40), out=st.integers(1, 20))
    @settings(max_examples=30, deadline=None)
    def test_linear_is_a_matrix_product_whatever_the_tile(self, rows: int, inner: int, out: int) -> None:
        x, weight = randn(rows, inner), randn(out, inner, seed=1)
        torch.testing.assert_close(kernels.linear(x, weight), x @ weight.T, atol=1e-5, rtol=1e-5)

    def test_linear_keeps_leading_axes_and_strides_do_not_matter(self) -> None:
        x, weight = randn(2, 3, 8), randn(5, 8)
        assert kernels.linear(x, weight).shape == (2, 3, 5)
        flat = kernels.linear(x.flatten(0, 1), weight)
        strided = torch.stack([x, -x], -1)[..., 0]
        assert torch.equal(kernels.linear(strided, weight).flatten(0, 1), flat)

    @given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=50))
    def test_fold_is_the_sum(self, values: list[float]) -> None:
        total = kernels.fold(torch.tensor(values, dtype=torch.float32))
        assert float(total) == pytest.approx(math.fsum(values), abs=1e-2)

    def test_fold_adds_in_halves(self) -> None:
        """(1e8 + -1e8) + (1 + 1): any other order would lose the ones."""
        assert kernels.fold(torch.tensor([1e8, 1.0, -1e8, 1.0])) == 2
        x = randn(3, 7, 5)
        torch.testing.assert_close(kernels.fold(x, 1), x.sum(1))
        torch.testing.assert_close(kernels.fold(x, 1, keepdim=True), x.sum(1, keepdim=True))

    @pytest.mark.parametrize(
        ("ours", "theirs"),
        [(kernels.sigmoid, torch.sigmoid), (kernels.silu, F.silu), (kernels.softplus, F.softplus)],
        ids=["sigmoid", "silu", "softplus"],
    )
    def test_functions_and_their_slopes(self, ours, theirs) -> None:
        points = torch.cat([torch.linspace(-12, 12, 97), torch.tensor([-200.0, -90.0, 0.0, 25.0, 90.0, 200.0])])
        mine, true = points.clone().requires_grad_(), points.double().requires_grad_()
        torch.testing.assert_close(ours(mine).double(), theirs(true), rtol=1e-6, atol=1e-6)
        (slope,) = torch.autograd.grad(ours(mine).sum(), mine)
        (expected,) = torch.autograd.grad(theirs(true).sum(), true)
        assert bool(torch.isfinite(slope).all())
        torch.testing.assert_close(slope.double(), expected, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("function", [torch.exp, torch.log1p, torch.cos, torch.sin])
    def test_a_value_does_not_depend_on_its_place(self, function) -> None:
        """What the kernels assume of the library; `torch.sigmoid` does not have it."""
        x = randn(256).abs()
        whole = function(x)
        for start in (0, 1, 5, 8):
            for length in (1, 3, 7, 8, 9, 31, 33, 100):
                assert torch.equal(function(x[start : start + length].clone()), whole[start : start + length])


class TestNorm:
    def test_formula(self) -> None:
        x, weight = randn(6, 37), randn(37, seed=1)
        torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-3), F.rms_norm(x, (37,), weight, 1e-3))

    def test_scale_does_not_matter_and_zero_stays_zero(self) -> None:
        x = randn(4, 24)
        torch.testing.assert_close(kernels.rms_norm(x, None, 1e-20), kernels.rms_norm(1e-3 * x, None, 1e-20))
        assert torch.equal(kernels.rms_norm(torch.zeros(2, 24), None, 1e-20), torch.zeros(2, 24))


class TestRotary:
    config = tiny_config(head_dim=10, rope_head_dim=6, rope_theta=100.0)

    def angles(self, *positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        return rotary_angles(torch.tensor(positions), self.config)

    def test_angles(self) -> None:
        cos, sin = self.angles(0, 3)
        expected = torch.tensor([[0.0, 0.0, 0.0], [3.0, 3 * 100 ** (-1 / 3), 3 * 100 ** (-2 / 3)]])
        torch.testing.assert_close(cos, expected.cos())
        torch.testing.assert_close(sin, expected.sin())

    def test_pairs_are_interleaved_and_the_rest_stays(self) -> None:
        x = torch.zeros(1, 10)
        x[0, :4] = torch.tensor([1.0, 2, 3, 4])
        x[0, 4] = 1.0
        turned = rotate(x, *self.angles(2))
        torch.testing.assert_close(turned[0], torch.tensor([1.0, 2, 3, 4, math.cos(2), math.sin(2), 0, 0, 0, 0]))

    def test_lengths_are_kept_and_the_inverse_undoes(self) -> None:
        x = randn(5, 10)
        angles = self.angles(0, 1, 7, 500, 100_000)
        turned = rotate(x, *angles)
        torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
        torch.testing.assert_close(rotate(turned, *angles, inverse=True), x)
        assert torch.equal(turned[0], x[0])

    def test_products_depend_on_the_difference(self) -> None:
        q, k = randn(1, 10), randn(1, 10, seed=1)

        def product(i: int, j: int) -> float:
            return float((rotate(q, *self.angles(i)) * rotate(k, *self.angles(j))).sum())

        assert product(9, 4) == pytest.approx(product(1005, 1000), abs=1e-5)
        assert product(9, 4) != pytest.approx(product(9, 5), abs=1e-3)


class TestHyperConnections:
    def test_sinkhorn_is_doubly_stochastic(self) -> None:
        comb = layers.sinkhorn(randn(4, 4, 6), iters=100, eps=1e-6)
        assert comb.min() > 0
        torch.testing.assert_close(comb.sum(0), torch.ones(4, 6), atol=1e-5, rtol=0)
        torch.testing.assert_close(comb.sum(1), torch.ones(4, 6), atol=1e-3, rtol=0)

    def test_sinkhorn_ends_with_columns(self) -> None:
        """After one pass the columns (sums over sources) are one; the rows are not yet."""
        comb = layers.sinkhorn(2 * randn(4, 4, 6), iters=1, eps=1e-6)
        torch.testing.assert_close(comb.sum(0), torch.ones(4, 6), atol=1e-5, rtol=0)
        assert (comb.sum(1) - 1).abs().max() > 0.05

    def test_sinkhorn_of_equal_and_of_dominant_logits(self) -> None:
        torch.testing.assert_close(
            layers.sinkhorn(torch.zeros(4, 4, 1), iters=20, eps=1e-9), torch.full((4, 4, 1), 0.25)
        )
        identity = layers.sinkhorn(60 * torch.eye(4).unsqueeze(-1), iters=20, eps=1e-9)
        torch.testing.assert_close(identity.squeeze(-1), torch.eye(4), atol=1e-6, rtol=0)

    def test_mixes_without_input_are_the_base(self) -> None:
        hc, base = 4, randn(24)
        mix = layers.mixes(
            randn(3, hc, 8), torch.zeros(24, 32), base, torch.ones(3), sinkhorn_iters=3, hc_eps=1e-3, norm_eps=1e-20
        )
        torch.testing.assert_close(mix.pre, (torch.sigmoid(base[:4]) + 1e-3).expand(3, 4))
        torch.testing.assert_close(mix.post, (2 * torch.sigmoid(base[4:8])).expand(3, 4))
        comb = layers.sinkhorn(base[8:].view(4, 4, 1), iters=3, eps=1e-3).squeeze(-1)
        torch.testing.assert_close(mix.comb, comb.expand(3, 4, 4))

    def test_each_scale_has_its_part(self) -> None:
        x, fn, base = randn(2, 4, 8), randn(24, 32, seed=1), torch.zeros(24)
        parts = [
            layers.mixes(x, fn, base, scale, sinkhorn_iters=3, hc_eps=1e-6, norm_eps=1e-20)
            for scale in (torch.tensor([1.0, 1, 1]), torch.tensor([0.0, 1, 1]), torch.tensor([1.0, 0, 1]))
        ]
        torch.testing.assert_close(parts[1].pre, torch.full((2, 4), 0.5 + 1e-6))
        torch.testing.assert_close(parts[2].post, torch.ones(2, 4))
        assert torch.equal(parts[0].post, parts[1].post)
        assert torch.equal(parts[0].comb, parts[2].comb)

    def test_the_projection_ignores_the_input_scale(self) -> None:
        x, fn = randn(3, 4, 8), randn(5, 32, seed=1)
        found = layers.normed_projection(x, fn, 1e-20)
        torch.testing.assert_close(found, F.rms_norm(x.flatten(1), (32,), eps=1e-20) @ fn.T)
        torch.testing.assert_close(found, layers.normed_projection(100 * x, fn, 1e-20))

    def test_identity(self) -> None:
        """comb = 1 and post = 0 leave the streams; a one-hot pre reads one stream; post = 1 adds to every stream."""
        x, h, comb = randn(3, 4, 8), randn(3, 8, seed=1), torch.eye(4).expand(3, 4, 4)
        assert torch.equal(layers.write_streams(x, h, torch.zeros(3, 4), comb), x)
        torch.testing.assert_close(layers.write_streams(x, h, torch.ones(3, 4), comb), x + h[:, None])
        assert torch.equal(layers.read_streams(x, F.one_hot(torch.tensor([2, 0, 3]), 4).float())[0], x[0, 2])

    def test_comb_goes_from_source_to_destination(self) -> None:
        x = randn(1, 4, 8)
        comb = torch.zeros(1, 4, 4)
        comb[0, 1, 3] = 2.0
        written = layers.write_streams(x, torch.zeros(1, 8), torch.zeros(1, 4), comb)
        torch.testing.assert_close(written[0, 3], 2 * x[0, 1])
        assert not written[0, :3].any()


class TestAttention:
    def case(self, n: int = 6) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return randn(2, 3, 4, 8), randn(2, n, 8, seed=1), torch.ones(2, n, dtype=torch.bool)

    def test_one_row_and_the_sink_share_the_mass(self) -> None:
        q, bank, valid = self.case(1)
        sink = randn(4, seed=2)
        score = (q * bank[:, :, None]).sum(-1) / math.sqrt(8)
        expected = torch.sigmoid(score - sink).unsqueeze(-1) * bank[:, :, None]
        torch.testing.assert_close(layers.sink_attention(q, bank, valid, sink), expected)

    def test_equal_rows_are_scaled_by_what_the_sink_leaves(self) -> None:
        q, _, valid = self.case()
        row = randn(8, seed=3)
        out = layers.sink_attention(torch.zeros_like(q), row.expand(2, 6, 8), valid, torch.full((4,), math.log(2.0)))
        torch.testing.assert_close(out, (6 / 8 * row).expand(2, 3, 4, 8))

    def test_without_sink_it_is_ordinary_attention(self) -> None:
        q, bank, valid = self.case()
        valid[0, :4] = False
        out = layers.sink_attention(q, bank, valid, torch.full((4,), -1e30))
        shared = bank.unsqueeze(1)
        expected = F.scaled_dot_product_attention(q.transpose(1, 2), shared, shared, valid[:, None, None, :])
        torch.testing.assert_close(out.transpose(1, 2), expected)

    def test_a_masked_row_does_not_matter(self) -> None:
        q, bank, valid = self.case()
        valid[:, 2] = False
        other = bank.clone()
        other[:, 2] = 100.0
        sink = randn(4)
        torch.testing.assert_close(
            layers.sink_attention(q, bank, valid, sink), layers.sink_attention(q, other, valid, sink)
        )

    def test_large_scores_do_not_overflow(self) -> None:
        q, bank, valid = self.case()
        for sink in (torch.zeros(4), torch.full((4,), 1e4)):
            assert bool(torch.isfinite(layers.sink_attention(1e3 * q, 10 * bank, valid, sink)).all())


class TestQuantization:
    def test_scalar_oracle(self) -> None:
        kv = randn(5, 132) * torch.tensor([1e-6, 0.1, 1.0, 30.0, 1e4])[:, None]
        found = layers.quantize_kv(kv, 4)
        for row, quantized in zip(kv.tolist(), found.tolist(), strict=True):
            for start in (0, 64):
                group = row[start : start + 64]
                scale = 2.0 ** math.ceil(math.log2(max(1e-4, *map(abs, group)) / 448))
                assert quantized[start : start + 64] == [e4m3(v / scale) * scale for v in group]

    def test_what_e4m3_can_hold_stays(self) -> None:
        exact = torch.tensor([448.0, -416.0, 1.125, 0.0, 2.0**-9, -(2.0**-6)]).repeat(11)[:64]
        for scale in (1.0, 2.0**-7, 8.0):
            kv = torch.cat([exact * scale, torch.randn(4)])[None]
            assert torch.equal(layers.quantize_kv(kv, 4), kv)

    def test_error_groups_and_rotary_part(self) -> None:
        kv = randn(20, 132)
        found = layers.quantize_kv(kv, 4)
        assert torch.equal(found[:, 128:], kv[:, 128:])
        assert torch.equal(layers.quantize_kv(found, 4), found)
        error = (found - kv)[:, :128].abs()
        assert bool((error <= kv[:, :128].abs() / 16 + kv.abs().amax() * 2.0**-17).all())
        assert error.max() > 0.01
        kv[:, :64] *= 1e3  # the second group's scale is its own
        assert torch.equal(layers.quantize_kv(kv, 4)[:, 64:], found[:, 64:])

    def test_the_gradient_passes_straight_through(self) -> None:
        kv = randn(2, 68).requires_grad_()
        weight = randn(2, 68, seed=1)
        (gradient,) = torch.autograd.grad((layers.quantize_kv(kv, 4) * weight).sum(), kv)
        assert torch.equal(gradient, weight)


class TestExperts:
    gate = torch.tensor([[1.0, 0], [0, 1], [-1, 0], [0, -1]])

    def test_the_best_are_picked_and_their_weights_sum_to_the_scaling(self) -> None:
        h = torch.tensor([[3.0, 2.0], [-1.0, -2.0]])
        picked, weight = layers.route(h, self.gate, torch.zeros(4), n_activated=2, norm_topk_prob=True, scaling=1.5)
        assert picked.tolist() == [[0, 1], [3, 2]]
        torch.testing.assert_close(weight.sum(-1), torch.full((2,), 1.5))
        score = F.softplus(torch.tensor([3.0, 2.0])).sqrt()
        torch.testing.assert_close(weight[0], 1.5 * score / score.sum())

    def test_the_bias_chooses_but_does_not_weigh(self) -> None:
        h, bias = torch.tensor([[3.0, 2.0]]), torch.tensor([0.0, 0, 10, 0])
        picked, weight = layers.route(h, self.gate, bias, n_activated=2, norm_topk_prob=False, scaling=1.0)
        assert picked.tolist() == [[2, 0]]
        torch.testing.assert_close(weight[0], F.softplus(torch.tensor([-3.0, 3.0])).sqrt())

    def test_a_tie_goes_to_the_lower_index(self) -> None:
        picked, _ = layers.route(
            torch.zeros(3, 2), self.gate, torch.zeros(4), n_activated=3, norm_topk_prob=True, scaling=1.0
        )
        assert picked.tolist() == [[0, 1, 2]] * 3

    def test_the_limits_of_swiglu(self) -> None:
        gate, up = torch.tensor([50.0, -50.0, 1.0, 1.0]), torch.tensor([1.0, 1.0, 50.0, -50.0])
        found = layers.swiglu(gate, up, 10.0)
        expected = torch.stack(
            [F.silu(torch.tensor(10.0)), F.silu(torch.tensor(-50.0)), 10 * F.silu(gate[2]), -10 * F.silu(gate[3])]
        )
        torch.testing.assert_close(found, expected)

    def test_an_expert(self) -> None:
        h, w1, w2, w3 = randn(3, 4), randn(6, 4, seed=1), randn(4, 6, seed=2), randn(6, 4, seed=3)
        expected = (F.silu(h @ w1.T) * (h @ w3.T)) @ w2.T
        torch.testing.assert_close(layers.expert(h, w1, w2, w3, 1e3), expected)
