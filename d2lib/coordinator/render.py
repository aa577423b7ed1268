"""The dry render: every command that a full run would start, as text. Reads nothing, starts nothing."""

from __future__ import annotations

import shlex

from d2lib.coordinator.contract import JOBS, Plan, git_commands
from d2lib.coordinator.profile import ANY_HOST

_GIT = {
    "type": "--commit is a commit",
    "tree": "its files",
    "top": "--source is a checkout's top",
    "head": "and is at that commit",
    "status": "and clean",
    "archive": "into SNAPSHOT/repo, then every file against its blob",
}


def render(plan: Plan) -> str:
    """The whole procedure of one run in the coordinator's order."""
    profile, paths = plan.profile, plan.paths
    host = "any host" if profile.host == ANY_HOST else f"host {profile.host}"
    parameters = paths.output / "admission.yaml"
    lines = [
        f"# Dry render of {paths.namespace}: nothing was read, started or changed.",
        f"# Profile {plan.profile_name}. --execute: {host}, D2_COORDINATOR={profile.coordinator}, "
        f"assembly {profile.assembly or 'any'}.",
        "",
        "# --check-inputs: CPU admission in the foreground, CUDA_VISIBLE_DEVICES='' (parameters in a temporary file)",
        shlex.join(plan.foreground("admission", 1, parameters)),
        "",
        f"# --execute --phase stage: new snapshot {paths.snapshot}",
        shlex.join(plan.foreground("stage", 1, paths.output / "stage.yaml")),
        "# inside:",
    ]
    commands = git_commands(paths)
    lines += [f"{shlex.join(commands[name])}  # {text}" for name, text in _GIT.items()]
    for name, text in plan.parameter_files().items():
        lines += [f"# {paths.snapshot / name}", *(f"#   {line}" for line in text.splitlines())]
    for job, spec in JOBS.items():
        start = plan.start(job)
        solo, place = profile.solo_of(job)
        card = place.card or ""
        lines += [
            "",
            f"# --execute --phase {spec.phase} --job {job}: {solo}, {place.title}",
            shlex.join(start.tmux),
            f"# {start.script}, mode 0500:",
            *(f"#   {line}" for line in start.script_text.splitlines()),
            f"# inside: CUDA_VISIBLE_DEVICES={card or chr(39) * 2}, log {start.child_log}",
            f"# after an interruption: --resume --attempt 1 starts {plan.start(job, 1).session}",
        ]
    return "\n".join(lines) + "\n"
