"""Loopback: joins the peers of one process by address, for tests, with faults that follow a script.

It behaves as the real transport does where callers could tell: streams hold a few frames and then make the sender
wait, a cancelled send or receive ends its stream, cancelling before `finish` loses what was not read. The one thing to
get wrong: faults belong to a direction, `link(a, b)` is what a sends to b; frames are counted from 0 on each stream.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar
from weakref import WeakSet

from peer.errors import StreamClosed, TransportError, Unreachable
from peer.transport import (
    ChunkFrame,
    Frame,
    Gossip,
    JoinReply,
    JoinRequest,
    Open,
    Service,
    Stage,
    StateChunk,
    StatePosition,
    StateRequest,
    Stream,
    TopK,
)

_T = TypeVar("_T")
_Item = TypeVar("_Item", bound=Frame | StatePosition | StateChunk)
OnDrop = Callable[[str], None]

_FRAMES_HELD = 16  # on the way, before the sender waits


def _uncounted(_reason: str) -> None:
    """Take a dropped frame's reason where nobody counts them."""


@dataclass
class Link:
    """What happens to what one peer sends to another. Numbers are those of frames, or state items, in each stream."""

    unreachable: bool = False  # all is lost without a word, dialling times out
    refuse: bool = False  # dialling fails at once; streams that are open go on
    drop: set[int] = field(default_factory=set)
    corrupt: set[int] = field(default_factory=set)  # a payload gets a wrong bit; a frame without one cannot be read
    duplicate: set[int] = field(default_factory=set)
    delay: dict[int, float | asyncio.Event] = field(default_factory=dict)  # seconds, or until set; holds up all behind
    cut_after: int | None = None  # so many get through, then the stream breaks
    stage: Stage | None = None  # only exchanges of this stage suffer; None: every stream
    sent: int = 0  # frames and items that went in, over all streams

    def concerns(self, stage: Stage | None) -> bool:
        return self.stage is None or self.stage is stage

    def cuts(self, number: int) -> bool:
        return self.cut_after is not None and number >= self.cut_after

    def deliver(self, number: int, item: _Item) -> list[_Item]:
        """Return what comes out at the other end."""
        if self.unreachable or number in self.drop:
            return []
        if number in self.corrupt:
            if not isinstance(item, ChunkFrame | StateChunk) or not item.payload:
                return []
            return [replace(item, payload=bytes([item.payload[0] ^ 1]) + item.payload[1:])]
        return [item, item] if number in self.duplicate else [item]


async def _hold(until: float | asyncio.Event) -> None:
    if isinstance(until, asyncio.Event):
        await until.wait()
    else:
        await asyncio.sleep(until)


@dataclass
class _Parcel:
    frame: Frame | None  # None: the end
    held: asyncio.Task[None] | None = None  # still on the way until this is done

    @property
    def arrived(self) -> bool:
        return self.held is None or self.held.done()


