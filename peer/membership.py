"""Who is in the swarm and how sure we are: a pure state machine, fed by the probe.

What peers say about a member forms an order (`standing`), and the larger always wins, so views agree whatever the
order in which rumours arrive. Only a member itself may raise its incarnation or its beat; everybody else only makes
its state worse. The one thing to get wrong: time-outs count from when a beat was last seen to *grow* here, never from
when the member was last mentioned, or a dead member lives on in gossip for ever.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import IntEnum

_LONGEST_ID = 128
_LONGEST_ADDRESS = 300
_LARGEST = 2**63 - 1  # what an int64 on the wire holds
_NEWCOMERS_PATIENCE = 12  # times longer a newcomer may be silent: it reads its text and builds its model first
_DEAD_SHARE = 0.1  # of the rounds in which a dead member is tried too, so that a healed partition is noticed
_OWN_FIELDS = frozenset({"address", "round", "step", "from_round", "upload_bps"})


class State(IntEnum):
    """What is believed of a member. Larger is worse news, or more final."""

    ALIVE = 0
    SUSPECT = 1  # silent for a while; still gossiped with, no longer planned with
    DEAD = 2
    LEFT = 3  # it said goodbye itself


@dataclass(frozen=True, slots=True)
class Member:
    """One peer as others see it. Everything but `state` is the member's own word."""

    id: str
    address: str  # host:port others dial; "" for a peer nobody can dial, which opens every stream itself
    incarnation: int = 0  # grows when the member restarts or refutes a rumour about itself
    state: State = State.ALIVE
    beat: int = 0  # grows with every sign of life of the same incarnation
    round: int = -1  # where it is; -1 while joining
    step: int = 0  # inner steps done in that round
    from_round: int = -1  # first round it takes part in; -1 while it does not know yet
    upload_bps: int = 0  # 0: unknown


@dataclass(frozen=True, slots=True)
class Change:
    """A member that is new, changed state, address or incarnation. For this peer itself: a rumour it has refuted."""

    member: Member
    before: State | None  # None: was not known


def standing(member: Member) -> tuple[int | str, ...]:
    """Return the place of a claim in the order of claims about one member; the larger wins.

    Newer incarnation first; then an end (dead, left) beats every sign of life; then the newer beat; then worse news.
    A suspicion is thus beaten by a beat younger than itself. The rest only breaks ties the same way on every peer.
    """
    end = max(member.state, State.SUSPECT)
    progress = (member.round, member.step, member.from_round, member.upload_bps, member.address)
    return (member.incarnation, end, member.beat, member.state, *progress)


@dataclass(slots=True)
class _Record:
    member: Member
    heard_s: float  # when its beat was last seen to grow, or it was heard directly
    ended_s: float  # when it was recorded as dead or left
    hidden: bool = False  # a tombstone: kept to refuse old rumours, in no view
    link_doubted: bool = False  # we could not reach it, others may: our own evidence counts no more

    @property
    def ended(self) -> bool:
        return self.member.state >= State.DEAD


