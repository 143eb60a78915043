"""The story of a round, told from the training thread.

Mix1 of z starts, H inner steps run, Mix2 of D blocks until its deadline, and the outer step makes the next z
(ALGORITHM.md sec. 1). The one thing to get wrong: between the end of Mix2 and the outer step a chunk's outer gradient
lives where the parameters were, and only there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from peer import codec as codecs
from peer import deadline, log, plan
from peer.catchup import Shelf
from peer.config import RunSpec
from peer.membership import Member
from peer.metrics import Metrics
from peer.mixing import Mix, Mixer, Outcome, OuterGradients, StartingPoints
from peer.mixing.quantity import Quantity
from peer.network import give_back_memory
from peer.outer import gamma_cap, outer_step
from peer.plan import Party, Plan
from peer.trainer import Trainer
from peer.waiting import Stop

SETTLE_SHARE = 0.75  # of the steps that this peer does in a round, after which owners of Mix1 wait for nobody

logger = log.get(__name__)


class Others(Protocol):
    """What a round needs to know of the swarm. Thread-safe."""

    def roster(self, round_: int) -> tuple[Member, ...]:
        """Return who takes part in a round, this peer included if it does."""

    def publish(self, round_: int, step: int) -> None:
        """Tell the others where this peer is."""


@dataclass(slots=True)
class RoundReport:
    """What a round did, for journal, metrics and report."""

    round: int
    steps: int = 0
    loss: float = float("nan")
    tokens: int = 0
    train_s: float = 0.0
    wall_s: float = 0.0
    waited_s: float = 0.0  # in Mix2
    deadline_s: float = 0.0
    mix1: Outcome | None = None
    mix2: Outcome | None = None
    planned_bytes: int = 0  # payload this peer sends if all is well
    l2: float | None = None  # |z - x|, where Mix1 was full
    losses: list[tuple[int, float, int, float]] = field(default_factory=list)  # step, loss, tokens, seconds

    @property
    def utilization(self) -> float:
        return self.train_s / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def ahead(self) -> int:
        return max(outcome.ahead if outcome else -1 for outcome in (self.mix1, self.mix2))


class Rounds:
    """Runs rounds on one peer. Everything is called from the training thread."""

    def __init__(
        self, spec: RunSpec, me: Member, trainer: Trainer, shelf: Shelf, others: Others, metrics: Metrics, stop: Stop
    ) -> None:
        self.spec = spec
        self.me = me
        self.trainer = trainer
        self.shelf = shelf
        self.others = others
        self.metrics = metrics
        self.stop = stop
        self.rate_bps: int | None = None  # the configured upload rate, for deadlines
        self.mixer: Mixer | None = None  # None: no network at all
        self._ended_at: float | None = None  # a round lasts from the end of the one before it, saving and all
        self._sizes = [chunk.stop - chunk.start for chunk in shelf.layout.chunks]

    def run(self, round_: int, first_step: int = 0, after_start: Callable[[], None] = lambda: None) -> RoundReport:
        """Run one round, from an inner step on; `after_start` runs with Mix1 in flight, before the steps.

        When asked to stop, returns after the step at hand with the parameters in mid-round and nothing applied:
        `steps` then is less than what was to do.
        """
        report = RoundReport(round_)
        started = time.perf_counter()
        mixing = self.spec.mixing
        mix1, points = self._start_mix1(round_, mixing.mix1.strategy, mixing.mix1.codec, report)
        after_start()
        self._inner_steps(report, first_step, mix1)
        if self.stop.asked.is_set() and first_step + report.steps < self.spec.round.steps:
            if mix1 is not None:
                mix1.close()
            return report
        gradients = self._mix2(report)
        if mix1 is not None:
            report.mix1 = self._close(mix1)
            if report.mix1.local == 0:
                report.l2 = points.squared_distance**0.5
        self._outer(round_, points, gradients)
        give_back_memory()
        ended = time.perf_counter()
        report.wall_s = ended - (started if self._ended_at is None else self._ended_at)
        self._ended_at = ended
        self._count(report)
        return report

    def last_mix1(self, round_: int) -> RoundReport:
        """Mix the final z over the members present, so that x is the model to keep; x = z where nobody answers."""
        # Differences need the reference that a global Mix1 leaves everywhere; pairs share none.
        codec = self.spec.mixing.mix1.codec if self.spec.mixing.mix1.strategy == "global" else "fp32"
        report = RoundReport(round_)
        mix1, points = self._start_mix1(round_, "global", codec, report)
        if mix1 is not None:
            report.deadline_s = self._deadline_s(report.planned_bytes)
            report.waited_s = self._wait(mix1, report.deadline_s)
            report.mix1 = mix1.close()
            self.metrics.stall("mix1", report.waited_s)
        for chunk, count in enumerate(points.contributors):
            if not count:
                self._own_start_stands(chunk)
        return report

    # The parts of the story.

    def _inner_steps(self, report: RoundReport, first_step: int, mix1: Mix | None) -> None:
        total = self.spec.round.steps
        waited_before_s = self.trainer.data_wait_s
        settle_at = first_step + int(SETTLE_SHARE * (total - first_step))
        for step in range(first_step, total):
            if self.stop.asked.is_set():
                break
            self.others.publish(report.round, step)
            result = self.trainer.step(report.round * total + step)
            report.steps += 1
            report.tokens += result.tokens
            report.train_s += result.seconds
            report.losses.append((report.round * total + step, result.loss, result.tokens, result.seconds))
            self.metrics.step(result.loss, result.tokens, result.seconds)
            if result.skipped:
                self.metrics.nonfinite_step()
            if mix1 is not None and step + 1 >= settle_at:
                mix1.settle()
                settle_at = total + 1
        self.metrics.stall("data", self.trainer.data_wait_s - waited_before_s)
        good = [loss for _, loss, _, _ in report.losses if loss == loss]
        report.loss = sum(good) / len(good) if good else float("nan")
        self.others.publish(report.round, total)

    def _start_mix1(
        self, round_: int, strategy: str, codec: str, report: RoundReport
    ) -> tuple[Mix | None, StartingPoints]:
        points = StartingPoints(
            self.shelf.layout,
            codecs.by_name(codec),
            self.spec.key,
            round_,
            self.me.id,
            self.shelf.vectors,
            self.shelf.guard,
        )
        return self._start(strategy, points, report), points

    def _mix2(self, report: RoundReport) -> OuterGradients:
        mixing = self.spec.mixing
        gradients = OuterGradients(
            self.shelf.layout,
            codecs.by_name(mixing.mix2.codec),
            self.spec.key,
            report.round,
            self.me.id,
            self.shelf.vectors.z,
            self.trainer,
            equal=mixing.mix1.strategy == "none",
        )
        before = report.planned_bytes
        mix2 = self._start(mixing.mix2.strategy, gradients, report)
        if mix2 is not None:
            report.deadline_s = self._deadline_s(report.planned_bytes - before)
            report.waited_s = self._wait(mix2, report.deadline_s)
            report.mix2 = self._close(mix2)
            self.metrics.stall("mix2", report.waited_s)
        return gradients

    def _wait(self, mix: Mix, deadline_s: float) -> float:
        """Block until the exchange ends; returns how long that took."""
        started = time.perf_counter()
        forget = self.stop.on_ask(mix.abandon)
        try:
            mix.wait(deadline_s)
        finally:
            forget()
        return time.perf_counter() - started

    def _close(self, mix: Mix) -> Outcome:
        outcome = mix.close()
        for name in ("mixed", "partial", "local"):
            self.metrics.chunks(outcome.stage, name, getattr(outcome, name))
        self.metrics.exchange(outcome.stage, outcome.label)
        self.metrics.mix(outcome.stage, outcome.seconds)
        return outcome

    def _outer(self, round_: int, points: StartingPoints, gradients: OuterGradients) -> None:
        """Steps 5 to 7 of the round, chunk by chunk: v, then z for the next round, then the parameters."""
        outer = self.spec.outer
        mixing = self.spec.mixing
        alone_with_drift = mixing.mix2.strategy == "none" and mixing.mix1.strategy != "none"
        gamma = gamma_cap(outer.lr, outer.momentum) if alone_with_drift else outer.lr
        vectors = self.shelf.vectors
        for chunk in self.shelf.layout.chunks:
            bounds = slice(chunk.start, chunk.stop)
            delta = torch.empty(chunk.stop - chunk.start)
            self.trainer.read(chunk.start, chunk.stop, delta)
            if not gradients.contributors[chunk.index]:
                torch.sub(vectors.z[bounds], delta, out=delta)
            if not points.contributors[chunk.index]:
                self._own_start_stands(chunk.index)
            with self.shelf.guard:
                outer_step(vectors.v[bounds], delta, gamma, outer.momentum, vectors.x[bounds], vectors.z[bounds])
                self.shelf.rounds[chunk.index] = round_ + 1
            self.trainer.write(chunk.start, chunk.stop, vectors.z[bounds])

    def _own_start_stands(self, chunk: int) -> None:
        bounds = self.shelf.layout.chunks[chunk]
        with self.shelf.guard:
            self.shelf.vectors.x[bounds.start : bounds.stop] = self.shelf.vectors.z[bounds.start : bounds.stop]

    # Planning.

    def _start(self, strategy: str, quantity: Quantity, report: RoundReport) -> Mix | None:
        roster = self.others.roster(quantity.round)
        planned = self._plan(strategy, quantity, roster)
        report.planned_bytes += plan.sent_bytes(planned, quantity.codec.size, quantity.result_codec.size, self._sizes)
        if self.mixer is None:
            return None
        return self.mixer.start(planned, quantity, {member.id: member.address for member in roster})

    def _plan(self, strategy: str, quantity: Quantity, roster: tuple[Member, ...]) -> Plan:
        parties = [Party(member.id, bool(member.address), member.upload_bps) for member in roster]
        if self.me.id not in {party.id for party in parties}:  # not in this round yet, or said dead by mistake
            strategy, parties = "none", [Party(self.me.id)]
        return plan.plan(
            strategy, self.spec.key, quantity.round, quantity.stage.value, parties, self.me.id, self._sizes
        )

    def _deadline_s(self, bytes_: int) -> float:
        fixed = self.spec.mixing.mix2.deadline
        return deadline.fixed_or_rate(None if fixed == "auto" else float(fixed), bytes_, self.rate_bps)

    def _count(self, report: RoundReport) -> None:
        members = max(outcome.members if outcome else 1 for outcome in (report.mix1, report.mix2))
        self.metrics.members_mixed(members)
        self.metrics.round_done(report.round, report.utilization)
        if report.l2 is not None:
            self.metrics.l2(report.l2)
