"""The heads that families share: the Markov head, which sees the token drafted before, and the confidence head.

logits_i = lm_head·y_i + W2·latent_i with y the normed output of the backbone; with e_i = W1[previous token of slot i]

- vanilla: latent_i = e_i (the DSpark paper, arXiv 2607.05147).
- gated: latent_i = σ(mix·[y_i; e_i] + bias) ⊙ e_i.
- rnn: [g, c, o] = mix·[s_i; e_i; y_i] + bias, latent_i = tanh(o), s_{i+1} = σ(g) ⊙ s_i + (1 - σ(g)) ⊙ tanh(c), s_0 = 0.

The last two are DeepSpec's. The backbone never sees the drafted tokens, so these heads alone are sequential.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from d2lib.drafter.kernels import sigmoid

Linear: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""x [..., in] and W [out, in] → x·Wᵀ [..., out]."""


@dataclass(frozen=True)
class MarkovHead:
    """The tensors of a Markov head of rank r.

    w1, w2: [V, r]. mix: [r, dim + r] of a gated, [3r, 2r + dim] of an rnn head; bias: its bias.
    """

    kind: Literal["vanilla", "gated", "rnn"]
    w1: Tensor
    w2: Tensor
    mix: Tensor | None = None
    bias: Tensor | None = None

    def latents(self, y: Tensor, previous: Tensor, linear: Linear) -> Tensor:
        """Every slot's latent given the tokens before: y [..., K, dim] and tokens [..., K] to [..., K, r]."""
        if self.kind != "rnn":
            return self.step(y, previous, None, linear)[0]
        latents, state = [], None
        for slot in range(y.shape[-2]):
            latent, state = self.step(y[..., slot, :], previous[..., slot], state, linear)
            latents.append(latent)
        return torch.stack(latents, dim=-2)

    def step(self, y: Tensor, previous: Tensor, state: Tensor | None, linear: Linear) -> tuple[Tensor, Tensor | None]:
        """One slot: y [..., dim], tokens [...] and state [..., r] (None at first) to its latent and the next one."""
        e = self.w1[previous]
        if self.mix is None or self.bias is None:
            return e, None
        if self.kind == "gated":
            return sigmoid(linear(torch.cat([y, e], dim=-1), self.mix) + self.bias) * e, None
        state = torch.zeros_like(e) if state is None else state
        g, c, o = (linear(torch.cat([state, e, y], dim=-1), self.mix) + self.bias).chunk(3, dim=-1)
        keep = sigmoid(g)
        return torch.tanh(o), keep * state + (1 - keep) * torch.tanh(c)


@dataclass(frozen=True)
class ConfidenceHead:
    """weight: [1, dim], or [1, dim + r] where the Markov head's W1 row of the previous token is read too. bias: [1]."""

    weight: Tensor
    bias: Tensor | None
    with_markov: bool
