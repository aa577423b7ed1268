"""What a phase runs in: the environment that children get, and the record of what was installed."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import site
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import d2lib
from d2lib.files import FileRecord, Hashed, digest_tree, record_file

NUMERIC = frozenset(
    {
        "CUBLAS_WORKSPACE_CONFIG",
        "CUDA_DEVICE_ORDER",
        "CUDA_VISIBLE_DEVICES",
        "MKL_NUM_THREADS",
        "NUMEXPR_NUM_THREADS",
        "OMP_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "PYTHONHASHSEED",
        "PYTHONPATH",
    }
)
"""Variables that can change a result; children get them and the record shows them."""

WAITING = {"OMP_WAIT_POLICY": "PASSIVE"}
"""How idle threads of a child wait unless its user says otherwise: asleep, before OpenMP starts. By default they spin,
and beside another busy process each spin takes a scheduler's time slice from those that work. No result changes."""

COORDINATOR = "D2_COORDINATOR"
"""Who executes. A stage's kernel gets it, because it checks it too; no other child does."""

ALLOWED = (
    NUMERIC
    | WAITING.keys()
    | {
        "CONDA_PREFIX",
        "HOME",
        "LANG",
        "LANGUAGE",
        "LD_LIBRARY_PATH",
        "LOGNAME",
        "MPLCONFIGDIR",
        "PATH",
        "PYTHONDONTWRITEBYTECODE",
        "SHELL",
        "TERM",
        "TMPDIR",
        "TZ",
        "USER",
        "VIRTUAL_ENV",
        "XDG_CACHE_HOME",
        "XDG_RUNTIME_DIR",
    }
)
"""Everything that a child may inherit, with the LC_* family; the rest stays behind."""


def child_environment(
    extra: Mapping[str, str] | None = None, *, source: Mapping[str, str] | None = None
) -> dict[str, str]:
    """A new environment for a kernel or another child: the allowlist, `WAITING`, and nothing else.

    Args:
        extra: variables to add.
        source: what to filter; by default this process's environment.
    """
    source = os.environ if source is None else source
    kept = {name: value for name, value in source.items() if name in ALLOWED or name.startswith("LC_")}
    return WAITING | kept | dict(extra or {})


def who_executes(phase: str) -> dict[str, str]:
    """`COORDINATOR` as this process has it, for a stage's child; nothing for another phase's."""
    return {COORDINATOR: os.environ[COORDINATOR]} if phase == "stage" and COORDINATOR in os.environ else {}


def library_folder() -> Path:
    """The folder of the d2lib that is running."""
    return Path(os.path.realpath(d2lib.__file__)).parent


def library_path(current: str | None) -> str | None:
    """PYTHONPATH under which a child imports this very d2lib, or None when it does so anyway."""
    parent = str(library_folder().parent)
    installed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), site.getusersitepackages()}
    if parent in installed or parent in (current or "").split(os.pathsep):
        return current
    return parent if not current else os.pathsep.join((parent, current))


def library_sha256() -> Hashed:
    """Digest of every file of the running d2lib, but for byte code and editors' leftovers.

    Installers may hard-link a library's files, so that links are no error here; the bytes are what counts.
    """
    root, records = library_folder(), dict[str, FileRecord]()
    for folder, names, files in os.walk(root):
        names[:] = sorted(name for name in names if name not in {"__pycache__", ".ipynb_checkpoints"})
        for name in sorted(files):
            if not name.endswith((".pyc", ".pyo", ".swp", "~")) and not name.startswith("."):
                path = Path(folder, name)
                records[path.relative_to(root).as_posix()] = record_file(path)
    return digest_tree(records)


def describe_environment() -> dict[str, Any]:
    """Interpreter, platform, the variables that can change a result, and every installed distribution."""
    distributions: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if name:  # a damaged installation may leave a folder without a name; the first on the path is imported
            distributions.setdefault(re.sub(r"[-_.]+", "-", name).lower(), distribution.version)
    libc = " ".join(platform.libc_ver()).strip()
    return {
        "python": platform.python_version(),
        "implementation": sys.implementation.name,
        "system": platform.system(),
        "release": platform.release(),
        "machine": platform.machine(),
        "libc": libc,
        "variables": {name: os.environ[name] for name in sorted(NUMERIC) if name in os.environ},
        "distributions": dict(sorted(distributions.items())),
    }
