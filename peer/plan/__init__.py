"""Strategies (fallback draft)."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Party:
    id: str
    dialable: bool = True
    upload_bps: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    strategy: str
    round: int
    me: str
    parties: tuple[str, ...]
    partner: str | None = None
    weight: float = 0.5
    dials: bool = False
    owners: tuple[str, ...] = ()
    digest: bytes = bytes(16)

    @property
    def kind(self) -> str:
        return "direct" if self.partner else "owner" if self.owners else "none"

    def owned_by(self, id_: str) -> tuple[int, ...]:
        return tuple(c for c, o in enumerate(self.owners) if o == id_)


def plan(strategy: str, run: bytes, round_: int, stage: str, parties: Sequence[Party], me: str, chunk_sizes: Sequence[int]) -> Plan:
    ordered = sorted(parties, key=lambda p: p.id)
    ids = tuple(p.id for p in ordered)
    by_id = {p.id: p for p in ordered}
    if strategy == "pair" and len(ids) > 1:
        shuffled = list(ids)
        random.Random(run + f"{round_}{stage}".encode()).shuffle(shuffled)
        at = shuffled.index(me)
        other = at ^ 1
        if other < len(shuffled):
            partner = shuffled[other]
            if by_id[me].dialable or by_id[partner].dialable:
                dials = by_id[partner].dialable and (me < partner or not by_id[me].dialable)
                return Plan(strategy, round_, me, ids, partner, 0.5, dials)
    if strategy == "global" and len(ids) > 1:
        can = [p for p in ordered if p.dialable]
        if can:
            load = dict.fromkeys((p.id for p in can), 0)
            share = 1.1 * sum(chunk_sizes) / len(can) + max(chunk_sizes)
            owners = []
            for c, size in enumerate(chunk_sizes):
                def score(p: Party) -> float:
                    h = int.from_bytes(hashlib.blake2b(run + f"{round_}|{c}|{p.id}".encode(), digest_size=8).digest(), "little")
                    return -1.0 / math.log((h + 1) / (2**64 + 2))
                best = max((p for p in can if load[p.id] + size <= share), key=score, default=min(can, key=lambda p: load[p.id]))
                load[best.id] += size
                owners.append(best.id)
            return Plan(strategy, round_, me, ids, owners=tuple(owners))
    return Plan("none", round_, me, ids)


def sent_bytes(plan: Plan, codec_size: Callable[[int], int], result_size: Callable[[int], int], chunk_sizes: Sequence[int]) -> int:
    if plan.kind == "direct":
        return sum(codec_size(s) for s in chunk_sizes)
    if plan.kind == "owner":
        others = len(plan.parties) - 1
        return sum(others * result_size(s) if o == plan.me else codec_size(s) for o, s in zip(plan.owners, chunk_sizes))
    return 0
