"""A dense drafter's sizes and switches, its tensors and its adapted modules.

This is the normal form: every layout in which dense drafters are stored is read into it, and the arithmetic sees
nothing else. Fields and tensor names are DeepSpec's where it has them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Literal, Self, TypeAlias

from pydantic import Field, model_validator

from d2lib.drafter.config import DrafterConfig
from d2lib.files import Record

LayerType: TypeAlias = Literal["full_attention", "sliding_attention"]
Layout: TypeAlias = Literal["anchor_first", "one_plus_n"]
MarkovHead: TypeAlias = Literal["vanilla", "gated", "rnn"]
RopeType: TypeAlias = Literal["default", "linear", "llama3", "yarn"]

_ROPE_FIELDS: dict[RopeType, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
_LARGEST = 2**31 - 1  # a position that a server's int32 holds
_LAYER_TARGETS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


class Rope(Record):
    """Rotary frequencies: theta^(-2m/D), scaled by type. Fields of another type are not read.

    `linear` divides by the factor (kaiokendev); `llama3` as Llama 3.1 (arXiv 2407.21783); `yarn` arXiv 2309.00071.
    """

    type: RopeType = "default"
    theta: float = Field(gt=0)
    factor: float = Field(default=1.0, ge=1)
    """Context extension; must be given for every type but `default`."""
    original_max_position_embeddings: int | None = Field(default=None, gt=0, le=_LARGEST)
    """Positions before the extension; for `yarn` the drafter's max_position_embeddings when None."""
    low_freq_factor: float = Field(default=1.0, gt=0)
    high_freq_factor: float = Field(default=4.0, gt=0)
    beta_fast: float = Field(default=32.0, gt=0)
    beta_slow: float = Field(default=1.0, gt=0)
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = Field(default=None, gt=0)
    """Scale of cos and sin under `yarn`; None: by mscale and mscale_all_dim, or else by the factor."""
    truncate: bool = True
    """Whether yarn's two correction bounds are rounded to whole channels."""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        for name in _ROPE_FIELDS[self.type]:
            if name not in self.model_fields_set or getattr(self, name) is None:
                raise ValueError(f"a rope of type {self.type} needs its {name}")
        if self.type == "default" and self.factor != 1:
            raise ValueError(f"a rope of type default has no factor; found {self.factor}")
        if self.type == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor ({self.low_freq_factor}) must be below high_freq_factor ({self.high_freq_factor})"
            )
        if self.type == "yarn" and self.beta_fast < self.beta_slow:
            raise ValueError(f"beta_fast ({self.beta_fast}) must be at least beta_slow ({self.beta_slow})")
        return self


class DenseConfig(DrafterConfig):
    """Every size and switch of a dense drafter; nothing in the arithmetic is hard-coded.

    `dim`, `vocab_size`, embedding and LM head are the target's; the activation is SiLU.
    """

    family: Literal["dense"] = "dense"
    n_layers: int = Field(gt=0)
    inter_dim: int = Field(gt=0)
    n_heads: int = Field(gt=0)
    n_kv_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    norm_eps: float = Field(default=1e-6, gt=0)
    attention_bias: bool = False
    """Biases on the query, key, value and output projections."""
    rope: Rope
    max_position_embeddings: int = Field(gt=0, le=_LARGEST)
    layer_types: tuple[LayerType, ...] = Field(strict=False)
    """What each layer sees of the context: every row before the anchor, or the last `sliding_window - 1`."""
    sliding_window: int | None = Field(default=None, gt=0, le=_LARGEST)
    """Width w of sliding layers: query row r of anchor a sees context rows j >= a + r - (w - 1)."""
    causal: tuple[bool, ...] = Field(strict=False)
    """Whether a layer's query rows see only themselves and the block's rows before them."""
    layout: Layout
    """`anchor_first`: slot i is query row i of K. `one_plus_n`: slot i is query row i + 1 of K + 1."""
    block_size: int = Field(gt=0)
    """K: draft slots per round, whatever a file's block_size counts."""
    mask_token_id: int = Field(ge=0)
    """Input id of every query row but the anchor's."""
    target_layer_ids: tuple[int, ...] = Field(min_length=1, strict=False)
    """Tap n is the input residual of the target's layer n: the residual after layer n - 1."""
    n_target_layers: int = Field(gt=0)
    """L: the target's layers."""
    markov_rank: int = Field(default=0, ge=0)
    """Inner width of the Markov head; 0: none, which is DFlash."""
    markov_head_type: MarkovHead = "vanilla"
    confidence: bool = False
    confidence_with_markov: bool = False
    """Whether the confidence head reads the Markov embedding beside the normed output."""

    @property
    def n_rows(self) -> int:
        """N: query rows per round, K or K + 1."""
        return self.block_size + (self.layout == "one_plus_n")

    @property
    def all_sliding(self) -> bool:
        """Whether no layer sees the whole context."""
        return "full_attention" not in self.layer_types

    @property
    def rope_original(self) -> int:
        """Positions that the rotary frequencies were made for, before any extension."""
        return self.rope.original_max_position_embeddings or self.max_position_embeddings

    def context_rows(self, anchor: int) -> int:
        """Context rows before an anchor that a round can see: the last `context_rows(anchor)` of them."""
        if self.all_sliding and self.sliding_window is not None:
            return min(anchor, self.sliding_window - 1)
        return anchor

    def padded_rows(self, rows: int) -> int:
        """See DrafterConfig: the next of 32, 64, 96, 128, 192, 256, 384, 512, … rows."""
        width = 32
        while width < rows:
            width *= 2
        return 3 * width // 4 if width > 64 and rows <= 3 * width // 4 else width

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        found = [*_attention(self), *_layers(self), *_taps(self), *_heads(self)]
        if found:
            raise Inconsistent(found)
        return self


