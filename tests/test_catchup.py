"""State from a member: only what differs moves, donors may fail, and nothing that is wrong is written."""

from __future__ import annotations

from types import SimpleNamespace

import inprocess
import pytest
import torch
from inprocess import Peer, Team

from peer.catchup import MOST_FAILED, Shelf
from peer.course import Course
from peer.errors import FrameError
from peer.membership import Member
from peer.transport import StateChunk, Vector


@pytest.fixture
def team():
    with inprocess.team(inprocess.spec(), 3) as three:
        trained = three.peers[:2]
        for peer in trained:
            peer.others.members = peer.others.members[:2]
        for round_ in range(2):
            three.run_round(round_, trained)
        yield three


def newcomer(team: Team) -> Peer:
    return team.peers[2]


def catch_up(team: Team, *donors: str):
    return team.network.call(newcomer(team).asker().catch_up(donors), 30)


def assert_same_state(one: Shelf, other: Shelf) -> None:
    for name in ("z", "v", "x"):
        assert torch.equal(getattr(one.vectors, name), getattr(other.vectors, name))
    assert one.rounds == other.rounds


def test_a_newcomer_gets_state_and_round_of_its_donor(team):
    donor = team.peers[0]
    donor.others.publish(2, 1)
    position = catch_up(team, "a")
    assert (position.round, position.step) == (2, 1)
    assert_same_state(newcomer(team).shelf, donor.shelf)


def test_peers_that_agree_move_nothing(team):
    team.peers[0].others.publish(2, 0)
    catch_up(team, "a")
    before = team.net.link("a", "c").sent
    catch_up(team, "a")
    assert team.net.link("a", "c").sent - before == 2  # where the donor is, first and last


def test_the_next_donor_is_asked_when_one_breaks_off_and_what_came_is_kept(team):
    for peer in team.peers[:2]:
        peer.others.publish(2, 0)
    team.peers[1].shelf.vectors.z.copy_(team.peers[0].shelf.vectors.z)
    team.peers[1].shelf.vectors.v.copy_(team.peers[0].shelf.vectors.v)
    team.net.link("a", "c").cut_after = 5
    catch_up(team, "a", "b")
    assert_same_state(newcomer(team).shelf, team.peers[1].shelf)
    assert team.net.link("b", "c").sent < 3 * len(team.peers[0].shelf.layout.chunks) + 2


@pytest.mark.parametrize("fault", [{"corrupt": {4}}, {"cut_after": 3}, {"refuse": True}])
def test_without_a_donor_that_gives_it_whole_there_is_no_state(team, fault):
    link = team.net.link("a", "c")
    for name, value in fault.items():
        setattr(link if name != "refuse" else team.net.link("c", "a"), name, value)
    assert catch_up(team, "a") is None


def test_members_that_are_made_up_are_not_tried_for_ever(team):
    team.peers[0].others.publish(2, 0)
    tried = [f"nowhere{i}" for i in range(MOST_FAILED)]
    assert catch_up(team, *tried[1:], "a") is not None
    assert catch_up(team, *tried, "a") is None


def course_among(team: Team, *members: Member):
    """Return whom the newcomer asked for state, and its course: it sees these members and is given nothing whole."""
    peer = newcomer(team)
    asked: list[list[str]] = []

    def give(donors: list[str]) -> None:
        asked.append(donors)
        peer.shelf.vectors.z.add_(1.0)  # part of the state came, then the donor broke off
        peer.shelf.rounds[0] = 5

    swarm = SimpleNamespace(view=lambda: members, catch_up=give, roster=lambda _: members)
    return asked, Course(
        peer.spec,
        settings=None,
        me=peer.id,
        home=None,
        trainer=peer.trainer,
        shelf=peer.shelf,
        rounds=None,
        swarm=swarm,
        metrics=peer.metrics,
        stop=peer.stop,
        losses=None,
        journal=None,
    )


def test_nobody_follows_a_rumour_into_a_round_that_the_run_does_not_have(team):
    far = [Member(f"far{i}", f"far{i}", round=2**62, from_round=0) for i in range(5)]
    asked, course = course_among(team, Member("a", "a", from_round=0, round=0), *far)
    course._stay_with_swarm()
    assert (asked, course.round, course.step) == ([], 0, 0)


