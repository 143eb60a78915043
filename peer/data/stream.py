"""Batches from a hub dataset too large to fetch: each peer reads its own shuffle of it, and keeps none.

The one thing you would get wrong: a stream only runs forward. A batch is still a function of (seed, peer, position),
but going to a position means reading all that lies before it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from peer.config import DataSpec
from peer.data.documents import encode_documents, hub_rows, rows_text
from peer.data.heldout import HeldOut, is_held_out
from peer.errors import DataError
from peer.model import Tokenizer

_SHUFFLE_DOCUMENTS = 1000
_HELD_OUT_TOKENS = 1 << 18
_HELD_OUT_READ = 20_000  # documents looked through for held-out ones


class StreamedCorpus:
    """Reads documents as batches need them. `batch` belongs to one thread."""

    def __init__(self, spec: DataSpec, rows: Any, tokenizer: Tokenizer, context: int) -> None:
        self._spec, self._rows, self._tokenizer, self._context = spec, rows, tokenizer, context
        self.heldout = HeldOut(self._read_held_out(), context)
        self._at: tuple[int, str, int, int] | None = None  # whose stream is open, and the position it is at
        self._tokens: Iterator[NDArray[np.uint32]] = iter(())
        self._left: NDArray[np.uint32] = np.empty(0, np.uint32)  # read, but not handed out

    def batch(self, seed: int, peer_id: str, position: int, size: int) -> Tensor:
        """Return (size, context + 1) int64, reading up to there where the stream is behind."""
        at = self._at
        if at is None or at[:3] != (seed, peer_id, size) or at[3] > position:
            self._tokens, self._left = self._read(seed, peer_id), np.empty(0, np.uint32)
            at = (seed, peer_id, size, 0)
        wanted = size * (self._context + 1)
        for _ in range(at[3], position):
            self._take(wanted)
        tokens = self._take(wanted)
        self._at = (seed, peer_id, size, position + 1)
        return torch.from_numpy(tokens.astype(np.int64)).view(size, self._context + 1)

    def _take(self, count: int) -> NDArray[np.uint32]:
        parts, held = [self._left], len(self._left)
        while held < count:
            parts.append(next(self._tokens))
            held += len(parts[-1])
        joined = np.concatenate(parts)
        self._left = joined[count:]
        return joined[:count]

    def _read(self, seed: int, peer_id: str) -> Iterator[NDArray[np.uint32]]:
        epoch = 0
        while True:
            digest = hashlib.blake2b(f"{seed}/{epoch}/{peer_id}".encode(), digest_size=4, person=b"peer stream")
            own_seed = int.from_bytes(digest.digest(), "little")
            shuffled = self._rows.shuffle(seed=own_seed, buffer_size=_SHUFFLE_DOCUMENTS)
            read = 0
            for text in rows_text(shuffled, self._spec.field, self._spec.source):
                if text and not is_held_out(text, self._spec.holdout):
                    read += 1
                    yield encode_documents(self._tokenizer, [text])[0]
            if not read:
                raise DataError(f"data.source: {self._spec.source} holds no text to train on")
            epoch += 1

    def _read_held_out(self) -> NDArray[np.uint32]:
        parts: list[NDArray[np.uint32]] = []
        tokens = 0
        for read, text in enumerate(rows_text(self._rows, self._spec.field, self._spec.source)):
            if text and is_held_out(text, self._spec.holdout):
                parts += encode_documents(self._tokenizer, [text])
                tokens += len(parts[-1])
            if tokens >= _HELD_OUT_TOKENS or read >= _HELD_OUT_READ:
                break
        if tokens <= self._context:
            raise DataError(
                f"data.source: {self._spec.source} has {tokens} held-out tokens, evaluation needs {self._context + 1}; "
                "a larger data.holdout takes more"
            )
        return np.concatenate(parts)


def open_stream(spec: DataSpec, name: str, config: str | None, tokenizer: Tokenizer, context: int) -> StreamedCorpus:
    """Open a hub dataset's stream and read its held-out part. Raises DataError."""
    return StreamedCorpus(spec, hub_rows(spec, name, config, streaming=True), tokenizer, context)