class Membership:
    """This peer's view of the swarm. No clock, no lock: one thread, `now_s` from any clock that never goes back."""

    def __init__(
        self,
        me: Member,
        suspect_after_s: float = 5.0,
        dead_after_s: float = 15.0,
        forget_after_s: float = 600.0,
        max_members: int = 4096,
    ) -> None:
        self._me = me
        self.suspect_after_s = suspect_after_s
        self._dead_after_s = dead_after_s
        self._forget_after_s = forget_after_s
        self._max_members = max_members
        self._records: dict[str, _Record] = {}

    @property
    def me(self) -> Member:
        return self._me

    # what this peer says of itself

    def beat(self, round_: int, step: int) -> None:
        """Show a sign of life, with where training is."""
        self.update_me(round=round_, step=step)

    def update_me(self, **fields: int | str) -> None:
        """Change what this peer says of itself. Counts as a beat, so that the newest word wins everywhere."""
        if not fields.keys() <= _OWN_FIELDS:
            raise TypeError(f"cannot change {sorted(fields.keys() - _OWN_FIELDS)}, only {sorted(_OWN_FIELDS)}")
        self._me = replace(self._me, beat=self._me.beat + 1, **fields)  # type: ignore[arg-type]  # names checked above

    def leave(self) -> None:
        """Say goodbye. What others say of this peer is no longer refuted."""
        self._me = replace(self._me, state=State.LEFT)

    # what others say

    def merge(self, members: Iterable[Member], now_s: float) -> list[Change]:
        """Take in another peer's view. Garbage and old news are ignored; returns what changed here."""
        changes = []
        for member in members:
            if not _sane(member):
                continue
            change = self._refute(member) if member.id == self._me.id else self._learn(member, now_s)
            if change is not None:
                changes.append(change)
        return changes

    def _refute(self, rumour: Member) -> Change | None:
        """Outbid a rumour about this peer: bad news, or an earlier life of it that got further."""
        me = self._me
        if standing(rumour) <= standing(me) or (me.state is State.LEFT and rumour.incarnation == me.incarnation):
            return None
        self._me = replace(me, incarnation=rumour.incarnation + 1)
        return Change(self._me, rumour.state)

    def _learn(self, member: Member, now_s: float) -> Change | None:
        record = self._records.get(member.id)
        if record is None:
            if not self._make_room(member):
                return None
            # The end of somebody never seen here is no news, but older rumours that it lives must not win later.
            hidden = member.state >= State.DEAD
            self._records[member.id] = _Record(member, now_s, now_s, hidden)
            return None if hidden else Change(member, None)
        before = record.member
        if standing(member) <= standing(before):
            return None
        if (member.incarnation, member.beat) > (before.incarnation, before.beat):
            record.heard_s = now_s
        if member.address != before.address:
            record.link_doubted = False
        if member.state >= State.DEAD > before.state:
            record.ended_s = now_s
        record.member = member
        if record.hidden:
            record.hidden = member.state >= State.DEAD
            return None if record.hidden else Change(member, None)
        told = (before.state, before.incarnation, before.address) != (member.state, member.incarnation, member.address)
        return Change(member, before.state) if told else None

    def _make_room(self, newcomer: Member) -> bool:
        """Whether a newcomer fits; the oldest tombstone or dead member makes way, a live one never does."""
        if len(self._records) < self._max_members:
            return True
        ended = [record for record in self._records.values() if record.ended]
        if not ended or newcomer.state >= State.DEAD:
            return False
        oldest = min(ended, key=lambda record: (not record.hidden, record.ended_s, record.member.id))
        del self._records[oldest.member.id]
        return True

    # what this peer sees for itself

    def heard(self, id_: str, now_s: float) -> None:
        """Note direct contact with a member. It puts time-outs off; only a grown beat clears a suspicion."""
        record = self._records.get(id_)
        if record is not None and not record.ended:
            record.heard_s = max(record.heard_s, now_s)
            record.link_doubted = False

    def unreachable(self, id_: str, now_s: float) -> list[Change]:
        """Suspect a member at once: its address refuses.

        Believed once. If others then see it beat, it is our link that is broken, and we say no more until we hear from
        it directly: otherwise the member would be suspected and cleared for ever.
        """
        record = self._records.get(id_)
        if record is None or record.member.state is not State.ALIVE or record.link_doubted or record.member.round < 0:
            return []  # a newcomer listens before it answers
        record.link_doubted = True
        return [self._set_state(record, State.SUSPECT, now_s)]

    def tick(self, now_s: float) -> list[Change]:
        """Let time pass: the silent become suspect, then dead, then forgotten."""
        changes = []
        for id_, record in list(self._records.items()):
            silent_s = now_s - record.heard_s
            if record.member.round < 0:
                silent_s /= _NEWCOMERS_PATIENCE
            if record.ended:
                age_s = now_s - record.ended_s
                # Hidden for as long again: peers forget at slightly different times and must not teach each other back.
                if age_s >= 2 * self._forget_after_s:
                    del self._records[id_]
                elif age_s >= self._forget_after_s:
                    record.hidden = True
            elif silent_s >= self._dead_after_s:
                changes.append(self._set_state(record, State.DEAD, now_s))
            elif silent_s >= self.suspect_after_s and record.member.state is State.ALIVE:
                changes.append(self._set_state(record, State.SUSPECT, now_s))
        return changes

    def excuse(self, stall_s: float, now_s: float) -> None:
        """Forgive everybody a silence that was ours: this process stood still and could hear nobody."""
        for record in self._records.values():
            record.heard_s = min(record.heard_s + stall_s, now_s)

    def _set_state(self, record: _Record, state: State, now_s: float) -> Change:
        before = record.member.state
        record.member = replace(record.member, state=state)
        if state >= State.DEAD:
            record.ended_s = now_s
        return Change(record.member, before)

    # questions

    def view(self) -> tuple[Member, ...]:
        """Return everybody known, this peer included, by id. This is what is gossiped."""
        others = [record.member for record in self._records.values() if not record.hidden]
        return tuple(sorted([self._me, *others], key=lambda member: member.id))

    def members(self, *states: State) -> tuple[Member, ...]:
        """Return the others in any of these states (no states: all of them), by id."""
        return tuple(m for m in self.view() if m.id != self._me.id and (not states or m.state in states))

    def get(self, id_: str) -> Member | None:
        if id_ == self._me.id:
            return self._me
        record = self._records.get(id_)
        return None if record is None or record.hidden else record.member

    def roster(self, round_: int) -> tuple[Member, ...]:
        """Return who takes part in a round, by id, this peer under the same rule. Equal views give equal rosters."""
        return roster(self.view(), round_)

    def gossip_targets(self, k: int, rng: random.Random) -> tuple[Member, ...]:
        """Return up to `k` random others that can be dialled, now and then a dead one among them."""
        dialable = [m for m in self.members() if m.address not in ("", self._me.address)]
        live = [m for m in dialable if m.state <= State.SUSPECT]
        dead = [m for m in dialable if m.state is State.DEAD]
        chosen = rng.sample(live, min(k, len(live)))
        if dead and k > 0 and (not live or rng.random() < _DEAD_SHARE):
            chosen = [*chosen[: k - 1], rng.choice(dead)]
        return tuple(chosen)

    def swarm_round(self) -> int | None:
        """Return the median round of the live others that train, None if there are none."""
        return swarm_round(self.view(), self._me.id)


def roster(view: Iterable[Member], round_: int) -> tuple[Member, ...]:
    """Return who takes part in a round according to a view, by id."""
    taking_part = (m for m in view if m.state is State.ALIVE and 0 <= m.from_round <= round_)
    return tuple(sorted(taking_part, key=lambda member: member.id))


def swarm_round(view: Iterable[Member], me: str) -> int | None:
    """Return the median round of the live members other than `me` that train, None if there are none."""
    rounds = [m.round for m in view if m.id != me and m.state is State.ALIVE and m.round >= 0]
    return statistics.median_low(rounds) if rounds else None


def _sane(member: Member) -> bool:
    names = 0 < len(member.id) <= _LONGEST_ID and len(member.address) <= _LONGEST_ADDRESS
    shown = member.id.isprintable() and member.address.isprintable()  # both end up in logs and on terminals
    counted = (member.incarnation, member.beat, member.step, member.upload_bps)
    placed = (member.round, member.from_round)
    return names and shown and all(0 <= n <= _LARGEST for n in counted) and all(-1 <= n <= _LARGEST for n in placed)
