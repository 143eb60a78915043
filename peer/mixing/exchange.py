"""One stage of one round on one peer: what both shapes of exchange share.

An exchange lives on the network loop. It ends in one of three ways: complete, closed at its deadline, or with every
other member lost; none of them is an error. The one thing to get wrong: a result is applied in the coding executor,
so `close` must wait for the jobs in flight before the training thread touches the vectors again.
"""

from __future__ import annotations

import asyncio
import random
import zlib
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from peer import log
from peer.codec import Codec
from peer.errors import FrameError, StreamClosed, TransportError
from peer.metrics import Metrics
from peer.mixing.quantity import Quantity
from peer.plan import Plan
from peer.transport import Accept, ChunkFrame, Decline, Done, Form, Open, Part, Stage, Stream, Transport

T = TypeVar("T")

DIAL_TIMEOUT_S = 5.0
DIAL_ATTEMPTS = 3
REDIAL_WAIT_S = 2.0  # how long a broken stream may take to come back before its member is given up
LINGER_S = 10.0  # how long results may still flow to slower members after this peer has gone on

logger = log.get(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of an exchange, in chunks."""

    stage: Stage
    mixed: int  # every planned peer's values are in it
    partial: int  # some are
    local: int  # none but our own
    members: int  # peers in the fullest average, this one included
    seconds: float = 0.0  # from its start until nothing more was to come, or it was closed
    ahead: int = -1  # latest round another member said it is in, when that is past ours
    apart: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # owner -> chunks it holds unlike us

    @property
    def label(self) -> Literal["full", "degraded", "failed"]:
        if self.partial == 0 and self.local == 0:
            return "full"
        return "failed" if self.mixed + self.partial == 0 else "degraded"


class Pacer:
    """Holds sends to a rate. `rate_bps` 0: unlimited."""

    def __init__(self, rate_bps: int) -> None:
        self._seconds_per_byte = 8.0 / rate_bps if rate_bps else 0.0
        self._free_at = 0.0

    async def take(self, size_bytes: int) -> None:
        if not self._seconds_per_byte:
            return
        now = asyncio.get_running_loop().time()
        start = max(now, self._free_at)
        self._free_at = start + size_bytes * self._seconds_per_byte
        if start > now:
            await asyncio.sleep(start - now)


@dataclass(frozen=True, slots=True)
class Links:
    """What an exchange needs of the peer it runs in."""

    run: bytes
    me: str
    transport: Transport
    coding: Executor
    metrics: Metrics
    pacer: Pacer


class Exchange:
    """Base of `Direct` and `Owned`."""

    def __init__(self, links: Links, plan: Plan, quantity: Quantity, addresses: Mapping[str, str]) -> None:
        self.links = links
        self.plan = plan
        self.quantity = quantity
        self.addresses = addresses
        self.round = quantity.round
        self.stage = quantity.stage
        self.closed = False
        self.ahead = -1
        self.seconds = 0.0
        self._began_at = self._now()
        self.apart: dict[str, tuple[int, ...]] = {}
        self.complete = asyncio.Event()
        self.gone: set[str] = set()
        self._last_frame_at: dict[str, float] = {}
        self._jobs: set[Future[Any]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._serving: set[asyncio.Task[None]] = set()
        self._jitter = random.Random(f"{links.me} {self.round} {self.stage}")

    # What a shape defines.

    def begin(self) -> None:
        """Start dialling. Called once, on the loop."""
        raise NotImplementedError

    async def _serve(self, opened: Open, stream: Stream) -> None:
        raise NotImplementedError

    async def serve(self, opened: Open, stream: Stream) -> None:
        """Talk with a member that dialled in."""
        if self.closed:
            await decline(stream, "late", self.round)
            return
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            await self._serve(opened, stream)
        finally:
            self._serving.discard(task)

    def settle(self) -> None:
        """From now on do not wait for members that hold others up."""

    def lost(self, member: str) -> None:
        """Stop waiting for a member, unless frames of it came just now."""
        last = self._last_frame_at.get(member)
        if last is None or self._now() - last > REDIAL_WAIT_S:
            self._give_up(member)

    def _give_up(self, member: str) -> None:
        raise NotImplementedError

    def _unreached(self, member: str) -> None:
        """Dialling a member has failed for good."""
        self._give_up(member)

    def _group_size(self) -> int:
        raise NotImplementedError

    # Ending.

    async def close(self) -> Outcome:
        """Stop writing into the vectors and return what became of every chunk."""
        if not self.closed:
            self.closed = True
            self._set_complete()
            for task in self._tasks:
                task.cancel()
            self._closing()
            await self._coding_ends()
            self.quantity.freeze()
        return self.outcome()

    def _set_complete(self) -> None:
        if not self.complete.is_set():
            self.seconds = self._now() - self._began_at
            self.complete.set()

    def abandon(self) -> None:
        """Let whoever waits go on."""
        self._set_complete()

    def _closing(self) -> None:
        """End what members that dialled in still expect."""
        raise NotImplementedError

    def _stop_serving(self) -> None:
        for task in self._serving:
            task.cancel()

    async def _coding_ends(self) -> None:
        jobs = list(self._jobs)  # in one go: the coders take theirs out while we look
        running = [asyncio.wrap_future(job) for job in jobs if not job.cancel()]
        if running:
            await asyncio.wait(running)

    def outcome(self) -> Outcome:
        whole = self._group_size()
        counts = self.quantity.contributors
        local = counts.count(0)
        mixed = sum(1 for count in counts if count >= whole)
        return Outcome(
            self.stage,
            mixed,
            len(counts) - mixed - local,
            local,
            max(1, *counts),
            self.seconds,
            self.ahead,
            dict(self.apart),
        )

    # Pieces that both shapes use.

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _code(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run a piece of coding beside the loop."""
        job = self.links.coding.submit(work, *arguments)
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)
        return await asyncio.wrap_future(job)

    async def _dial(
        self,
        member: str,
        chunks_wanted: Callable[[], tuple[int, ...]],
        converse: Callable[[Stream, tuple[int, ...], Accept], Coroutine[Any, Any, None]],
    ) -> None:
        """Open a stream and converse; a broken stream is opened again for what is still wanted, a few times."""
        for attempt in range(DIAL_ATTEMPTS):
            chunks = chunks_wanted()
            if not chunks or member in self.gone:
                break
            if attempt:  # full jitter, so that the members of a lost peer do not come back all at once
                await asyncio.sleep(self._jitter.uniform(0.05, 0.25 * 2**attempt))
            try:
                stream = await self.links.transport.exchange(self.addresses[member], DIAL_TIMEOUT_S)
                try:
                    references = await self._code(self._references, chunks)
                    plan = self.plan.digest
                    opening = Open(self.links.run, self.round, self.stage, self.links.me, plan, chunks, references)
                    await stream.send(opening)
                    answer = await stream.receive()
                    if isinstance(answer, Decline):
                        self.ahead = max(self.ahead, answer.round if answer.round > self.round else -1)
                        logger.debug("declined", stage=self.stage, round=self.round, member=member, why=answer.reason)
                        break
                    if isinstance(answer, Accept):
                        await converse(stream, chunks, answer)
                        return
                    raise StreamClosed("no answer to Open")
                finally:
                    stream.cancel()
            except TransportError as error:
                logger.debug("stream broke", stage=self.stage, round=self.round, member=member, why=str(error))
        self._unreached(member)

    def _references(self, chunks: tuple[int, ...]) -> bytes:
        return b"".join(self.quantity.reference_hash(chunk) for chunk in chunks)

    async def _send_chunk(
        self, stream: Stream, chunk: int, part: Part, form: Form, codec: Codec, payload: bytes, contributors: int
    ) -> None:
        size = self.quantity.size(chunk)
        await self.links.pacer.take(len(payload))
        await stream.send(
            ChunkFrame(
                run=self.links.run,
                round=self.round,
                stage=self.stage,
                chunk=chunk,
                part=part,
                form=form,
                codec=codec.wire_id,
                values=size,
                contributors=contributors,
                checksum=zlib.crc32(payload),
                payload=payload,
            )
        )
        self.links.metrics.sent(self.stage, len(payload), 4 * size)

    async def _next_chunk(self, stream: Stream, member: str, part: Part) -> ChunkFrame | None:
        """Return the next frame that passes every check, None when no more come."""
        while True:
            frame = await stream.receive()
            self._last_frame_at[member] = self._now()
            if frame is None or isinstance(frame, Done):
                return None
            reason = self._objection(frame, part) if isinstance(frame, ChunkFrame) else "malformed"
            if reason is None:
                assert isinstance(frame, ChunkFrame)
                self.links.metrics.received(self.stage, len(frame.payload), 4 * frame.values)
                return frame
            self._drop(reason, member)

    def _objection(self, frame: ChunkFrame, part: Part) -> str | None:
        """Return why a frame cannot be used, as counted in peer_frames_dropped_total, or None."""
        if frame.run != self.links.run:
            return "foreign_run"
        if frame.round != self.round:
            return "late" if frame.round < self.round else "foreign_round"
        if frame.stage != self.stage:
            return "stage"
        if frame.part is not part or not 0 <= frame.chunk < len(self.quantity.contributors):
            return "unplanned"
        if frame.values != self.quantity.size(frame.chunk) or frame.contributors < 1:
            return "size"
        if zlib.crc32(frame.payload) != frame.checksum:
            return "checksum"
        if self.quantity.contributors[frame.chunk]:
            return "duplicate"
        return "late" if self.closed else None

    def _drop(self, reason: str, member: str) -> None:
        self.links.metrics.dropped(reason)
        logger.debug("frame dropped", stage=self.stage, round=self.round, member=member, reason=reason)

    async def _use(self, member: str, work: Callable[..., Any], *arguments: Any) -> bool:
        """Code with what arrived; a payload that turns out bad is counted and dropped, and False returned."""
        try:
            await self._code(work, *arguments)
        except FrameError as error:
            self._drop(error.reason, member)
            return False
        return True


async def decline(stream: Stream, why: str, round_: int) -> None:
    """Answer an Open with no."""
    await stream.send(Decline(why, round_))
    await stream.finish()


async def both(first: Coroutine[Any, Any, None], second: Coroutine[Any, Any, None]) -> None:
    """Run two halves of a conversation; when one fails the other is cancelled and the failure raised as it is."""
    tasks = [asyncio.ensure_future(first), asyncio.ensure_future(second)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
