"""The `d2` command. Each subcommand is a few lines over a library function; exit statuses are those of every phase."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from d2lib import __version__
from d2lib.entry import run_command
from d2lib.errors import ExitStatus

Command = Callable[[argparse.Namespace], ExitStatus]

EXITS = """exit statuses:
  0  done, and PASS where it judges
  1  a verdict of FAIL or INCONCLUSIVE
  2  refused, or bad input
  3  interrupted; the same job can be resumed
  4  anything unexpected"""


def _run(options: argparse.Namespace) -> ExitStatus:
    from d2lib.chain import read_parameters, run_root
    from d2lib.evidence.run import run_phase

    parameters = read_parameters(options.file)
    runs, namespace = run_root(parameters, options.file)
    return run_phase(options.notebook, parameters, runs, namespace, job=options.job, attempt=options.attempt)


def _chain(options: argparse.Namespace) -> ExitStatus:
    from d2lib.chain import run_chain
    from d2lib.evidence.run import done_status, run_phase

    status = run_chain(options.profile, options.notebooks, run_phase, is_done=done_status)
    return ExitStatus.DONE if options.any_verdict and status is ExitStatus.VERDICT else status


def _verify(options: argparse.Namespace) -> ExitStatus:
    from d2lib.evidence.sign import read_policy
    from d2lib.evidence.verify import verify

    policy = None if options.policy is None else read_policy(options.policy)
    report = verify(options.path, progress=sys.stderr.isatty(), policy=policy)
    print(json.dumps(report.as_dict(), indent=1) if options.json else report.render_text())
    return ExitStatus.DONE if report.holds else ExitStatus.REFUSED


def _repair(options: argparse.Namespace) -> ExitStatus:
    from d2lib.evidence.repair import repair

    root = Path(os.path.abspath(options.path))
    found = repair(root, remove=not options.dry_run)
    for path in found:
        print(f"{'would be removed' if options.dry_run else 'removed'}: {path.relative_to(root)}")
    print(f"{len(found)} leftovers of writers that died")
    return ExitStatus.DONE


def _status(options: argparse.Namespace) -> ExitStatus:
    from d2lib.evidence.status import as_dicts, render_text, status

    rows = status(options.runs, params=options.params, notebooks=options.notebooks)
    print(json.dumps(as_dicts(rows), indent=1) if options.json else render_text(rows))
    return ExitStatus.DONE


def _keygen(options: argparse.Namespace) -> ExitStatus:
    from d2lib.evidence.sign import make_key

    key = make_key(options.private, options.public)
    print(f"key {key.keyid}\nprivate {options.private} (keep it outside of every run and repository)")
    print(f"public  {options.public} (a policy lists it)")
    return ExitStatus.DONE


def _sign(options: argparse.Namespace) -> ExitStatus:
    from d2lib.evidence.sign import sign_receipt

    print(sign_receipt(options.attempt, options.key))
    return ExitStatus.DONE


def _drill(options: argparse.Namespace) -> ExitStatus:
    from d2lib.coordinator.drill import drill

    return drill(options.run)


def _cost_sheet(options: argparse.Namespace) -> ExitStatus:
    from d2lib.cost import cost_sheet, load_inputs, render_text

    sheet = cost_sheet(load_inputs(options.file))
    print(json.dumps(sheet.as_dict(), indent=1) if options.json else render_text(sheet))
    return ExitStatus.DONE


def _site(options: argparse.Namespace) -> ExitStatus:
    from d2lib.evidence.site import build_site

    pages = build_site(options.runs, options.out)
    print(f"{len(pages)} pages; open {options.out / 'index.html'}")
    return ExitStatus.DONE


def _weights_inspect(options: argparse.Namespace) -> ExitStatus:
    from d2lib.drafter.weights_card import inspect_weights, render_card

    card = inspect_weights(options.path, form=options.form, config=options.config, target=options.target)
    print(json.dumps(card.as_dict(), indent=1) if options.json else render_card(card))
    return ExitStatus.DONE if card.holds else ExitStatus.REFUSED


def _adapter_export(options: argparse.Namespace) -> ExitStatus:
    from d2lib.export.card import statement
    from d2lib.export.write import export_adapter

    print(f"{options.to}: {statement(export_adapter(options.run, options.to, unqualified=options.unqualified))}")
    return ExitStatus.DONE


def _adapter_merge(options: argparse.Namespace) -> ExitStatus:
    from d2lib.export.card import statement
    from d2lib.export.write import merge_adapter

    print(f"{options.to}: {statement(merge_adapter(options.run, options.to, unqualified=options.unqualified))}")
    return ExitStatus.DONE


def _full(options: argparse.Namespace) -> ExitStatus:
    from d2lib.full_stage import main as full_stage

    return ExitStatus(full_stage(options.arguments))


def parser() -> argparse.ArgumentParser:
    """The command line; every subcommand is listed here and nowhere else."""
    top = argparse.ArgumentParser(
        prog="d2",
        description="Adapt a speculative-decoding drafter to your own traffic, and decide by evidence whether it is "
        "better.",
        epilog=EXITS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"d2 {__version__}")
    commands = top.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, run: Command, text: str, under: Any = commands, **extra: Any) -> argparse.ArgumentParser:
        command: argparse.ArgumentParser = under.add_parser(
            name,
            help=text,
            description=text,
            epilog=EXITS,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            **extra,
        )
        command.set_defaults(command=run)
        return command

    chain = add("chain", _chain, "run a profile's phases in order, going on where an earlier run stopped")
    chain.add_argument("profile", type=Path, help="folder with one YAML of parameters per phase, e.g. params/demo")
    chain.add_argument("--notebooks", type=Path, default=Path("notebooks"), help="where the phase notebooks are")
    chain.add_argument(
        "--any-verdict", action="store_true", help="exit with 0 on a verdict of FAIL or INCONCLUSIVE too"
    )

    run = add("run", _run, "run one phase's notebook into its next receipt (short for papermill --engine d2)")
    run.add_argument("notebook", type=Path)
    run.add_argument("-f", "--file", type=Path, required=True, help="YAML of parameters; `run:` names the run root")
    run.add_argument("--job", help="the job's name, where a phase has several (g2: dev, legal, general)")
    run.add_argument("--attempt", type=int, help="the attempt's number (default: the next one)")

    verify = add("verify", _verify, "re-hash everything in a run and walk its ledger; says what is broken")
    verify.add_argument("path", type=Path, help="a run root, e.g. runs/demo")
    verify.add_argument("--json", action="store_true", help="print data instead of a table")

    verify.add_argument("--policy", type=Path, help="YAML: which phases must be signed, and by whose keys")

    text = "remove what writers that died left beside what they had published; touches nothing final or running"
    repair = add("repair", _repair, text)
    repair.add_argument("path", type=Path, help="a run root, e.g. runs/demo")
    repair.add_argument("--dry-run", action="store_true", help="only say what would be removed")

    status = add(
        "status", _status, "what ran, what runs, what may come next with its command, and why the rest may not"
    )
    status.add_argument("runs", type=Path, nargs="?", default=Path("runs"), help="a folder of runs, or one run")
    status.add_argument("--params", type=Path, default=Path("params"), help="folder of profiles")
    status.add_argument("--notebooks", type=Path, default=Path("notebooks"), help="where the phase notebooks are")
    status.add_argument("--json", action="store_true", help="print data instead of text")

    cost = add("cost-sheet", _cost_sheet, "print the cost and scope sheet")
    cost.add_argument("-f", "--file", type=Path, required=True, help="e.g. params/dsv41/cost_sheet.yaml")
    cost.add_argument("--json", action="store_true", help="print data instead of a table")

    site = add("site", _site, "render every receipt to self-contained HTML with an index")
    site.add_argument("runs", type=Path, help="a folder of runs, or one run")
    site.add_argument("--out", type=Path, required=True, help="a new folder for the pages")

    keygen = add("keygen", _keygen, "make an Ed25519 key pair to sign receipts with")
    keygen.add_argument("private", type=Path, help="new file for the private key (PEM, mode 0600)")
    keygen.add_argument("public", type=Path, help="new file for the public key (JSON)")

    sign = add("sign", _sign, "sign a receipt: a DSSE envelope over an in-toto statement, beside it")
    sign.add_argument("attempt", type=Path, help="the receipt's folder, e.g. runs/demo/finish/attempt-1")
    sign.add_argument("--key", type=Path, required=True, action="append", help="private key; once per signer")

    drill = add("drill", _drill, "rehearse the coordinator's procedure on CPU, with interruptions, kills and damage")
    drill.add_argument(
        "run", type=Path, help="a run whose chain has passed its pilot, e.g. runs/demo; it is not touched"
    )

    weights = commands.add_parser("weights", help="look at a drafter's weights")
    parts = weights.add_subparsers(metavar="ACTION", required=True)
    text = "print the data card of a released drafter or of one safetensors file of ours; reads headers only"
    inspect = add("inspect", _weights_inspect, text, parts)
    inspect.add_argument("path", type=Path, help="a folder with config.json and weights, or a .safetensors file")
    inspect.add_argument("--form", choices=["deepseek_v41", "deepseek_v4"], help="default: config.json's model_type")
    inspect.add_argument(
        "--config", type=Path, help="config.json or drafter.json (default: the one beside the weights)"
    )
    inspect.add_argument("--target", type=Path, help="the target's folder, to compare a dense drafter with")
    inspect.add_argument("--json", action="store_true", help="print data instead of text")

    adapter = commands.add_parser("adapter", help="take a run's judged adapter to other stacks")
    actions = adapter.add_subparsers(metavar="ACTION", required=True)
    text = "write the adapter that G2 judged as a PEFT folder, with a card that says the verdict first"
    export = add("export", _adapter_export, text, actions)
    text = "write the adapted projections, merged in fp32 under the release's names, with the same card"
    merge = add("merge", _adapter_merge, text, actions)
    export.add_argument("--to", type=Path, required=True, help="a new folder")
    merge.add_argument("--to", type=Path, required=True, help="a new folder, or a new file named *.safetensors")
    for action in (export, merge):
        action.add_argument("run", type=Path, help="a run root, e.g. runs/demo")
        action.add_argument("--unqualified", action="store_true", help="take one without a PASS; the card says so")

    full = add("full", _full, "the coordinator's procedure (same as python -m d2lib.full_stage)", add_help=False)
    full.add_argument("arguments", nargs=argparse.REMAINDER)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; errors become one clear line and an exit status, never a traceback for a user's mistake."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] == ["full"]:  # its flags are its own, so argparse must not see them
        options = argparse.Namespace(command=_full, arguments=arguments[1:])
    else:
        options = parser().parse_args(arguments)
    return run_command("d2", lambda: int(options.command(options)))


if __name__ == "__main__":
    raise SystemExit(main())
