"""The peer of the dense training step: speculators' own class, eager. Run by the interpreter that has that package,

    python -m d2lib.benchmark.peer JSON

and by it alone: this module imports nothing that speculators does not bring.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

_UNUSED = {"openai", "datasets", "hs_connectors"}
"""What speculators imports to generate data; where it was installed without these, an empty module will do."""


class _Empty(ModuleType):
    """A module in which every name is a class of its own."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _Missing(MetaPathFinder, Loader):
    """Asked last, when a module is not installed."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in _UNUSED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def training_step(*, case: str, sizes: dict[str, Any], threads: int, device: str) -> None:
    """Forward, loss and backward of the case in that file, whenever told to; all but embedding and LM head learn.

    Args:
        case: safetensors file; see `dense_step.write_case`.
        sizes: of the drafter, under the names of `DenseConfig`.
    """
    sys.meta_path.append(_Missing())
    from safetensors.torch import load_file
    from speculators.losses import resolve_loss_config
    from speculators.models.dflash import core
    from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
    from transformers import Qwen3Config

    from d2lib.benchmark.turns import take_turns

    torch.set_num_threads(threads)
    given = {name: value.clone() for name, value in load_file(case, device=device).items()}
    layers = Qwen3Config(
        hidden_size=sizes["dim"],
        vocab_size=sizes["vocab_size"],
        num_hidden_layers=sizes["n_layers"],
        intermediate_size=sizes["inter_dim"],
        num_attention_heads=sizes["n_heads"],
        num_key_value_heads=sizes["n_kv_heads"],
        head_dim=sizes["head_dim"],
        rms_norm_eps=sizes["norm_eps"],
        max_position_embeddings=sizes["max_position_embeddings"],
        rope_parameters={"rope_type": "default", "rope_theta": sizes["rope"]["theta"]},
    )
    layers._attn_implementation = "eager"
    config = DSparkSpeculatorConfig(
        transformer_layer_config=layers,
        draft_vocab_size=sizes["vocab_size"],
        block_size=sizes["block_size"],
        aux_hidden_state_layer_ids=list(sizes["target_layer_ids"]),
        mask_token_id=sizes["mask_token_id"],
        sample_from_anchor=True,
        markov_rank=sizes["markov_rank"],
        enable_confidence_head=False,
    )
    with torch.device("meta"):
        model = DSparkDraftModel(config)
    weights = {name.removeprefix("weights."): value for name, value in given.items() if name.startswith("weights.")}
    weights["verifier_lm_head.weight"] = weights["lm_head.weight"]
    weights["verifier_norm.weight"] = torch.ones(sizes["dim"], device=device)
    missing, unexpected = model.load_state_dict(weights, strict=False, assign=True)
    if missing or unexpected:
        raise SystemExit(f"speculators has other tensors: it misses {missing} and does not know {unexpected}")
    model.rotary_emb = type(model.rotary_emb)(layers).to(device)  # its frequencies are in no file
    for name, value in model.named_parameters():
        value.requires_grad_(name not in {"embed_tokens.weight", "lm_head.weight"} and not name.startswith("verifier_"))
    anchors = given["anchor"]
    core.select_anchors = lambda *_: (anchors, torch.ones_like(anchors, dtype=torch.bool))  # ours, not random ones
    inputs = {
        "hidden_states": given["taps"],
        "input_ids": given["tokens"],
        "loss_mask": torch.ones_like(given["tokens"]),
        "verifier_last_hidden_states": given["hidden"],
        "document_ids": torch.zeros_like(given["tokens"]),
    }
    inputs = {name: value.unsqueeze(0) for name, value in inputs.items()}
    losses = resolve_loss_config("kl_div", "eager"), resolve_loss_config("tv", "eager")["tv"][0]

    def step() -> float:
        model.zero_grad()
        loss: Tensor = model(**inputs, loss_config=losses[0], tv_loss_fn=losses[1], max_anchors=len(anchors))[1]
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    take_turns(step, device)


if __name__ == "__main__":
    training_step(**json.loads(sys.argv[1]))
