"""Scoring: what drafters get accepted, and how far they are from the teacher, on the same rounds.

A round is scored from one teacher-forced pass per drafter. That is enough for the accepted length too: while the
drafts so far equal the committed tokens, the previous token that drafting feeds back *is* the committed one, so the
logits of the next slot are the teacher-forced logits. The accepted length is therefore the number of leading slots
whose teacher-forced argmax is the committed token, and what later slots would have drafted does not matter.

Arithmetic is REF's. Rounds go together through batched REF, which has the same bits; a scorer proves that at its start
on rounds of the data at hand, and again on the first rounds of every width of context that these did not have. It goes
one by one where it does not hold.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from d2lib.drafter.batch import BlockBatch
from d2lib.drafter.batched import BatchedReference, padded_widths, select_rounds, self_check
from d2lib.drafter.kernels import fold, one_thread
from d2lib.drafter.reference import Reference, teacher_logits
from d2lib.errors import Interrupted, Refused
from d2lib.gates.journal import Computation, Journal
from d2lib.gates.request import RequestScore

_BATCH = 256
_PROBES = 8
"""Rounds on which a width of context is proven."""
_BATCH_LOGITS = 1 << 22
"""Rounds go together up to the first number, fewer where their logits would exceed the second (32 MiB in float64)."""


class RoundSource(Protocol):
    """Where rounds come from (see d2lib.data.blocks.D2Blocks)."""

    def rounds_batch(self, sequence_id: str, anchors: Sequence[int]) -> BlockBatch:
        """The rounds at these anchors of a sequence, in this order."""
        ...


@dataclass
class ArmRounds:
    """One drafter on R rounds: accepted [R] draft tokens (bonus excluded), kl [R][K] nats, teacher-forced."""

    accepted: list[int] = field(default_factory=list)
    kl: list[list[float]] = field(default_factory=list)


def log_softmax(logits: Tensor) -> Tensor:
    """Log-probabilities in float64, [..., V] to [..., V], with sums in a fixed order so that no batch shows."""
    shifted = logits.double()
    shifted = shifted - shifted.amax(-1, keepdim=True)
    return shifted - fold(shifted.exp(), keepdim=True).log()


def measure(logits: Tensor, teacher: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Accepted length and divergence of B rounds.

    Args:
        logits: [B, K, V] of the drafter, teacher-forced.
        teacher: [B, K, V] log-probabilities p of the target.
        target: [B, K] int64 committed tokens.
    Returns: [B] int64 accepted draft tokens, the lowest index winning a tie; [B, K] float64 KL(p || q) in nats.
    """
    accepted = (logits.argmax(-1) == target).long().cumprod(-1).sum(-1)
    return accepted, fold(teacher.exp() * (teacher - log_softmax(logits)))


def describe_device(device: torch.device) -> str:
    """A device's kind and model: the card's name, or the processor's with the vector instructions that torch uses."""
    if device.type == "cuda":
        return f"cuda, {torch.cuda.get_device_name(device)}"
    return f"{device.type}, {_processor()}, {torch.backends.cpu.get_cpu_capability()}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


