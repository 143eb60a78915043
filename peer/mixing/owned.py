"""Owner-wise exchange: every chunk has one owner, who averages what arrives and sends the mean back.

Chunks are reduced independently, a few at a time: a running sum is only held for chunks whose contributions are
arriving, and a stream whose next chunk has no room waits (its sender feels it). Senders all send in the same order, so
the few open chunks are the ones everybody sends. The one thing to get wrong: a member whose frame was lost must not
hold its chunk open; a later frame of the same stream proves that the earlier one never comes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from peer import codec as codecs
from peer.errors import TransportError
from peer.mixing.exchange import LINGER_S, REDIAL_WAIT_S, Exchange, Links, both, decline
from peer.mixing.quantity import NO_REFERENCE, Quantity
from peer.plan import Plan
from peer.transport import Accept, ChunkFrame, Done, Form, Open, Part, Stream

OPEN_CHUNKS = 3  # running sums held at a time
WAITING_RESULTS = 3  # results queued for one member before it counts as slow
PATIENCE_S = 1.0  # after settling: how long an open chunk may wait for one more contribution

Result = tuple[int, Form, codecs.Codec, bytes, int]  # chunk, form, codec, payload, contributors


@dataclass(slots=True)
class Reduction:
    """An owned chunk whose contributions are arriving."""

    chunk: int
    opened_at: float
    memory: torch.Tensor  # as long as the largest chunk; the sum is its beginning
    sum: torch.Tensor
    got: set[str] = field(default_factory=set)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    overdue: bool = False
    finishing: bool = False


@dataclass(slots=True)
class Inbox:
    """A member that dialled in to this owner."""

    member: str
    stream: Stream
    agreed: frozenset[int]  # chunks for which it holds our reference
    finals: tuple[int, ...]  # chunks that were final before it dialled in, sent as they stand
    results: asyncio.Queue[Result | None] = field(default_factory=lambda: asyncio.Queue(WAITING_RESULTS))
    passed: int = -1  # no contribution for this chunk or an earlier one comes any more
    slow: bool = False  # it kept the others waiting once; from then on it gets only what it has room for


class Owned(Exchange):
    """Strategies with owners: global, group."""

    def __init__(self, links: Links, plan: Plan, quantity: Quantity, addresses: Mapping[str, str]) -> None:
        super().__init__(links, plan, quantity, addresses)
        self._mine = plan.owned_by(links.me)
        self._mine_set = frozenset(self._mine)
        self._others = frozenset(plan.parties) - {links.me}
        self._reductions: dict[int, Reduction] = {}
        self._room = asyncio.Semaphore(OPEN_CHUNKS)
        self._spare: list[torch.Tensor] = []  # sums to use again; ever fresh ones leave a heap full of holes
        self._inboxes: dict[str, Inbox] = {}
        self._finishing: set[asyncio.Task[None]] = set()
        self._dialling: dict[str, asyncio.Task[None]] = {}
        self._settling = False
        self._results_end: asyncio.Task[None] | None = None

    def _group_size(self) -> int:
        return len(self.plan.parties)

    def begin(self) -> None:
        for owner in sorted(self._others):
            if self.plan.owned_by(owner):
                self._dialling[owner] = self._spawn(self._contribute_to(owner))
        self._check_complete()

    # As a sender.

    async def _contribute_to(self, owner: str) -> None:
        owned = self.plan.owned_by(owner)

        def wanted() -> tuple[int, ...]:
            return tuple(chunk for chunk in owned if not self.quantity.contributors[chunk])

        async def converse(stream: Stream, chunks: tuple[int, ...], answer: Accept) -> None:
            theirs = _by_chunk(answer.chunks, answer.references)
            ours = _by_chunk(chunks, await self._code(self._references, chunks))
            agreed = {chunk for chunk, name in ours.items() if name != NO_REFERENCE and theirs.get(chunk) == name}
            unlike = (chunk for chunk, name in ours.items() if NO_REFERENCE != theirs.get(chunk, name) != name)
            self.apart[owner] = tuple(unlike)
            accepted = [chunk for chunk in chunks if chunk in theirs]
            await both(self._send(stream, accepted, agreed), self._receive(stream, owner, frozenset(owned)))
            await stream.finish()

        await self._dial(owner, wanted, converse)
        self._dialling.pop(owner, None)
        self._check_complete()

    def _unreached(self, member: str) -> None:
        if member not in self._inboxes:
            self._give_up(member)

    async def _send(self, stream: Stream, chunks: Iterable[int], agreed: set[int]) -> None:
        for chunk in chunks:
            if self.quantity.contributors[chunk]:
                continue  # reduced without us
            form, codec, payload = await self._code(self.quantity.contribute, chunk, chunk in agreed)
            await self._send_chunk(stream, chunk, Part.CONTRIBUTION, form, codec, payload, 1)
        await stream.send(Done(Part.CONTRIBUTION))

    async def _receive(self, stream: Stream, owner: str, owned: frozenset[int]) -> None:
        while frame := await self._next_chunk(stream, owner, Part.RESULT):
            if frame.chunk not in owned or not 2 <= frame.contributors <= len(self.plan.parties):
                self._drop("unplanned", owner)
                continue
            apply = self.quantity.apply
            await self._use(owner, apply, frame.chunk, frame.form, frame.codec, frame.payload, frame.contributors)

    # As an owner.

    async def _serve(self, opened: Open, stream: Stream) -> None:
        member = opened.sender
        if member not in self._others or not self._mine:
            await decline(stream, "not planned", self.round)
            return
        if (before := self._inboxes.get(member)) is not None:
            before.stream.cancel()  # it came back; the old stream is dead, known or not
        chunks = tuple(chunk for chunk in opened.chunks if chunk in self._mine_set)
        references = await self._code(self._references, chunks)
        theirs = _by_chunk(opened.chunks, opened.references)
        ours = _by_chunk(chunks, references)
        agreed = frozenset(chunk for chunk in chunks if ours[chunk] == theirs[chunk] != NO_REFERENCE)
        finals = tuple(chunk for chunk in chunks if self.quantity.contributors[chunk])
        inbox = self._inboxes[member] = Inbox(member, stream, agreed, finals)
        self.gone.discard(member)
        try:
            await stream.send(Accept(chunks, references))
            if self._results_end is not None:
                self._spawn(self._put_end(inbox))
            await both(self._read(inbox), self._write(inbox))
        except TransportError:
            if not self.complete.is_set():
                asyncio.get_running_loop().call_later(REDIAL_WAIT_S, self._give_up_unless_back, inbox)

    def _give_up_unless_back(self, inbox: Inbox) -> None:
        if self._inboxes.get(inbox.member) is inbox:
            self._give_up(inbox.member)

    def _give_up(self, member: str) -> None:
        self.gone.add(member)
        task = self._dialling.pop(member, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()
        self._recheck()

    async def _read(self, inbox: Inbox) -> None:
        while frame := await self._next_chunk(inbox.stream, inbox.member, Part.CONTRIBUTION):
            if frame.chunk not in self._mine_set or frame.contributors != 1:
                self._drop("unplanned", inbox.member)
                continue
            self._pass(inbox, frame.chunk - 1)
            await self._absorb(inbox.member, frame)
            self._recheck()
        self._pass(inbox, len(self.quantity.contributors))

    def _pass(self, inbox: Inbox, chunk: int) -> None:
        if chunk > inbox.passed:
            inbox.passed = chunk
            self._recheck()

    async def _absorb(self, member: str, frame: ChunkFrame) -> None:
        reduction = await self._reduction(frame.chunk)
        if reduction is None:
            self._drop("late", member)
            return
        async with reduction.lock:
            if reduction.finishing or self.closed:
                self._drop("late", member)
            elif member in reduction.got:
                self._drop("duplicate", member)
            else:
                absorb = self.quantity.absorb
                sum_ = reduction.sum
                if await self._use(member, absorb, frame.chunk, frame.form, frame.codec, frame.payload, sum_):
                    reduction.got.add(member)

    async def _reduction(self, chunk: int) -> Reduction | None:
        """Return the open reduction of a chunk, waiting for room to open it; None when it is too late for it."""
        if chunk not in self._reductions:
            await self._room.acquire()
            if self.closed or self.quantity.contributors[chunk] or chunk in self._reductions:
                self._room.release()
            else:
                self._reductions[chunk] = self._open(chunk)
        return self._reductions.get(chunk)

    def _open(self, chunk: int) -> Reduction:
        memory = self._spare.pop() if self._spare else torch.empty(max(map(self.quantity.size, self._mine)))
        return Reduction(chunk, self._now(), memory, memory[: self.quantity.size(chunk)].zero_())

    def _recheck(self) -> None:
        """Finish every open chunk that nobody has to be waited for any more."""
        if self.closed:
            return
        for reduction in self._reductions.values():
            if not reduction.finishing and not self._awaited(reduction):
                reduction.finishing = True
                task = asyncio.create_task(self._finish(reduction))
                self._finishing.add(task)
                task.add_done_callback(self._finishing.discard)
        self._check_complete()

    def _awaited(self, reduction: Reduction) -> bool:
        waited = self._others - reduction.got - self.gone
        return not reduction.overdue and any(self._comes(member, reduction.chunk) for member in waited)

    def _comes(self, member: str, chunk: int) -> bool:
        inbox = self._inboxes.get(member)
        return inbox is None or inbox.passed < chunk

    async def _finish(self, reduction: Reduction) -> None:
        chunk, count = reduction.chunk, len(reduction.got)
        async with reduction.lock:
            reduced = None
            if count and not self.closed:
                reduced = await self._code(self.quantity.reduce, chunk, reduction.sum, count)
            if not self.closed:
                self._spare.append(reduction.memory)
        if reduced is not None:
            await self._dispatch((chunk, *reduced, count + 1))
        del self._reductions[chunk]  # only now: an exchange is not complete while a result is still to be queued
        self._room.release()
        self._recheck()

    async def _dispatch(self, result: Result) -> None:
        """Queue a result for every member that listens, in full for those that hold another reference."""
        chunk, form = result[:2]
        listening = [inbox for inbox in self._inboxes.values() if inbox.member not in self.gone]
        apart = [] if form is Form.PLAIN else [inbox for inbox in listening if chunk not in inbox.agreed]
        whole = await self._as_it_stands(chunk) if apart else None
        for inbox in listening:
            item = whole if inbox in apart else result
            if item is not None:
                await self._deliver(inbox, item)

    async def _deliver(self, inbox: Inbox, result: Result) -> None:
        if inbox.slow and inbox.results.full():
            return
        try:
            async with asyncio.timeout(PATIENCE_S):
                await inbox.results.put(result)
            inbox.slow = False
        except TimeoutError:
            inbox.slow = True

    async def _write(self, inbox: Inbox) -> None:
        for chunk in inbox.finals:
            if (whole := await self._as_it_stands(chunk)) is not None:
                await self._send_result(inbox, whole)
        while (result := await inbox.results.get()) is not None:
            await self._send_result(inbox, result)
        await inbox.stream.send(Done(Part.RESULT))
        await inbox.stream.finish()

    async def _send_result(self, inbox: Inbox, result: Result) -> None:
        chunk, form, codec, payload, contributors = result
        await self._send_chunk(inbox.stream, chunk, Part.RESULT, form, codec, payload, contributors)

    async def _as_it_stands(self, chunk: int) -> Result | None:
        """Return a final chunk in full, for members that cannot apply its result as a difference."""
        if self.closed or (value := await self._code(self.quantity.settled, chunk)) is None:
            return None
        fp32 = codecs.by_name("fp32")
        payload = await self._code(fp32.encode, value, 0)
        return chunk, Form.PLAIN, fp32, payload, self.quantity.contributors[chunk]

    # Ending.

    def settle(self) -> None:
        if not self._settling and not self.closed:
            self._settling = True
            self.gone |= self._others - self._inboxes.keys()
            self._spawn(self._hurry())

    async def _hurry(self) -> None:
        while not self.complete.is_set():
            for reduction in self._reductions.values():
                reduction.overdue |= self._overdue(reduction)
            self._recheck()
            await asyncio.sleep(PATIENCE_S / 2)

    def _overdue(self, reduction: Reduction) -> bool:
        """Those still awaited have fallen silent, or hold the others up although they do send."""
        now = self._now()
        open_s = now - reduction.opened_at
        awaited = self._others - reduction.got - self.gone
        silent = all(now - self._last_frame_at.get(member, 0.0) > PATIENCE_S for member in awaited)
        return open_s > 3 * PATIENCE_S or (open_s > PATIENCE_S and silent)

    def _check_complete(self) -> None:
        if self.complete.is_set() or not self._owned_done():
            return
        self._end_results()
        if not self._dialling:
            self._set_complete()

    def _owned_done(self) -> bool:
        if self._reductions:
            return False
        if all(self.quantity.contributors[chunk] for chunk in self._mine):
            return True
        last = len(self.quantity.contributors)
        return not any(self._comes(member, last) for member in self._others - self.gone)

    def _end_results(self) -> None:
        if self._results_end is None:
            self._results_end = asyncio.create_task(self._finish_results())

    async def _finish_results(self) -> None:
        if self._finishing:
            await asyncio.wait(self._finishing)
        for inbox in list(self._inboxes.values()):
            await self._put_end(inbox)

    async def _put_end(self, inbox: Inbox) -> None:
        try:
            async with asyncio.timeout(LINGER_S):
                await inbox.results.put(None)
        except TimeoutError:
            inbox.stream.cancel()

    def _closing(self) -> None:
        """Results that are ready still go out, for a bounded time; sums that are not whole end here."""
        self._spare.clear()
        self._end_results()
        asyncio.get_running_loop().call_later(LINGER_S, self._stop_serving)


def _by_chunk(chunks: tuple[int, ...], references: bytes) -> dict[int, bytes]:
    if len(references) != 8 * len(chunks):
        return dict.fromkeys(chunks, NO_REFERENCE)
    return {chunk: references[8 * i : 8 * i + 8] for i, chunk in enumerate(chunks)}
