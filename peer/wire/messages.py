"""Everything that is not a frame to bytes and back: membership, state, probe, status, refusals."""

from __future__ import annotations

import math
from collections.abc import Iterable

from peer.errors import FrameError, RefusedError
from peer.membership import Member, State
from peer.proto import peer_pb2 as pb
from peer.transport import Gossip, JoinReply, JoinRequest, StateChunk, StatePosition, StateRequest, TopK, Vector
from peer.wire import bounds

_STATES: dict[int, State] = {
    pb.MEMBER_STATE_ALIVE: State.ALIVE,
    pb.MEMBER_STATE_SUSPECT: State.SUSPECT,
    pb.MEMBER_STATE_DEAD: State.DEAD,
    pb.MEMBER_STATE_LEFT: State.LEFT,
}
_STATE_NUMBERS = {
    State.ALIVE: pb.MEMBER_STATE_ALIVE,
    State.SUSPECT: pb.MEMBER_STATE_SUSPECT,
    State.DEAD: pb.MEMBER_STATE_DEAD,
    State.LEFT: pb.MEMBER_STATE_LEFT,
}
_VECTORS: dict[int, Vector] = {pb.VECTOR_Z: Vector.Z, pb.VECTOR_V: Vector.V, pb.VECTOR_X: Vector.X}
_VECTOR_NUMBERS = {Vector.Z: pb.VECTOR_Z, Vector.V: pb.VECTOR_V, Vector.X: pb.VECTOR_X}

# A refusal travels in trailing metadata, which must stay small.
_REFUSAL_FIELDS = 32
_REFUSAL_VALUE = 80

# ---- membership ----


def encode_gossip(message: Gossip) -> bytes:
    return pb.View(
        run=message.run, sender=message.sender, members=[_member_message(m) for m in message.members]
    ).SerializeToString()


def decode_gossip(raw: bytes) -> Gossip:
    message = bounds.parse_listing(pb.View, raw, pb.View.MEMBERS_FIELD_NUMBER)
    return Gossip(
        run=bounds.run_key(message.run), sender=bounds.peer_id(message.sender), members=_members(message.members)
    )


def encode_join_request(request: JoinRequest) -> bytes:
    return pb.JoinRequest(
        protocol=request.protocol,
        member=_member_message(request.member),
        name=request.name,
        fields=request.fields,
        layout=request.layout,
    ).SerializeToString()


def decode_join_request(raw: bytes) -> JoinRequest:
    message = bounds.parse(pb.JoinRequest, raw)
    if len(message.fields) > bounds.MAX_FIELDS:
        raise FrameError("malformed", f"{len(message.fields)} fields, at most {bounds.MAX_FIELDS}")
    for name, value in message.fields.items():
        bounds.text("field", name, bounds.MAX_ID)
        if len(value) > bounds.MAX_FIELD_VALUE:
            raise FrameError("malformed", f"{name} has {len(value)} characters, at most {bounds.MAX_FIELD_VALUE}")
    member = _member(message.member)
    if member is None:
        raise FrameError("malformed", "no member to let in")
    return JoinRequest(
        protocol=message.protocol,
        member=member,
        name=bounds.text("name", message.name, bounds.MAX_ID),
        fields=dict(message.fields),
        layout=bounds.digest("layout", message.layout),
    )


def encode_join_reply(reply: JoinReply) -> bytes:
    return pb.JoinReply(spec=reply.spec, members=[_member_message(m) for m in reply.members]).SerializeToString()


def decode_join_reply(raw: bytes) -> JoinReply:
    message = bounds.parse_listing(pb.JoinReply, raw, pb.JoinReply.MEMBERS_FIELD_NUMBER)
    if len(message.spec) > bounds.MAX_SPEC:
        raise FrameError("malformed", f"a run spec of {len(message.spec)} characters")
    return JoinReply(spec=message.spec, members=_members(message.members))


def encode_refusal(refusal: RefusedError) -> bytes:
    """Write a refusal small enough for trailing metadata: long values are cut, they are for reading only."""
    differences = [
        pb.Difference(field=_cut(name), asked=_cut(asked), swarm=_cut(swarm))
        for name, (asked, swarm) in sorted(refusal.fields.items())[:_REFUSAL_FIELDS]
    ]
    return pb.Refusal(reason=refusal.reason[: bounds.MAX_TEXT], differences=differences).SerializeToString()


def decode_refusal(raw: bytes) -> RefusedError:
    message = bounds.parse(pb.Refusal, raw)
    fields = {_printable(d.field): (_printable(d.asked), _printable(d.swarm)) for d in message.differences}
    return RefusedError(_printable(message.reason) or "no reason given", fields)


def _member_message(member: Member) -> pb.Member:
    return pb.Member(
        id=member.id,
        address=member.address,
        incarnation=member.incarnation,
        state=_STATE_NUMBERS[member.state],
        beat=member.beat,
        round=member.round,
        step=member.step,
        from_round=member.from_round,
        upload_bps=member.upload_bps,
    )


