"""The loop that feeds membership: beats, trades views with a few random members, and looks for a lost swarm.

A round never waits for its calls, so one silent address does not slow this peer's own beat; an address with a call
under way is not called again. Everything runs on the network loop; other threads read `view`, which is replaced whole.
The one thing to get wrong: only a refusal is evidence against a member. An answer that is late may be a full link, and
is left to the time-outs.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from peer import log
from peer.errors import RefusedError, TransportError, Unreachable
from peer.membership import Change, Member, Membership, State
from peer.metrics import Metrics
from peer.transport import Gossip, Transport

TARGETS = 2  # members called in a round
GOODBYE_S = 1.0  # longest time to spend on telling others
_GOODBYES = 16  # members told; they tell the rest
_JITTER = 0.2  # share of the interval
_MOST_CALLS = 16  # under way at once
_REDIAL_S = 10.0  # mean pause between looks for a part of the swarm that was split off
_SHOWN = 8  # members named in one line of the log

logger = log.get(__name__)


class Backoff:
    """Pauses that double up to a limit, each drawn from the whole range: many peers that fail together spread out."""

    def __init__(self, rng: random.Random, first_s: float = 0.5, longest_s: float = 10.0) -> None:
        self._rng = rng
        self._first_s = first_s
        self._longest_s = longest_s
        self._most_s = first_s

    def pause_s(self) -> float:
        most_s, self._most_s = self._most_s, min(2 * self._most_s, self._longest_s)
        return self._rng.uniform(0, most_s)

    def reset(self) -> None:
        self._most_s = self._first_s


class Probe:
    """One peer's gossip and failure detection. `view` may be read from any thread, the rest is the loop's."""

    def __init__(
        self,
        membership: Membership,
        transport: Transport,
        run: bytes,
        metrics: Metrics,
        *,
        bootstrap: Sequence[str] = (),
        position: Callable[[], tuple[int, int]] = lambda: (0, 0),
        on_changes: Callable[[list[Change]], None] = lambda _: None,
        interval_s: float = 0.5,
        timeout_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        """`position` says which round and step training is in; `on_changes` must neither raise nor take long."""
        self.view: tuple[Member, ...] = membership.view()
        self._membership = membership
        self._transport = transport
        self._run = run
        self._metrics = metrics
        self._bootstrap = tuple(dict.fromkeys(bootstrap))
        self._position = position
        self._on_changes = on_changes
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._clock = clock
        self._rng = rng or random.Random(f"{membership.me.id} {membership.me.incarnation}")
        self._backoff = Backoff(self._rng)
        self._redial_at_s = clock()
        self._round_at_s: float | None = None
        self._alone: bool | None = None
        self._calls: dict[str, asyncio.Task[None]] = {}
        self._own_addresses: set[str] = set()  # bootstrap addresses that turned out to be ours
        self._wrong: dict[str, str] = {}  # what was last wrong with a bootstrap address
        self._forgetting: set[asyncio.Task[None]] = set()
        self._twin_told = False
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Probe until `stop`, `leave` or cancelled."""
        loop = asyncio.get_running_loop()
        try:
            while not self._stopping.is_set():
                self._begin_round()
                due_s = loop.time() + self._interval_s * self._rng.uniform(1 - _JITTER, 1 + _JITTER)
                try:
                    async with asyncio.timeout_at(due_s):
                        await self._stopping.wait()
                except TimeoutError:
                    self._metrics.loop_lag(loop.time() - due_s)
        finally:
            await _end(self._calls.values())

    def stop(self) -> None:
        """Let `run` return at once. From the loop."""
        self._stopping.set()

    async def round_once(self) -> None:
        """Do one round and wait for its calls."""
        self._begin_round()
        await asyncio.gather(*self._calls.values())

    async def leave(self) -> None:
        """Say goodbye to as many members as answer in a second, and stop."""
        self._stopping.set()
        self._membership.leave()
        self._publish()
        targets = self._membership.gossip_targets(_GOODBYES, self._rng)
        calls = [asyncio.create_task(self._push_pull(target.address, target.id)) for target in targets]
        try:
            if calls:
                await asyncio.wait(calls, timeout=GOODBYE_S)
        finally:
            await _end(calls)

    async def on_gossip(self, message: Gossip) -> Gossip:
        """Take in a view and return our own. Raises RefusedError for a foreign run."""
        if message.run != self._run:
            raise RefusedError(f"this member is in run {self._run.hex()}, the caller in {message.run.hex()}")
        if message.sender == self._membership.me.id:
            self._check_twin(message)
        else:
            self.learn(message.members, message.sender)
        return self._mine()

    def learn(self, members: Iterable[Member], sender: str = "") -> None:
        """Take in what somebody said; `sender` was heard directly."""
        now_s = self._clock()
        self._membership.merge(members, now_s)
        self._membership.heard(sender, now_s)
        self._publish()

    # a round

    def _begin_round(self) -> None:
        now_s = self._clock()
        self._excuse_stall(now_s)
        self._membership.beat(*self._position())
        self._membership.tick(now_s)
        self._publish()
        for address in self._to_redial(now_s):
            self._call(address, None)
        for target in self._membership.gossip_targets(TARGETS, self._rng):
            self._call(target.address, target.id)

    def _excuse_stall(self, now_s: float) -> None:
        """A process that was stopped heard nobody; that is nobody's fault."""
        if self._round_at_s is not None:
            stall_s = now_s - self._round_at_s - self._interval_s
            if stall_s > self._membership.suspect_after_s / 2:
                self._membership.excuse(stall_s, now_s)
                logger.warning("this process stood still", seconds=round(stall_s, 1))
        self._round_at_s = now_s

    def _to_redial(self, now_s: float) -> list[str]:
        """Return the bootstrap addresses to call: often while alone, else one now and then."""
        me = self._membership.me
        live = _live_addresses(self.view, me)
        candidates = [a for a in self._bootstrap if a not in live | self._own_addresses | {me.address}]
        alone = not live
        if alone != self._alone:
            self._tell_alone(alone, candidates)
            self._alone, self._redial_at_s = alone, now_s
            self._backoff.reset()
        if now_s < self._redial_at_s or not candidates:
            return []
        if alone:
            self._redial_at_s = now_s + self._backoff.pause_s()
            return self._rng.sample(candidates, len(candidates))
        self._redial_at_s = now_s + _REDIAL_S * self._rng.uniform(0.5, 1.5)
        return [self._rng.choice(candidates)]

    def _tell_alone(self, alone: bool, candidates: list[str]) -> None:
        if not alone:
            logger.info("connected", members=len(self._membership.members(State.ALIVE)))
        elif candidates:
            logger.info("no other member known, calling bootstrap addresses", addresses=" ".join(candidates[:_SHOWN]))
        else:
            logger.info("no other member known, waiting to be called")

    def _call(self, address: str, expected: str | None) -> None:
        if address in self._calls or len(self._calls) >= _MOST_CALLS:
            return
        task = asyncio.create_task(self._push_pull(address, expected), name=f"gossip with {address}")
        self._calls[address] = task
        task.add_done_callback(lambda _: self._calls.pop(address))

    # a call

    async def _push_pull(self, address: str, expected: str | None) -> None:
        """Trade views with whoever answers there; `expected` is the member that should."""
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        try:
            async with asyncio.timeout(2 * self._timeout_s):  # the transport keeps its own, half as long
                reply = await self._transport.gossip(address, self._mine(), self._timeout_s)
        except RefusedError as error:
            self._failed(address, expected, error.reason, evidence=True)
        except TransportError as error:
            refused = isinstance(error, Unreachable) and loop.time() - started_s < self._timeout_s / 2
            self._failed(address, expected, str(error), evidence=refused)
        except TimeoutError:
            self._failed(address, expected, "no answer", evidence=False)
        else:
            if reply.run != self._run:
                self._failed(address, expected, f"is in run {reply.run.hex()}", evidence=True)
            else:
                self._answered(address, expected, reply)

    def _answered(self, address: str, expected: str | None, reply: Gossip) -> None:
        self._wrong.pop(address, None)
        if expected is not None and reply.sender != expected:  # somebody else lives there now
            self._membership.unreachable(expected, self._clock())
        if reply.sender != self._membership.me.id:
            self.learn(reply.members, reply.sender)
        elif address not in self._own_addresses and expected is None:
            self._own_addresses.add(address)
            logger.info("bootstrap address is this peer's own, ignored", address=address)

    def _failed(self, address: str, expected: str | None, why: str, *, evidence: bool) -> None:
        if expected is None:
            if self._wrong.get(address) != why:
                self._wrong[address] = why
                logger.info("bootstrap does not answer", address=address, why=why)
        elif evidence:
            self._membership.unreachable(expected, self._clock())
            self._publish()
        if address not in _live_addresses(self.view, self._membership.me):
            self._forget(address)

    def _check_twin(self, message: Gossip) -> None:
        """A caller with our own id is this peer, by an address it did not know as its own, or a copy of its folder."""
        me = self._membership.me
        elsewhere = [m.address for m in message.members if m.id == me.id and m.address != me.address]
        if elsewhere and not self._twin_told:
            self._twin_told = True
            logger.warning("another peer uses this peer's identity", id=me.id, address=elsewhere[0])

    # what the rest of the process sees

    def _mine(self) -> Gossip:
        return Gossip(self._run, self._membership.me.id, self._membership.view())

    def _publish(self) -> None:
        """Replace `view` and tell what is different, whoever changed membership since the last time."""
        before, me = {member.id: member for member in self.view}, self._membership.me
        dialled = _live_addresses(self.view, me)
        self.view = self._membership.view()
        self._metrics.members(Counter(member.state.name.lower() for member in self.view))
        if me.incarnation != before[me.id].incarnation:
            logger.info("others had given this peer up, corrected", incarnation=me.incarnation)
        changes = [
            Change(member, known.state if known else None)
            for member in self.view
            if member.id != me.id and ((known := before.get(member.id)) is None or _differ(known, member))
        ]
        if changes:
            _tell(changes)
            self._on_changes(changes)
        # A restarted member is dialled anew: the old connection would go on refusing until its pause is over.
        restarted = {c.member.address for c in changes if c.before is State.SUSPECT and _restarted(before, c.member)}
        for address in (dialled - _live_addresses(self.view, me) | restarted) - {""}:
            self._forget(address)

    def _forget(self, address: str) -> None:
        task = asyncio.create_task(self._transport.forget(address))
        self._forgetting.add(task)
        task.add_done_callback(self._forgetting.discard)


