"""A judged adapter in PEFT's hands and in the merged projections; and everything that must keep it from leaving."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from export_case import ADAPTER, CONFIG, GAINING, LOSING, RECIPE, WEIGHTS, make_judged
from peft import PeftModel
from safetensors import safe_open
from test_drafter_lora import ByModules, module_tree
from tiny import random_batch

from d2lib import files
from d2lib.cli import main
from d2lib.drafter.family import reference_drafter
from d2lib.drafter.lora import lora_targets, merge
from d2lib.drafter.weights import read_tensors
from d2lib.errors import Refused, Unexpected
from d2lib.evidence.ledger import genesis, make_line, read_ledger
from d2lib.evidence.receipts import read_receipt
from d2lib.evidence.verify import verify
from d2lib.export import write
from d2lib.export.write import export_adapter, merge_adapter
from d2lib.files import parse_json, read_json, sha256_file
from d2lib.gates.words import TRAJECTORY
from d2lib.train.recipe import RECIPES

FOLDER = {"README.md", "adapter_config.json", "adapter_model.safetensors", "card.json"}


@pytest.fixture(scope="module")
def passed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_judged(tmp_path_factory.mktemp("a") / "work" / "runs" / "demo", GAINING)


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_judged(tmp_path_factory.mktemp("b") / "work" / "runs" / "demo", LOSING)


def test_the_case_is_a_sound_run(passed: Path) -> None:
    assert {row.state for row in verify(passed).rows if not row.holds} <= {"extra", "missing"}
    assert [(line.phase, line.verdict) for line in read_ledger(passed)] == [("train", None), ("finish", "PASS")]


def test_peft_reads_the_folder_and_computes_what_we_compute(passed: Path, tmp_path: Path) -> None:
    """The same outputs module by module, the same weights once merged, and REF's logits from PEFT's modules."""
    export_adapter(passed, tmp_path / "adapter")
    assert {path.name for path in (tmp_path / "adapter").iterdir()} == FOLDER
    model = PeftModel.from_pretrained(module_tree(WEIGHTS), str(tmp_path / "adapter"))
    settings = model.peft_config["default"]
    assert (settings.r, settings.lora_alpha, settings.bias) == (RECIPE.rank, RECIPE.rank, "none")
    adapted = {name for name, module in model.base_model.model.named_modules() if hasattr(module, "lora_A")}
    assert adapted == set(lora_targets(CONFIG))

    merged = merge(WEIGHTS, ADAPTER, CONFIG)
    tree = ByModules(CONFIG, WEIGHTS)
    tree.modules = {name: model.base_model.model.get_submodule(name) for name in lora_targets(CONFIG)}
    active, plain = reference_drafter(CONFIG, WEIGHTS, ADAPTER), reference_drafter(CONFIG, merged)
    with torch.no_grad():
        for name, module in tree.modules.items():
            x = torch.randn(4, WEIGHTS[f"{name}.weight"].shape[1])
            torch.testing.assert_close(module(x), x @ merged[f"{name}.weight"].T, rtol=1e-4, atol=1e-4)
        for index in range(3):
            round = random_batch(CONFIG, 3).round(index)
            logits = active.forward(round).logits
            torch.testing.assert_close(tree.forward(round).logits, logits, rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(plain.forward(round).logits, logits, rtol=1e-3, atol=1e-3)
        unloaded = model.merge_and_unload()
    for name in lora_targets(CONFIG):
        torch.testing.assert_close(unloaded.get_submodule(name).weight.data, merged[f"{name}.weight"])


def test_the_merged_file_holds_the_projections_and_nothing_else(passed: Path, tmp_path: Path) -> None:
    merge_adapter(passed, tmp_path / "merged.safetensors")
    tensors = read_tensors(tmp_path / "merged.safetensors")
    assert set(tensors) == {f"{name}.weight" for name in lora_targets(CONFIG)}
    assert not {"embed.weight", "head.weight"} & set(tensors)
    assert all(tensor.dtype == torch.float32 for tensor in tensors.values())
    active, plain = reference_drafter(CONFIG, WEIGHTS, ADAPTER), reference_drafter(CONFIG, {**WEIGHTS, **tensors})
    round = random_batch(CONFIG, 4).round(3)
    with torch.no_grad():
        torch.testing.assert_close(plain.forward(round).logits, active.forward(round).logits, rtol=1e-3, atol=1e-3)
    with safe_open(tmp_path / "merged.safetensors", framework="pt") as stored:
        card = parse_json(stored.metadata()["card"])
    assert (card["verdict"], card["kind"]) == ("PASS", "merged projections")


def test_the_grouped_projection_merges_row_by_row(passed: Path, tmp_path: Path) -> None:
    """y_g = x_g·W_gᵀ + (x_g·Aᵀ)·B_gᵀ, written out group by group from PEFT's tensors, is x_g·(merged rows of g)ᵀ."""
    export_adapter(passed, tmp_path / "adapter")
    merge_adapter(passed, tmp_path / "merged")
    stored = read_tensors(tmp_path / "adapter" / "adapter_model.safetensors")
    merged = read_tensors(tmp_path / "merged" / "merged.safetensors")
    rank, groups = CONFIG.o_lora_rank, CONFIG.o_groups
    for stage in range(CONFIG.n_stages):
        name = f"mtp.{stage}.attn.wo_a"
        a = stored[f"base_model.model.{name}.lora_A.weight"].double()
        b = stored[f"base_model.model.{name}.lora_B.weight"].double()
        w = WEIGHTS[f"{name}.weight"].double()
        x = torch.randn(5, CONFIG.head_inner, dtype=torch.float64)
        for g, x_g in enumerate(x.chunk(groups, dim=-1)):
            rows = slice(g * rank, (g + 1) * rank)
            y = x_g @ w[rows].T + (x_g @ a.T) @ b[rows].T
            torch.testing.assert_close(y, x_g @ merged[f"{name}.weight"][rows].double().T, rtol=1e-5, atol=1e-5)


