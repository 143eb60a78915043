"""Four daemons, and what an operator and a bad day do to them: kill -9, a freeze, the first peer gone."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import processes
import pytest
from processes import Peer, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

FROZEN_S = 20.0
STEPS = 30
SETTINGS = {
    **processes.SMALL_MODEL,
    **processes.EMULATED,
    "trainer.step_time": '"200ms"',
    "round.steps": STEPS,  # six seconds: longer than it takes to find a frozen member out
    "round.count": 1000,
    "start.members": 4,
    "network.join_timeout": '"60s"',
}


def test_four_daemons_outlive_kill_9_a_freeze_and_the_loss_of_the_first_one(tmp_path: Path) -> None:
    with processes.crew(tmp_path) as crew:
        first = crew.start("a", SETTINGS)
        killed, frozen, steady = (crew.start(name, SETTINGS, "--bootstrap", first.address()) for name in "bcd")
        killed.at(1, 5)

        down_at = _round(steady)
        killed.kill()
        crew.restart(killed)
        up_at = _up(killed, steady)
        assert _mixes_again(killed, up_at) <= up_at + 2
        away = {killed: range(down_at, up_at + 1)}

        frozen_at = frozen.at(_round(frozen), STEPS - 5)["round"]  # its partner will wait for it in vain
        stopped_at = time.monotonic()
        frozen.send(signal.SIGSTOP)

        down_at = _round(steady)
        first.kill()  # it was given no bootstrap address: it knows only whom it met
        crew.restart(first)
        up_at = _up(first, steady)
        assert _mixes_again(first, up_at) <= up_at + 2
        away[first] = range(down_at, up_at + 1)

        until(lambda: time.monotonic() - stopped_at >= FROZEN_S, "the end of the freeze")
        thawed_at = _round(steady)
        frozen.send(signal.SIGCONT)
        assert _mixes_again(frozen, thawed_at) <= thawed_at + 2
        away[frozen] = range(frozen_at, thawed_at + 2)

        for peer in (first, killed, frozen, steady):
            peer.send(signal.SIGTERM)
        for peer in (first, killed, frozen, steady):
            assert peer.ended() == 0, peer.log
            assert "Traceback" not in peer.log
            rows, absent = peer.rounds(), away.get(peer, range(0))
            assert {row["round"] for row in rows} >= set(range(rows[-1]["round"])) - set(absent), peer.folder.name
            waits = [(row["round"], row["stall_s"]) for row in rows if row["stall_s"] > row["deadline_s"] + 1]
            assert [wait for wait in waits if wait[0] not in absent] == [], peer.folder.name


def _round(peer: Peer) -> int:
    return int(until(peer.status, f"{peer.folder.name} answering")["round"])


def _up(peer: Peer, witness: Peer) -> int:
    """Wait until a restarted peer is in the run; returns the swarm's round then."""
    until(lambda: "run" in (peer.status() or {}), f"{peer.folder.name} up again")
    return _round(witness)


def _mixes_again(peer: Peer, since: int) -> int:
    """Wait until a peer has mixed with others in a round from `since` on; returns which."""

    def mixed() -> list[int]:
        peer.status()
        return [
            row["round"]
            for row in peer.rounds()
            if row["round"] >= since and row["members_mixed"] > 1 and "failed" not in (row["mix1"], row["mix2"])
        ]

    return until(mixed, f"{peer.folder.name} mixing again")[0]
