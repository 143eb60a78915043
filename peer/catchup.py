"""State from a member: how a newcomer, or a peer that was away, gets z, v, x and the round.

The asker says what it holds, as a hash for each chunk and vector, and gets only what differs, so two peers that agree
move nothing. The donor trains on: a chunk is read whole under the guard and carries the round it belongs to. The one
thing to get wrong: the swarm does not wait. When the donor passes into another round meanwhile, what changed is asked
for again, a few times at most; what is then still a round old is left to the next mixes.
"""

from __future__ import annotations

import asyncio
import threading
import zlib
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import torch

from peer import log
from peer.errors import Declined, FrameError, RefusedError, TransportError
from peer.layout import Layout
from peer.metrics import Metrics
from peer.mixing import Pacer
from peer.mixing.quantity import tensor_hash
from peer.outer import Vectors
from peer.transport import StateChunk, StatePosition, StateRequest, Transport, Vector

SIGN_OF_LIFE_S = 1.0  # a donor that finds nothing to send says so this often
SILENCE_S = 20.0  # longest wait for the next item; a slow link may take as long as it needs in all
PASSES = 3
MOST_FAILED = 5  # donors that break off or do not answer, one after another: made-up members never end
TAKE_TRIES = 20
TAKE_PAUSE_S = 0.25
NOT_WANTED = b"\xff" * 8  # in place of a hash: do not send this one

logger = log.get(__name__)


@dataclass(slots=True)
class Shelf:
    """The vectors that others may read while this peer trains."""

    layout: Layout
    vectors: Vectors
    guard: threading.Lock  # held for one chunk at a time by whoever writes z, v or x
    rounds: list[int]  # the round each chunk's z, v and x belong to

    @classmethod
    def of(cls, layout: Layout, vectors: Vectors, round_: int = 0) -> Shelf:
        return cls(layout, vectors, threading.Lock(), [round_] * len(layout.chunks))

    def slice(self, vector: Vector, chunk: int) -> torch.Tensor:
        bounds = self.layout.chunks[chunk]
        return {Vector.Z: self.vectors.z, Vector.V: self.vectors.v, Vector.X: self.vectors.x}[vector][
            bounds.start : bounds.stop
        ]

    def hashes(self, only: Collection[int] | None = None) -> bytes:
        """Return 24 bytes a chunk: hashes of z, v and x, or NOT_WANTED for chunks outside `only`."""
        return b"".join(
            tensor_hash(self.slice(vector, chunk)) if only is None or chunk in only else NOT_WANTED
            for chunk in range(len(self.rounds))
            for vector in Vector
        )

    def read(self, vector: Vector, chunk: int, known: bytes) -> StateChunk | None:
        """Copy one chunk out, None if the asker holds it already."""
        if known == NOT_WANTED:
            return None
        with self.guard:
            values = self.slice(vector, chunk)
            if tensor_hash(values) == known:
                return None
            payload = values.numpy().tobytes()
            round_ = self.rounds[chunk]
        return StateChunk(round_, vector, chunk, zlib.crc32(payload), payload)

    def write(self, item: StateChunk) -> None:
        """Take one chunk in. Raises FrameError, and then has written nothing."""
        if not 0 <= item.chunk < len(self.rounds) or item.round < 0:
            raise FrameError("unplanned", f"state chunk {item.chunk} of round {item.round}")
        target = self.slice(item.vector, item.chunk)
        if len(item.payload) != 4 * target.numel():
            raise FrameError("size", f"state chunk {item.chunk}: {len(item.payload)} bytes for {target.numel()} values")
        if zlib.crc32(item.payload) != item.checksum:
            raise FrameError("checksum", f"state chunk {item.chunk}")
        values = torch.frombuffer(bytearray(item.payload), dtype=torch.float32)
        if not torch.isfinite(values).all():
            raise FrameError("nonfinite", f"state chunk {item.chunk}")
        with self.guard:
            target.copy_(values)
            self.rounds[item.chunk] = item.round


