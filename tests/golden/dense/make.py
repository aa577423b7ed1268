"""Make the golden dense drafters: small checkpoints as speculators saves them, and what its classes compute of them.

Run once, in an environment of its own (it imports nothing of d2lib); what it made is committed beside it:

    python -m venv env
    env/bin/pip install torch==2.13.0 transformers==5.24.0 safetensors==0.8.0 pydantic==2.14.4
    env/bin/pip install --no-deps speculators==0.9.0
    env/bin/python make.py FOLDER

Every case is a folder with the checkpoint (config.json and model.safetensors, bf16) and `golden.safetensors`: the
inputs `tokens` [L], `taps` [L, n_taps·dim], `last_hidden` [L, dim] (the target's residual before its final norm) and
`anchors` [A]; and per anchor and query row, as computed in fp32 from the bf16 weights, `hidden` [A, N, dim], `logits`
[A, N, V] with the Markov bias, `confidence` [A, N] and `teacher` [A, N, V]. `target/` holds the target's two tables and
final norm. Weights, inputs and anchors come from the seeds in CASES; norm gains and biases are random as well, so that
one that is left out cannot go unseen.
"""

from __future__ import annotations

import json
import sys
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from pathlib import Path
from unittest.mock import MagicMock

import torch
from safetensors.torch import save_file
from transformers import Qwen3Config

torch.compile(lambda: None)  # looks for triton by itself, before the stand-in below
# speculators imports its loaders of training data, and triton for its fused losses; neither takes part here.
for name in ("speculators.train.data", "triton", "triton.language"):
    sys.modules[name] = MagicMock(__spec__=ModuleSpec(name, None))

from speculators.config import SpeculatorsConfig, VerifierConfig  # noqa: E402
from speculators.models.dflash import core as dflash  # noqa: E402
from speculators.models.dflash.config import DFlashSpeculatorConfig  # noqa: E402
from speculators.models.dspark import core as dspark  # noqa: E402
from speculators.models.dspark.config import DSparkSpeculatorConfig  # noqa: E402
from speculators.proposals.greedy import GreedyTokenProposalConfig  # noqa: E402

VERSIONS = {"speculators": "0.9.0", "transformers": "5.24.0", "torch": "2.13.0"}
VOCAB, DIM, DEPTH, ROWS = 40, 16, 6, 34
ANCHORS = (1, 2, 9, 20, 26)
FULL, SLIDING = "full_attention", "sliding_attention"

DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES = {
    "anchor_first_vanilla_full": {"seed": 1, "head": "vanilla"},
    "one_plus_n_none_sliding_causal": {"seed": 2, "head": None, "anchor": False, "layers": [SLIDING, SLIDING]},
    "anchor_first_gated_mixed": {"seed": 3, "head": "gated", "layers": [SLIDING, FULL], "beside": False},
    "anchor_first_rnn_full": {"seed": 4, "head": "rnn"},
    "anchor_first_vanilla_yarn": {"seed": 5, "head": "vanilla", "rope": YARN},
    "anchor_first_vanilla_biases": {"seed": 6, "head": "vanilla", "bias": True},
    "one_plus_n_gated_sliding_not_causal": {
        "seed": 7,
        "head": "gated",
        "anchor": False,
        "layers": [SLIDING, SLIDING],
        "non_causal": True,
        "rope": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    },
    "one_plus_n_vanilla_llama3": {"seed": 8, "head": "vanilla", "anchor": False, "rope": LLAMA3},
}


def make_model(
    head: str | None,
    *,
    anchor: bool = True,
    layers: list[str] = [FULL, FULL],  # noqa: B006 (not changed)
    rope: dict[str, object] = DEFAULT,
    bias: bool = False,
    beside: bool = True,
    non_causal: bool = False,
) -> torch.nn.Module:
    """A drafter of K = 4 slots; `head` None is DFlash."""
    sliding = SLIDING in layers
    sizes = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=DIM,
        intermediate_size=24,
        num_hidden_layers=len(layers),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        attention_bias=bias,
        rope_parameters=dict(rope),
        max_position_embeddings=64,
        layer_types=list(layers),
        use_sliding_window=sliding,
        sliding_window=7 if sliding else None,
    )
    sizes._attn_implementation = "eager"
    block = 4 if anchor else 5
    algorithm = "dflash" if head is None else "dspark"
    own = {} if head is None else {"markov_rank": 3, "markov_head_type": head, "confidence_head_with_markov": beside}
    config = (DFlashSpeculatorConfig if head is None else DSparkSpeculatorConfig)(
        transformer_layer_config=sizes,
        draft_vocab_size=VOCAB,
        block_size=block,
        aux_hidden_state_layer_ids=[1, 3, 4],
        mask_token_id=VOCAB - 1,
        sample_from_anchor=anchor,
        sliding_window_non_causal=non_causal,
        speculators_config=SpeculatorsConfig(
            algorithm=algorithm,
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=4)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["Qwen3ForCausalLM"]),
        ),
        **own,
    )
    return (dflash.DFlashDraftModel if head is None else dspark.DSparkDraftModel)(config)


