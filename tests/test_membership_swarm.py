"""Membership as an order of claims, and as eight peers under a fake clock."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peer.membership import Member, Membership, State, standing

ALIVE, SUSPECT, DEAD, LEFT = State


def view_of(id_: str) -> Membership:
    return Membership(Member(id_, f"{id_}:1", from_round=0, round=0))


# the order of claims

claims = st.builds(
    Member,
    id=st.sampled_from("abcd"),
    address=st.sampled_from(["", "x:1", "y:2"]),
    incarnation=st.integers(0, 2),
    state=st.sampled_from(State),
    beat=st.integers(0, 3),
    round=st.integers(-1, 2),
    step=st.integers(0, 1),
    from_round=st.integers(-1, 2),
    upload_bps=st.integers(0, 1),
)
views = st.lists(claims, max_size=12)


def belief(membership: Membership) -> tuple[object, ...]:
    """Everything believed of others, tombstones included."""
    return tuple(sorted((id_, standing(record.member)) for id_, record in membership._records.items()))


@given(views, views)
def test_merging_is_commutative(one: list[Member], other: list[Member]):
    first, second = view_of("a"), view_of("a")
    first.merge(one, 0.0)
    first.merge(other, 0.0)
    second.merge(other, 0.0)
    second.merge(one, 0.0)
    assert belief(first) == belief(second)
    assert first.members(ALIVE, SUSPECT) == second.members(ALIVE, SUSPECT)


@given(views)
def test_merging_is_idempotent(one: list[Member]):
    membership = view_of("a")
    membership.merge(one, 0.0)
    before = membership.view(), belief(membership)
    assert membership.merge(one, 1.0) == []
    assert (membership.view(), belief(membership)) == before


@given(views, views, views)
def test_merging_is_associative(one: list[Member], two: list[Member], three: list[Member]):
    together, relayed, relay = view_of("a"), view_of("a"), view_of("relay")
    together.merge([*one, *two, *three], 0.0)
    relay.merge([*two, *three], 0.0)
    relayed.merge(one, 0.0)
    relayed.merge([m for m in relay.view() if m.id != "relay"], 0.0)
    # A relay passes no tombstones of members it never saw alive: what it says is never more than the truth.
    told = {m.id for m in relay.view()}
    everything, heard = dict(belief(together)), dict(belief(relayed))  # type: ignore[arg-type]
    assert all(heard[id_] <= everything[id_] for id_ in heard)
    assert all(heard[id_] == everything[id_] for id_ in heard if id_ in told)


@given(views)
def test_my_own_entry_is_never_overwritten(rumours: list[Member]):
    membership = view_of("a")
    mine = membership.me
    membership.merge(rumours, 0.0)
    assert replace(membership.me, incarnation=mine.incarnation) == mine
    assert membership.view().count(membership.me) == 1
    other = view_of("other")
    other.merge(rumours, 0.0)
    other.merge(membership.view(), 0.0)
    assert other.get("a") == membership.me


@settings(max_examples=30)
@given(st.lists(views, min_size=3, max_size=5), st.randoms(use_true_random=False))
def test_views_converge_under_random_push_pull(starts: list[list[Member]], rng: random.Random):
    peers = [view_of(f"p{i}") for i in range(len(starts))]
    for membership, start in zip(peers, starts, strict=True):
        membership.merge([m for m in start if m.state <= SUSPECT], 0.0)
    pairs = list(itertools.combinations(peers, 2))
    for _ in range(3):
        rng.shuffle(pairs)
        for one, other in pairs:
            other.merge(one.view(), 0.0)
            one.merge(other.view(), 0.0)
    assert len({membership.view() for membership in peers}) == 1
    assert len({membership.roster(1) for membership in peers}) == 1


# eight peers


class Swarm:
    """Peers that gossip twice a second under a fake clock, over links that can be cut."""

    def __init__(self, n: int, seed: int) -> None:
        self.now_s = 0.0
        self.rng = random.Random(seed)
        self.peers = {f"p{i}": view_of(f"p{i}") for i in range(n)}
        self.silent: set[str] = set()
        self.linked: Callable[[str, str], bool] = lambda one, other: True
        first = self.peers["p0"]
        for id_, membership in self.peers.items():
            if id_ != "p0":
                self.push_pull(membership, first)

    def push_pull(self, one: Membership, other: Membership) -> None:
        other.merge(one.view(), self.now_s)
        other.heard(one.me.id, self.now_s)
        one.merge(other.view(), self.now_s)
        one.heard(other.me.id, self.now_s)

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.5)):
            self.now_s += 0.5
            for id_ in self.rng.sample(sorted(self.peers), len(self.peers)):
                if id_ not in self.silent:
                    self.gossip(id_)

    def gossip(self, id_: str) -> None:
        membership = self.peers[id_]
        membership.beat(1, 0)
        membership.tick(self.now_s)
        for target in membership.gossip_targets(2, self.rng):
            other = target.address.partition(":")[0]
            if other in self.silent or not self.linked(id_, other):
                membership.unreachable(other, self.now_s)
            else:
                self.push_pull(membership, self.peers[other])

    def states(self, of: str) -> set[State]:
        found = [m.get(of) for id_, m in self.peers.items() if id_ not in self.silent]
        return {member.state for member in found if member is not None}

    def alive(self, id_: str) -> list[str]:
        return [m.id for m in self.peers[id_].roster(0)]


@pytest.mark.parametrize("seed", range(20))
def test_eight_peers_connect_from_one_bootstrap(seed: int):
    swarm = Swarm(8, seed)
    swarm.run(5.0)
    assert all(swarm.alive(id_) == sorted(swarm.peers) for id_ in swarm.peers)


@pytest.mark.parametrize("seed", range(5))
def test_a_silent_peer_is_suspected_then_dead_and_comes_back(seed: int):
    swarm = Swarm(8, seed)
    swarm.run(5.0)
    swarm.silent = {"p3"}
    swarm.run(6.0)
    assert swarm.states("p3") == {SUSPECT}
    swarm.run(11.0)
    assert swarm.states("p3") == {DEAD}
    swarm.silent = set()
    swarm.run(5.0)
    assert swarm.states("p3") == {ALIVE}


@pytest.mark.parametrize("seed", range(5))
def test_a_partition_heals(seed: int):
    swarm = Swarm(8, seed)
    swarm.run(5.0)
    swarm.linked = lambda one, other: (one < "p4") == (other < "p4")
    swarm.run(20.0)
    assert swarm.alive("p0") == ["p0", "p1", "p2", "p3"]
    assert swarm.alive("p7") == ["p4", "p5", "p6", "p7"]
    swarm.linked = lambda one, other: True
    swarm.run(15.0)
    assert all(swarm.alive(id_) == sorted(swarm.peers) for id_ in swarm.peers)


def test_one_cut_link_costs_nobody_its_place():
    swarm = Swarm(8, 0)
    swarm.linked = lambda one, other: {one, other} != {"p1", "p2"}
    swarm.run(30.0)
    incarnations = {id_: m.me.incarnation for id_, m in swarm.peers.items()}
    swarm.run(30.0)
    assert all(swarm.alive(id_) == sorted(swarm.peers) for id_ in swarm.peers)
    assert {id_: m.me.incarnation for id_, m in swarm.peers.items()} == incarnations


def test_ten_restarts_in_a_row_are_taken_each_time_and_leave_one_entry():
    swarm = Swarm(4, 0)
    for _ in range(10):
        swarm.run(2.0)
        swarm.peers["p3"] = view_of("p3")
        swarm.push_pull(swarm.peers["p3"], swarm.peers["p0"])
        swarm.run(2.0)
        assert swarm.states("p3") == {ALIVE}
    assert swarm.alive("p0") == sorted(swarm.peers)
    assert all(len(m.view()) == 4 for m in swarm.peers.values())


def test_a_peer_nobody_can_dial_stays_a_member():
    swarm = Swarm(8, 0)
    swarm.peers["p5"].update_me(address="")
    swarm.run(60.0)
    assert all(swarm.alive(id_) == sorted(swarm.peers) for id_ in swarm.peers)