def _members(messages: Iterable[pb.Member]) -> tuple[Member, ...]:
    """Leave out those that cannot be read: one bad rumour must not cost the others."""
    members = (_member(message) for message in messages)
    return tuple(member for member in members if member is not None)


def _member(message: pb.Member) -> Member | None:
    named = 0 < len(message.id) <= bounds.MAX_ID and message.id.isprintable()
    addressed = len(message.address) <= bounds.MAX_ADDRESS and message.address.isprintable()
    if not named or not addressed or message.state not in _STATES:
        return None
    return Member(
        id=message.id,
        address=message.address,
        incarnation=message.incarnation,
        state=_STATES[message.state],
        beat=message.beat,
        round=message.round,
        step=message.step,
        from_round=message.from_round,
        upload_bps=message.upload_bps,
    )


# ---- state ----


def encode_state_request(request: StateRequest) -> bytes:
    return pb.StateRequest(run=request.run, layout=request.layout, have=request.have).SerializeToString()


def decode_state_request(raw: bytes) -> StateRequest:
    message = bounds.parse(pb.StateRequest, raw)
    have = bounds.short("have", message.have, bounds.HAVE_BYTES * bounds.MAX_CHUNKS)
    if len(have) % bounds.HAVE_BYTES:
        raise FrameError("malformed", f"{len(have)} bytes of hashes, not a multiple of {bounds.HAVE_BYTES}")
    return StateRequest(run=bounds.run_key(message.run), layout=bounds.digest("layout", message.layout), have=have)


def encode_state_item(item: StatePosition | StateChunk) -> bytes:
    match item:
        case StateChunk():
            chunk = pb.StateChunk(
                round=item.round,
                vector=_VECTOR_NUMBERS[item.vector],
                chunk=item.chunk,
                checksum=item.checksum,
                payload=item.payload,
            )
            return pb.StateItem(chunk=chunk).SerializeToString()
        case StatePosition():
            position = pb.Position(round=item.round, step=item.step, step_seconds=item.step_seconds)
            return pb.StateItem(position=position).SerializeToString()


def decode_state_item(raw: bytes, limit: int) -> StatePosition | StateChunk:
    message = bounds.parse(pb.StateItem, raw, limit)
    match message.WhichOneof("kind"):
        case "chunk":
            chunk = message.chunk
            vector = bounds.known(_VECTORS, "vector", chunk.vector)
            return StateChunk(chunk.round, vector, chunk.chunk, chunk.checksum, chunk.payload)
        case "position":
            position = message.position
            if not (math.isfinite(position.step_seconds) and position.step_seconds >= 0):
                raise FrameError("malformed", f"step_seconds is {position.step_seconds}")
            return StatePosition(position.round, position.step, position.step_seconds)
        case kind:
            raise FrameError("malformed", f"unexpected kind of state item: {kind}")


# ---- probe ----


def encode_top_k_request(run: bytes, round_: int) -> bytes:
    return pb.TopKRequest(run=run, round=round_).SerializeToString()


def decode_top_k_request(raw: bytes) -> tuple[bytes, int]:
    message = bounds.parse(pb.TopKRequest, raw)
    return bounds.run_key(message.run), message.round


def encode_top_k_reply(probe: TopK | None) -> bytes:
    if probe is None:
        return pb.TopKReply().SerializeToString()
    message = pb.TopK(
        round=probe.round, tokens=probe.tokens, k=probe.k, ids=probe.ids, log_probs=probe.log_probs, tail=probe.tail
    )
    return pb.TopKReply(probe=message).SerializeToString()


def decode_top_k_reply(raw: bytes) -> TopK | None:
    reply = bounds.parse(pb.TopKReply, raw)
    if not reply.HasField("probe"):
        return None
    message = reply.probe
    entries = message.tokens * message.k
    if not 0 < entries <= bounds.MAX_PROBE_ENTRIES:
        raise FrameError("malformed", f"a probe of {message.tokens} tokens x {message.k}")
    if (len(message.ids), len(message.log_probs), len(message.tail)) != (4 * entries, 2 * entries, 4 * message.tokens):
        raise FrameError("malformed", f"sizes do not fit a probe of {message.tokens} tokens x {message.k}")
    return TopK(message.round, message.tokens, message.k, message.ids, message.log_probs, message.tail)


# ---- admin ----


def encode_status(text: str) -> bytes:
    return pb.StatusReply(json=text).SerializeToString()


def decode_status(raw: bytes) -> str:
    return bounds.parse(pb.StatusReply, raw).json


def _cut(value: str) -> str:
    return value if len(value) <= _REFUSAL_VALUE else value[: _REFUSAL_VALUE - 1] + "\u2026"


def _printable(value: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in value[: bounds.MAX_TEXT])
