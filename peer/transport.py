"""How peers talk, as the rest of the code sees it: messages, streams and the Transport protocol.

Nothing here knows gRPC. `Loopback` connects peers of one process for tests; the real one is in rpc_client and
rpc_server. The one thing to get wrong: a `Stream` is used by one reader and one writer at a time.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Protocol

from peer.membership import Member


class Stage(StrEnum):
    """Which of a round's two exchanges. Values are metric labels."""

    MIX1 = "mix1"
    MIX2 = "mix2"


class Part(IntEnum):
    """What a chunk frame carries."""

    CONTRIBUTION = 1  # one peer's values, on the way to whoever reduces them
    RESULT = 2  # an owner's mean, on the way back


class Form(IntEnum):
    """How a chunk frame's values relate to the receiver's."""

    PLAIN = 1  # the values themselves
    DIFFERENCE = 2  # values minus the shared reference of that chunk


@dataclass(frozen=True, slots=True)
class Open:
    """First frame of an exchange, from the side that dialled."""

    run: bytes  # 16 bytes: RunSpec.key
    round: int
    stage: Stage
    sender: str
    plan: bytes  # digest of the sender's plan; for the log only, views may differ
    chunks: tuple[int, ...]  # those this stream is about, ascending
    references: bytes = b""  # 8 bytes for each of `chunks`: hash of the sender's reference, zeros if it has none


@dataclass(frozen=True, slots=True)
class Accept:
    """The answer: go on. Mirrors the chunks it agrees to, with its own reference hashes."""

    chunks: tuple[int, ...]
    references: bytes = b""


@dataclass(frozen=True, slots=True)
class Decline:
    """The answer: not in this round."""

    reason: str
    round: int  # where the answering peer is


@dataclass(frozen=True, slots=True)
class ChunkFrame:
    """One chunk, coded. Everything that says where it belongs travels with it."""

    run: bytes
    round: int
    stage: Stage
    chunk: int
    part: Part
    form: Form
    codec: int  # Codec.wire_id
    values: int  # how many the payload decodes to
    contributors: int  # how many peers' values are in it: 1 in a contribution
    checksum: int  # zlib.crc32 of payload
    payload: bytes


@dataclass(frozen=True, slots=True)
class Done:
    """The sender of this frame has no more chunks of that part."""

    part: Part


Frame = Open | Accept | Decline | ChunkFrame | Done


class Stream(Protocol):
    """One bidirectional exchange with one peer."""

    async def send(self, frame: Frame) -> None:
        """Send, waiting while the other side is slow. Raises StreamClosed."""

    async def receive(self) -> Frame | None:
        """Return the next well-formed frame, None when the other side has ended in order. Raises StreamClosed.

        Malformed frames are counted and skipped inside; they never surface.
        """

    async def finish(self) -> None:
        """Say that nothing more will be sent. Idempotent."""

    def cancel(self) -> None:
        """Drop the stream at once. Idempotent."""


@dataclass(frozen=True, slots=True)
class Gossip:
    """One push or pull of a membership view."""

    run: bytes  # RunSpec.key: a foreign run is refused
    sender: str
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """Ask a member to be let in."""

    protocol: int
    member: Member
    name: str  # the run's name, "" to take whatever runs there
    fields: dict[str, str]  # spec fields set on purpose, dotted name -> canonical JSON; compared, not adopted
    layout: bytes = b""  # unused until the spec is known


@dataclass(frozen=True, slots=True)
class JoinReply:
    """Let in: the run spec as canonical JSON and the present view."""

    spec: str
    members: tuple[Member, ...]


class Vector(IntEnum):
    """Which of the round's vectors a state chunk belongs to."""

    Z = 1
    V = 2
    X = 3


@dataclass(frozen=True, slots=True)
class StateRequest:
    """What a joiner holds already: for each chunk a hash per vector (z, v, x), 24 bytes a chunk."""

    run: bytes
    layout: bytes  # Layout.digest
    have: bytes


@dataclass(frozen=True, slots=True)
class StatePosition:
    """Where the donor is. First and last item of a state stream."""

    round: int
    step: int  # inner steps done in that round
    step_seconds: float


@dataclass(frozen=True, slots=True)
class StateChunk:
    """One chunk of one vector, fp32 little-endian."""

    round: int
    vector: Vector
    chunk: int
    checksum: int  # zlib.crc32 of payload
    payload: bytes


@dataclass(frozen=True, slots=True)
class TopK:
    """The most likely tokens of one peer at each probe position (ALGORITHM.md sec. 4)."""

    round: int
    tokens: int
    k: int
    ids: bytes  # int32 (tokens, k)
    log_probs: bytes  # float16 (tokens, k), natural log
    tail: bytes  # float32 (tokens,): probability mass outside the top k


class Transport(Protocol):
    """The outgoing side. Every call raises TransportError when the link fails."""

    async def exchange(self, address: str, timeout_s: float) -> Stream:
        """Open a Mixing.Exchange stream; the caller sends Open first."""

    async def gossip(self, address: str, message: Gossip, timeout_s: float) -> Gossip: ...

    async def join(self, address: str, request: JoinRequest, timeout_s: float) -> JoinReply:
        """Raises RefusedError when the member says no."""

    def state(self, address: str, request: StateRequest, timeout_s: float) -> AsyncIterator[StatePosition | StateChunk]:
        """Stream a member's state; `timeout_s` is the longest silence between two items."""

    async def top_k(self, address: str, run: bytes, round_: int, timeout_s: float) -> TopK | None:
        """Return the member's probe of that round, None if it has none."""

    async def forget(self, address: str) -> None:
        """Close the channels to an address that nobody uses any more."""


class Service(Protocol):
    """The incoming side: what a server calls. The servicer decodes, calls one of these, encodes."""

    async def on_exchange(self, stream: Stream) -> None:
        """Serve one exchange until it ends. The first frame is the dialler's Open."""

    async def on_gossip(self, message: Gossip) -> Gossip:
        """Raises RefusedError for a foreign run."""

    async def on_join(self, request: JoinRequest) -> JoinReply:
        """Raises RefusedError."""

    def on_state(self, request: StateRequest) -> AsyncIterator[StatePosition | StateChunk]: ...

    async def on_top_k(self, run: bytes, round_: int) -> TopK | None: ...