@dataclass(frozen=True, slots=True)
class Donor:
    """The giving side."""

    run: bytes
    shelf: Shelf
    position: Callable[[], StatePosition]
    coding: Executor
    pacer: Pacer

    async def give(self, request: StateRequest) -> AsyncIterator[StatePosition | StateChunk]:
        """Stream what the asker lacks. Raises RefusedError for another run or another model."""
        chunks = len(self.shelf.rounds)
        if request.run != self.run:
            raise RefusedError("another run")
        if request.layout != self.shelf.layout.digest or len(request.have) != 24 * chunks:
            raise RefusedError("another model: names, shapes or chunks of the parameters differ")
        loop = asyncio.get_running_loop()
        yield self.position()
        told_at = loop.time()
        for chunk in range(chunks):
            for vector in Vector:
                at = 24 * chunk + 8 * (vector - 1)
                known = request.have[at : at + 8]
                item = await loop.run_in_executor(self.coding, self.shelf.read, vector, chunk, known)
                if item is not None:
                    await self.pacer.take(len(item.payload))
                    yield item
                    told_at = loop.time()
                elif loop.time() - told_at > SIGN_OF_LIFE_S:
                    yield self.position()
                    told_at = loop.time()
        yield self.position()


@dataclass(frozen=True, slots=True)
class Asker:
    """The receiving side."""

    run: bytes
    shelf: Shelf
    transport: Transport
    coding: Executor
    metrics: Metrics

    async def catch_up(self, donors: Sequence[str]) -> StatePosition | None:
        """Take the state from the first donor address that gives it whole; None when none does.

        Chunks taken from a donor that then failed are kept: the next one is only asked for what differs from its own.
        """
        failed = 0
        for address in donors:
            try:
                return await self._from(address)
            except Declined as error:  # busy; it answered at once, so ask on
                logger.info("donor is busy", address=address, why=str(error))
            except (TransportError, FrameError, RefusedError) as error:
                logger.warning("donor failed", address=address, why=str(error))
                failed += 1
                if failed == MOST_FAILED:
                    break
        return None

    async def take(self, address: str, chunks: Collection[int], round_: int) -> bool:
        """Take some chunks of a round from one member; False when it does not give them, whole and of that round."""
        loop = asyncio.get_running_loop()
        for _ in range(TAKE_TRIES):
            have = await loop.run_in_executor(self.coding, self.shelf.hashes, chunks)
            request = StateRequest(self.run, self.shelf.layout.digest, have)
            behind = False
            try:
                async for item in self.transport.state(address, request, SILENCE_S):
                    if isinstance(item, StateChunk) and item.chunk in chunks:
                        if item.round == round_:
                            await loop.run_in_executor(self.coding, self.shelf.write, item)
                        behind = behind or item.round != round_
            except (TransportError, FrameError, RefusedError) as error:
                logger.warning("chunks not given", address=address, why=str(error))
                return False
            if not behind:
                return True
            await asyncio.sleep(TAKE_PAUSE_S)  # it has not ended its round yet
        return False

    async def _from(self, address: str) -> StatePosition:
        position = await self._one_pass(address)
        for _ in range(PASSES - 1):
            if all(round_ == position.round for round_ in self.shelf.rounds):
                break
            position = await self._one_pass(address)
        return position

    async def _one_pass(self, address: str) -> StatePosition:
        loop = asyncio.get_running_loop()
        have = await loop.run_in_executor(self.coding, self.shelf.hashes)
        request = StateRequest(self.run, self.shelf.layout.digest, have)
        first: StatePosition | None = None
        last: StatePosition | None = None
        asked = set(range(len(self.shelf.rounds)))
        async for item in self.transport.state(address, request, SILENCE_S):
            if isinstance(item, StateChunk):
                await loop.run_in_executor(self.coding, self.shelf.write, item)
                asked.discard(item.chunk)
            else:
                first, last = first or item, item
        if first is None or last is None or first is last:
            raise FrameError("malformed", "the state ended before its last item")
        for chunk in asked:  # equal to the donor's when it read them
            self.shelf.rounds[chunk] = first.round
        return last
