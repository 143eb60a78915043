"""What goes on the wire comes back the same, and nothing that arrives can be larger or stranger than its bounds."""

from __future__ import annotations

import importlib.util
import random
import zlib
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from peer import wire
from peer.errors import FrameError, RefusedError
from peer.membership import Member, State
from peer.proto import peer_pb2 as pb
from peer.transport import (
    Accept,
    ChunkFrame,
    Decline,
    Done,
    Form,
    Gossip,
    JoinReply,
    JoinRequest,
    Open,
    Part,
    Stage,
    StateChunk,
    StatePosition,
    StateRequest,
    TopK,
    Vector,
)
from peer.wire import bounds

RUN = bytes(range(16))
LIMIT = 1 << 20
CHUNK = ChunkFrame(RUN, 2**40, Stage.MIX2, 5, Part.RESULT, Form.DIFFERENCE, 4, 999, 3, zlib.crc32(b"abc"), b"abc")
FRAMES = [
    Open(RUN, 0, Stage.MIX1, "a", b"p" * 16, (0, 3, 4), b"12345678" * 3),
    Open(RUN, 1, Stage.MIX2, "ä", b"", ()),
    Accept((1, 2), b"x" * 16),
    Accept(()),
    Decline("busy", -1),
    CHUNK,
    replace(CHUNK, payload=b""),
    replace(CHUNK, payload=b"x" * 100_000, contributors=1, round=0, chunk=0, part=Part.CONTRIBUTION, form=Form.PLAIN),
    Done(Part.CONTRIBUTION),
]
MEMBER = Member("a", "h:1", 1, State.SUSPECT, 2, -1, 3, -1, 4)


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: type(frame).__name__)
def test_a_frame_comes_back_as_it_was(frame):
    raw = wire.encode_frame(frame)
    assert wire.decode_frame(raw, LIMIT) == frame
    assert wire.decode_frame(memoryview(raw), LIMIT) == frame
    assert pb.Frame.FromString(raw).SerializeToString() == raw  # the chunk's short cut writes what protobuf writes


def test_frames_of_the_largest_run_fit_what_frame_bytes_says():
    chunks, id_ = tuple(range(2**32 - 5000, 2**32)), "\U0001f600" * bounds.MAX_ID
    opened = Open(RUN, 2**63, Stage.MIX1, id_, b"p" * 64, chunks, b"r" * 8 * len(chunks))
    assert len(wire.encode_frame(opened)) <= wire.frame_bytes(1000, len(chunks))
    large = replace(CHUNK, payload=b"x" * 5000, chunk=2**32 - 1, values=2**32 - 1, codec=2**32 - 1, round=2**63)
    assert len(wire.encode_frame(large)) <= wire.frame_bytes(5000, 3)
    item = StateChunk(2**63, Vector.X, 2**32 - 1, 2**32 - 1, b"x" * 5000)
    assert len(wire.encode_state_item(item)) <= wire.frame_bytes(5000, 3)


def test_every_other_message_comes_back_as_it_was():
    gossip = Gossip(RUN, "a", (MEMBER, Member("b", "")))
    assert wire.decode_gossip(wire.encode_gossip(gossip)) == gossip
    request = JoinRequest(wire.PROTOCOL, MEMBER, "run", {"inner.lr": "0.001"}, b"digest")
    assert wire.decode_join_request(wire.encode_join_request(request)) == request
    reply = JoinReply('{"a":1}', (MEMBER,))
    assert wire.decode_join_reply(wire.encode_join_reply(reply)) == reply
    ask = StateRequest(RUN, b"layout", b"h" * 48)
    assert wire.decode_state_request(wire.encode_state_request(ask)) == ask
    for item in (StatePosition(3, 4, 0.5), StateChunk(3, Vector.X, 7, 9, b"data")):
        assert wire.decode_state_item(wire.encode_state_item(item), LIMIT) == item
    assert wire.decode_top_k_request(wire.encode_top_k_request(RUN, 5)) == (RUN, 5)
    probe = TopK(5, 2, 3, b"i" * 24, b"l" * 12, b"t" * 8)
    assert wire.decode_top_k_reply(wire.encode_top_k_reply(probe)) == probe
    assert wire.decode_top_k_reply(wire.encode_top_k_reply(None)) is None
    assert wire.decode_status(wire.encode_status('{"round":1}')) == '{"round":1}'


