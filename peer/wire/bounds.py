"""How large anything another peer sends may be, and the checks that hold it there.

The one thing to get wrong: protobuf builds an object of every two-byte entry of a repeated message, so a few megabytes
can become a hundred; entries are counted before anything is parsed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from peer.errors import FrameError

RUN_BYTES = 16
REFERENCE_BYTES = 8  # a chunk's reference hash
HAVE_BYTES = 24  # a chunk's three hashes in a StateRequest
MAX_DIGEST = 64
MAX_ID = 128
MAX_ADDRESS = 300
MAX_MEMBERS = 4096 + 1  # the largest view, and whose it is
MAX_CHUNKS = 1_000_000
MAX_TEXT = 512
MAX_FIELDS = 512
MAX_FIELD_VALUE = 64 * 1024
MAX_SPEC = 1 << 20
MAX_PROBE_ENTRIES = 1 << 20  # tokens x k
MAX_CONTROL = 8 << 20  # bytes of a control message

_M = TypeVar("_M", bound=Message)
_T = TypeVar("_T")


def parse(kind: type[_M], raw: bytes | memoryview, limit: int = MAX_CONTROL) -> _M:
    """Read a message of at most `limit` bytes."""
    if len(raw) > limit:
        raise FrameError("oversized", f"{len(raw)} bytes, at most {limit}")
    buffer: Any = raw  # the stubs know bytes only, the parser takes any buffer
    try:
        return kind.FromString(buffer)
    except DecodeError as error:
        raise FrameError("malformed", f"not a {kind.DESCRIPTOR.name}: {error}") from None


def parse_listing(kind: type[_M], raw: bytes, listing: int) -> _M:
    """Read a message whose repeated field number `listing` names members."""
    if len(raw) > MAX_CONTROL:
        raise FrameError("oversized", f"{len(raw)} bytes, at most {MAX_CONTROL}")
    entries = 0
    for number in _field_numbers(raw):
        entries += number == listing
        if entries > MAX_MEMBERS:
            raise FrameError("malformed", f"more than {MAX_MEMBERS} members")
    return parse(kind, raw)


def _field_numbers(raw: bytes) -> Iterator[int]:
    """Yield the number of each length-delimited field at the top level, building nothing."""
    at = 0
    while at < len(raw):
        tag, at = _varint(raw, at)
        match tag & 7:
            case 0:
                _, at = _varint(raw, at)
            case 1:
                at += 8
            case 2:
                size, at = _varint(raw, at)
                at += size
                yield tag >> 3
            case 5:
                at += 4
            case wire_type:
                raise FrameError("malformed", f"wire type {wire_type}")


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(raw):
            break
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise FrameError("malformed", "a number without an end")


def known(table: dict[int, _T], field: str, value: int, reason: str = "malformed") -> _T:
    """Turn an enum's number into ours; a number from the future is refused."""
    if value not in table:
        raise FrameError(reason, f"{field} is {value}")
    return table[value]


def run_key(value: bytes) -> bytes:
    if len(value) != RUN_BYTES:
        raise FrameError("malformed", f"run is {len(value)} bytes, must be {RUN_BYTES}")
    return value


def digest(field: str, value: bytes) -> bytes:
    return short(field, value, MAX_DIGEST)


def short(field: str, value: bytes, most: int) -> bytes:
    if len(value) > most:
        raise FrameError("malformed", f"{field} is {len(value)} bytes, at most {most}")
    return value


def peer_id(value: str) -> str:
    if not value:
        raise FrameError("malformed", "an empty id")
    return text("id", value, MAX_ID)


def text(field: str, value: str, most: int) -> str:
    """Refuse what is too long or could forge lines of a log."""
    if len(value) > most or not value.isprintable():
        raise FrameError("malformed", f"{field} has {len(value)} characters (at most {most}) or unprintable ones")
    return value