def _live_addresses(view: Iterable[Member], me: Member) -> set[str]:
    return {member.address for member in view if member.id != me.id and member.state <= State.SUSPECT}


def _differ(one: Member, other: Member) -> bool:
    return (one.state, one.incarnation, one.address) != (other.state, other.incarnation, other.address)


def _restarted(before: Mapping[str, Member], member: Member) -> bool:
    return member.state is State.ALIVE and member.incarnation > before[member.id].incarnation


def _tell(changes: list[Change]) -> None:
    """Log one line for each kind of change, however many members."""
    kinds: dict[str, list[str]] = {}
    for change in changes:
        kinds.setdefault(_kind(change), []).append(f"{change.member.id}@{change.member.address or 'nowhere'}")
    for kind, who in kinds.items():
        more = {"and_more": len(who) - _SHOWN} if len(who) > _SHOWN else {}
        logger.info(f"members {kind}", members=" ".join(who[:_SHOWN]), **more)


def _kind(change: Change) -> str:
    state = change.member.state
    if change.before is None:
        return "joined"
    if change.before == state:
        return "restarted or moved"
    return {State.ALIVE: "back", State.SUSPECT: "silent", State.DEAD: "lost", State.LEFT: "left"}[state]


async def _end(calls: Iterable[asyncio.Task[None]]) -> None:
    """Cancel calls and wait for them, not for long."""
    pending = [call for call in calls if not call.done()]
    for call in pending:
        call.cancel()
    if pending:
        await asyncio.wait(pending, timeout=GOODBYE_S)
