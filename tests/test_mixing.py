"""Exchanges under scripted faults: what is lost degrades its chunk, and nothing else."""

from __future__ import annotations

import inprocess
import pytest
import torch
from inprocess import Team

from peer.loopback import Link
from peer.rounds import RoundReport
from peer.transport import ChunkFrame, Decline, Form, Open, Part, Stage

PAIRS = {"mixing__mix1__strategy": "none", "mixing__mix1__codec": "int8"}
GLOBAL = {"mixing__mix2__strategy": "none"}


def dropped(team: Team) -> dict[str, int]:
    """Return the frames dropped by all peers together, by reason."""
    sums: dict[str, int] = {}
    for peer in team.peers:
        for reason, count in peer.metrics.totals()["dropped"].items():
            if count:
                sums[reason] = sums.get(reason, 0) + count
    return sums


def chunks_of(report: RoundReport, stage: str) -> tuple[int, int, int]:
    outcome = getattr(report, stage)
    return outcome.mixed, outcome.partial, outcome.local


def count_chunks(team: Team) -> int:
    return len(team.peers[0].shelf.layout.chunks)


@pytest.fixture
def pair():
    with inprocess.team(inprocess.spec(**PAIRS, mixing__mix2__deadline=6.0), 2) as team:
        yield team


def link(team: Team, source: str, target: str, **faults: object) -> Link:
    """Set what happens to what one peer sends to another."""
    there = team.net.link(source, target)
    for name, value in faults.items():
        setattr(there, name, value)
    return there


def test_a_frame_lost_between_two_peers_costs_its_chunk_on_one_side_only(pair):
    link(pair, "a", "b", drop={3})  # 0 is Open, so this is a chunk
    a, b = pair.run_round(0)
    assert chunks_of(a, "mix2") == (count_chunks(pair), 0, 0)
    assert chunks_of(b, "mix2") == (count_chunks(pair) - 1, 0, 1)
    assert (a.mix2.label, b.mix2.label) == ("full", "degraded")


def test_a_corrupted_frame_is_counted_and_dropped_and_the_stream_goes_on(pair):
    link(pair, "a", "b", corrupt={2, 4})
    _, b = pair.run_round(0)
    assert dropped(pair) == {"checksum": 2}
    assert chunks_of(b, "mix2") == (count_chunks(pair) - 2, 0, 2)


def test_a_frame_that_comes_twice_is_used_once(pair):
    link(pair, "a", "b", duplicate={2, 3})
    reports = pair.run_round(0)
    assert {report.mix2.label for report in reports} == {"full"}
    assert dropped(pair) == {"duplicate": 2}
    with inprocess.team(pair.peers[0].spec, 2) as spared:
        spared.run_round(0)
        for hit, twin in zip(pair.peers, spared.peers, strict=True):
            assert torch.equal(hit.shelf.vectors.z, twin.shelf.vectors.z)


def test_a_broken_stream_is_opened_again_for_what_is_still_missing(pair):
    there = link(pair, "a", "b", cut_after=4)
    original = pair.peers[0].transport.exchange
    opened = []

    async def counted(address: str, timeout_s: float):
        opened.append(address)
        if len(opened) == 2:
            there.cut_after = None
        return await original(address, timeout_s)

    pair.peers[0].transport.exchange = counted
    a, b = pair.run_round(0)
    assert opened == ["b", "b"]
    assert a.mix2.mixed + b.mix2.mixed >= 2 * count_chunks(pair) - 4
    assert {a.mix2.label, b.mix2.label} <= {"full", "degraded"}


def test_an_unreachable_partner_costs_at_most_the_deadline_and_leaves_the_own_gradient(pair):
    link(pair, "a", "b", refuse=True)
    twin = pair.peers[0].trainer.twin()
    a, b = pair.run_round(0)
    assert (a.mix2.label, b.mix2.label) == ("failed", "failed")
    assert a.waited_s <= a.deadline_s + 1
    assert b.waited_s <= b.deadline_s + 1
    for step in range(3):
        twin.step(step)
    start = inprocess.start_point()
    assert torch.equal(pair.peers[0].shelf.vectors.v, start - twin.y)


def test_a_member_given_up_by_the_probe_is_not_waited_for(pair):
    a = pair.peers[0]
    a.network.loop.call_soon_threadsafe(a.network.loop.call_later, 0.3, a.mixer.lost, "b")
    report = a.rounds.run(0)
    assert report.mix2.label == "failed"
    assert report.waited_s < 3.0


def test_a_round_asked_to_end_while_it_waits_ends_the_wait(pair):
    a = pair.peers[0]
    a.network.loop.call_soon_threadsafe(a.network.loop.call_later, 0.3, a.stop.ask)
    report = a.rounds.run(0)
    assert report.steps == 3
    assert report.mix2.label == "failed"
    assert report.waited_s < 3.0


# Owner-wise.


def test_a_frame_lost_on_the_way_to_an_owner_makes_one_chunk_partial_for_all():
    with inprocess.team(inprocess.spec(**GLOBAL), 4) as team:
        # What a sends to b: on a's stream that is a contribution, on b's own stream a result.
        link(team, "a", "b", drop={2}, stage=Stage.MIX1)
        a, b, c, d = team.run_round(0)
        assert {chunks_of(report, "mix1") for report in (a, c, d)} == {(count_chunks(team) - 1, 1, 0)}
        assert chunks_of(b, "mix1") == (count_chunks(team) - 2, 1, 1)
        first, _, *rest = [peer.shelf.vectors.x for peer in team.peers]
        assert all(torch.equal(first, x) for x in rest)


