"""The probe, driven round by round over Loopback under a fake clock."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Coroutine
from typing import Any, cast

import pytest

from peer.errors import RefusedError
from peer.loopback import Loopback
from peer.membership import Change, Member, Membership, State, roster
from peer.metrics import Metrics
from peer.probe import Backoff, Probe
from peer.transport import Gossip, Service, Transport

RUN, OTHER_RUN = b"r" * 16, b"o" * 16
ALIVE, SUSPECT, DEAD, LEFT = State


class Peer:
    """A peer that can do nothing but gossip."""

    def __init__(self, swarm: Swarm, id_: str, bootstrap: tuple[str, ...], **settings: Any) -> None:
        self.me = Member(id_, settings.pop("address", f"{id_}:1"), incarnation=settings.pop("incarnation", 0), round=0)
        self.membership = Membership(self.me)
        self.membership.update_me(from_round=0)
        self.transport = swarm.net.transport(f"{id_}:1")
        self.metrics = Metrics()
        self.changes: list[Change] = []
        self.heard_from: list[str] = []
        self.probe = Probe(
            self.membership,
            settings.pop("transport", self.transport),
            settings.pop("run", RUN),
            self.metrics,
            bootstrap=bootstrap,
            on_changes=self.changes.extend,
            clock=lambda: swarm.now_s,
            rng=random.Random(f"{swarm.seed} {id_}"),
            **settings,
        )

    async def on_gossip(self, message: Gossip) -> Gossip:
        self.heard_from.append(message.sender)
        return await self.probe.on_gossip(message)

    def alive(self) -> str:
        """Ids of those alive, in one word."""
        return "".join(m.id for m in roster(self.probe.view, 0))

    def states(self) -> dict[str, State]:
        return {m.id: m.state for m in self.probe.view}


class Swarm:
    """Peers on one Loopback; each call of `rounds` is half a second for all."""

    def __init__(self, seed: int = 0) -> None:
        self.net = Loopback()
        self.now_s = 100.0
        self.seed = seed
        self.order = random.Random(seed)
        self.peers: dict[str, Peer] = {}

    def add(self, id_: str, *bootstrap: str, at: str = "", **settings: Any) -> Peer:
        peer = self.peers[id_] = Peer(self, id_, bootstrap, **settings)
        self.net.serve(at or f"{id_}:1", cast("Service", peer))
        return peer

    async def rounds(self, n: int) -> None:
        for _ in range(n):
            self.now_s += 0.5
            for id_ in self.order.sample(sorted(self.peers), len(self.peers)):
                await self.peers[id_].probe.round_once()

    def kill(self, id_: str) -> Peer:
        self.net.stop(f"{id_}:1")
        return self.peers.pop(id_)

    def cut(self, one: str, other: str, *, refuse: bool = True) -> None:
        for a, b in ((one, other), (other, one)):
            self.net.link(f"{a}:1", f"{b}:1").refuse = refuse


def play(scene: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scene)


def events(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "peer.probe"]


@pytest.mark.parametrize("seed", range(20))
def test_eight_peers_with_one_bootstrap_become_one_swarm(seed: int):
    async def scene() -> None:
        swarm = Swarm(seed)
        for id_ in swarm.order.sample("abcdefgh", 8):
            swarm.add(id_, "a:1")
        await swarm.rounds(12)
        assert {peer.alive() for peer in swarm.peers.values()} == {"abcdefgh"}

    play(scene())


def test_two_swarms_that_know_one_address_of_each_other_merge():
    async def scene() -> None:
        swarm = Swarm()
        swarm.add("a"), swarm.add("b", "a:1"), swarm.add("c"), swarm.add("d", "c:1", "a:1")
        swarm.cut("d", "a")
        await swarm.rounds(8)
        assert {peer.alive() for peer in swarm.peers.values()} == {"ab", "cd"}
        swarm.cut("d", "a", refuse=False)
        await swarm.rounds(40)
        assert {peer.alive() for peer in swarm.peers.values()} == {"abcd"}

    play(scene())


def test_a_killed_member_is_suspected_within_a_round_and_dead_within_the_limit():
    async def scene() -> None:
        swarm = Swarm()
        for id_ in "abcd":
            swarm.add(id_, "a:1")
        await swarm.rounds(8)
        swarm.kill("d")
        await swarm.rounds(3)
        assert [peer.states()["d"] for peer in swarm.peers.values()] == [SUSPECT] * 3
        await swarm.rounds(32)
        assert [peer.states()["d"] for peer in swarm.peers.values()] == [DEAD] * 3
        assert swarm.peers["a"].metrics.registry.get_sample_value("peer_members", {"state": "dead"}) == 1
        assert "d:1" in swarm.peers["a"].transport.forgotten

    play(scene())


def test_a_killed_member_that_restarts_is_back_at_once_ten_times():
    async def scene() -> None:
        swarm = Swarm()
        for id_ in "abc":
            swarm.add(id_, "a:1")
        for life in range(1, 11):
            await swarm.rounds(5)
            swarm.kill("c")
            await swarm.rounds(4)
            swarm.add("c", "a:1", incarnation=life)
            await swarm.rounds(4)
            assert {peer.alive() for peer in swarm.peers.values()} == {"abc"}
        assert all(len(peer.probe.view) == 3 for peer in swarm.peers.values())

    play(scene())


def test_a_restarted_member_is_dialled_anew():
    async def scene() -> None:
        swarm = Swarm()
        a = swarm.add("a")
        swarm.add("b", "a:1")
        await swarm.rounds(4)
        swarm.kill("b")
        await swarm.rounds(2)
        assert a.states()["b"] is SUSPECT
        assert a.transport.forgotten == []
        swarm.add("b", "a:1", incarnation=1)
        await swarm.rounds(2)
        assert a.states()["b"] is ALIVE
        assert a.transport.forgotten == ["b:1"]

    play(scene())


def test_a_partition_heals_without_bootstrap():
    async def scene() -> None:
        swarm = Swarm()
        for id_ in "abcd":
            swarm.add(id_, *(["a:1"] if id_ != "a" else []))
        await swarm.rounds(8)
        for peer in swarm.peers.values():
            peer.probe._bootstrap = ()
        for one in "ab":
            for other in "cd":
                swarm.cut(one, other)
        await swarm.rounds(40)
        assert [peer.alive() for peer in swarm.peers.values()] == ["ab", "ab", "cd", "cd"]
        for one in "ab":
            for other in "cd":
                swarm.cut(one, other, refuse=False)
        await swarm.rounds(40)
        assert {peer.alive() for peer in swarm.peers.values()} == {"abcd"}

    play(scene())


def test_a_peer_nobody_can_dial_is_a_member_like_others():
    async def scene() -> None:
        swarm = Swarm()
        for id_ in "abc":
            swarm.add(id_, "a:1")
        swarm.add("n", "a:1", address="")
        await swarm.rounds(60)
        assert {peer.alive() for peer in swarm.peers.values()} == {"abcn"}

    play(scene())


def test_a_lone_peer_keeps_calling_and_says_so_once(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "peer.probe")

    async def scene() -> None:
        swarm = Swarm()
        swarm.add("b", "a:1")
        await swarm.rounds(240)
        assert events(caplog) == ["no other member known, calling bootstrap addresses", "bootstrap does not answer"]
        swarm.add("a")
        await swarm.rounds(22)  # the longest pause is ten seconds
        assert swarm.peers["b"].alive() == "ab"
        assert "connected" in events(caplog)

    play(scene())


def test_a_quiet_swarm_writes_no_log(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "peer.probe")

    async def scene() -> None:
        swarm = Swarm()
        for id_ in "abc":
            swarm.add(id_, "a:1")
        await swarm.rounds(10)
        before = len(events(caplog))
        await swarm.rounds(100)
        assert events(caplog)[before:] == []

    play(scene())


def test_a_peer_ignores_its_own_address_under_another_name(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "peer.probe")

    async def scene() -> None:
        swarm = Swarm()
        peer = swarm.add("a", "alias:1", "a:1")
        swarm.net.serve("alias:1", cast("Service", peer))
        await swarm.rounds(50)
        assert peer.states() == {"a": ALIVE}
        assert events(caplog).count("bootstrap address is this peer's own, ignored") == 1
        assert peer.heard_from == ["a"]

    play(scene())


def test_a_copy_of_this_peers_folder_is_warned_of_and_not_merged(caplog: pytest.LogCaptureFixture):
    async def scene() -> None:
        peer = Swarm().add("a")
        twin = Member("a", "elsewhere:1", incarnation=5)
        for _ in range(3):
            reply = await peer.on_gossip(Gossip(RUN, "a", (twin, Member("x", "x:1"))))
        assert reply.members == (peer.membership.me,)
        assert peer.membership.me.incarnation == 0
        assert events(caplog) == ["another peer uses this peer's identity"]

    play(scene())


def test_a_foreign_run_is_refused_with_both_keys():
    async def scene() -> None:
        peer = Swarm().add("a")
        with pytest.raises(RefusedError, match=f"{RUN.hex()}.*{OTHER_RUN.hex()}"):
            await peer.on_gossip(Gossip(OTHER_RUN, "b", (Member("b", "b:1"),)))
        assert peer.states() == {"a": ALIVE}

    play(scene())


def test_runs_that_share_a_bootstrap_address_never_meet():
    async def scene() -> None:
        swarm = Swarm()
        swarm.add("a", "x:1"), swarm.add("b", "a:1", "x:1"), swarm.add("x", "a:1", run=OTHER_RUN)
        await swarm.rounds(40)
        assert [peer.alive() for peer in swarm.peers.values()] == ["ab", "ab", "x"]

    play(scene())


def test_an_address_taken_over_by_somebody_else_does_not_keep_the_old_member_alive():
    async def scene() -> None:
        swarm = Swarm()
        for id_ in "abc":
            swarm.add(id_, "a:1")
        await swarm.rounds(8)
        swarm.kill("c")
        swarm.add("d", "a:1", at="c:1", address="c:1")
        await swarm.rounds(40)
        assert {peer.alive() for peer in swarm.peers.values()} == {"abd"}

    play(scene())


def test_leaving_tells_the_others_at_once():
    async def scene() -> None:
        swarm = Swarm()
        for id_ in "abc":
            swarm.add(id_, "a:1")
        await swarm.rounds(8)
        await swarm.peers["c"].probe.leave()
        assert [swarm.peers[id_].states()["c"] for id_ in "ab"] == [LEFT, LEFT]
        swarm.kill("c")
        await swarm.rounds(40)
        assert [swarm.peers[id_].states()["c"] for id_ in "ab"] == [LEFT, LEFT]

    play(scene())


def test_changes_are_told_once_with_what_was_before():
    async def scene() -> None:
        swarm = Swarm()
        a = swarm.add("a")
        swarm.add("b", "a:1")
        await swarm.rounds(4)
        swarm.kill("b")
        await swarm.rounds(40)
        assert [(c.member.id, c.before, c.member.state) for c in a.changes] == [
            ("b", None, ALIVE),
            ("b", ALIVE, SUSPECT),
            ("b", SUSPECT, DEAD),
        ]

    play(scene())


def test_changes_made_elsewhere_are_told_in_the_next_round():
    async def scene() -> None:
        swarm = Swarm()
        a = swarm.add("a")
        a.membership.merge([Member("b", "b:1")], swarm.now_s)  # as when a newcomer is let in
        swarm.add("b")
        await swarm.rounds(1)
        assert [c.member.id for c in a.changes] == ["b"]

    play(scene())


def test_a_stall_of_this_process_suspects_nobody():
    async def scene() -> None:
        swarm = Swarm()
        for id_ in "abc":
            swarm.add(id_, "a:1")
        await swarm.rounds(8)
        a = swarm.peers["a"]
        a.changes.clear()
        for id_ in "bc":
            swarm.net.stop(f"{id_}:1")  # or their first answer would hide what is tested
        swarm.now_s += 60.0
        a.probe._begin_round()
        assert a.changes == []
        assert a.alive() == "abc"
        await a.probe.round_once()

    play(scene())


def test_a_stalled_peer_corrects_what_was_said_of_it(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "peer.probe")

    async def scene() -> None:
        swarm = Swarm()
        for id_ in "abc":
            swarm.add(id_, "a:1")
        await swarm.rounds(8)
        stopped = swarm.peers.pop("c")
        swarm.net.stop("c:1")
        await swarm.rounds(60)
        assert swarm.peers["a"].states()["c"] is DEAD
        swarm.peers["c"] = stopped
        swarm.net.serve("c:1", cast("Service", stopped))
        await swarm.rounds(4)
        assert {peer.alive() for peer in swarm.peers.values()} == {"abc"}
        assert "others had given this peer up, corrected" in events(caplog)

    play(scene())


class Deaf:
    """A transport whose calls hang until they are let go."""

    def __init__(self) -> None:
        self.called: list[str] = []
        self.under_way = asyncio.Event()
        self.cancelled = 0

    async def gossip(self, address: str, message: Gossip, timeout_s: float) -> Gossip:
        self.called.append(address)
        self.under_way.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        raise AssertionError

    async def forget(self, address: str) -> None: ...


def test_calls_that_hang_do_not_pile_up_nor_stop_the_beat():
    async def scene() -> None:
        swarm, transport = Swarm(), Deaf()
        peer = swarm.add("a", transport=cast("Transport", transport))
        peer.probe.learn([Member(f"m{i}", f"m{i}:1") for i in range(100)])
        before = peer.membership.me.beat
        for _ in range(50):
            peer.probe._begin_round()
            await asyncio.sleep(0)
        assert peer.membership.me.beat == before + 50
        assert len(transport.called) == len(set(transport.called)) == 16
        for call in peer.probe._calls.values():
            call.cancel()

    play(scene())


def test_an_address_with_a_call_under_way_is_not_called_again():
    async def scene() -> None:
        swarm, transport = Swarm(), Deaf()
        peer = swarm.add("a", "b:1", transport=cast("Transport", transport))
        for _ in range(10):
            swarm.now_s += 0.5
            peer.probe._begin_round()
            await asyncio.sleep(0)
        assert transport.called == ["b:1"]
        for call in peer.probe._calls.values():
            call.cancel()

    play(scene())


def test_an_answer_from_a_foreign_run_is_not_merged():
    class Foreign:
        async def gossip(self, address: str, message: Gossip, timeout_s: float) -> Gossip:
            return Gossip(OTHER_RUN, "b", (Member("b", "b:1", beat=9), Member("x", "x:1")))

        async def forget(self, address: str) -> None: ...

    async def scene() -> None:
        peer = Swarm().add("a", transport=cast("Transport", Foreign()))
        peer.probe.learn([Member("b", "b:1", round=0)])
        await peer.probe.round_once()
        assert peer.states() == {"a": ALIVE, "b": SUSPECT}

    play(scene())


def test_silence_in_a_call_is_no_evidence_but_a_refusal_is():
    async def scene() -> None:
        swarm = Swarm()
        a = swarm.add("a", timeout_s=0.01)
        swarm.net.link("a:1", "late:1").unreachable = True
        swarm.net.link("a:1", "gone:1").refuse = True
        a.probe.learn([Member("late", "late:1", round=0), Member("gone", "gone:1", round=0)])
        await a.probe.round_once()
        assert a.states() == {"a": ALIVE, "late": ALIVE, "gone": SUSPECT}

    play(scene())


@pytest.mark.parametrize("end", ["stop", "leave", "cancel"])
def test_running_ends_at_once_with_calls_under_way(end: str):
    async def scene() -> None:
        swarm, transport = Swarm(), Deaf()
        peer = swarm.add("a", "b:1", transport=cast("Transport", transport), interval_s=3600.0)
        running = asyncio.create_task(peer.probe.run())
        await transport.under_way.wait()
        if end == "leave":
            await peer.probe.leave()
        elif end == "stop":
            peer.probe.stop()
        else:
            running.cancel()
        await asyncio.wait([running], timeout=5)
        assert running.done()
        assert running.cancelled() is (end == "cancel")
        assert transport.cancelled == 1
        assert len(asyncio.all_tasks()) == 1

    play(scene())


def test_leaving_is_bounded_when_nobody_answers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("peer.probe.GOODBYE_S", 0.01)

    async def scene() -> None:
        swarm, transport = Swarm(), Deaf()
        peer = swarm.add("a", transport=cast("Transport", transport))
        peer.probe.learn([Member("b", "b:1"), Member("c", "c:1")])
        await asyncio.wait_for(peer.probe.leave(), 5)
        assert sorted(transport.called) == ["b:1", "c:1"]
        assert transport.cancelled == 2

    play(scene())


def test_the_lag_of_the_loop_is_measured():
    async def scene() -> None:
        swarm = Swarm()
        peer = swarm.add("a", interval_s=0.001)
        measured = peer.metrics.loop_lag
        peer.metrics.loop_lag = lambda seconds: (measured(seconds), peer.probe.stop())
        await asyncio.wait_for(peer.probe.run(), 5)
        assert peer.metrics.registry.get_sample_value("peer_loop_lag_seconds") >= 0

    play(scene())


def test_progress_reaches_the_others():
    async def scene() -> None:
        swarm = Swarm()
        swarm.add("a"), swarm.add("b", "a:1", position=lambda: (7, 30))
        await swarm.rounds(3)
        b = swarm.peers["a"].membership.get("b")
        assert b is not None
        assert (b.round, b.step) == (7, 30)

    play(scene())


def test_pauses_grow_to_a_limit_and_start_anew():
    backoff = Backoff(random.Random(0), first_s=1.0, longest_s=8.0)
    for most_s in (1.0, 2.0, 4.0, 8.0, 8.0, 8.0):
        assert 0 <= backoff.pause_s() <= most_s
    backoff.reset()
    assert backoff.pause_s() <= 1.0
