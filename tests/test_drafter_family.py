"""A family is one folder and one line: a third one goes through data, training, scoring and a gate unknown to them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from data_case import write_dataset, write_trajectory
from gates_cases import identities
from tiny import tiny_config
from tiny_dense import dense_config
from toy_family import ToyConfig

import d2lib
from d2lib.data.assembly import K2_NAMES, Assembly
from d2lib.drafter.config import AnyDrafterConfig, DrafterConfig, load_config, parse_config
from d2lib.drafter.family import FAMILIES, family_of, fast_drafter, reference_drafter
from d2lib.drafter.lora import initialize_adapter, merge
from d2lib.drafter.weights import Weights, initialize, load_weights, save_weights
from d2lib.errors import Refused
from d2lib.files import Record, read_json, write_json
from d2lib.gates.evaluate import evaluate_split
from d2lib.gates.scoring import Scorer
from d2lib.train import checkpoint
from d2lib.train.loop import train
from d2lib.train.recipe import to_qualify

TOY = ToyConfig(dim=12, vocab_size=40, block_size=4, target_layer_ids=(0, 2))
ASSEMBLIES: dict[str, DrafterConfig] = {
    "toy": TOY,
    "dense, full": dense_config(block_size=7),
    "dense, sliding, one plus n": dense_config(
        layer_types=("sliding_attention",) * 2, sliding_window=6, causal=(True, True), layout="one_plus_n"
    ),
}


@pytest.fixture(autouse=True)
def a_third_family(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one line."""
    monkeypatch.setitem(FAMILIES, "toy", "toy_family")


def native(config: DrafterConfig) -> Weights:
    generator = torch.Generator().manual_seed(3)
    embed, head = torch.randn(2, config.vocab_size, config.dim, generator=generator)
    return initialize(config, embed, head, generator)


def assemble(folder: Path, config: DrafterConfig) -> Assembly:
    """An assembly of random rows around a fresh drafter."""
    weights = native(config)
    manifest = write_dataset(folder, config, head=weights[family_of(config).head])
    write_json(folder / "drafter.json", config.model_dump(mode="json"))
    save_weights(folder / "native.safetensors", weights, config)
    write_trajectory(folder, manifest, "dev", folder / K2_NAMES["dev"], block_size=config.block_size)
    return Assembly(folder)


@pytest.mark.parametrize("name", ASSEMBLIES)
def test_any_family_goes_through_training_scoring_and_a_gate(name: str, tmp_path: Path) -> None:
    assembly = assemble(tmp_path / "assembly", ASSEMBLIES[name])
    assert assembly.config == ASSEMBLIES[name]

    # 1. a training run, both backends from one start
    recipe = to_qualify("KL", 1e-2, 1)
    results = {
        backend: train(
            assembly.blocks("train"),
            assembly.config,
            assembly.weights,
            recipe,
            tmp_path / backend,
            backend=backend,
            name="run",
            identity={"data": "d"},
            progress=False,
        )
        for backend in ("fast", "ref")
    }
    adapters = {backend: checkpoint.load(result.path).adapter for backend, result in results.items()}
    start = initialize_adapter(assembly.config, recipe.rank, recipe.seed)
    for tensor, value in start.items():
        torch.testing.assert_close(adapters["fast"][tensor], adapters["ref"][tensor], rtol=1e-2, atol=1e-4)
        assert not torch.equal(adapters["fast"][tensor], value)

    # 2. scoring, and the gates of a split
    found = evaluate_split(assembly, "dev", adapters["fast"], identities(), tmp_path)
    assert "batched" in found.scoring
    gates = [gate.name for gate in found.part.judgement.gates if gate.name.startswith("KL at slot")]
    assert len(gates) == assembly.config.block_size
    assert found.part.judgement.totals["candidate"]["kl_mean"] != found.part.judgement.totals["baseline"]["kl_mean"]


@pytest.mark.parametrize("config", [*ASSEMBLIES.values(), tiny_config()], ids=lambda config: config.family)
def test_a_configuration_names_its_family(config: DrafterConfig, tmp_path: Path) -> None:
    class Case(Record):
        drafter: AnyDrafterConfig

    write_json(tmp_path / "drafter.json", config.model_dump(mode="json"))
    assert read_json(tmp_path / "drafter.json")["family"] == config.family
    assert load_config(tmp_path / "drafter.json") == config
    case = Case.model_validate({"drafter": config.model_dump(mode="json")})
    assert case.drafter == config
    assert case.model_dump(mode="json")["drafter"] == config.model_dump(mode="json")


def test_a_configuration_without_a_family_is_of_the_first_one() -> None:
    fields = tiny_config().model_dump(mode="json")
    del fields["family"]
    assert parse_config(fields) == tiny_config()


@pytest.mark.parametrize("family", ["sparse", None, 3])
def test_an_unknown_family_is_refused(family: object) -> None:
    with pytest.raises(Refused, match="no such family") as refused:
        parse_config(tiny_config().model_dump(mode="json") | {"family": family}, where="drafter.json")
    assert "deepseek or dense" in str(refused.value)


def test_drafters_of_different_families_are_not_compared() -> None:
    arms = {
        str(number): reference_drafter(config, native(config)) for number, config in enumerate((TOY, tiny_config()))
    }
    with pytest.raises(Refused, match="must share"):
        Scorer(arms, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("config", ASSEMBLIES.values(), ids=ASSEMBLIES)
def test_a_fresh_adapter_changes_no_bit_and_a_merged_one_is_the_adapter(config: DrafterConfig, tmp_path: Path) -> None:
    save_weights(tmp_path / "native.safetensors", native(config), config)
    weights, adapter = load_weights(tmp_path / "native.safetensors", config), initialize_adapter(config, 3, 23)
    generator = torch.Generator().manual_seed(1)
    taps, rows = torch.randn(5, config.n_taps * config.dim, generator=generator), torch.arange(5)
    plain, fresh = (reference_drafter(config, weights, a).context(taps, rows) for a in (None, adapter))
    assert all(torch.equal(a, b) for a, b in zip(plain, fresh, strict=True))
    for name in adapter:
        if name.endswith("lora_B"):
            adapter[name] = 0.1 * torch.randn(adapter[name].shape, generator=generator)
    adapted = fast_drafter(config, weights, adapter).context(taps, rows)
    merged = reference_drafter(config, merge(weights, adapter, config)).context(taps, rows)
    for ours, expected, before in zip(adapted, merged, plain, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-4)
        assert not torch.allclose(ours, before, rtol=1e-2, atol=1e-2)


OF_A_FAMILY = ("benchmark/", "lab/decode_")
"""What is of one family by its nature: measurements of certain drafters, and the live loops, which are oracles."""


def test_nothing_above_the_drafter_imports_a_family() -> None:
    root = Path(d2lib.__file__).parent
    packages = tuple(FAMILIES.values())
    for path in root.rglob("*.py"):
        name = path.relative_to(root).as_posix()
        if name.startswith((*(f"drafter/{family}/" for family in FAMILIES), *OF_A_FAMILY)):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not [module for module in modules if module.startswith(packages)], name


def test_families_do_not_import_each_other() -> None:
    root = Path(d2lib.__file__).parent / "drafter"
    for family in ("deepseek", "dense"):
        others = [package for name, package in FAMILIES.items() if name != family]
        for path in (root / family).rglob("*.py"):
            assert not [other for other in others if f"{other}." in path.read_text()], path