class _Direction:
    """Frames on their way from one end of a stream to the other."""

    def __init__(self, link: Link, on_drop: OnDrop) -> None:
        self._link = link
        self._on_drop = on_drop  # of the receiving end
        self._parcels: deque[_Parcel] = deque()
        self._moved = asyncio.Event()
        self._sent = 0
        self.stage: Stage | None = None  # known from the first frame
        self.broken = False

    async def put(self, frame: Frame) -> None:
        number, self._sent = self._sent, self._sent + 1
        arriving, held = [frame], None
        if self._link.concerns(self.stage):
            if self._link.cuts(number):
                raise StreamClosed(f"cut after {number} frames")
            self._link.sent += 1
            arriving = self._link.deliver(number, frame)
            if not arriving and number in self._link.corrupt:
                self._on_drop("malformed")
            if number in self._link.delay:
                held = asyncio.create_task(_hold(self._link.delay[number]))
                held.add_done_callback(lambda _: self._moved.set())
        for one in arriving:
            while len(self._parcels) >= _FRAMES_HELD and not self.broken:
                await self._next_move()
            self._check()
            self._add(_Parcel(one, held))

    async def get(self) -> Frame | None:
        while not (self._parcels and self._parcels[0].arrived):
            self._check()
            await self._next_move()
        if self._parcels[0].frame is None:
            return None  # stays, so that asking again gives the same answer
        self._moved.set()
        return self._parcels.popleft().frame

    def end(self) -> None:
        if not (self._link.unreachable and self._link.concerns(self.stage)):
            self._add(_Parcel(None))

    def break_off(self, lose: bool = False) -> None:
        """Let nothing more pass; what has arrived can still be read, unless it is to be lost."""
        self.broken = True
        self._moved.set()
        for parcel in self._parcels:
            if parcel.held is not None:
                parcel.held.cancel()
        self._parcels = deque(parcel for parcel in self._parcels if parcel.arrived and not lose)

    def _add(self, parcel: _Parcel) -> None:
        self._parcels.append(parcel)
        self._moved.set()

    def _check(self) -> None:
        if self.broken:
            raise StreamClosed("the stream is broken")

    async def _next_move(self) -> None:
        self._moved.clear()
        await self._moved.wait()


class _End:
    """One end of an exchange."""

    def __init__(self, outgoing: _Direction, incoming: _Direction) -> None:
        self._outgoing = outgoing
        self._incoming = incoming
        self._finished = False
        self._cancelled = False

    async def send(self, frame: Frame) -> None:
        if self._finished or self._outgoing.broken:
            raise StreamClosed("nothing more can be sent")
        if isinstance(frame, Open):
            self._outgoing.stage = self._incoming.stage = frame.stage
        try:
            await self._outgoing.put(frame)
        except (StreamClosed, asyncio.CancelledError):
            self.break_off()
            raise

    async def receive(self) -> Frame | None:
        if self._cancelled:
            raise StreamClosed("cancelled here")
        try:
            return await self._incoming.get()
        except asyncio.CancelledError:
            self.cancel()
            raise

    async def finish(self) -> None:
        if not (self._finished or self._outgoing.broken):
            self._finished = True
            self._outgoing.end()

    def cancel(self) -> None:
        self._cancelled = True
        self.break_off(lose=not self._finished)

    def break_off(self, lose: bool = False) -> None:
        self._outgoing.break_off(lose)
        self._incoming.break_off()

    async def leave(self) -> None:
        """End as a server does when its call returns: what was sent arrives, nothing more is taken in."""
        await self.finish()
        self._incoming.break_off()


class Loopback:
    """The network between peers of one process. An address is any text."""

    def __init__(self) -> None:
        self._served: dict[str, tuple[Service, OnDrop]] = {}
        self._links: dict[tuple[str, str], Link] = {}
        self._ends: dict[str, WeakSet[_End]] = {}  # by the address of the peer that holds them
        self._tasks: dict[asyncio.Task[None], str] = {}
        self.errors: list[BaseException] = []  # what served exchanges raised and should not have

    def serve(self, address: str, service: Service, on_drop: OnDrop = _uncounted) -> None:
        self._served[address] = (service, on_drop)

    def transport(self, source: str, on_drop: OnDrop = _uncounted) -> LoopbackTransport:
        """Return the outgoing side of the peer at that address; it need not serve."""
        return LoopbackTransport(self, source, on_drop)

    def link(self, source: str, target: str) -> Link:
        """Return what stands between them in that direction, to be changed at any time."""
        return self._links.setdefault((source, target), Link())

    def stop(self, address: str) -> None:
        """Let the peer die as with kill -9: its streams break, in and out, and nobody answers there."""
        self._served.pop(address, None)
        for end in self._ends.pop(address, ()):
            end.break_off()
        for task, where in self._tasks.items():
            if where == address:
                task.cancel()

    async def close(self) -> None:
        """Stop every peer and wait for what they were serving."""
        tasks = list(self._tasks)
        for address in {*self._served, *self._ends}:
            self.stop(address)
        await asyncio.gather(*tasks, return_exceptions=True)

    def service(self, address: str) -> Service:
        if address not in self._served:
            raise Unreachable(f"{address}: nobody serves there")
        return self._served[address][0]

    def open(self, source: str, target: str, on_drop: OnDrop) -> Stream:
        """Join two ends and let the target serve its own."""
        service, target_on_drop = self._served[target]
        there = _Direction(self.link(source, target), target_on_drop)
        back = _Direction(self.link(target, source), on_drop)
        near, far = _End(there, back), _End(back, there)
        self._ends.setdefault(source, WeakSet()).add(near)
        self._ends.setdefault(target, WeakSet()).add(far)
        task = asyncio.create_task(self._serve(service, far), name=f"exchange {source} -> {target}")
        self._tasks[task] = target
        task.add_done_callback(self._served_one)
        return near

    async def _serve(self, service: Service, end: _End) -> None:
        try:
            await service.on_exchange(end)
            await end.leave()
        except BaseException:
            end.break_off()
            raise

    def _served_one(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, TransportError):
            self.errors.append(error)