def test_a_result_lost_on_the_way_back_leaves_that_chunk_local_and_it_mixes_again():
    with inprocess.team(inprocess.spec(**GLOBAL), 4) as team:
        back = link(team, "b", "a", drop={1}, stage=Stage.MIX1)  # 0 is Accept
        reports = team.run_round(0)
        local = [report.mix1.local for report in reports]
        assert local[0] == 1
        assert local[1:] == [0, 0, 0]
        back.drop = set()
        for round_ in (1, 2):
            reports = team.run_round(round_)
            assert {report.mix1.label for report in reports} == {"full"}
            first, *rest = [peer.shelf.vectors.x for peer in team.peers]
            assert all(torch.equal(first, x) for x in rest)


def test_a_peer_with_another_reference_gets_the_same_bits_as_the_others():
    with inprocess.team(inprocess.spec(**GLOBAL), 3) as team:
        team.run_round(0)
        team.peers[2].shelf.vectors.x += 0.25
        reports = team.run_round(1)
        assert {report.mix1.label for report in reports} == {"full"}
        first, *rest = [peer.shelf.vectors.x for peer in team.peers]
        assert all(torch.equal(first, x) for x in rest)


def test_a_member_nobody_can_reach_does_not_stop_the_others():
    with inprocess.team(inprocess.spec(**GLOBAL), 4) as team:
        for other in "abc":
            link(team, "d", other, refuse=True)
            link(team, other, "d", refuse=True)
        reports = team.run_round(0, team.peers[:3])
        for report in reports:
            assert report.mix1.members == 3
            owned_by_d = report.mix1.local
            assert report.mix1.mixed == 0
            assert report.mix1.partial == count_chunks(team) - owned_by_d


def test_every_chunk_of_every_round_is_accounted_for():
    with inprocess.team(inprocess.spec(), 3) as team:
        link(team, "a", "b", drop={2, 5}, corrupt={3})
        link(team, "c", "a", cut_after=3, stage=Stage.MIX1)
        for round_ in range(2):
            for report in team.run_round(round_):
                for outcome in (report.mix1, report.mix2):
                    if outcome is not None:
                        assert outcome.mixed + outcome.partial + outcome.local == count_chunks(team)
        assert all(torch.isfinite(peer.shelf.vectors.z).all() for peer in team.peers)


# What arrives is not trusted.


def chunk_frame(team: Team, **fields: object) -> ChunkFrame:
    values = {
        "run": team.peers[0].spec.key,
        "round": 0,
        "stage": Stage.MIX2,
        "chunk": 0,
        "part": Part.CONTRIBUTION,
        "form": Form.PLAIN,
        "codec": 4,
        "values": 1024,
        "contributors": 1,
        "checksum": 0,
        "payload": b"",
    }
    return ChunkFrame(**{**values, **fields})


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"run": bytes(16)}, "foreign_run"),
        ({"round": 7}, "foreign_round"),
        ({"stage": Stage.MIX1}, "stage"),
        ({"chunk": 10_000}, "unplanned"),
        ({"part": Part.RESULT}, "unplanned"),
        ({"values": 3}, "size"),
        ({"checksum": 1}, "checksum"),
        ({"codec": 99}, "codec"),
        ({"payload": b"", "checksum": 0}, "size"),
    ],
)
def test_a_frame_that_does_not_belong_is_dropped_with_its_reason_and_the_rest_is_mixed(pair, fields, reason):
    sent = []

    async def interfere(address: str, timeout_s: float):
        stream = await original(address, timeout_s)
        send = stream.send

        async def also(frame):
            await send(frame)
            if isinstance(frame, Open):
                size = pair.peers[0].shelf.layout.chunks[0].size
                sent.append(chunk_frame(pair, **{"values": size, **fields}))
                await send(sent[0])

        stream.send = also
        return stream

    original = pair.peers[0].transport.exchange
    pair.peers[0].transport.exchange = interfere
    reports = pair.run_round(0)
    assert sent
    assert dropped(pair) == {reason: 1}
    assert {report.mix2.label for report in reports} == {"full"}


def test_a_peer_that_is_past_a_round_tells_so_at_once(pair):
    a, b = pair.peers
    b.others.members = tuple(m for m in b.others.members if m.id == "b")
    for round_ in range(3):
        b.rounds.run(round_)
    report = a.rounds.run(0)
    assert report.mix2.label == "failed"
    assert report.waited_s < 3.0
    assert report.ahead == 2


def test_a_stream_of_another_run_is_declined(pair):
    async def knock() -> object:
        stream = await pair.peers[0].transport.exchange("b", 5.0)
        await stream.send(Open(bytes(16), 0, Stage.MIX2, "a", b"", ()))
        answer = await stream.receive()
        stream.cancel()
        return answer

    answer = pair.network.call(knock(), 10)
    assert isinstance(answer, Decline)
    assert dropped(pair) == {"foreign_run": 1}


@pytest.mark.parametrize("waiting", [0, 1])
def test_a_partner_rounds_away_is_not_waited_for_until_the_deadline(waiting):
    with inprocess.team(inprocess.spec(**PAIRS, mixing__mix2__deadline=30.0), 2) as team:
        peer = team.peers[waiting]
        peer.mixer._round_of = {peer.id: 0, team.peers[1 - waiting].id: 4}.get
        (report,) = team.run_round(0, [peer])
        assert report.mix2.label == "failed"
        assert report.waited_s < 15.0


def test_a_partner_one_round_behind_is_waited_for(pair):
    early = pair.peers[0]
    early.mixer._round_of = {"a": 0, "b": -1}.get
    (report,) = pair.run_round(0, [early])
    assert report.mix2.label == "failed"
    assert report.waited_s >= 5.9
