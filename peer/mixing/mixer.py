"""The exchanges of one peer: starts them for the training thread, hands incoming streams to them.

The training thread calls `start`, `settle`, `wait` and `close` through a `Mix`; everything else is on the network
loop. The one thing to get wrong: a member may dial before this peer has reached that round and stage. Its stream waits
here until the exchange exists, or is told at once that this peer is past it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future

from peer import log
from peer.errors import TransportError
from peer.mixing.direct import Direct
from peer.mixing.exchange import Exchange, Links, Outcome, decline
from peer.mixing.owned import Owned
from peer.mixing.quantity import Quantity
from peer.plan import Plan
from peer.transport import Open, Stage, Stream
from peer.waiting import result_of

OPEN_TIMEOUT_S = 10.0
EARLY_TIMEOUT_S = 600.0  # a bound on how long an early stream waits; its dialler gives up long before
CLOSE_TIMEOUT_S = 60.0  # a bound on coding jobs in flight; past it something is broken and the error is raised

ASTRAY_AFTER_S = 2.0  # of waiting: by then what is known of others is fresh, however short the rounds

RoundOf = Callable[[str], int | None]

logger = log.get(__name__)


class Mix:
    """An exchange as the training thread sees it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, exchange: Exchange, round_of: RoundOf) -> None:
        self._loop = loop
        self._exchange = exchange
        self._round_of = round_of

    def settle(self) -> None:
        """Stop waiting for members that hold others up. Returns at once."""
        self._loop.call_soon_threadsafe(self._exchange.settle)

    def abandon(self) -> None:
        """Make `wait` return now. Safe from a signal handler."""
        self._loop.call_soon_threadsafe(self._exchange.abandon)

    def wait(self, deadline_s: float) -> None:
        """Block until the exchange is complete, at most `deadline_s`. Settles at 70 % of it."""
        done: Future[None] = asyncio.run_coroutine_threadsafe(self._until(deadline_s), self._loop)
        result_of(done, deadline_s + CLOSE_TIMEOUT_S)

    async def _until(self, deadline_s: float) -> None:
        watch = asyncio.create_task(self._give_up_astray())
        try:
            # An owner stops waiting before those who wait for it do: its results still have to travel.
            for share_s, then in ((0.7 * deadline_s, self._exchange.settle), (0.3 * deadline_s, lambda: None)):
                try:
                    async with asyncio.timeout(share_s):
                        await self._exchange.complete.wait()
                    return
                except TimeoutError:
                    then()
        finally:
            watch.cancel()

    async def _give_up_astray(self) -> None:
        """Stop waiting for members more than a round away: they decline this round, and never dial for it.

        A peer that stood still comes back rounds behind, alive as ever: it and its partner would wait in vain.
        """
        exchange = self._exchange
        while not exchange.complete.is_set():
            await asyncio.sleep(ASTRAY_AFTER_S)
            for member in exchange.plan.parties:
                round_ = self._round_of(member)
                if member != exchange.links.me and round_ is not None and abs(round_ - exchange.round) > 1:
                    exchange.lost(member)

    def close(self) -> Outcome:
        """End the exchange. After this returns nothing of it touches the vectors."""
        return result_of(asyncio.run_coroutine_threadsafe(self._exchange.close(), self._loop), CLOSE_TIMEOUT_S)


class Mixer:
    """Where streams and exchanges find each other. Made and used on the network loop, but for `start`."""

    def __init__(self, links: Links, loop: asyncio.AbstractEventLoop, round_of: RoundOf = lambda _member: None) -> None:
        """`round_of` says which round a member was last heard to be in, None if that is not known."""
        self._links = links
        self._loop = loop
        self._round_of = round_of
        self._round = -1
        self._rooms: dict[tuple[int, Stage], asyncio.Future[Exchange | None]] = {}

    def start(self, plan: Plan, quantity: Quantity, addresses: Mapping[str, str]) -> Mix | None:
        """Begin a stage of a round; None when the plan has nobody to mix with. From the training thread."""
        started = asyncio.run_coroutine_threadsafe(self._start(plan, quantity, addresses), self._loop)
        exchange = result_of(started, CLOSE_TIMEOUT_S)
        return None if exchange is None else Mix(self._loop, exchange, self._round_of)

    async def _start(self, plan: Plan, quantity: Quantity, addresses: Mapping[str, str]) -> Exchange | None:
        self._enter(quantity.round)
        exchange: Exchange | None = None
        if plan.kind == "direct":
            exchange = Direct(self._links, plan, quantity, addresses)
        elif plan.kind == "owner":
            exchange = Owned(self._links, plan, quantity, addresses)
        room = self._room(quantity.round, quantity.stage)
        if not room.done():
            room.set_result(exchange)
        if exchange is not None:
            exchange.begin()
        return exchange

    def _enter(self, round_: int) -> None:
        if round_ < self._round:  # a peer that caught up from an older swarm starts over
            self._leave_rooms(lambda _: True)
        self._round = round_
        self._leave_rooms(lambda key: key < round_ - 1)
        for (round_waiting, _), room in self._rooms.items():
            if round_waiting < round_ and not room.done():
                room.set_result(None)

    def _leave_rooms(self, old: Callable[[int], bool]) -> None:
        for key in [key for key in self._rooms if old(key[0])]:
            room = self._rooms.pop(key)
            if not room.done():
                room.set_result(None)

    def _room(self, round_: int, stage: Stage) -> asyncio.Future[Exchange | None]:
        return self._rooms.setdefault((round_, stage), self._loop.create_future())

    def lost(self, member: str) -> None:
        """A member was found dead, or said goodbye: nobody waits for it any more."""
        for room in self._rooms.values():
            if room.done() and (exchange := room.result()) is not None and not exchange.closed:
                exchange.lost(member)

    async def on_exchange(self, stream: Stream) -> None:
        """Serve one incoming stream until it ends."""
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                opened = await stream.receive()
            if not isinstance(opened, Open) or opened.run != self._links.run:
                self._links.metrics.dropped("foreign_run" if isinstance(opened, Open) else "malformed")
                await decline(stream, "not our run", self._round)
                return
            exchange = await self.exchange(opened.round, opened.stage)
            if exchange is None:
                await decline(stream, f"not mixing {opened.stage} of round {opened.round}", self._round)
            else:
                await exchange.serve(opened, stream)
        except TransportError as error:
            logger.debug("incoming stream ended", why=str(error))
        except TimeoutError:
            logger.debug("incoming stream never opened")
        finally:
            stream.cancel()

    async def exchange(self, round_: int, stage: Stage) -> Exchange | None:
        """Return the exchange of a round and stage, waiting for it if it is yet to come; None if it never will."""
        if not self._round - 1 <= round_ <= self._round + 1:
            return None
        room = self._room(round_, stage)
        if round_ < self._round and not room.done():
            return None
        async with asyncio.timeout(EARLY_TIMEOUT_S):
            return await asyncio.shield(room)
