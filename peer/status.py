"""What a peer says of itself: to `peer status` while it runs, and to the swarm report when it has ended."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from peer import __version__
from peer.config import RunSpec
from peer.course import Course
from peer.membership import Member


def starting(id_: str, address: str, up_s: float) -> dict[str, Any]:
    """Return what can be told before the peer is in a run."""
    return {"id": id_, "pid": os.getpid(), "address": address, "version": __version__, "up_seconds": round(up_s, 1)}


def running(spec: RunSpec, course: Course, position: tuple[int, int], members: Iterable[Member]) -> dict[str, Any]:
    """Return what `peer status` adds once the peer is in a run."""
    return {
        "round": position[0],
        "step": position[1],
        "run": spec.name,
        "fingerprint": spec.fingerprint,
        "preset": spec.mixing.preset,
        "rounds": spec.round.count,
        "steps": spec.round.steps,
        "eval_loss": course.eval_loss,
        "members": [_shown(member) for member in members],
        "totals": course.metrics.totals(),
    }


def summary(id_: str, exit_code: int, spec: RunSpec, course: Course) -> dict[str, Any]:
    """Return summary.json. Counts are of this process's life; `round` is where the peer is in the run."""
    totals = course.metrics.totals()
    same = (
        "rounds",
        "tokens",
        "loss_first",
        "loss_last",
        "utilization",
        "mix1",
        "mix2",
        "sent_bytes",
        "received_bytes",
    )
    return {
        "id": id_,
        "exit_code": exit_code,
        "preset": spec.mixing.preset,
        "run": spec.name,
        "fingerprint": spec.fingerprint,
        "round": course.round,
        **{name: totals[name] for name in same},
        "eval_loss_last": course.eval_loss,
        "predicted_sent_bytes": course.planned_bytes,
        "js_distance_last": course.last_js,
        "l2_distance_last": course.last_l2,
        "stall_seconds": totals["stall_seconds"],
        "dropped": totals["dropped"],
    }


def _shown(member: Member) -> dict[str, Any]:
    return {
        "id": member.id,
        "address": member.address,
        "state": member.state.name.lower(),
        "round": member.round,
        "step": member.step,
        "from_round": member.from_round,
        "incarnation": member.incarnation,
    }