def test_peft_keys_and_bytes(passed: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        export_adapter(passed, tmp_path / name)
    stored = read_tensors(tmp_path / "one" / "adapter_model.safetensors")
    assert set(stored) == {f"base_model.model.{name}.weight" for name in ADAPTER}
    assert all(torch.equal(stored[f"base_model.model.{name}.weight"], tensor) for name, tensor in ADAPTER.items())
    assert not any("embed" in name or "head" in name for name in stored)
    for name in FOLDER:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_the_card_of_a_pass(passed: Path, tmp_path: Path) -> None:
    export_adapter(passed, tmp_path / "adapter", unqualified=True)  # allowed, not claimed
    card = read_json(tmp_path / "adapter" / "card.json")
    line = read_ledger(passed)[-1]
    assert (card["verdict"], card["qualified"], card["namespace"]) == ("PASS", True, "demo")
    assert card["finish"]["receipt_json_sha256"] == line.receipt_json_sha256
    assert card["finish"]["receipt_json_sha256"] == str(sha256_file(passed / "finish" / "attempt-1" / "receipt.json"))
    assert card["base"] == read_json(passed / "full" / "g2.json")["identities"]
    assert card["recipe"] == RECIPE.model_dump(mode="json")
    legal = card["splits"]["heldout_legal"]
    assert (legal["gain"], legal["requests"], legal["rounds"], legal["failed_gates"]) == (0.2, 20, 800, [])
    assert legal["lower"] <= legal["gain"] <= legal["upper"]
    judged = card["judged_on"]
    parts = {split: read_json(passed / "full" / f"{split}.json") for split in judged["splits"]}
    assert set(parts) == {"dev", "heldout_legal", "heldout_general"}
    for split, part in parts.items():
        facts = judged["splits"][split]
        assert facts["k2"] == part["contract"]["k2"]
        assert facts["requests"] == len(part["requests"])
        assert facts["rounds"] == sum(request["rounds"] for request in part["requests"])
    assert judged["identities"] == card["base"]
    assert judged["target"] == read_json(passed / "assembly" / "MANIFEST.json")["target"]
    assert "bonus excluded" in judged["measure"]
    for name, record in card["files"].items():
        assert record["sha256"] == str(sha256_file(tmp_path / "adapter" / name))
    readme = (tmp_path / "adapter" / "README.md").read_text()
    assert readme.startswith("# PASS: every gate of G2 held on all three splits\n")
    assert "UNQUALIFIED" not in readme
    assert "| heldout_legal | PASS | +0.2000 | [+0.2000, +0.2000] | 20 | 800 |" in readme
    assert line.receipt_json_sha256 in readme
    for fact in (TRAJECTORY, *judged["target"].values(), *(one["k2"] for one in judged["splits"].values())):
        assert fact in readme
    assert all(value in readme for value in card["base"].values())


def test_without_a_pass_only_unqualified_and_it_says_so(
    failed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    for action, to in (("export", adapter), ("merge", merged), ("merge", tmp_path / "merged.safetensors")):
        assert main(["adapter", action, str(failed), "--to", str(to)]) == 2
        assert "the run's verdict is not PASS; expected: PASS; found: FAIL" in capsys.readouterr().err
        assert list(tmp_path.iterdir()) == []
    for action, to in (("export", adapter), ("merge", merged)):
        assert main(["adapter", action, str(failed), "--to", str(to), "--unqualified"]) == 0
        assert "UNQUALIFIED: the verdict of G2 is FAIL" in capsys.readouterr().out
        readme = (to / "README.md").read_text()
        assert readme.startswith("# UNQUALIFIED: the verdict of G2 is FAIL\n")
        assert "- dev: every request's gain does not hold" in readme
        card = read_json(to / "card.json")
        assert (card["verdict"], card["qualified"]) == ("FAIL", False)
        assert card["statement"].startswith("UNQUALIFIED")
    to = tmp_path / "merged.safetensors"
    assert main(["adapter", "merge", str(failed), "--to", str(to), "--unqualified"]) == 0
    with safe_open(to, framework="pt") as stored:
        assert parse_json(stored.metadata()["card"])["statement"].startswith("UNQUALIFIED")


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_nothing_is_overwritten(kind: str, passed: Path, tmp_path: Path) -> None:
    for name, act in (("a", export_adapter), ("b.safetensors", merge_adapter), ("c", merge_adapter)):
        to = tmp_path / name
        if kind == "file":
            to.write_text("mine")
        elif kind == "folder":
            to.mkdir()
        else:
            to.symlink_to(tmp_path / "nowhere")
        with pytest.raises(Refused, match="never overwritten"):
            act(passed, to)
        assert kind != "file" or to.read_text() == "mine"
        assert kind != "folder" or not list(to.iterdir())
    assert len(list(tmp_path.iterdir())) == 3


def test_not_into_the_evidence_nor_into_nothing(passed: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(passed)
    for to in (passed / "adapter", passed / "full" / "adapter", tmp_path / "link" / "adapter"):
        with pytest.raises(Refused, match="does not lie among a run's evidence"):
            export_adapter(passed, to)
    with pytest.raises(Refused, match="is to hold the export is missing"):
        merge_adapter(passed, tmp_path / "no" / "folder")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    replace(path, bytes(data))


def replace(path: Path, data: bytes) -> None:
    os.chmod(path, 0o644)
    path.write_bytes(data)


def cut_ledger(run: Path, lines: int) -> None:
    path = run / "LEDGER.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:lines]))


def other_verdict(run: Path) -> None:
    value = read_json(run / "full" / "g2.json")
    replace(run / "full" / "g2.json", json.dumps(value | {"verdict": "FAIL"}).encode())


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda run: flip(run / "full" / "full-fast.pt"), "adapter is not the file"),
        (lambda run: flip(run / "full" / "g2.json"), "g2 is not the file"),
        (other_verdict, "g2 is not the file"),
        (lambda run: flip(run / "full" / "dev.json"), "dev is not the file"),
        (lambda run: flip(run / "admission" / "admitted.json"), "admission is not the file"),
        (lambda run: flip(run / "assembly" / "drafter.json"), "configuration is not the file"),
        (lambda run: flip(run / "finish" / "attempt-1" / "receipt.json"), "a receipt is not the file"),
        (lambda run: flip(run / "finish" / "attempt-1" / "receipt.ipynb"), "receipt's notebook is not the file"),
        (lambda run: flip(run / "train" / "attempt-1" / "receipt.json"), "a receipt is not the file"),
        (lambda run: (run / "finish" / "attempt-1" / "receipt.json").unlink(), "file is missing.*receipt.json"),
        (lambda run: (run / "full" / "full-fast.pt").unlink(), "file is missing.*full-fast"),
        (lambda run: cut_ledger(run, 1), "the run has no verdict"),
        (lambda run: (run / "LEDGER.jsonl").unlink(), "the run has no verdict"),
        (lambda run: flip(run / "LEDGER.jsonl"), "ledger"),
    ],
)
def test_changed_evidence_exports_nothing(
    spoil: Callable[[Path], object], message: str, passed: Path, tmp_path: Path
) -> None:
    run = tmp_path / "demo"
    shutil.copytree(passed, run)
    spoil(run)
    (tmp_path / "out").mkdir()
    for to, act in (("a", export_adapter), ("b", merge_adapter), ("c.safetensors", merge_adapter)):
        with pytest.raises(Refused, match=message):
            act(run, tmp_path / "out" / to, unqualified=True)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("plus", "forgery", "message"),
    [
        (LOSING, {"forged": {"verdict": "PASS"}, "verdict": "PASS"}, "does not follow from its parts"),
        (LOSING, {"verdict": "PASS"}, "receipt's verdict is not that of g2.json; expected: FAIL; found: PASS"),
        (GAINING, {"verdict": "FAIL"}, "receipt's verdict is not that of g2.json; expected: PASS; found: FAIL"),
        (GAINING, {"backend": "ref"}, "belongs to another run: backend differs"),
        (GAINING, {"recipe": RECIPES["ACE"].model_dump()}, r"belongs to another run: recipe\.\w+ differs"),
        (GAINING, {"native": "sha256:" + "e" * 64}, "belongs to another run: native differs"),
    ],
)
def test_a_forgery_whose_digests_all_agree_exports_nothing(
    plus: int, forgery: dict[str, Any], message: str, tmp_path: Path
) -> None:
    run = make_judged(tmp_path / "work" / "runs" / "demo", plus, **forgery)
    with pytest.raises(Refused, match=message):
        export_adapter(run, tmp_path / "adapter", unqualified=True)
    assert not (tmp_path / "adapter").exists()


