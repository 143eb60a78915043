"""The batch of a step: a pure function of (seed, peer, position), so a resumed peer reads on where it was.

Training tokens are cut into windows. In each pass over them a peer takes every window once, in an order of its own,
from a cut shifted at random. The one thing you would get wrong: no state is kept between batches, neither a
generator's nor a shuffled list; position alone says where a peer is, after any number of restarts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from peer import log
from peer.config import DataSpec
from peer.data.cache import open_tokens
from peer.data.documents import Source, Tally, documents, encode_documents, find_source
from peer.data.heldout import HeldOut, is_held_out, take_windows
from peer.data.stream import open_stream
from peer.errors import DataError
from peer.model import Tokenizer

_FORMAT = 1  # of the token files; a change here makes every cache anew
_ENCODE_AT_ONCE = 256
_log = log.get(__name__)


class TokenSource(Protocol):
    """What a trainer reads from."""

    @property
    def heldout(self) -> HeldOut: ...

    def batch(self, seed: int, peer_id: str, position: int, size: int) -> Tensor:
        """Return (size, context + 1) int64: a step's sequences and, shifted by one, their targets."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Tokens of a whole data source, mapped into memory."""

    train: NDArray[Any]
    heldout: HeldOut
    context: int
    facts: dict[str, int] = field(default_factory=dict)

    def batch(self, seed: int, peer_id: str, position: int, size: int) -> Tensor:
        """Return (size, context + 1) int64. Any thread."""
        samples = position * size + np.arange(size, dtype=np.int64)
        starts = np.empty(size, np.int64)
        # One window less than fits leaves room for the shift of the cut.
        windows = max(1, (len(self.train) - 1) // self.context - 1)
        slack = min(self.context, len(self.train) - windows * self.context)
        for epoch in np.unique(samples // windows):
            here = samples // windows == epoch
            keys = _keys(seed, peer_id, int(epoch))
            shift = int(keys[4]) % slack
            starts[here] = shuffled(samples[here] % windows, windows, keys[:4]) * self.context + shift
        return take_windows(self.train, starts, self.context + 1)


def load_corpus(spec: DataSpec, tokenizer: Tokenizer, context: int, cache_folder: Path) -> TokenSource:
    """Return the tokens of the spec's source, made or found in the cache. Raises DataError, ConfigError."""
    source = find_source(spec)
    if source.hub and spec.streaming:
        return open_stream(spec, *source.hub, tokenizer, context)
    dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
    identity = repr((_FORMAT, source.identity(), spec.field, spec.split, spec.holdout, tokenizer.digest, dtype))
    key = hashlib.sha256(identity.encode()).hexdigest()[:24]
    files = open_tokens(cache_folder, key, dtype, _Tokenise(spec, source, tokenizer))
    if files.facts["replaced"] or files.facts["binary"]:
        _log.warning("not all of the data is text", source=spec.source, **files.facts)
    train, heldout = _with_holdout(spec, files.train, files.heldout, context)
    return Corpus(train, HeldOut(heldout, context), context, files.facts)


def shuffled(indices: NDArray[np.int64], n: int, keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return where a keyed permutation of range(n) sends each index: a Feistel network, walked until inside.

    It needs no list of n, and any index on its own.
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask, bits = np.uint64((1 << half) - 1), np.uint64(half)
    values = indices.astype(np.uint64)
    outside = np.ones(len(values), np.bool_)
    while outside.any():
        left, right = values[outside] >> bits, values[outside] & mask
        for key in keys:
            left, right = right, left ^ (_scramble(right ^ key) & mask)
        values[outside] = (left << bits) | right
        outside = values >= np.uint64(n)
    return values.astype(np.int64)


class _Tokenise:
    """Yields the tokens of every document with the part it belongs to."""

    def __init__(self, spec: DataSpec, source: Source, tokenizer: Tokenizer) -> None:
        self._spec, self._source, self._tokenizer = spec, source, tokenizer
        self._tally = Tally()

    def __iter__(self) -> Iterator[tuple[str, NDArray[Any]]]:
        self._tally = Tally()
        texts: list[str] = []
        for text in documents(self._spec, self._source, self._tally):
            texts.append(text)
            if len(texts) == _ENCODE_AT_ONCE:
                yield from self._encoded(texts)
                texts = []
        yield from self._encoded(texts)
        if not self._tally.documents:
            raise DataError(f"data.source: {self._spec.source} holds no text")

    def facts(self) -> dict[str, int]:
        return asdict(self._tally)

    def _encoded(self, texts: list[str]) -> Iterator[tuple[str, NDArray[Any]]]:
        for text, tokens in zip(texts, encode_documents(self._tokenizer, texts), strict=True):
            yield ("heldout" if is_held_out(text, self._spec.holdout) else "train"), tokens


def _with_holdout(
    spec: DataSpec, train: NDArray[Any], heldout: NDArray[Any], context: int
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Take the end of a text too small for the hash to have chosen any of it."""
    width = context + 1
    if len(heldout) < width or len(train) < width:
        whole = np.concatenate([train, heldout])
        if len(whole) < 2 * width:
            raise DataError(
                f"data.source: {spec.source} holds {len(whole)} tokens, too few: "
                f"training and evaluation need {2 * width} with model.context {context}"
            )
        cut = len(whole) - max(width, int(len(whole) * spec.holdout))
        train, heldout = whole[:cut], whole[cut:]
    return train, heldout


def _keys(seed: int, peer_id: str, epoch: int) -> NDArray[np.uint64]:
    digest = hashlib.blake2b(f"{seed}/{epoch}/{peer_id}".encode(), digest_size=40, person=b"peer batch")
    return np.frombuffer(digest.digest(), "<u8")


def _scramble(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finaliser (Steele et al. 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
