"""The command contract: the dry render touches nothing, names are exact, no flag can change the recipe."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from coordinator_case import LIBRARY, PROFILE
from hypothesis import given
from hypothesis import strategies as st

from d2lib.coordinator.command import main, parser, plan_of, resume_number
from d2lib.coordinator.contract import JOBS, Plan, job_parameters, parameters_text
from d2lib.coordinator.profile import Profile, load_profile
from d2lib.errors import Refused
from d2lib.evidence.phase import validate_parameters
from d2lib.params import SCHEMAS
from d2lib.strict import parse_yaml

ROOT = LIBRARY.parent
COMMIT = "0123456789abcdef" * 2 + "01234567"
FLAGS = {
    "source": "/nowhere/checkout",
    "commit": COMMIT,
    "snapshot": "/nowhere/full/decode-p2-ace-full",
    "output": "/nowhere/data/decode-p2-ace-full",
    "assembly": "/opt/dsv41/x86host-data/d2/decode-d2pass2-r1-c2",
    "pilot-source": "/nowhere/pilot/decode-p2-ace/repo",
    "pilot-receipt": "/nowhere/pilot/decode-p2-ace/receipt.json",
    "g1": "/nowhere/g1/dev.json",
    "k2-dev": "/nowhere/g1/dev.k2_drafts.jsonl",
    "k2-legal": "/nowhere/g1/heldout_legal.k2_drafts.jsonl",
    "k2-general": "/nowhere/g1/heldout_general.k2_drafts.jsonl",
}


def flags(*more: str, **changed: str) -> list[str]:
    values = FLAGS | {name.replace("_", "-"): value for name, value in changed.items()}
    return [part for name, value in values.items() for part in (f"--{name}", value)] + list(more)


def plan(**changed: str) -> Plan:
    return plan_of(parser().parse_args(flags(**changed)))


DEMO = str(ROOT / "params" / "demo" / "coordinator.yaml")
GUARD = """
import sys
class Forbidden:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in {'torch', 'subprocess', 'psutil', 'pynvml', 'ctypes', 'papermill'}:
            raise ImportError(f'the dry render imported {name}')
sys.meta_path.insert(0, Forbidden())
opened = []
def audit(event, arguments):
    if event in {'subprocess.Popen', 'os.system', 'os.exec', 'os.posix_spawn', 'os.fork', 'socket.connect'}:
        raise RuntimeError(event)
    if event == 'open' and '/nowhere' in str(arguments[0]):
        raise RuntimeError(f'opened {arguments[0]}')
