"""Pairwise gossip: one random partner a round, the plain mean of both.

No round waits for more than one other member, so a slow peer costs one partner, not everyone. The price is slower
agreement: of n peers' squared spread a round of random pairs leaves (n - 2)/(2 (n - 1)) (ALGORITHM.md sec. 4).
"""

from __future__ import annotations

from collections.abc import Sequence

from peer.plan.party import Party, draw


def pairs(key: bytes, parties: Sequence[Party]) -> tuple[tuple[Party, Party], ...]:
    """Return a random matching. An odd one out is in no pair, nor are two of whom neither can be dialled.

    The first of a pair opens the stream: the smaller id, unless the other cannot be dialled.
    """
    # Sorted by hash, not shuffled: peers of different Python versions must agree.
    order = sorted(parties, key=lambda party: (draw(key, party.id), party.id))
    matched = []
    for one, other in zip(order[::2], order[1::2], strict=False):
        small, large = sorted((one, other), key=lambda party: party.id)
        if large.dialable:
            matched.append((small, large))
        elif small.dialable:
            matched.append((large, small))
    return tuple(matched)