class LoopbackTransport:
    """transport.Transport over a Loopback."""

    def __init__(self, net: Loopback, source: str, on_drop: OnDrop) -> None:
        self._net = net
        self._source = source
        self._on_drop = on_drop
        self.forgotten: list[str] = []

    async def exchange(self, address: str, timeout_s: float) -> Stream:
        await self._dial(address, timeout_s)
        return self._net.open(self._source, address, self._on_drop)

    async def gossip(self, address: str, message: Gossip, timeout_s: float) -> Gossip:
        return await self._ask(address, timeout_s, lambda service: service.on_gossip(message))

    async def join(self, address: str, request: JoinRequest, timeout_s: float) -> JoinReply:
        return await self._ask(address, timeout_s, lambda service: service.on_join(request))

    async def top_k(self, address: str, run: bytes, round_: int, timeout_s: float) -> TopK | None:
        return await self._ask(address, timeout_s, lambda service: service.on_top_k(run, round_))

    async def state(
        self, address: str, request: StateRequest, timeout_s: float
    ) -> AsyncGenerator[StatePosition | StateChunk, None]:
        service = await self._dial(address, timeout_s)
        link = self._net.link(address, self._source)
        items, number = service.on_state(request), 0
        try:
            while (item := await self._next_item(items, link, number, timeout_s)) is not None:
                if link.cuts(number) or self._net.service(address) is not service:
                    raise StreamClosed(f"{address}: cut after {number} items")
                link.sent += 1
                for one in link.deliver(number, item):
                    yield one
                number += 1
        except Unreachable as error:
            raise StreamClosed(str(error)) from None
        finally:
            if isinstance(items, AsyncGenerator):
                await items.aclose()

    async def _next_item(
        self, items: AsyncIterator[StatePosition | StateChunk], link: Link, number: int, timeout_s: float
    ) -> StatePosition | StateChunk | None:
        try:
            async with asyncio.timeout(timeout_s):
                if link.unreachable:
                    await asyncio.Event().wait()
                if number in link.delay:
                    await _hold(link.delay[number])
                return await anext(items, None)
        except TimeoutError:
            raise StreamClosed(f"silent for {timeout_s} s") from None

    async def forget(self, address: str) -> None:
        self.forgotten.append(address)

    async def _dial(self, address: str, timeout_s: float) -> Service:
        there, back = self._net.link(self._source, address), self._net.link(address, self._source)
        if there.unreachable or back.unreachable:
            await asyncio.sleep(timeout_s)
            raise Unreachable(f"{address}: no answer in {timeout_s} s")
        if there.refuse:
            raise Unreachable(f"{address}: refused")
        return self._net.service(address)

    async def _ask(self, address: str, timeout_s: float, question: Callable[[Service], Awaitable[_T]]) -> _T:
        service = await self._dial(address, timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                return await question(service)
        except TimeoutError:
            raise Unreachable(f"{address}: no answer in {timeout_s} s") from None