sys.addaudithook(audit)
from d2lib.full_stage import main
raise SystemExit(main(sys.argv[1:]))
"""


def test_dry_render_reads_nothing_and_starts_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", GUARD, *flags()],
        env={"PATH": "", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []
    for job in JOBS:
        assert f"tmux new-session -d -s d2full-decode-p2-ace-full-{job} " in done.stdout
    assert "CUDA_VISIBLE_DEVICES=GPU-240876ad" in done.stdout
    assert f"archive --format=tar {COMMIT}" in done.stdout
    assert done.stdout.count("-m papermill --engine d2") == 2 + len(JOBS)


def test_the_guard_of_the_dry_render_bites(tmp_path: Path) -> None:
    """With an action the same guard stops the command, so it would also have stopped the render."""
    done = subprocess.run(
        [sys.executable, "-c", GUARD, *flags("--check-inputs", source=str(ROOT))],
        env={"PATH": "", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 4
    assert "the dry render imported" in done.stderr


def test_production_profile_is_the_source_documents() -> None:
    profile = load_profile(ROOT / "params" / "dsv41" / "coordinator.yaml")
    cards = {job: profile.solo_of(job)[1].card for job in JOBS}
    assert cards == {
        "full-fast": "GPU-240876ad",
        "g2-dev": "GPU-240876ad",
        "g2-legal": "GPU-bc62df2a",
        "g2-general": "GPU-bc62df2a",
        "g2-finish": None,
    }
    assert (profile.host, profile.coordinator) == ("x86host", "Deepseek/coordinator")
    assert (profile.power_limit_watts, profile.power_logger) == (225.0, "dsv41-powerlog")
    assert (profile.memory_limit_gib, profile.save_every, profile.session_prefix) == (128.0, 300.0, "d2full")
    assert profile.assembly == "/opt/dsv41/x86host-data/d2/decode-d2pass2-r1-c2"


def test_every_profile_loads() -> None:
    found = sorted((ROOT / "params").glob("*/coordinator.yaml"))
    assert {path.parent.name for path in found} >= {"demo", "dsv41"}
    for path in found:
        assert set(load_profile(path).jobs) == set(JOBS)


def test_no_recipe_option_exists() -> None:
    """Neither flags, nor the profile, nor a rendered parameter may name anything that a recipe holds."""
    recipe = {"objective", "recipe", "lr", "learning", "rate", "rank", "seed", "epochs", "batch", "decay", "clip"}
    recipe |= {"schedule", "warmup", "alpha", "betas", "chunk", "updates", "sample", "size", "resamples", "threshold"}
    options = {word for action in parser()._actions for name in action.option_strings for word in name.split("-")}
    fields = {word for name in Profile.model_fields for word in name.split("_")} - {"sample"}  # sample_seconds
    assert not recipe & (options | fields)
    for job in JOBS:
        for resume in (False, True):
            assert not recipe & {
                word for name in job_parameters(plan(), job, resume=resume) for word in name.split("_")
            }


def test_flags_are_not_abbreviated(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags("--exec", "--phase", "stage")) == 2
    assert "unrecognized arguments: --exec" in capsys.readouterr().err


@pytest.mark.parametrize("job", ["admission", *JOBS])
def test_rendered_parameters_fit_the_phases_schema(job: str) -> None:
    values = job_parameters(plan(), job, resume=True)  # type: ignore[arg-type]
    if job != "g2-finish":
        assert values["k2"] == {
            split: f"/nowhere/g1/{split}.k2_drafts.jsonl" for split in ("dev", "heldout_legal", "heldout_general")
        }
    phase = "admission" if job == "admission" else JOBS[job].notebook  # type: ignore[index]
    validate_parameters(SCHEMAS[phase], values)


def test_trajectories_are_named_for_every_split_or_for_none() -> None:
    values = job_parameters(plan(), "g2-dev")
    del values["k2"]["heldout_general"]
    with pytest.raises(Refused, match="the parameter k2 is wrong") as refused:
        validate_parameters(SCHEMAS["g2"], values)
    assert "heldout_general" in str(refused.value)


def test_names_of_the_first_start_and_of_a_resumption() -> None:
    first, again = plan().start("full-fast"), plan().start("full-fast", 2, 3)
    assert first.session == "d2full-decode-p2-ace-full-full-fast"
    assert first.script == Path("/nowhere/full/decode-p2-ace-full/d2full-decode-p2-ace-full-full-fast.sh")
    assert first.coordinator_log.name == "d2full-decode-p2-ace-full-full-fast.coordinator.log"
    assert first.child_log == Path("/nowhere/full/decode-p2-ace-full/logs/full-fast.log")
    assert first.receipt == Path("/nowhere/data/decode-p2-ace-full/train-full-fast/attempt-1/receipt.ipynb")
    assert again.session == "d2full-decode-p2-ace-full-full-fast-attempt-2"
    assert again.receipt.parent.name == "attempt-3"
    assert yaml.safe_load(plan().parameter_files()["parameters/full-fast.resume.yaml"])["resume"] is True
    assert yaml.safe_load(plan().parameter_files()["parameters/full-fast.yaml"])["resume"] is False


def test_script_quotes_what_a_shell_would_read() -> None:
    folder = "/nowhere/a b; $(touch x) 'q'/decode-p2-ace-full"
    text = plan(snapshot=folder).start("g2-dev").script_text
    assert "$(touch x)" in text
    done = subprocess.run(["/bin/sh", "-n"], input=text, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    words = subprocess.run(
        ["/bin/sh", "-c", text.splitlines()[-1].replace("exec ", "printf '%s\\n' ")], text=True, capture_output=True
    ).stdout.splitlines()
    assert tuple(words) == plan(snapshot=folder).start("g2-dev").runner


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"commit": "HEAD"}, "--commit is not a full commit id"),
        ({"commit": COMMIT[:12]}, "--commit is not a full commit id"),
        ({"commit": COMMIT.upper()}, "--commit is not a full commit id"),
        ({"snapshot": "/nowhere/full/other-full"}, "not named after the pilot"),
        ({"snapshot": "/a/ns", "output": "/b/ns"}, "not named after the pilot"),
        ({"snapshot": "/a/-full", "output": "/b/-full"}, "not named after the pilot"),
        ({"snapshot": "/a/n.s-full", "output": "/b/n.s-full"}, "tmux would change"),
        ({"snapshot": "/a/n:s-full", "output": "/b/n:s-full"}, "tmux would change"),
        ({"output": FLAGS["snapshot"]}, "--snapshot lies in --output"),
        ({"output": FLAGS["snapshot"] + "/decode-p2-ace-full"}, "--output lies in --snapshot"),
        ({"snapshot": FLAGS["assembly"] + "/decode-p2-ace-full"}, "--snapshot lies in --assembly"),
        ({"output": FLAGS["pilot-source"] + "/decode-p2-ace-full"}, "--output lies in --pilot-source"),
        ({"pilot_receipt": "/nowhere/pilot/x.json"}, "--pilot-receipt is no receipt"),
        ({"assembly": "/a\nb"}, "--assembly has a control character"),
    ],
)
def test_flags_that_do_not_go_together_refuse(
    changed: dict[str, str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags(**changed)) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--execute",), "--execute needs --phase"),
        (("--phase", "stage"), "--phase needs --execute"),
        (("--check-inputs", "--job", "g2-dev"), "--job needs --execute"),
        (("--execute", "--phase", "stage", "--job", "g2-dev"), "stage has no job"),
        (("--execute", "--phase", "full-train"), "--phase full-train needs its --job"),
        (("--execute", "--phase", "full-g2", "--job", "full-fast"), "--phase full-g2 needs its --job"),
        (("--execute", "--phase", "full-train", "--job", "full-fast", "--resume"), "go together"),
        (("--execute", "--phase", "full-train", "--job", "full-fast", "--attempt", "1"), "go together"),
        (("--execute", "--phase", "full-train", "--job", "full-fast", "--resume", "--attempt", "0"), "go together"),
        (("--profile", "/nowhere/else.yaml"), "the profile is not part of the source"),
        (("--execute", "--phase", "stage", "--profile", DEMO), "--profile does not go with --execute"),
        (
            ("--execute", "--phase", "full-train", "--job", "full-fast", "--profile", DEMO),
            "--profile does not go with --execute",
        ),
    ],
)
def test_actions_that_are_not_whole_refuse(
    more: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags(*more)) == 2
    assert message in capsys.readouterr().err


def test_missing_flag_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags()[2:]) == 2
    assert main(["--help"]) == 0
    capsys.readouterr()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"unknown": 1}, r"the profile is wrong.*yaml: unknown$"),
        ({"jobs": {**PROFILE["jobs"], "g2-dev": "slot-z"}}, "unknown solos: slot-z"),
        ({"jobs": {"g2-dev": "slot-a"}}, "jobs without a solo"),
        ({"solos": {"slot-a": {"card": "0"}, "slot-b": {}}}, r"the profile is wrong.*: solos\.slot-a\.card$"),
        ({"solos": {"slot-a": {"card": "GPU-240876ad"}, "slot-b": {}}}, "power_limit_watts is missing"),
        ({"solos": {"slot-a": {"card": "GPU-240876ad", "cpus": [0]}, "slot-b": {}}}, "a card and a CPU slot"),
        ({"solos": {"../a": {}, "slot-a": {}, "slot-b": {}}}, "letters, digits and dashes"),
        ({"solos": {"slot-a": {"further_locks": ["pilot.lock"]}, "slot-b": {}}}, "absolute path, found .pilot.lock"),
        ({"memory_limit_gib": "much"}, r"the profile is wrong.*: memory_limit_gib$"),
        ({"grace_seconds": float("nan")}, r"a YAML number is not finite.*\.nan.*line \d+$"),
    ],
)
def test_profiles_that_are_wrong_refuse(changed: dict[str, object], message: str, tmp_path: Path) -> None:
    path = tmp_path / "coordinator.yaml"
    path.write_text(yaml.safe_dump(PROFILE | changed))
    with pytest.raises(Refused, match=message):
        load_profile(path)


@pytest.mark.parametrize("text", ["[", "- a\n", ""])
def test_profiles_that_are_none_refuse(text: str, tmp_path: Path) -> None:
    path = tmp_path / "coordinator.yaml"
    path.write_text(text)
    with pytest.raises(Refused):
        load_profile(path)
    with pytest.raises(Refused, match="cannot be read"):
        load_profile(tmp_path / "absent.yaml")


def test_the_contract_is_the_same_every_time_and_follows_every_flag() -> None:
    assert plan().contract() == plan().contract()
    for name, value in FLAGS.items():
        if name not in ("commit", "snapshot", "output"):
            assert plan(**{name.replace("-", "_"): value.replace("/", "/x", 1)}).contract() != plan().contract()


def test_default_profile_is_the_production_hosts() -> None:
    assert plan().profile_name == "params/dsv41/coordinator.yaml"


def test_the_coordinator_knows_no_arithmetic() -> None:
    """Importing all of it brings in neither torch nor a room that knows it."""
    code = (
        "import importlib, pkgutil, sys, d2lib.coordinator as c, d2lib.full_stage\n"
        "for found in pkgutil.iter_modules(c.__path__): importlib.import_module(f'd2lib.coordinator.{found.name}')\n"
        "rooms = ('torch', 'papermill', *(f'd2lib.{n}' for n in 'drafter data train gates admission lab'.split()))\n"
        "print([name for name in sys.modules if name.startswith(rooms)])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_the_run_pages_commands_are_commands() -> None:
    """Every line of the production's page that types `full`: its flags parse and go together, in the jobs' order."""
    page = (ROOT / "params" / "dsv41" / "README.md").read_text()
    given = shlex.split(page.split("full_args=(\n")[1].split(")\n")[0].replace("$PWD", str(ROOT)))
    given[given.index("--commit") + 1] = COMMIT
    typed = [shlex.split(line, comments=True)[1:] for line in page.splitlines() if re.match(r"full( |$)", line)]
    started = []
    for words in typed:
        options = parser().parse_args([*given, *words])
        number = resume_number(options)
        plan = plan_of(options)
        assert plan.profile.host == "x86host"
        assert str(plan.paths.assembly) == plan.profile.assembly
        if options.execute and not options.stop and number == 0:
            started.append(options.job or options.phase)
    assert started == ["stage", *JOBS]
    assert any(words[1:2] == ["--stop"] for words in typed)
    assert any("--resume" in words for words in typed)


@given(
    st.dictionaries(
        st.text("abc_", min_size=1),
        st.recursive(
            st.none()
            | st.booleans()
            | st.integers(-(2**53), 2**53)
            | st.floats(allow_nan=False, allow_infinity=False)
            | st.sampled_from(["1e-3", "7e1234567", "007", "no", "on", "0x1f", "~", "12:30", "2026-01-01", "", " "])
            | st.text("0123456789e+-.:_ \n\u00e9#", max_size=12),
            lambda inner: st.lists(inner, max_size=3),
            max_leaves=4,
        ),
    )
)
def test_a_parameter_file_is_read_as_it_was_meant(parameters: dict[str, Any]) -> None:
    text = parameters_text(parameters)
    assert parse_yaml(text) == parameters
    assert (yaml.safe_load(text) or {}) == parameters  # as papermill reads it
