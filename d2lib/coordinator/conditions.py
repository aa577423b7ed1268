"""What must hold on the host before a job starts and while it runs. Nothing here changes the host."""

from __future__ import annotations

from pathlib import Path

import psutil

from d2lib.coordinator import sessions
from d2lib.coordinator.cards import Cards, find_card
from d2lib.coordinator.children import ANSWER_SECONDS
from d2lib.coordinator.contract import JOBS
from d2lib.coordinator.profile import GIB, Profile, Solo
from d2lib.errors import Refused


def card_memory(job: str, assembly: Path) -> int:
    """Bytes of card memory that a job needs, computed from the assembly's drafter; 0 for one that uses no card."""
    from d2lib.train.memory import card_bytes  # torch, which no other part of a start needs

    notebooks: dict[str, str] = {name: spec.notebook for name, spec in JOBS.items()}
    if notebooks.get(job) == "train":
        return card_bytes(assembly, "train")
    return card_bytes(assembly, "g2") if notebooks.get(job) == "g2" else 0


def check_start(profile: Profile, solo: Solo, cards: Cards | None, needed: int = 0) -> str | None:
    """Everything that a start needs, but for the lock.

    Args:
        cards: needed when the solo is a card.
        needed: bytes of card memory.

    Returns: the card's whole UUID, or None for a CPU slot.
    Raises:
        Refused: names the condition that does not hold.
    """
    available = psutil.virtual_memory().available / GIB
    if available < profile.minimum_free_memory_gib:
        raise Refused(
            "too little free memory",
            expected=f"at least {profile.minimum_free_memory_gib:g} GiB available",
            found=f"{available:.1f} GiB",
        )
    uuid = None
    if solo.card is not None and cards is not None:
        uuid = find_card(cards, solo.card)
        others = cards.compute_processes(uuid)
        if others:
            raise Refused(
                "another process computes on the card",
                expected="none before a start",
                found=f"pid {', '.join(map(str, others))}",
                where=uuid,
                remedy="wait until it has ended; nothing here ends it",
            )
        free = cards.free_memory_bytes(uuid)
        if free < needed:
            raise Refused(
                "too little free card memory",
                expected=f"at least {needed / GIB:.1f} GiB, for this drafter's weights and activations",
                found=f"{free / GIB:.1f} GiB",
                where=uuid,
            )
    check_watched(profile, uuid, cards)
    return uuid


def check_watched(profile: Profile, uuid: str | None, cards: Cards | None) -> None:
    """What must stay true while a job runs: the power logger and the card's power limit; raises Refused."""
    patience = min(ANSWER_SECONDS, profile.answer_seconds)
    if profile.power_logger is not None and not sessions.exists(profile.power_logger, timeout=patience):
        raise Refused(
            "the power logger is not there",
            expected=f"a tmux session named {profile.power_logger}",
            found="none",
            remedy="start it; it is not part of this procedure",
        )
    if uuid is not None and cards is not None:
        found = cards.enforced_power_limit_watts(uuid)
        if found != profile.power_limit_watts:
            raise Refused(
                "the card's power limit is another one",
                expected=f"{profile.power_limit_watts:g} W enforced",
                found=f"{found:g} W",
                where=uuid,
                remedy="set it back; nothing here changes it",
            )