class Scorer:
    """Drafters of one target, scored side by side.

    Args:
        arms: name → drafter, all of the same target and block size, on the device that computes.
        probe: rounds of the kind that will be scored, for the check at the start.

    Attributes:
        batched: whether rounds go together.
    """

    def __init__(self, arms: Mapping[str, Reference], probe: BlockBatch) -> None:
        first = next(iter(arms.values()))
        self.head = first.head
        for name, arm in arms.items():
            if arm.config != first.config or not torch.equal(arm.head, self.head):
                raise Refused("drafters that are compared must share their target and configuration", found=name)
        self.block_size = first.config.block_size
        probe = probe.to(self.head.device)
        self._vocabulary = first.config.vocab_size
        self._one = dict(arms)
        self._many = {
            name: BatchedReference(arm.config, arm.weights, arm.adapter or None) for name, arm in arms.items()
        }
        self._probes = len(probe)
        self._proven = set(padded_widths(first.config, probe))
        self.batched = all(self_check(arm, probe) for arm in arms.values()) and self._same_alone(probe)

    @property
    def note(self) -> str:
        """How rounds are computed, in words, for the receipt."""
        if self.batched:
            return f"batched reference arithmetic: the same bits as one by one on {self._probes} probe rounds"
        return "one round at a time: batched arithmetic does not give the same bits on this machine"

    @property
    def computation(self) -> Computation:
        """What decides the last bits of a score here: a journal goes on only where it is the same."""
        return Computation(torch=str(torch.__version__), device=describe_device(self.head.device), batched=self.batched)

    @one_thread()
    @torch.no_grad()
    def score(self, batch: BlockBatch) -> dict[str, tuple[Tensor, Tensor]]:
        """Arm → `measure` of the batch's rounds, all of which must be complete."""
        self._prove(batch)
        teacher = log_softmax(teacher_logits(self.head, batch.teacher_hidden)[batch.teacher])
        return {name: measure(self._logits(name, batch), teacher, batch.target) for name in self._one}

    def rounds(
        self,
        blocks: RoundSource,
        request: str,
        anchors: Sequence[int],
        *,
        batch: int = _BATCH,
        stop: Callable[[], Any] | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> dict[str, ArmRounds]:
        """Every arm on a request's rounds, in the order of the anchors.

        Args:
            blocks: the split that holds the request.
            batch: rounds that go together at most.
            stop: asked before every batch; when it is true, Interrupted is raised.
            progress: called with the rounds done since the last call.
        Raises Refused: a round is incomplete, or a divergence is not finite.
        """
        found = {name: ArmRounds() for name in self._one}
        for part in _pieces(anchors, self._together(batch)):
            if stop is not None and stop():
                raise Interrupted(
                    "scoring was asked to stop", where=request, remedy="resume; this request starts again"
                )
            rounds = blocks.rounds_batch(request, part).to(self.head.device)
            if rounds.anchor.tolist() != part:
                raise Refused("the data give other rounds than those asked for", expected=part, where=request)
            if not bool(rounds.valid.all()):
                raise Refused("a round is incomplete", expected=f"{self.block_size} targets each", where=request)
            for name, (accepted, kl) in self.score(rounds).items():
                if not bool(kl.isfinite().all()):
                    bad = part[int((~kl.isfinite().all(-1)).nonzero()[0])]
                    raise Refused("a divergence is not finite", where=f"{request}, anchor {bad}, {name}")
                found[name].accepted += accepted.tolist()
                found[name].kl += kl.tolist()
            if progress is not None:
                progress(len(part))
        return found

    def _together(self, batch: int) -> int:
        limit = max(1, _BATCH_LOGITS // (self.block_size * self._vocabulary))
        return min(batch, limit) if self.batched else 1

    def _logits(self, name: str, batch: BlockBatch) -> Tensor:
        if self.batched:
            return self._many[name].forward_batch(batch)[1]
        return torch.stack([self._one[name].forward(batch.round(index)).logits for index in range(len(batch))])

    def _prove(self, batch: BlockBatch) -> None:
        """Check the first rounds of a width of context that no check had."""
        for width, rounds in padded_widths(next(iter(self._one.values())).config, batch).items():
            if self.batched and width not in self._proven:
                part = select_rounds(batch, rounds[:_PROBES])
                self.batched = all(self_check(arm, part) for arm in self._one.values())
                self._proven.add(width)
                self._probes += len(part)

    def _same_alone(self, probe: BlockBatch) -> bool:
        """Whether the probe's measures, too, are the same bits together and alone."""
        self.batched = True
        together = self.score(probe)
        for index in range(len(probe)):
            alone = self.score(select_rounds(probe, torch.tensor([index])))
            for name, (accepted, kl) in together.items():
                if alone[name][0][0] != accepted[index] or not torch.equal(alone[name][1][0], kl[index]):
                    return False
        return True


def score_request(
    scorer: Scorer,
    blocks: RoundSource,
    request: str,
    anchors: Sequence[int],
    *,
    batch: int = _BATCH,
    stop: Callable[[], Any] | None = None,
    progress: Callable[[int], object] | None = None,
) -> RequestScore:
    """The arms `baseline` and `candidate` on one request's population of rounds (arguments as `Scorer.rounds`)."""
    found = scorer.rounds(blocks, request, anchors, batch=batch, stop=stop, progress=progress)
    baseline, candidate = found["baseline"], found["candidate"]
    return RequestScore.of(request, anchors, (baseline.accepted, candidate.accepted), (baseline.kl, candidate.kl))


def score_population(
    scorer: Scorer,
    blocks: RoundSource,
    population: Mapping[str, Sequence[int]],
    journal: Journal,
    *,
    batch: int = _BATCH,
    stop: Callable[[], Any] | None = None,
    progress: Callable[[int], object] | None = None,
) -> list[RequestScore]:
    """Score what the journal does not hold yet, request by request; returns every request's score.

    Raises Interrupted when `stop` says so; what the journal holds by then stays. Arguments as `Scorer.rounds`.
    """
    for request in journal.pending:
        if stop is not None and stop():
            raise Interrupted("scoring was asked to stop", where=request, remedy="resume; completed requests are kept")
        journal.add(
            score_request(scorer, blocks, request, population[request], batch=batch, stop=stop, progress=progress)
        )
    return [journal.completed[request] for request in sorted(journal.completed)]


def score_sample(
    scorer: Scorer,
    blocks: RoundSource,
    sample: Sequence[tuple[str, int]],
    *,
    batch: int = _BATCH,
    stop: Callable[[], Any] | None = None,
    progress: Callable[[int], object] | None = None,
) -> dict[str, dict[str, list[int]]]:
    """A frozen sample of one split: request → anchors and, per arm, accepted draft tokens (see pilot.SampledRounds).

    Args:
        sample: (request, anchor) pairs. The other arguments as `Scorer.rounds`.
    """
    anchors: dict[str, list[int]] = {}
    for request, anchor in sorted(sample):
        anchors.setdefault(request, []).append(anchor)
    scored = {}
    for request, wanted in anchors.items():
        found = scorer.rounds(blocks, request, wanted, batch=batch, stop=stop, progress=progress)
        scored[request] = {"anchors": wanted, **{name: arm.accepted for name, arm in found.items()}}
    return scored


def _pieces(anchors: Sequence[int], size: int) -> Iterator[list[int]]:
    for start in range(0, len(anchors), size):
        yield [int(anchor) for anchor in anchors[start : start + size]]