class Inconsistent(ValueError):
    """Fields that do not go together: each field with what is wrong."""

    def __init__(self, findings: list[tuple[str, str]]) -> None:
        self.findings = tuple(findings)
        super().__init__("; ".join(message for _, message in findings))


def _attention(config: DenseConfig) -> Iterator[tuple[str, str]]:
    if config.n_heads % config.n_kv_heads:
        yield "n_heads", f"{config.n_heads} query heads must be a multiple of {config.n_kv_heads} KV heads"
    if config.head_dim % 2:
        yield "head_dim", f"a head's {config.head_dim} channels must be even: rotary turns them in pairs"


def _layers(config: DenseConfig) -> Iterator[tuple[str, str]]:
    for name in ("layer_types", "causal"):
        if (length := len(getattr(config, name))) != config.n_layers:
            yield name, f"there must be one {name} for each of {config.n_layers} layers, not {length}"
    if "sliding_attention" in config.layer_types:
        if config.sliding_window is None:
            yield "sliding_window", "a sliding layer needs a window"
        elif config.sliding_window < config.n_rows:
            yield (
                "sliding_window",
                f"a window of {config.sliding_window} must hold a block's {config.n_rows} query rows",
            )


def _taps(config: DenseConfig) -> Iterator[tuple[str, str]]:
    taps, last = config.target_layer_ids, config.n_target_layers - 1
    if any(later <= earlier for earlier, later in pairwise(taps)):
        yield "target_layer_ids", f"taps must rise strictly, for servers concatenate them so; found {list(taps)}"
    if min(taps) < 0 or max(taps) > last:
        yield (
            "target_layer_ids",
            f"taps are inputs of the target's layers 0 … {last}; the last layer's output is not one, for sources "
            f"disagree whether the final norm stands on it; found {list(taps)}",
        )


def _heads(config: DenseConfig) -> Iterator[tuple[str, str]]:
    if config.mask_token_id >= config.vocab_size:
        yield "mask_token_id", f"{config.mask_token_id} is not in the vocabulary of {config.vocab_size}"
    if config.markov_rank == 0 and config.markov_head_type != "vanilla":
        yield "markov_head_type", f"a {config.markov_head_type} Markov head needs markov_rank > 0"
    if config.layout == "one_plus_n" and config.markov_head_type == "rnn":
        yield (
            "markov_head_type",
            "an rnn Markov head cannot go with layout one_plus_n: in training its state takes a step on the anchor's "
            "row that servers do not take",
        )
    if config.confidence_with_markov and not (config.confidence and config.markov_rank):
        yield "confidence_with_markov", "it needs a confidence head and markov_rank > 0"


def shapes(config: DenseConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of a dense drafter with its shape, the target's embedding and LM head first."""
    c = config
    table: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (c.vocab_size, c.dim),
        "lm_head.weight": (c.vocab_size, c.dim),
        "fc.weight": (c.dim, c.n_taps * c.dim),
        "hidden_norm.weight": (c.dim,),
    }
    for layer in range(c.n_layers):
        prefix = f"layers.{layer}"
        table |= {f"{prefix}.input_layernorm.weight": (c.dim,), f"{prefix}.post_attention_layernorm.weight": (c.dim,)}
        for name, heads in (("q_proj", c.n_heads), ("k_proj", c.n_kv_heads), ("v_proj", c.n_kv_heads)):
            table |= _linear(f"{prefix}.self_attn.{name}", heads * c.head_dim, c.dim, bias=c.attention_bias)
        table |= _linear(f"{prefix}.self_attn.o_proj", c.dim, c.n_heads * c.head_dim, bias=c.attention_bias)
        table |= {
            f"{prefix}.self_attn.q_norm.weight": (c.head_dim,),
            f"{prefix}.self_attn.k_norm.weight": (c.head_dim,),
            f"{prefix}.mlp.gate_proj.weight": (c.inter_dim, c.dim),
            f"{prefix}.mlp.up_proj.weight": (c.inter_dim, c.dim),
            f"{prefix}.mlp.down_proj.weight": (c.dim, c.inter_dim),
        }
    table["norm.weight"] = (c.dim,)
    if c.markov_rank:
        rank = c.markov_rank
        table |= {f"markov_head.markov_{name}.weight": (c.vocab_size, rank) for name in ("w1", "w2")}
        if c.markov_head_type == "gated":
            table |= _linear("markov_head.gate_proj", rank, c.dim + rank, bias=True)
        elif c.markov_head_type == "rnn":
            table |= _linear("markov_head.joint_proj", 3 * rank, 2 * rank + c.dim, bias=True)
    if c.confidence:
        width = c.dim + (c.markov_rank if c.confidence_with_markov else 0)
        table |= _linear("confidence_head.proj", 1, width, bias=True)
    return table


def lora_targets(config: DenseConfig) -> list[str]:
    """Names of the adapted modules: `fc`, and every layer's attention and MLP projections.

    Embedding, heads, norms and biases stay frozen.
    """
    return ["fc"] + [f"layers.{layer}.{name}" for layer in range(config.n_layers) for name in _LAYER_TARGETS]


def peft_modules(config: DenseConfig) -> list[str]:
    """The last parts of the adapted modules' names, which is how servers want them told in a PEFT folder."""
    return sorted({name.rpartition(".")[2] for name in lora_targets(config)})


def _linear(name: str, out: int, inner: int, *, bias: bool) -> dict[str, tuple[int, ...]]:
    table: dict[str, tuple[int, ...]] = {f"{name}.weight": (out, inner)}
    return table | {f"{name}.bias": (out,)} if bias else table
