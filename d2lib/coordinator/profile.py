"""The coordinator's profile: which host, which cards, which limits. No recipe can stand in it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from d2lib.files import Record
from d2lib.params import RESCORED_ROUNDS, PilotDemands
from d2lib.strict import read_yaml

Job = Literal["full-fast", "g2-dev", "g2-legal", "g2-general", "g2-finish"]
ANY_HOST = "localhost"
"""The host name that a profile gives when it may run on any machine."""
GIB = 1 << 30
MIB = 1 << 20


class Solo(Record):
    """One place where one job runs at a time: a GPU by its UUID, or a CPU slot where there is no card."""

    card: str | None = Field(default=None, pattern=r"^GPU-[0-9a-f]{8}[0-9a-f-]*$")
    """The card's UUID as NVML prints it, or a beginning of it that names one card. Never an index."""
    cpus: tuple[int, ...] | None = Field(default=None, min_length=1, strict=False)
    """The CPUs that the job may use; without it, all of them."""
    further_locks: tuple[str, ...] = Field(default=(), strict=False)
    """Lock files of other tools that use the same place, absolute (or from `~`): held (flock) beside our own lock."""

    @property
    def title(self) -> str:
        """What the solo is, for people."""
        if self.card is not None:
            return f"card {self.card}"
        return "CPU slot" if self.cpus is None else f"CPU slot on CPUs {', '.join(map(str, self.cpus))}"


class AdmissionProfile(Record):
    """What admission compares the pilot with, and how much it computes again (see d2lib.params.AdmissionParams)."""

    demands: PilotDemands
    rescored_rounds: int = Field(default=RESCORED_ROUNDS, ge=1)
    parity_rounds: int = Field(default=100, ge=1)
    replayed_sequences: int = Field(default=3, ge=0)


class Profile(Record):
    """What the coordinator's command must know about its host; one YAML file, every key known."""

    host: str = Field(min_length=1)
    """The host's name; `localhost` means any machine."""
    coordinator: str = Field(min_length=1)
    """What D2_COORDINATOR must be for --execute."""
    assembly: str | None
    """The one path that --assembly must be for --execute; null means any."""
    session_prefix: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")
    lock_folder: str = Field(min_length=1)
    """Private folder with one lock file a solo; `~` is the home folder. Every run on a host must name the same one."""
    solos: dict[str, Solo] = Field(min_length=1)
    jobs: dict[Job, str]
    """Job → the solo that it runs on; every job stands here."""
    power_limit_watts: float | None = Field(default=None, gt=0)
    """The enforced power limit that every card must have, before and during a job; nothing here sets it."""
    power_logger: str | None = None
    """The tmux session that must be there, before and during a job."""
    memory_limit_gib: float = Field(gt=0)
    """Most resident memory of a job's whole process tree."""
    minimum_free_memory_gib: float = Field(ge=0)
    """Available host memory without which no job starts."""
    grace_seconds: float = Field(gt=0)
    """From the request to stop to SIGKILL: what a job needs to reach a boundary and save it."""
    sample_seconds: float = Field(default=0.5, gt=0)
    """Between two looks at the job's memory."""
    watch_seconds: float = Field(default=5.0, gt=0)
    """Between two looks at the power limit and the power logger."""
    answer_seconds: float = Field(default=60.0, gt=0)
    """How long a running job goes on while tmux or the driver gives no answer to such a look."""
    swap_allowance_mib: float = Field(default=64.0, ge=0)
    """What a job's computing processes may have in swap where no control group forbids it."""
    swap_samples: int = Field(default=5, ge=1)
    """Looks in a row, sample_seconds apart, that must find more in swap before the job is stopped."""
    confirm_seconds: float = Field(default=60.0, gt=0)
    """How long a start may take to be confirmed by the locked runner."""
    save_every: float = Field(default=300.0, gt=0)
    """Seconds between the training's checkpoints."""
    threads: int = Field(default=2, ge=1)
    """CPU threads of a job's arithmetic."""
    admission: AdmissionProfile
    pins: str | None = None
    """What is known of the inputs from outside of them: a YAML file of the source (see d2lib.train.pins)."""
    policy: str | None = None
    """Whose signatures the receipts need, every phase's: a YAML file of the source (see d2lib.evidence.sign)."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        missing = set(Job.__args__) - self.jobs.keys()  # type: ignore[attr-defined]
        if missing:
            raise ValueError(f"jobs without a solo: {', '.join(sorted(missing))}")
        unknown = set(self.jobs.values()) - self.solos.keys()
        if unknown:
            raise ValueError(f"unknown solos: {', '.join(sorted(unknown))}")
        for name, solo in self.solos.items():
            if not name.replace("-", "").isalnum():
                raise ValueError(f"a solo's name has letters, digits and dashes, found {name!r}")
            for path in solo.further_locks:
                if not os.path.isabs(os.path.expanduser(path)):
                    raise ValueError(f"a further lock of solo {name} is an absolute path, found {path!r}")
            if solo.card is not None and solo.cpus is not None:
                raise ValueError(f"solo {name} is a card and a CPU slot")
            if solo.card is not None and self.power_limit_watts is None:
                raise ValueError(f"solo {name} is a card, and power_limit_watts is missing")
        return self

    @property
    def locks(self) -> Path:
        """The folder of the locks, absolute."""
        return Path(os.path.abspath(os.path.expanduser(self.lock_folder)))

    def solo_of(self, job: Job) -> tuple[str, Solo]:
        """(name, solo) that a job runs on."""
        return self.jobs[job], self.solos[self.jobs[job]]


def load_profile(path: Path) -> Profile:
    """A profile from its YAML file.

    Raises:
        Refused: it cannot be read, a key is unknown or missing, or a value is of another kind.
    """
    return Profile.parse(read_yaml(path, what="the profile"), path, message="the profile is wrong")
