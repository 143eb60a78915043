"""Plans: the same on every peer, fair, and as good at agreement as the theory says."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peer.plan import Party, Plan, plan, sent_bytes

QUICK = settings(derandomize=True, max_examples=40, deadline=None)
RUN = bytes(range(16))


def parties(count: int, undialable: frozenset[int] = frozenset()) -> list[Party]:
    return [Party(f"peer-{number:03d}", number not in undialable) for number in range(count)]


def everyone(strategy: str, group: list[Party], round_: int = 3, sizes: tuple[int, ...] = (4096,) * 64) -> list[Plan]:
    """Return each party's plan, each from its own order of the same members."""
    shuffled = random.Random(round_)
    plans = []
    for party in group:
        seen = shuffled.sample(group, len(group))
        plans.append(plan(strategy, RUN, round_, "mix2", seen, party.id, sizes))
    return plans


@pytest.mark.parametrize("strategy", ["none", "pair", "global"])
def test_a_peer_alone_plans_nothing(strategy):
    alone = plan(strategy, RUN, 0, "mix1", parties(1), "peer-000", [10, 20])
    assert (alone.strategy, alone.kind, alone.parties) == ("none", "none", ("peer-000",))
    assert sent_bytes(alone, lambda n: n, lambda n: n, [10, 20]) == 0


@given(st.integers(2, 17), st.integers(0, 10_000))
@QUICK
def test_pairs_are_mutual_opened_from_one_side_and_leave_at_most_one_idle(count, round_):
    plans = {p.me: p for p in everyone("pair", parties(count), round_)}
    idle = [p for p in plans.values() if p.kind == "none"]
    assert len(idle) == count % 2
    for mine in plans.values():
        if mine.partner is not None:
            theirs = plans[mine.partner]
            assert theirs.partner == mine.me != mine.partner
            assert mine.dials != theirs.dials
            assert mine.dials == (mine.me < mine.partner)
            assert mine.weight == theirs.weight == 0.5
            assert mine.kind == "direct"
    assert len({p.digest for p in plans.values()}) == 1


@given(st.integers(2, 12), st.sets(st.integers(0, 11)), st.integers(0, 50))
@QUICK
def test_whoever_cannot_be_dialled_dials_and_two_of_them_stay_alone(count, undialable, round_):
    group = parties(count, frozenset(undialable))
    can = {party.id: party.dialable for party in group}
    for mine in everyone("pair", group, round_):
        if mine.partner is None:
            continue
        dialler, dialled = (mine.me, mine.partner) if mine.dials else (mine.partner, mine.me)
        assert can[dialled]
        assert dialler < dialled or not can[dialler]


def test_two_peers_that_nobody_can_dial_have_no_exchange():
    assert [p.kind for p in everyone("pair", parties(2, frozenset({0, 1})))] == ["none", "none"]
    assert [p.kind for p in everyone("global", parties(3, frozenset({0, 1, 2})))] == ["none"] * 3


def test_pairs_change_with_round_stage_and_run():
    group = parties(8)

    def partners(run: bytes, round_: int, stage: str) -> tuple[str | None, ...]:
        return tuple(plan("pair", run, round_, stage, group, party.id, ()).partner for party in group)

    drawn = [
        partners(RUN, 1, "mix1"),
        partners(RUN, 2, "mix1"),
        partners(RUN, 1, "mix2"),
        partners(bytes(16), 1, "mix1"),
    ]
    assert len(set(drawn)) == 4


def test_every_pair_is_drawn_equally_often():
    rounds, group = 2100, parties(6)
    met: dict[tuple[str, str], int] = {}
    for round_ in range(rounds):
        for party in group:
            mine = plan("pair", RUN, round_, "mix2", group, party.id, ())
            if mine.partner is not None and mine.me < mine.partner:
                met[mine.me, mine.partner] = met.get((mine.me, mine.partner), 0) + 1
    assert len(met) == 15
    assert all(abs(count - rounds / 5) < 5 * (rounds * 0.2 * 0.8) ** 0.5 for count in met.values())


@pytest.mark.parametrize(("count", "rho"), [(8, 6 / 14), (4, 2 / 6), (5, 1 / 2), (7, 1 / 2)])
def test_a_round_of_random_pairs_contracts_the_spread_as_the_theory_says(count, rho):
    """ALGORITHM.md sec. 4: (n-2)/(2(n-1)) of the squared spread is left for even n, 1/2 for odd n."""
    draw = random.Random(count)
    group = parties(count)
    left = 0.0
    rounds = 1500
    for round_ in range(rounds):
        values = {party.id: draw.gauss(0, 1) for party in group}
        mean = sum(values.values()) / count
        before = sum((value - mean) ** 2 for value in values.values())
        after = 0.0
        for party in group:
            mine = plan("pair", RUN, round_, "mix2", group, party.id, ())
            mixed = values[party.id] if mine.partner is None else (values[party.id] + values[mine.partner]) / 2
            after += (mixed - mean) ** 2
        left += after / before / rounds
    assert left == pytest.approx(rho, rel=0.06)


