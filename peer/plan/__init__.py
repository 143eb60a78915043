"""Who sends which chunk to whom, and who reduces: a pure function of what every peer knows.

No negotiation: the same inputs give the same plan on every peer. The one thing to get wrong: nothing may depend on
the order in which parties are listed, on Python's own hash, or on who asks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from peer.plan.owner import owners
from peer.plan.pair import pairs
from peer.plan.party import Party

__all__ = ["STRATEGIES", "Party", "Plan", "plan", "sent_bytes"]

STRATEGIES = ("none", "pair", "global")


@dataclass(frozen=True, slots=True)
class Plan:
    """One peer's part in one stage of one round."""

    strategy: str
    round: int
    me: str
    parties: tuple[str, ...]  # all of them, `me` too, sorted
    partner: str | None = None  # direct: the one to exchange with
    weight: float = 0.5  # direct: of the partner's values in the mean
    dials: bool = False  # direct: this peer opens the stream
    owners: tuple[str, ...] = ()  # owner: who reduces each chunk
    digest: bytes = bytes(16)  # of the whole plan, the same on every peer that has the same

    @property
    def kind(self) -> Literal["none", "direct", "owner"]:
        """The shape of the exchange."""
        if self.partner is not None:
            return "direct"
        return "owner" if self.owners else "none"

    def owned_by(self, member: str) -> tuple[int, ...]:
        """Return the chunks that a member reduces, ascending."""
        return tuple(chunk for chunk, owner in enumerate(self.owners) if owner == member)


def plan(
    strategy: str,
    run: bytes,
    round_: int,
    stage: str,
    parties: Sequence[Party],
    me: str,
    chunk_sizes: Sequence[int],
) -> Plan:
    """Return `me`'s part. A lone peer, an odd one out and a swarm that nobody can dial have a plan of kind none."""
    assert strategy in STRATEGIES, strategy
    ids = tuple(sorted(party.id for party in parties))
    assert me in ids
    assert len(set(ids)) == len(ids), "two parties of one id"
    if len(ids) == 1:
        strategy = "none"
    key = b"|".join((run, str(round_).encode(), stage.encode(), strategy.encode()))
    match strategy:
        case "pair":
            matched = pairs(key, parties)
            digest = _digest(key, ids, [f"{first.id} {second.id}" for first, second in matched])
            for first, second in matched:
                if me in (first.id, second.id):
                    partner = second.id if me == first.id else first.id
                    return Plan(strategy, round_, me, ids, partner=partner, dials=me == first.id, digest=digest)
            return Plan(strategy, round_, me, ids, digest=digest)
        case "global":
            chosen = owners(key, parties, chunk_sizes)
            return Plan(strategy, round_, me, ids, owners=chosen, digest=_digest(key, ids, chosen))
        case _:
            return Plan(strategy, round_, me, ids, digest=_digest(key, ids, ()))


def sent_bytes(
    plan: Plan, codec_size: Callable[[int], int], result_size: Callable[[int], int], chunk_sizes: Sequence[int]
) -> int:
    """Return how many payload bytes `plan.me` sends if all goes well: its contributions and, as an owner, results."""
    match plan.kind:
        case "direct":
            return sum(map(codec_size, chunk_sizes))
        case "owner":
            others = len(plan.parties) - 1
            return sum(
                others * result_size(size) if owner == plan.me else codec_size(size)
                for owner, size in zip(plan.owners, chunk_sizes, strict=True)
            )
        case _:
            return 0


def _digest(key: bytes, ids: Sequence[str], decided: Sequence[str]) -> bytes:
    text = "\n".join((*ids, "", *decided)).encode()
    return hashlib.blake2b(key + b"\n" + text, digest_size=16).digest()
