"""The rounds of a run, one after another, on one peer: stay with the swarm, look, train, save.

Everything here is on the training thread. The one thing to get wrong: what a checkpoint holds. Between rounds it is z,
v, x and the trainer's state; in mid-round (asked to end) x makes place for the parameters as they stand, since the next
x is made anew at the end of the round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from peer import checkpoint, log
from peer.catchup import Shelf
from peer.config import RunSpec, Settings
from peer.errors import CheckpointError
from peer.home import Home
from peer.log import Journal
from peer.membership import Member, State, roster, swarm_round
from peer.metrics import Metrics
from peer.rounds import RoundReport, Rounds
from peer.trainer import Trainer
from peer.transport import StatePosition
from peer.waiting import Stop

LATE_SHARE = 0.25  # of a round: a peer that begins later than this after the others runs fewer steps, to end with them

logger = log.get(__name__)


class Swarm(Protocol):
    """The other peers, as the course sees them. Thread-safe; calls may block."""

    def view(self) -> tuple[Member, ...]: ...

    def roster(self, round_: int) -> tuple[Member, ...]: ...

    def publish(self, round_: int, step: int) -> None: ...

    def take_part_from(self, round_: int) -> None:
        """Tell the others the first round this peer takes part in."""

    def catch_up(self, donors: list[str]) -> StatePosition | None:
        """Take z, v and x from the first of these addresses that gives them."""

    def take(self, address: str, chunks: Collection[int], round_: int) -> bool:
        """Take z, v and x of some chunks as a member has them at the start of a round."""

    def compare(self, round_: int, log_probs: torch.Tensor) -> None:
        """Offer this round's predictions and measure the distance to another member's."""

    def distance(self, round_: int) -> float | None:
        """Return the JS distance measured in a round."""


@dataclass(slots=True)
class Course:
    """One peer's way through the run. `round` and `step` say where it is."""

    spec: RunSpec
    settings: Settings
    me: str
    home: Home
    trainer: Trainer
    shelf: Shelf
    rounds: Rounds
    swarm: Swarm
    metrics: Metrics
    stop: Stop
    losses: Journal
    journal: Journal
    round: int = 0
    step: int = 0
    planned_bytes: int = 0
    eval_loss: float | None = None
    last_js: float | None = None
    last_l2: float | None = None
    last_loss: float | None = None
    saved: bool = False
    inside: bool = False  # the parameters are those of a round's middle, not the z it began with
    apart: Mapping[str, Collection[int]] = field(default_factory=dict)  # owner -> chunks to take from it

    def run(self) -> None:
        """Run to the end of the run, or until asked to end; either way the state is saved."""
        while self.round < self.spec.round.count and not self.stop.asked.is_set():
            if self.step == 0:
                self._stay_with_swarm()
            self.metrics.at_round(self.round)
            self.saved = False
            began = self.step
            report = self.rounds.run(self.round, began, (lambda: None) if self.inside else self._look)
            self.inside = False
            self._write_losses(report)
            if began + report.steps < self.spec.round.steps:
                self.step = began + report.steps
                break
            self._conclude(report)
            self.round, self.step = self.round + 1, 0
            if self.round % self.settings.checkpoint.every == 0 and self.round < self.spec.round.count:
                self.save()
        if self.round >= self.spec.round.count and self.step == 0 and not self.stop.asked.is_set():
            self._finish()
        if not self.saved:
            self.save()
        logger.info("ended", round=self.round, step=self.step, saved=self.saved, folder=str(self.home.path))

    # Staying with the swarm.

    def wait_for_members(self) -> None:
        """Hold the first round until enough members are present, at most as long as configured."""
        wanted, timeout_s = self.settings.start.members, self.settings.start.timeout
        if wanted <= 1 or self.round > 0 or self.step > 0:
            return
        give_up_at = time.monotonic() + timeout_s
        told = 0
        while time.monotonic() < give_up_at and not self.stop.asked.is_set():
            present = self.swarm.roster(0)
            if len(present) >= wanted or any(m.round > 0 or m.step > 0 for m in present if m.id != self.me):
                return
            if len(present) != told:
                told = len(present)
                logger.info("waiting for members", present=told, wanted=wanted, at_most_s=round(timeout_s))
            self.stop.asked.wait(0.1)
        if not self.stop.asked.is_set():
            logger.warning("starting with fewer members than wanted", present=told, wanted=wanted)

    def catch_up(self) -> bool:
        """Take the state of a member that is further on, and its place in the round. False when none gives it."""
        view = [m for m in self._believable() if m.id != self.me and m.state is State.ALIVE and m.round >= self.round]
        target = swarm_round(view, self.me)
        donors = [m.address for m in sorted(view, key=lambda m: (m.round != target, m.id)) if m.address]
        if not donors:
            return False
        started = time.monotonic()
        before = list(self.shelf.rounds)
        position = self.swarm.catch_up(donors)
        taken_s = time.monotonic() - started
        self.metrics.stall("catchup", taken_s)
        if position is not None and position.round > self.spec.round.count:
            logger.warning("a member gave the state of a round that the run does not have", round=position.round)
            position = None
        if position is None:
            if not self.inside or self.shelf.rounds != before:  # z moved from under the parameters where chunks came
                self._load_start()
            return False
        self.metrics.catchup(taken_s)
        self._load_start()
        first = position.round == 0 and position.step == 0
        self.round = position.round
        self.step = 0 if first else min(position.step, int((1 - LATE_SHARE) * self.spec.round.steps))
        self.swarm.publish(self.round, self.step)
        self.swarm.take_part_from(self.round if first else self.round + 1)
        logger.info("caught up", round=self.round, step=self.step, seconds=round(taken_s, 2))
        return True

    def _stay_with_swarm(self) -> None:
        """Catch up when rounds behind; begin late in the round when steps behind, so as to end it with the others."""
        view = self._believable()
        target = swarm_round(view, self.me)
        lag = 0 if target is None else max(0, target - self.round)
        self.metrics.round_lag(lag)
        if lag and self.step == 0:
            logger.info("behind the swarm", round=self.round, swarm_round=target)
            if not self.catch_up():
                logger.warning("no member gives its state; going on alone", round=self.round)
        elif self.step == 0:
            self._agree()
            steps = self.spec.round.steps
            others = [m for m in roster(view, self.round) if m.id != self.me]
            late = statistics.median_low([(m.round - self.round) * steps + m.step for m in others]) if others else 0
            if late > LATE_SHARE * steps:
                self.step = min(late, int((1 - LATE_SHARE) * steps))
                logger.info("beginning late in the round", round=self.round, step=self.step)

    def _believable(self) -> list[Member]:
        """Leave out whoever claims a round that the run does not have: a rumour must not send everybody after it."""
        return [member for member in self.swarm.view() if member.round <= self.spec.round.count]

    def _agree(self) -> None:
        """Take over chunks that a degraded round of DiLoCo left unlike their owner's: nothing else makes them equal."""
        addresses = {member.id: member.address for member in self.swarm.view()}
        started = time.monotonic()
        for owner, chunks in self.apart.items():
            if chunks and addresses.get(owner) and self.swarm.take(addresses[owner], frozenset(chunks), self.round):
                logger.info("agree again", owner=owner, chunks=len(chunks), round=self.round)
                for chunk in chunks:
                    bounds = self.shelf.layout.chunks[chunk]
                    self.trainer.write(bounds.start, bounds.stop, self.shelf.vectors.z[bounds.start : bounds.stop])
        if any(self.apart.values()):
            self.metrics.stall("catchup", time.monotonic() - started)
        self.apart = {}

    # Looking.

    def _look(self) -> None:
        """Measure the held-out loss and the distance of predictions, of z, with Mix1 in flight."""
        every = self.settings.eval.every
        started = time.monotonic()
        if every and self.round % every == 0:
            self.eval_loss = self.trainer.evaluate()
            self.metrics.eval_loss(self.eval_loss)
        predictions = self.trainer.probe()
        if predictions is not None:
            self.swarm.compare(self.round, predictions)
        self.metrics.stall("eval", time.monotonic() - started)

    # Remembering.

    def _write_losses(self, report: RoundReport) -> None:
        for step, loss, tokens, seconds in report.losses:
            self.losses.write(
                {"step": step, "round": report.round, "loss": loss, "tokens": tokens, "seconds": round(seconds, 4)}
            )

    def _conclude(self, report: RoundReport) -> None:
        self.planned_bytes += report.planned_bytes
        if self.spec.mixing.mix1.strategy == "none" and report.mix2 is not None:
            self.apart = report.mix2.apart
        self.last_loss = report.loss
        js = self.swarm.distance(report.round)
        self.last_js = js if js is not None else self.last_js
        self.last_l2 = report.l2 if report.l2 is not None else self.last_l2
        facts = {
            "round": report.round,
            "loss": report.loss,
            "eval_loss": self.eval_loss,
            "js": js,
            "l2": report.l2,
            "mix1": report.mix1.label if report.mix1 else None,
            "mix2": report.mix2.label if report.mix2 else None,
            "mix1_s": round(report.mix1.seconds, 3) if report.mix1 else None,
            "mix2_s": round(report.mix2.seconds, 3) if report.mix2 else None,
            "members_mixed": max(o.members if o else 1 for o in (report.mix1, report.mix2)),
            "steps": report.steps,
            "stall_s": round(report.waited_s, 3),
            "deadline_s": round(report.deadline_s, 3),
            "wall_s": round(report.wall_s, 3),
            "utilization": round(report.utilization, 4),
        }
        self.journal.write({"time": time.time(), **facts, "chunks": _chunks(report)})
        logger.info("round done", **{key: value for key, value in facts.items() if value is not None})

    def save(self) -> None:
        """Save where this peer is. A disk that does not take it is warned of, and training goes on."""
        started = time.monotonic()
        vectors = self.shelf.vectors
        if self.step:
            with self.shelf.guard:
                self.trainer.read(0, vectors.x.numel(), vectors.x)
        meta: dict[str, Any] = {
            "spec": self.spec.canonical(),
            "fingerprint": self.spec.fingerprint,
            "layout": self.shelf.layout.digest.hex(),
            "peer": self.me,
            "step": self.step,
        }
        snapshot = checkpoint.Snapshot(self.round, vectors, self.trainer.state(), meta)
        try:
            checkpoint.save(self.home.checkpoints, snapshot, self.settings.checkpoint.keep)
        except CheckpointError as error:
            logger.warning("checkpoint not saved, training goes on", why=str(error))
            return
        finally:
            self.metrics.stall("checkpoint", time.monotonic() - started)
        self.saved = True
        self.metrics.checkpoint(time.monotonic() - started)

    def restore(self, snapshot: checkpoint.Snapshot) -> None:
        """Go on from a checkpoint whose vectors are already on the shelf."""
        self.round = snapshot.round
        self.step = int(snapshot.meta.get("step", 0))
        self.inside = self.step > 0
        self.trainer.load_state(snapshot.trainer)
        vectors = self.shelf.vectors
        self.trainer.write(0, vectors.z.numel(), vectors.x if self.step else vectors.z)
        self.shelf.rounds[:] = [self.round] * len(self.shelf.rounds)
        reached = self.round * self.spec.round.steps + self.step
        for journal, keep in (
            (self.losses, lambda record: record.get("step", -1) < reached),
            (self.journal, lambda record: record.get("round", -1) < self.round),
        ):
            _keep(journal, keep)

    def forget_journals(self) -> None:
        """Begin a new run: what an earlier one left in this folder is not part of it."""
        for journal in (self.losses, self.journal):
            _keep(journal, lambda _: False)

    def _load_start(self) -> None:
        """Put z where the parameters are."""
        self.trainer.write(0, self.shelf.vectors.z.numel(), self.shelf.vectors.z)
        self.inside = False

    def _finish(self) -> None:
        """Mix once more, so that what is kept and exported is the members' common model; measure it."""
        final = self.rounds.last_mix1(self.round)
        self.planned_bytes += final.planned_bytes
        vectors = self.shelf.vectors
        self.trainer.write(0, vectors.x.numel(), vectors.x)
        if self.settings.eval.every:
            self.eval_loss = self.trainer.evaluate()
            self.metrics.eval_loss(self.eval_loss)
        self._load_start()
        mixed_with = final.mix1.members - 1 if final.mix1 else 0
        logger.info("run finished", rounds=self.round, mixed_with=mixed_with, eval_loss=self.eval_loss)


def _chunks(report: RoundReport) -> dict[str, list[int]]:
    """Return [mixed, partial, local] of each stage that mixed."""
    return {o.stage.value: [o.mixed, o.partial, o.local] for o in (report.mix1, report.mix2) if o is not None}


def _keep(journal: Journal, predicate: Callable[[dict[str, Any]], bool]) -> None:
    try:
        journal.keep(predicate)
    except OSError as error:
        logger.warning("journal not shortened", path=str(journal.path), why=str(error))
