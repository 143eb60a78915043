"""Text to token batches: where it comes from, how it is cached, which batch a step gets.

documents   a data source as a sequence of texts
cache       token files shared by the peers of one machine
heldout     what no peer trains on
corpus      the batch of a step, a pure function of (seed, peer, position)
stream      the same for a hub dataset too large to fetch
prefetch    the next batches, made while the trainer computes
"""

from __future__ import annotations

from peer.data.corpus import Corpus, TokenSource, load_corpus
from peer.data.heldout import HeldOut
from peer.data.prefetch import Prefetcher

__all__ = ["Corpus", "HeldOut", "Prefetcher", "TokenSource", "load_corpus"]