def test_the_plan_is_pinned_so_that_peers_of_different_versions_meet():
    """A change here splits running swarms: raise the protocol's version with it."""
    group = parties(6)
    partners = [p.partner and int(p.partner[-1]) for p in everyone("pair", group, 4)]
    assert partners == [1, 0, 4, 5, 2, 3]
    owners = plan("global", RUN, 3, "mix1", group, "peer-000", [100] * 12).owners
    assert [int(owner[-1]) for owner in owners] == [5, 2, 4, 3, 0, 1, 3, 1, 0, 4, 5, 2]


@given(st.integers(2, 9), st.sets(st.integers(0, 8)), st.integers(0, 30))
@QUICK
def test_all_agree_on_owners_and_only_those_that_can_be_dialled_own(count, undialable, round_):
    group = parties(count, frozenset(undialable))
    plans = everyone("global", group, round_)
    assert len({p.owners for p in plans}) == len({p.digest for p in plans}) == 1
    assert set(plans[0].owners) <= {party.id for party in group if party.dialable}
    if plans[0].kind == "owner":
        owned = sorted(itertools.chain.from_iterable(plans[0].owned_by(party.id) for party in group))
        assert owned == list(range(64))


RATES = {
    "unknown": [0] * 8,
    "equal": [20_000_000] * 5,
    "mixed": [10_000_000, 20_000_000, 40_000_000, 20_000_000],
    "one fast": [10_000_000] * 6 + [80_000_000],
    "some unknown": [10_000_000, 0, 30_000_000, 0],
}


@pytest.mark.parametrize("rates", RATES.values(), ids=RATES)
@pytest.mark.parametrize("per_party", [16, 50])
def test_owners_loads_are_within_a_quarter_of_their_rates_shares(rates, per_party):
    known = [rate for rate in rates if rate]
    weights = [rate or (sum(known) / len(known) if known else 1) for rate in rates]
    group = [Party(f"peer-{number}", True, rate) for number, rate in enumerate(rates)]
    for round_ in range(10):
        sizes = [65_536] * (per_party * len(group) - 8) + [12_000, 700] * 4
        owners = plan("global", RUN, round_, "mix1", group, "peer-0", sizes).owners
        for party, weight in zip(group, weights, strict=True):
            load = sum(size for size, owner in zip(sizes, owners, strict=True) if owner == party.id)
            assert load / sum(sizes) == pytest.approx(weight / sum(weights), rel=0.25)


def test_a_boastful_rate_does_not_own_everything():
    group = [Party("boaster", True, 10**18), *(Party(f"peer-{n}", True, 10_000_000) for n in range(7))]
    owners = plan("global", RUN, 1, "mix1", group, "boaster", [1000] * 230).owners
    assert owners.count("boaster") < 0.72 * 230


def test_peers_whose_views_differ_by_one_member_still_meet_at_most_chunks():
    group = parties(8)
    kept = total = 0
    for round_ in range(20):
        full = plan("global", RUN, round_, "mix1", group, "peer-000", [4096] * 256).owners
        less = plan("global", RUN, round_, "mix1", group[:-1], "peer-000", [4096] * 256).owners
        for before, after in zip(full, less, strict=True):
            if before != "peer-007":
                total += 1
                kept += before == after
    assert kept / total > 0.9


def test_owners_are_dealt_anew_each_round():
    group = parties(4)
    dealt = {plan("global", RUN, round_, "mix1", group, "peer-000", [4096] * 32).owners for round_ in range(5)}
    assert len(dealt) == 5


def test_a_declared_rate_changes_the_plans_digest_only_through_what_is_decided():
    group = parties(2)
    slow = [replace(party, upload_bps=5_000_000) for party in group]
    plain, rated = (plan("pair", RUN, 1, "mix2", g, "peer-000", ()) for g in (group, slow))
    assert plain == rated


@given(st.integers(2, 9), st.sets(st.integers(0, 3)), st.lists(st.integers(1, 9999), min_size=1, max_size=40))
@QUICK
def test_what_all_send_is_twice_the_vector_to_and_from_owners(count, undialable, sizes):
    group = parties(count, frozenset(undialable))
    plans = everyone("global", group, sizes=tuple(sizes))
    sent = sum(sent_bytes(p, lambda n: 3 * n, lambda n: 5 * n, sizes) for p in plans)
    assert sent == ((count - 1) * 8 * sum(sizes) if plans[0].kind == "owner" else 0)


def test_a_pair_sends_the_vector_once_each():
    mine = plan("pair", RUN, 1, "mix2", parties(2), "peer-001", [10, 20])
    assert sent_bytes(mine, lambda n: 2 * n, lambda n: 7 * n, [10, 20]) == 60
    assert mine.owned_by("peer-001") == ()


def test_a_model_without_chunks_has_nothing_to_own():
    assert plan("global", RUN, 1, "mix1", parties(3), "peer-001", []).kind == "none"