def frame(**kind: object) -> bytes:
    return pb.Frame(**kind).SerializeToString()


def opened(**fields: object) -> bytes:
    return frame(open=pb.Open(**{"run": RUN, "stage": 1, "sender": "a", **fields}))


def coded(**fields: object) -> bytes:
    whole = {"run": RUN, "stage": 1, "part": 1, "form": 1, "contributors": 1, **fields}
    return frame(chunk=pb.Chunk(**whole))


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "malformed"),
        (b"\xff", "malformed"),
        (wire.END, "malformed"),  # streams take it out; it means nothing here
        (b"\x22\xff\xff\xff\xff\x0f", "malformed"),  # a chunk that claims 4 GiB
        (wire.encode_frame(CHUNK)[:-1], "malformed"),
        (opened(run=b"short"), "malformed"),
        (opened(stage=0), "stage"),
        (opened(stage=77), "stage"),
        (opened(sender=""), "malformed"),
        (opened(sender="x" * 129), "malformed"),
        (opened(sender="a\nERROR forged"), "malformed"),
        (opened(plan=b"p" * 65), "malformed"),
        (opened(chunks=[2, 1]), "malformed"),
        (opened(chunks=[1, 1]), "malformed"),
        (opened(chunks=[1, 2], references=b"x" * 15), "malformed"),
        (frame(accept=pb.Accept(references=b"x" * 8)), "malformed"),
        (frame(decline=pb.Decline(reason="x" * 513)), "malformed"),
        (frame(done=pb.Done()), "malformed"),
        (coded(run=b""), "malformed"),
        (coded(stage=9), "stage"),
        (coded(part=0), "malformed"),
        (coded(form=3), "malformed"),
        (coded(contributors=0), "malformed"),
        (coded(contributors=2**32 - 1), "malformed"),
        (b"x" * (LIMIT + 1), "oversized"),
    ],
)
def test_a_frame_out_of_bounds_is_refused_with_its_reason(raw, reason):
    with pytest.raises(FrameError) as refused:
        wire.decode_frame(raw, LIMIT)
    assert refused.value.reason == reason


def test_a_million_chunks_are_the_most_a_frame_may_list():
    most = bounds.MAX_CHUNKS
    assert len(wire.decode_frame(frame(accept=pb.Accept(chunks=range(most))), 8 * LIMIT).chunks) == most
    with pytest.raises(FrameError):
        wire.decode_frame(frame(accept=pb.Accept(chunks=range(most + 1))), 8 * LIMIT)


@pytest.mark.parametrize(
    "decode",
    [
        wire.decode_gossip,
        wire.decode_join_request,
        wire.decode_join_reply,
        wire.decode_state_request,
        wire.decode_top_k_request,
        wire.decode_top_k_reply,
        wire.decode_refusal,
        wire.decode_status,
        lambda raw: wire.decode_frame(raw, LIMIT),
        lambda raw: wire.decode_state_item(raw, LIMIT),
    ],
)
def test_noise_is_refused_and_never_more_than_that(decode):
    noise = random.Random(0)
    samples = [wire.encode_frame(f) for f in FRAMES] + [wire.encode_gossip(Gossip(RUN, "a", (MEMBER,)))]
    for _ in range(500):
        raw = bytearray(noise.choice(samples)[:200] or b"x")
        for _ in range(noise.randrange(1, 6)):
            raw[noise.randrange(len(raw))] = noise.randrange(256)
        with suppress(FrameError):
            decode(bytes(raw))


@pytest.mark.parametrize(
    "bad",
    [
        pb.Member(id="", address="h:1"),
        pb.Member(id="x" * 129),
        pb.Member(id="a\nb"),
        pb.Member(id="c", address="h" * 301),
        pb.Member(id="d", address="h\t:1"),
        pb.Member(id="e", state=9),
    ],
)
def test_a_member_that_cannot_be_read_does_not_cost_the_others(bad):
    good = pb.Member(id="ok", address="h:1")
    view = pb.View(run=RUN, sender="a", members=[bad, good])
    assert [m.id for m in wire.decode_gossip(view.SerializeToString()).members] == ["ok"]
    with pytest.raises(FrameError):
        wire.decode_join_request(pb.JoinRequest(member=bad).SerializeToString())


