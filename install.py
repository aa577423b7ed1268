"""Install the workbench and requirements.lock into a virtual environment: `python3 install.py .venv [PIP OPTIONS]`.

What cannot work is refused in one line before anything is downloaded. Without an NVIDIA driver torch's CPU build is
taken from its own index where that can be reached (a third of the size). Progress is one line; pip's whole text is in
VENV/install.log. Uses the standard library alone, since it runs before anything is installed.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import urllib.request

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
OLDEST, NEWEST = (3, 11), (3, 13)
PROBE_SECONDS = 5
_NAME = re.compile(r"^\s*(?:Collecting|Requirement already satisfied:|Processing) (?:.*/)?([A-Za-z0-9._-]+)")


def refusal(version, has_venv):
    """Why this Python cannot be used, in one line, or None.

    Args:
        version: its (major, minor).
        has_venv: whether it can make virtual environments with pip in them.
    """
    if not OLDEST <= version <= NEWEST:
        return (
            f"Python {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]} is needed, found {version[0]}.{version[1]}: "
            "make PYTHON=python3.12 ..."
        )
    if not has_venv:
        return "this Python makes no virtual environments: apt-get install python{}.{}-venv".format(*version)
    return None


def has_nvidia_driver():
    """Whether CUDA could be of use here."""
    return os.path.exists("/proc/driver/nvidia/version") or shutil.which("nvidia-smi") is not None


def reachable(url):
    """Whether an index answers within a few seconds."""
    try:
        with urllib.request.urlopen(url + "/torch/", timeout=PROBE_SECONDS) as answer:
            return answer.status == 200
    except (OSError, ValueError):
        return False


def torch_options(driver, answers, given):
    """(pip options that choose torch's build, what to say about it).

    Args:
        driver: whether there is an NVIDIA driver.
        answers: url → whether it can be reached; only called where that matters.
        given: the user's own pip options, which are never overruled.
    """
    if any("index" in option for option in given):
        return [], "torch as your pip options choose it"
    if driver:
        return [], "torch with CUDA (NVIDIA driver found; about 5.6 GB in all)"
    if answers(CPU_INDEX):
        return ["--extra-index-url", CPU_INDEX], "torch for CPU (no NVIDIA driver found; about 2 GB in all)"
    return (
        [],
        "torch as pip's own index has it (" + CPU_INDEX + " cannot be reached; about 2 GB for CPU, 5.6 GB with CUDA)",
    )


def complaint(lines):
    """What a person needs of pip's text when it failed: its errors, without the lists of versions in them."""
    errors = [line.strip() for line in lines if line.startswith("ERROR:") and "Ignored the following" not in line]
    return [re.sub(r" \(from versions: .*", "", error)[:300] for error in errors] or [
        line.strip() for line in lines[-3:]
    ]


def run_pip(python, options, log, total, say):
    """Run pip; returns its exit status. Every package that it comes to is shown by `say`."""
    command = [python, "-m", "pip", "--disable-pip-version-check", "install", *options]
    lines, seen = [], set()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True, errors="replace"
    ) as child:
        for line in child.stdout:
            log.write(line)
            lines.append(line)
            found = _NAME.match(line)
            if found:
                name = re.split(r"-\d", found.group(1))[0]  # a file's name goes on with its version
                seen.add(name.lower())
                say(f"{min(len(seen), total)} of {total} {name}")
            elif "Downloading" in line and "MB" in line:
                say(" ".join(line.split())[:100])
            elif line.startswith("Installing collected"):
                say("unpacking: a minute or two" if total > 1 else "the workbench itself")
    if child.returncode:
        say("")
        for line in complaint(lines):
            print(line, file=sys.stderr)
        print(f"pip failed; its whole text: {log.name}", file=sys.stderr)
    return child.returncode


def progress(stream):
    """A function that shows one changing line on a terminal, and a line every fifth time elsewhere."""
    count = 0

    def say(text):
        nonlocal count
        if stream.isatty():
            stream.write("\r\x1b[K" + text)
        elif text and (count % 5 == 0 or "Downloading" in text or "unpacking" in text):
            stream.write(text + "\n")
        count += 1
        stream.flush()

    return say


def main(arguments):
    """Returns 0, 2 for a Python that cannot be used, 4 when pip failed."""
    venv, given = arguments[0], arguments[1:]
    has_venv = bool(sysconfig.get_path("stdlib")) and os.path.isdir(
        os.path.join(sysconfig.get_path("stdlib"), "ensurepip")
    )
    why = refusal(sys.version_info[:2], has_venv)
    if why is not None:
        print(why, file=sys.stderr)
        return 2
    here = os.path.dirname(os.path.abspath(__file__))
    lock = os.path.join(here, "requirements.lock")
    with open(lock, encoding="utf-8") as stream:
        total = sum("==" in line for line in stream)
    options, word = torch_options(has_nvidia_driver(), reachable, given)
    print(f"installing into {venv}: {total} packages, {word}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    python, say = os.path.join(venv, "bin", "python"), progress(sys.stderr)
    with open(os.path.join(venv, "install.log"), "w", encoding="utf-8") as log:
        steps = ([*options, *given, "-r", lock], ["--no-deps", "--no-build-isolation", "-e", here])
        for step, count in zip(steps, (total, 1), strict=True):
            if run_pip(python, step, log, count, say):
                return 4
    say("")
    print(f"installed into {venv}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