def randomize(model: torch.nn.Module, target: dict[str, torch.Tensor], generator: torch.Generator) -> None:
    """Random bf16 values in every tensor, none of them at its usual start; the target's tables and norm in theirs."""
    shared = {
        "embed_tokens.weight": "model.embed_tokens.weight",
        "lm_head.weight": "lm_head.weight",
        "verifier_lm_head.weight": "lm_head.weight",
        "verifier_norm.weight": "model.norm.weight",
    }
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name in shared:
                value.copy_(target[shared[name]])
            elif name.endswith("norm.weight"):
                value.copy_(torch.rand(value.shape, generator=generator) + 0.5)
            else:
                scale = value.shape[-1] ** -0.5 if value.ndim == 2 else 0.5
                value.copy_(torch.randn(value.shape, generator=generator) * scale)
            value.copy_(value.bfloat16())


def run(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The model's own forward at every anchor, its loss left out: what it hands to the loss is what is kept."""
    handed: dict[str, object] = {}

    def keep(logits: torch.Tensor, targets: torch.Tensor, *others: object, **options: object) -> tuple[None, dict]:
        handed.update(logits=logits, targets=targets, others=others)
        return None, {}

    dspark.compute_metrics = dflash.compute_metrics = keep
    model.norm.register_forward_hook(lambda module, given, out: handed.update(hidden=out))
    mask = torch.zeros(1, ROWS)
    mask[0, list(ANCHORS)] = 1
    with torch.no_grad():
        model(
            hidden_states=inputs["taps"].unsqueeze(0),
            input_ids=inputs["tokens"].unsqueeze(0),
            loss_mask=mask,
            verifier_last_hidden_states=inputs["last_hidden"].unsqueeze(0),
            document_ids=torch.zeros(1, ROWS, dtype=torch.long),
            max_anchors=len(ANCHORS),
        )
    shape = (len(ANCHORS), model.block_size)
    found = {
        "hidden": handed["hidden"].reshape(*shape, DIM),
        "logits": handed["logits"].reshape(*shape, VOCAB),
        "teacher": handed["targets"].reshape(*shape, VOCAB),
    }
    confidence = handed["others"][0]
    if confidence is not None and confidence.is_floating_point() and isinstance(model, dspark.DSparkDraftModel):
        found["confidence"] = confidence.reshape(shape)
    return found


def main(folder: Path) -> None:
    for package, wanted in VERSIONS.items():
        if version(package).split("+")[0] != wanted:
            raise SystemExit(f"{package} {version(package)} is not {wanted}")
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    target = {
        "model.embed_tokens.weight": torch.randn(VOCAB, DIM, generator=generator).bfloat16(),
        "lm_head.weight": (torch.randn(VOCAB, DIM, generator=generator) / 4).bfloat16(),
        "model.norm.weight": (torch.rand(DIM, generator=generator) + 0.5).bfloat16(),
    }
    (folder / "target").mkdir()
    save_file(target, folder / "target" / "model.safetensors")
    sizes = {"model_type": "qwen3", "vocab_size": VOCAB, "hidden_size": DIM, "num_hidden_layers": DEPTH}
    (folder / "target" / "config.json").write_text(json.dumps(sizes | {"rms_norm_eps": 1e-6}, indent=1) + "\n")
    for name, case in CASES.items():
        options = dict(case)
        generator = torch.Generator().manual_seed(options.pop("seed"))
        model = make_model(**options).eval()
        randomize(model, target, generator)
        inputs = {
            "tokens": torch.randint(VOCAB, (ROWS,), generator=generator),
            "taps": torch.randn(ROWS, 3 * DIM, generator=generator).bfloat16().float(),
            "last_hidden": torch.randn(ROWS, DIM, generator=generator).bfloat16().float(),
        }
        found = run(model, inputs)
        bf16 = {key: value.bfloat16() for key, value in inputs.items() if value.is_floating_point()}
        model.bfloat16().save_pretrained(folder / name)
        (folder / name / "config.py").unlink()  # the class's source, which save_pretrained copies
        golden = inputs | bf16 | found | {"anchors": torch.tensor(ANCHORS)}
        golden = {key: value.contiguous() for key, value in golden.items()}
        golden["tokens"] = golden["tokens"].int()
        save_file(golden, folder / name / "golden.safetensors")
        print(name, {key: tuple(value.shape) for key, value in found.items()})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