def test_parameters_are_where_z_is_after_a_donor_broke_off(team):
    asked, course = course_among(team, Member("a", "a", from_round=0, round=5))
    course._stay_with_swarm()
    assert asked == [["a"]]
    assert torch.equal(newcomer(team).trainer.y, newcomer(team).shelf.vectors.z)


def test_a_donor_that_goes_on_meanwhile_is_asked_again_for_what_changed(team):
    donor = team.peers[0]
    donor.others.publish(2, 0)
    moved = []

    def where():
        if not moved:  # the first position was told; now the donor passes into the next round
            moved.append(True)
            donor.shelf.vectors.z += 1
            donor.shelf.rounds[:] = [3] * len(donor.shelf.rounds)
            donor.others.publish(3, 0)
        return donor.where()

    team.peers[0].donor = type(donor.donor)(donor.donor.run, donor.shelf, where, donor.donor.coding, donor.donor.pacer)
    position = catch_up(team, "a")
    assert position.round == 3
    assert_same_state(newcomer(team).shelf, donor.shelf)


def test_a_state_of_another_model_or_run_is_refused(team):
    peer = newcomer(team)
    asker = type(peer.asker())(bytes(16), peer.shelf, peer.transport, peer.network.coding, peer.metrics)
    assert team.network.call(asker.catch_up(["a"]), 30) is None


def state_chunk(**fields: object) -> StateChunk:
    values = {"round": 1, "vector": Vector.Z, "chunk": 0, "checksum": 0, "payload": b""}
    return StateChunk(**{**values, **fields})


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"chunk": 999}, "unplanned"),
        ({"chunk": -1}, "unplanned"),
        ({"round": -2}, "unplanned"),
        ({"payload": b"1234"}, "size"),
        ({"checksum": 1, "payload": None}, "checksum"),
    ],
)
def test_what_is_wrong_is_not_written(team, fields, reason):
    shelf = newcomer(team).shelf
    before = shelf.vectors.z.clone()
    if fields.get("payload", b"") is None:
        fields = {**fields, "payload": bytes(4 * shelf.layout.chunks[0].size)}
    with pytest.raises(FrameError) as caught:
        shelf.write(state_chunk(**fields))
    assert caught.value.reason == reason
    assert torch.equal(shelf.vectors.z, before)


def test_numbers_that_are_none_are_not_written(team):
    import zlib

    shelf = newcomer(team).shelf
    payload = torch.full((shelf.layout.chunks[0].size,), float("nan")).numpy().tobytes()
    with pytest.raises(FrameError) as caught:
        shelf.write(state_chunk(payload=payload, checksum=zlib.crc32(payload)))
    assert caught.value.reason == "nonfinite"


def test_diloco_peers_that_fell_apart_agree_again_chunk_by_chunk_with_the_owners():
    run = inprocess.spec().of({**inprocess.spec().model_dump(), "mixing": {"preset": "diloco"}})
    with inprocess.team(run, 3) as team:
        a, b, c = team.peers
        team.net.link("b", "c").drop = {1}  # a result of b never reaches c
        assert [report.mix2.local for report in team.run_round(0)] == [0, 0, 1]
        team.net.link("b", "c").drop = set()
        assert not torch.equal(a.shelf.vectors.z, c.shelf.vectors.z)
        reports = team.run_round(1)
        # Who is unlike depends on who owns the chunk in this round: c itself, or the two others.
        taken = 0
        for peer, report in zip(team.peers, reports, strict=True):
            for owner, chunks in report.mix2.apart.items():
                taken += len(chunks)
                assert team.network.call(peer.asker().take(owner, frozenset(chunks), 2), 30)
        assert taken in (1, 2)
        for name in ("z", "v"):
            assert torch.equal(getattr(a.shelf.vectors, name), getattr(c.shelf.vectors, name))
            assert torch.equal(getattr(b.shelf.vectors, name), getattr(c.shelf.vectors, name))


def test_a_donor_with_nothing_to_send_still_gives_signs_of_life(team, monkeypatch):
    monkeypatch.setattr("peer.catchup.SIGN_OF_LIFE_S", 0.0)
    team.peers[0].others.publish(2, 0)
    assert catch_up(team, "a") is not None
    before = team.net.link("a", "c").sent
    assert catch_up(team, "a").round == 2
    assert team.net.link("a", "c").sent - before > 2