def test_an_adapter_that_no_training_made_exports_nothing(passed: Path, tmp_path: Path) -> None:
    """A ledger without the training's receipt is a chain that still holds, begun at finish."""
    run = tmp_path / "demo"
    shutil.copytree(passed, run)
    (run / "LEDGER.jsonl").unlink()
    finish = read_receipt(run / "finish" / "attempt-1" / "receipt.json")
    (run / "LEDGER.jsonl").write_bytes(make_line(finish, 1, genesis("demo")))
    with pytest.raises(Refused, match=r"no training in the ledger made the adapter.*no receipt of train"):
        export_adapter(run, tmp_path / "adapter")


def test_merging_needs_the_judged_native_drafter(passed: Path, tmp_path: Path) -> None:
    run = tmp_path / "demo"
    shutil.copytree(passed, run)
    flip(run / "assembly" / "native.safetensors")
    with pytest.raises(Refused, match="native drafter is not the file"):
        merge_adapter(run, tmp_path / "merged.safetensors")
    assert not (tmp_path / "merged.safetensors").exists()


def test_a_full_disk_leaves_nothing(passed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, written = write.write_exclusive, []

    def fills(path: Path, data: bytes) -> Any:
        if len(written) == 2:
            raise OSError(28, "No space left on device")
        written.append(path.name)
        return real(path, data)

    for module in (write, files):
        monkeypatch.setattr(module, "write_exclusive", fills)
    for to in ("a", "b.safetensors"):
        with pytest.raises(Unexpected, match="No space left"):
            (export_adapter if to == "a" else merge_adapter)(passed, tmp_path / to)
    assert list(tmp_path.iterdir()) == []
