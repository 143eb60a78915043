"""Each chunk has one owner, who averages it for everyone: rendezvous hashing with bounded loads.

Owners take bytes in proportion to their upload rates, yet a chunk's owner seldom depends on who else is there, so
peers whose views of the membership differ for a moment still meet at most chunks. The one thing to get wrong: a rate
is what a member says of itself, and must not make it the owner of everything.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from peer.plan.party import Party, draw

_FASTEST = 16  # times the median rate: what is declared beyond that counts no more


def owners(key: bytes, parties: Sequence[Party], chunk_sizes: Sequence[int]) -> tuple[str, ...]:
    """Return the owner of each chunk, among parties that can be dialled; empty if there is none."""
    able = sorted((party for party in parties if party.dialable), key=lambda party: party.id)
    if not able:
        return ()
    shares = _shares(able)
    scores = _scores(key, able, shares, len(chunk_sizes))
    room = shares * sum(chunk_sizes)  # bytes still to take
    chosen = [0] * len(chunk_sizes)
    # Large chunks first, so that small ones even out what is left.
    for chunk in sorted(range(len(chunk_sizes)), key=lambda index: (-chunk_sizes[index], index)):
        size = chunk_sizes[chunk]
        willing = room >= size
        # With none willing, the one with most room: so every load ends within about a chunk of its share.
        best = int(np.where(willing, scores[chunk], 0.0).argmax() if willing.any() else room.argmax())
        room[best] -= size
        chosen[chunk] = best
    return tuple(able[index].id for index in chosen)


def _shares(parties: Sequence[Party]) -> NDArray[np.float64]:
    known = [party.upload_bps for party in parties if party.upload_bps > 0]
    most = _FASTEST * statistics.median_low(known) if known else 1
    bounded = [min(rate, most) for rate in known]
    average = sum(bounded) / len(bounded) if bounded else 1.0
    weights = [min(party.upload_bps, most) if party.upload_bps > 0 else average for party in parties]
    return np.array([weight / sum(weights) for weight in weights])


def _scores(key: bytes, parties: Sequence[Party], shares: NDArray[np.float64], chunks: int) -> NDArray[np.float64]:
    """Return how much each party is drawn to each chunk, (chunks, parties), all above 0.

    Weighted rendezvous hashing: the largest of -share / ln(uniform) falls to each in proportion to its share.
    """
    seeds = np.array([draw(key, party.id) for party in parties], np.uint64)
    places = np.array([draw(key, chunk) for chunk in range(chunks)], np.uint64)
    # 52 bits and a half, so that no uniform is 0 or 1.
    uniform = ((_mixed(places[:, None] ^ seeds) >> np.uint64(12)) + 0.5) * 2.0**-52
    return np.asarray(-shares / np.log(uniform))


def _mixed(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Spread 64 bits over 64 (the finaliser of splitmix64): a hash of the pair without hashing every pair."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
