"""Frames of an exchange to bytes and back: called for every chunk on the network loop, so it does no more than it must.

Whether a chunk's checksum holds is left to whoever decodes its payload, off the loop.
"""

from __future__ import annotations

from collections.abc import Iterable

from peer.errors import FrameError
from peer.proto import peer_pb2 as pb
from peer.transport import Accept, ChunkFrame, Decline, Done, Form, Frame, Open, Part, Stage
from peer.wire import bounds

# Last frame of a direction, as it travels. Streams send it and look for it; nothing above them sees it.
END: bytes = pb.Frame(end=pb.End()).SerializeToString()

_STAGES: dict[int, Stage] = {pb.STAGE_MIX1: Stage.MIX1, pb.STAGE_MIX2: Stage.MIX2}
_STAGE_NUMBERS = {Stage.MIX1: pb.STAGE_MIX1, Stage.MIX2: pb.STAGE_MIX2}
_PARTS: dict[int, Part] = {pb.PART_CONTRIBUTION: Part.CONTRIBUTION, pb.PART_RESULT: Part.RESULT}
_PART_NUMBERS = {Part.CONTRIBUTION: pb.PART_CONTRIBUTION, Part.RESULT: pb.PART_RESULT}
_FORMS: dict[int, Form] = {pb.FORM_PLAIN: Form.PLAIN, pb.FORM_DIFFERENCE: Form.DIFFERENCE}
_FORM_NUMBERS = {Form.PLAIN: pb.FORM_PLAIN, Form.DIFFERENCE: pb.FORM_DIFFERENCE}


# A field's number and that it has a length.
_CHUNK_TAG = bytes([pb.Frame.CHUNK_FIELD_NUMBER << 3 | 2])
_PAYLOAD_TAG = bytes([pb.Chunk.PAYLOAD_FIELD_NUMBER << 3 | 2])

_ENVELOPE = 1024  # all of a frame or state item but its payload and its lists of chunks
_LISTED = 5 + bounds.REFERENCE_BYTES  # a chunk in Open or Accept


def frame_bytes(payload_bytes: int, chunks: int) -> int:
    """Return the size of the largest legal frame in a run with that many chunks and payloads of at most that size."""
    return max(payload_bytes, _LISTED * chunks) + _ENVELOPE


def encode_frame(frame: Frame) -> bytes:
    match frame:
        case ChunkFrame():
            return _chunk_bytes(frame)
        case Open():
            message = pb.Frame(
                open=pb.Open(
                    run=frame.run,
                    round=frame.round,
                    stage=_STAGE_NUMBERS[frame.stage],
                    sender=frame.sender,
                    plan=frame.plan,
                    chunks=frame.chunks,
                    references=frame.references,
                )
            )
        case Accept():
            message = pb.Frame(accept=pb.Accept(chunks=frame.chunks, references=frame.references))
        case Decline():
            message = pb.Frame(decline=pb.Decline(reason=frame.reason[: bounds.MAX_TEXT], round=frame.round))
        case Done():
            message = pb.Frame(done=pb.Done(part=_PART_NUMBERS[frame.part]))
    return message.SerializeToString()


def _chunk_bytes(frame: ChunkFrame) -> bytes:
    """Put the payload, the last field, behind what protobuf writes of the others.

    The bytes are those protobuf would write, with one copy of the payload instead of three; fresh memory for those cost
    twice as much as all else in sending.
    """
    head = pb.Chunk(
        run=frame.run,
        round=frame.round,
        stage=_STAGE_NUMBERS[frame.stage],
        chunk=frame.chunk,
        part=_PART_NUMBERS[frame.part],
        form=_FORM_NUMBERS[frame.form],
        codec=frame.codec,
        values=frame.values,
        contributors=frame.contributors,
        checksum=frame.checksum,
    ).SerializeToString()
    before_payload = _PAYLOAD_TAG + _varint(len(frame.payload)) if frame.payload else b""
    size = len(head) + len(before_payload) + len(frame.payload)
    return b"".join((_CHUNK_TAG, _varint(size), head, before_payload, frame.payload))


def _varint(number: int) -> bytes:
    digits = bytearray()
    while number > 0x7F:
        digits.append(number & 0x7F | 0x80)
        number >>= 7
    digits.append(number)
    return bytes(digits)


def decode_frame(raw: bytes | memoryview, limit: int) -> Frame:
    """Read one frame of at most `limit` bytes. Raises FrameError."""
    message = bounds.parse(pb.Frame, raw, limit)
    match message.WhichOneof("kind"):
        case "chunk":
            return _chunk(message.chunk)
        case "open":
            return _open(message.open)
        case "accept":
            return Accept(*_chunks(message.accept.chunks, message.accept.references))
        case "decline":
            return Decline(bounds.text("reason", message.decline.reason, bounds.MAX_TEXT), message.decline.round)
        case "done":
            return Done(bounds.known(_PARTS, "part", message.done.part))
        case kind:
            raise FrameError("malformed", f"unexpected kind of frame: {kind}")


def _chunk(chunk: pb.Chunk) -> ChunkFrame:
    if not 1 <= chunk.contributors <= bounds.MAX_MEMBERS:
        raise FrameError("malformed", f"{chunk.contributors} contributors")
    return ChunkFrame(
        run=bounds.run_key(chunk.run),
        round=chunk.round,
        stage=bounds.known(_STAGES, "stage", chunk.stage, "stage"),
        chunk=chunk.chunk,
        part=bounds.known(_PARTS, "part", chunk.part),
        form=bounds.known(_FORMS, "form", chunk.form),
        codec=chunk.codec,
        values=chunk.values,
        contributors=chunk.contributors,
        checksum=chunk.checksum,
        payload=chunk.payload,
    )


def _open(message: pb.Open) -> Open:
    chunks, references = _chunks(message.chunks, message.references)
    return Open(
        run=bounds.run_key(message.run),
        round=message.round,
        stage=bounds.known(_STAGES, "stage", message.stage, "stage"),
        sender=bounds.peer_id(message.sender),
        plan=bounds.digest("plan", message.plan),
        chunks=chunks,
        references=references,
    )


def _chunks(chunks: Iterable[int], references: bytes) -> tuple[tuple[int, ...], bytes]:
    indices = tuple(chunks)
    if len(indices) > bounds.MAX_CHUNKS:
        raise FrameError("malformed", f"{len(indices)} chunks, at most {bounds.MAX_CHUNKS}")
    if indices != tuple(sorted(set(indices))):
        raise FrameError("malformed", "chunks are not ascending")
    if references and len(references) != bounds.REFERENCE_BYTES * len(indices):
        raise FrameError("malformed", f"{len(references)} bytes of references for {len(indices)} chunks")
    return indices, references
