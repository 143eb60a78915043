"""Membership as a table of rumours, time-outs and questions."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from peer.membership import Change, Member, Membership, State, roster, swarm_round

ALIVE, SUSPECT, DEAD, LEFT = State
B = Member("b", "b:1", incarnation=3, beat=10, round=5, from_round=0)


def view_of(id_: str = "a", **limits: float) -> Membership:
    return Membership(Member(id_, f"{id_}:1", from_round=0, round=0), **limits)  # type: ignore[arg-type]


def knowing(*members: Member, now_s: float = 0.0, **limits: float) -> Membership:
    membership = view_of(**limits)
    membership.merge(members, now_s)
    return membership


# one rumour


@pytest.mark.parametrize(
    ("rumour", "wins"),
    [
        (replace(B, beat=11), True),
        (replace(B, beat=9), False),
        (replace(B, beat=10), False),
        (replace(B, incarnation=4, beat=0), True),
        (replace(B, incarnation=2, beat=99, state=DEAD), False),
        (replace(B, state=SUSPECT), True),
        (replace(B, state=SUSPECT, beat=9), False),
        (replace(B, state=DEAD), True),
        (replace(B, state=DEAD, beat=1), True),
        (replace(B, state=LEFT, beat=1), True),
    ],
)
def test_the_larger_claim_wins(rumour: Member, wins: bool):
    membership = knowing(B)
    membership.merge([rumour], 1.0)
    assert membership.get("b") == (rumour if wins else B)


@pytest.mark.parametrize(
    ("known", "rumour", "told"),
    [
        (None, B, Change(B, None)),
        (B, replace(B, beat=11, round=6), None),
        (B, replace(B, state=SUSPECT), Change(replace(B, state=SUSPECT), ALIVE)),
        (B, replace(B, beat=11, address="b:2"), Change(replace(B, beat=11, address="b:2"), ALIVE)),
        (B, replace(B, incarnation=4), Change(replace(B, incarnation=4), ALIVE)),
        (None, replace(B, state=DEAD), None),
    ],
)
def test_only_what_matters_is_told(known: Member | None, rumour: Member, told: Change | None):
    membership = knowing(known) if known else view_of()
    assert membership.merge([rumour], 1.0) == ([told] if told else [])


@pytest.mark.parametrize(
    "garbage",
    [
        replace(B, id=""),
        replace(B, id="x" * 1000),
        replace(B, id="b\n2026 everything is fine"),
        replace(B, address="h" * 10_000),
        replace(B, address="b:1\x1b[2J"),
        replace(B, incarnation=-1),
        replace(B, incarnation=2**63),
        replace(B, beat=-1),
        replace(B, round=-2),
        replace(B, step=-1),
        replace(B, from_round=-7),
        replace(B, upload_bps=-1),
    ],
)
def test_garbage_is_ignored(garbage: Member):
    membership = view_of()
    assert membership.merge([garbage], 0.0) == []
    assert membership.members() == ()


def test_a_dead_member_can_come_back_with_a_higher_incarnation():
    membership = knowing(replace(B, state=DEAD), replace(B, id="c", state=ALIVE))
    membership.merge([replace(B, id="c", state=DEAD)], 0.0)
    membership.merge([replace(B, beat=99), replace(B, id="c", beat=99)], 1.0)
    assert membership.members(ALIVE) == ()
    membership.merge([replace(B, incarnation=4), replace(B, id="c", incarnation=4)], 2.0)
    assert [m.id for m in membership.members(ALIVE)] == ["b", "c"]


def test_left_stays_left_until_a_higher_incarnation():
    membership = knowing(B)
    membership.merge([replace(B, state=LEFT)], 0.0)
    membership.merge([replace(B, beat=99), replace(B, state=DEAD, beat=99)], 1.0)
    assert membership.members(LEFT) == (replace(B, state=LEFT),)
    membership.merge([replace(B, incarnation=4, beat=0)], 2.0)
    assert membership.members(ALIVE) == (replace(B, incarnation=4, beat=0),)


# about myself


def test_a_suspicion_older_than_my_last_beat_needs_no_answer():
    membership = view_of()
    rumour = replace(membership.me, state=SUSPECT)
    membership.beat(0, 1)
    assert membership.merge([rumour], 0.0) == []
    assert membership.me.incarnation == 0


@pytest.mark.parametrize("state", [SUSPECT, DEAD, LEFT])
@pytest.mark.parametrize("incarnation", [0, 1, 7])
def test_bad_news_about_me_is_refuted_with_a_higher_incarnation(state: State, incarnation: int):
    membership = view_of()
    [change] = membership.merge([replace(membership.me, state=state, incarnation=incarnation)], 0.0)
    assert change == Change(membership.me, state)
    assert membership.me.state is ALIVE
    assert membership.me.incarnation == incarnation + 1


@pytest.mark.parametrize("earlier_life", [{"incarnation": 4}, {"beat": 1000}])
def test_a_restarted_peer_outbids_its_earlier_life(earlier_life: dict[str, int]):
    membership, other = view_of(), view_of("b")
    stale = replace(membership.me, address="old:9", **earlier_life)  # type: ignore[arg-type]
    other.merge([stale], 0.0)
    membership.merge(other.view(), 0.0)
    other.merge(membership.view(), 0.0)
    assert other.get("a") == membership.me
    assert membership.me.address == "a:1"


def test_who_has_left_does_not_argue():
    membership = view_of()
    membership.leave()
    assert membership.merge([replace(membership.me, state=DEAD), replace(membership.me, state=LEFT, beat=9)], 0.0) == []
    assert membership.me.state is LEFT
    assert membership.roster(3) == ()


def test_my_own_progress_beats_what_others_have():
    membership, other = view_of(), view_of("b")
    other.merge(membership.view(), 0.0)
    membership.beat(2, 17)
    membership.update_me(upload_bps=5, address="a:2")
    other.merge(membership.view(), 0.0)
    assert other.get("a") == membership.me
    assert (membership.me.round, membership.me.step, membership.me.address) == (2, 17, "a:2")


def test_the_state_and_the_id_are_not_mine_to_change():
    with pytest.raises(TypeError, match="state"):
        view_of().update_me(state=3)


# time


def test_a_silent_member_becomes_suspect_then_dead_within_the_times():
    membership = knowing(B)
    assert membership.tick(4.9) == []
    assert membership.tick(5.0) == [Change(replace(B, state=SUSPECT), ALIVE)]
    assert membership.tick(14.9) == []
    assert membership.tick(15.0) == [Change(replace(B, state=DEAD), SUSPECT)]
    assert membership.tick(16.0) == []


def test_being_mentioned_is_no_sign_of_life():
    membership = knowing(B)
    for second in range(1, 15):
        membership.merge([B], float(second))
    assert membership.tick(15.0) == [Change(replace(B, state=DEAD), ALIVE)]


def test_a_suspect_recovers_when_its_beat_grows():
    membership = knowing(B)
    membership.tick(6.0)
    assert membership.merge([replace(B, beat=11)], 6.5) == [Change(replace(B, beat=11), SUSPECT)]
    assert membership.tick(11.0) == []


def test_direct_contact_puts_time_outs_off():
    membership = knowing(B)
    membership.heard("b", 4.0)
    membership.heard("nobody", 4.0)
    assert membership.tick(8.9) == []
    assert [c.member.state for c in membership.tick(9.0)] == [SUSPECT]


def test_an_unreachable_member_is_suspected_at_once_and_dies_of_silence():
    membership = knowing(B)
    assert membership.unreachable("b", 0.1) == [Change(replace(B, state=SUSPECT), ALIVE)]
    assert membership.unreachable("b", 0.2) == []
    assert membership.unreachable("nobody", 0.2) == []
    assert [c.member.state for c in membership.tick(15.0)] == [DEAD]


def test_a_broken_link_of_ours_does_not_suspect_a_member_for_ever():
    membership = knowing(B)
    membership.unreachable("b", 0.0)
    membership.merge([replace(B, beat=11)], 0.5)
    assert membership.unreachable("b", 1.0) == []
    membership.heard("b", 1.5)
    assert len(membership.unreachable("b", 2.0)) == 1


def test_a_stall_of_ours_is_nobody_elses_fault():
    membership = knowing(B)
    membership.excuse(60.0, 60.0)
    assert membership.tick(60.0) == []
    assert len(membership.tick(65.0)) == 1


def test_who_was_heard_after_a_stall_is_not_excused_into_the_future():
    membership = knowing(B)
    membership.merge([replace(B, beat=11)], 60.0)
    membership.excuse(60.0, 60.0)
    assert len(membership.tick(65.0)) == 1


def test_the_dead_are_forgotten_and_stale_gossip_does_not_bring_them_back():
    membership = knowing(B, forget_after_s=100.0)
    membership.tick(15.0)
    membership.tick(114.0)
    assert membership.members(DEAD) == (replace(B, state=DEAD),)
    membership.tick(115.0)
    assert membership.members() == ()
    assert membership.get("b") is None
    for stale in (B, replace(B, beat=99), replace(B, state=DEAD)):
        assert membership.merge([stale], 120.0) == []
        assert membership.members() == ()
    assert membership.merge([replace(B, incarnation=4)], 121.0) == [Change(replace(B, incarnation=4), None)]


def test_nobody_learns_a_dead_member_from_gossip_so_it_does_not_go_round_for_ever():
    membership = knowing(replace(B, state=DEAD))
    assert membership.view() == (membership.me,)
    membership.tick(1200.0)
    assert membership._records == {}


def test_a_full_view_gives_up_the_dead_but_never_the_living():
    crowd = [replace(B, id=f"m{i}") for i in range(4)]
    membership = knowing(*crowd, max_members=4)
    membership.merge([replace(crowd[2], state=LEFT)], 1.0)
    membership.merge([replace(B, id="new"), replace(B, id="newer")], 2.0)
    assert [m.id for m in membership.members()] == ["m0", "m1", "m3", "new"]


# questions


def test_the_roster_holds_who_is_alive_and_has_started():
    others = [
        replace(B, id="joining", from_round=-1),
        replace(B, id="later", from_round=8),
        replace(B, id="suspect", state=SUSPECT),
        replace(B, id="in", from_round=7),
    ]
    membership = knowing(*others)
    assert [m.id for m in membership.roster(7)] == ["a", "in"]
    assert [m.id for m in membership.roster(8)] == ["a", "in", "later"]
    membership.update_me(from_round=-1)
    assert [m.id for m in membership.roster(7)] == ["in"]
    assert roster(membership.view(), 7) == membership.roster(7)


def test_a_member_without_an_address_takes_part_but_is_never_a_target():
    membership = knowing(replace(B, address=""), replace(B, id="c", address="c:1"))
    rng = random.Random(0)
    assert [m.id for m in membership.roster(5)] == ["a", "b", "c"]
    assert {m.id for _ in range(50) for m in membership.gossip_targets(2, rng)} == {"c"}


def test_nobody_gossips_with_itself_even_under_an_older_name():
    membership = knowing(replace(B, id="older-me", address="a:1"))
    assert membership.gossip_targets(2, random.Random(0)) == ()
    assert "a" not in [m.id for m in membership.members()]


def test_targets_are_few_live_and_now_and_then_a_dead_one():
    membership = knowing(*[replace(B, id=f"m{i}", address=f"m{i}:1") for i in range(6)])
    membership.merge([replace(B, id="m5", address="m5:1", state=DEAD)], 0.0)
    membership.merge([replace(B, id="m4", address="m4:1", state=LEFT)], 0.0)
    rng = random.Random(1)
    draws = [[m.id for m in membership.gossip_targets(2, rng)] for _ in range(200)]
    assert all(len(set(draw)) == 2 for draw in draws)
    assert 5 < sum("m5" in draw for draw in draws) < 50
    assert {id_ for draw in draws for id_ in draw} == {"m0", "m1", "m2", "m3", "m5"}


def test_the_swarm_is_where_the_median_of_the_others_is():
    membership = view_of()
    assert membership.swarm_round() is None
    rounds = {"b": 4, "c": 9, "d": 6, "joining": -1}
    membership.merge([replace(B, id=id_, round=r) for id_, r in rounds.items()], 0.0)
    membership.merge([replace(B, id="e", round=50, state=SUSPECT)], 0.0)
    assert membership.swarm_round() == 6
    assert swarm_round(membership.view(), "a") == 6