def test_members_are_counted_before_they_are_parsed():
    empty_member = bytes([pb.View.MEMBERS_FIELD_NUMBER << 3 | 2, 0])
    for decode, entry in (
        (wire.decode_gossip, empty_member),
        (wire.decode_join_reply, bytes([pb.JoinReply.MEMBERS_FIELD_NUMBER << 3 | 2, 0])),
    ):
        with pytest.raises(FrameError, match="more than 4097 members"):
            decode(entry * 1_000_000)
    full = Gossip(RUN, "a", tuple(replace(MEMBER, id=f"peer-{i}") for i in range(bounds.MAX_MEMBERS)))
    assert wire.decode_gossip(wire.encode_gossip(full)) == full


@pytest.mark.parametrize(
    ("decode", "message"),
    [
        (wire.decode_gossip, pb.View(run=RUN)),
        (wire.decode_join_request, pb.JoinRequest(member=pb.Member(id="a"), name="x" * 129)),
        (wire.decode_join_request, pb.JoinRequest(member=pb.Member(id="a"), fields={"a": "x" * 65_537})),
        (wire.decode_join_request, pb.JoinRequest(member=pb.Member(id="a"), fields={"x" * 129: ""})),
        (wire.decode_join_request, pb.JoinRequest(member=pb.Member(id="a"), fields={str(i): "" for i in range(513)})),
        (wire.decode_join_request, pb.JoinRequest()),
        (wire.decode_join_reply, pb.JoinReply(spec="x" * (LIMIT + 1))),
        (wire.decode_state_request, pb.StateRequest(run=RUN, have=b"x" * 25)),
        (wire.decode_state_request, pb.StateRequest(run=RUN, layout=b"x" * 65)),
        (wire.decode_top_k_request, pb.TopKRequest(run=b"")),
        (wire.decode_top_k_reply, pb.TopKReply(probe=pb.TopK())),
        (wire.decode_top_k_reply, pb.TopKReply(probe=pb.TopK(tokens=2**32 - 1, k=2**32 - 1))),
        (wire.decode_top_k_reply, pb.TopKReply(probe=pb.TopK(tokens=1, k=1, ids=b"1234", log_probs=b"12", tail=b"1"))),
    ],
)
def test_a_message_out_of_bounds_is_malformed(decode, message):
    with pytest.raises(FrameError) as refused:
        decode(message.SerializeToString())
    assert refused.value.reason == "malformed"


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        (pb.StateItem(), "malformed"),
        (pb.StateItem(chunk=pb.StateChunk(vector=0)), "malformed"),
        (pb.StateItem(chunk=pb.StateChunk(vector=1, payload=b"x" * LIMIT)), "oversized"),
        (pb.StateItem(position=pb.Position(step_seconds=float("nan"))), "malformed"),
        (pb.StateItem(position=pb.Position(step_seconds=-1)), "malformed"),
    ],
)
def test_a_state_item_out_of_bounds_is_refused_with_its_reason(item, reason):
    with pytest.raises(FrameError) as refused:
        wire.decode_state_item(item.SerializeToString(), LIMIT)
    assert refused.value.reason == reason


def test_a_refusal_keeps_its_fields_but_not_their_length():
    refused = RefusedError("different run", {f"f{i}": ("a" * 1000, "b") for i in range(100)} | {"e": ("1", "2")})
    raw = wire.encode_refusal(refused)
    assert len(raw) < 8192
    back = wire.decode_refusal(raw)
    assert back.reason == refused.reason
    assert back.fields["e"] == ("1", "2")
    assert len(back.fields) == 32


def test_a_refusal_cannot_forge_lines_of_a_log():
    back = wire.decode_refusal(pb.Refusal(reason="no\n\x1b[31mERROR all is lost").SerializeToString())
    assert back.reason.isprintable()


def test_the_generated_code_is_that_of_the_protocol():
    path = Path(__file__).parents[1] / "protos" / "generate.py"
    spec = importlib.util.spec_from_file_location("generate", path)
    generate = importlib.util.module_from_spec(spec)
    pytest.importorskip("grpc_tools")
    spec.loader.exec_module(generate)
    assert generate.stale() == []
