"""Direct exchange: two peers stream their chunks to each other, and each reduces for itself.

The one thing to get wrong: a chunk may be finalised only after it was coded for the partner, since for outer
gradients the result takes the place of what it was made from.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from peer.errors import TransportError
from peer.mixing.exchange import REDIAL_WAIT_S, Exchange, Links, both, decline
from peer.mixing.quantity import Quantity
from peer.plan import Plan
from peer.transport import Accept, Done, Form, Open, Part, Stream


class Direct(Exchange):
    """One partner."""

    def __init__(self, links: Links, plan: Plan, quantity: Quantity, addresses: Mapping[str, str]) -> None:
        super().__init__(links, plan, quantity, addresses)
        assert plan.partner is not None
        self._partner: str = plan.partner
        self._coded_to = -1  # every chunk up to this one has been coded for the partner
        self._coded = asyncio.Condition()
        self._redial: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        if self.plan.dials:
            self._spawn(self._dial(self._partner, self._lacking, self._as_dialler))

    def _lacking(self) -> tuple[int, ...]:
        return tuple(chunk for chunk, count in enumerate(self.quantity.contributors) if not count)

    def _group_size(self) -> int:
        return 2

    def _give_up(self, member: str) -> None:
        if member == self._partner:
            self.gone.add(member)
            self._set_complete()

    async def _as_dialler(self, stream: Stream, _chunks: tuple[int, ...], answer: Accept) -> None:
        await self._converse(stream, answer.chunks)

    async def _serve(self, opened: Open, stream: Stream) -> None:
        if opened.sender != self._partner:
            await decline(stream, "not your partner", self.round)
            return
        if self._redial is not None:
            self._redial.cancel()
        try:
            await stream.send(Accept(self._lacking()))
            await self._converse(stream, opened.chunks)
        except TransportError:
            if not self.complete.is_set():
                loop = asyncio.get_running_loop()
                self._redial = loop.call_later(REDIAL_WAIT_S, self._give_up, self._partner)

    def _closing(self) -> None:
        self._stop_serving()  # what is sent here is read from vectors that change now

    async def _converse(self, stream: Stream, they_lack: tuple[int, ...]) -> None:
        self._coded_to = -1
        await both(self._send(stream, they_lack), self._receive(stream))
        await stream.finish()
        self._set_complete()

    async def _send(self, stream: Stream, they_lack: tuple[int, ...]) -> None:
        for chunk in they_lack:
            if not 0 <= chunk < len(self.quantity.contributors) or self.quantity.contributors[chunk]:
                continue  # final here: what it was made from is gone
            codec, payload = await self._code(self.quantity.contribution, chunk)
            await self._mark_coded(chunk)
            await self._send_chunk(stream, chunk, Part.CONTRIBUTION, Form.PLAIN, codec, payload, 1)
        await self._mark_coded(len(self.quantity.contributors))
        await stream.send(Done(Part.CONTRIBUTION))

    async def _mark_coded(self, chunk: int) -> None:
        async with self._coded:
            self._coded_to = chunk
            self._coded.notify_all()

    async def _receive(self, stream: Stream) -> None:
        while frame := await self._next_chunk(stream, self._partner, Part.CONTRIBUTION):
            chunk = frame.chunk
            async with self._coded:
                await self._coded.wait_for(lambda chunk=chunk: self._coded_to >= chunk)  # type: ignore[misc]
            blend = self.quantity.blend
            await self._use(self._partner, blend, chunk, frame.codec, frame.payload, self.plan.weight)
