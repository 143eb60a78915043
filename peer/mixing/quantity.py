"""What the two stages mix: starting points z (Mix1) and outer gradients D (Mix2), chunk by chunk.

Everything here runs in the coding executor, never on the network loop. The one thing to get wrong: a chunk is final
once. `_finalise` is the only place that writes a result, and after `freeze` it writes nothing any more, so that the
training thread may use the vectors.
"""

from __future__ import annotations

import hashlib
import threading
from typing import Protocol

import torch

from peer import codec as codecs
from peer.codec import Codec
from peer.errors import FrameError
from peer.layout import Layout
from peer.outer import Vectors
from peer.transport import Form, Stage

NO_REFERENCE = bytes(8)

# The owner quantises the mean once, at 8 bit or better (ALGORITHM.md sec. 6): the mean of n coarse values is finer.
RESULT_CODEC = {"fp32": "fp32", "bf16": "bf16", "int8": "int8", "int4": "int8"}


class Parameters(Protocol):
    """Where the inner steps' parameters live (a Trainer)."""

    def read(self, start: int, stop: int, out: torch.Tensor) -> None: ...

    def write(self, start: int, stop: int, values: torch.Tensor) -> None: ...


class Quantity:
    """Chunks of one flat vector, coded, averaged and finalised one by one. Shared by both stages."""

    stage: Stage

    def __init__(self, layout: Layout, codec: Codec, run: bytes, round_: int, me: str) -> None:
        self.layout = layout
        self.codec = codec
        self.result_codec = codecs.by_name(RESULT_CODEC[codec.name])
        self.round = round_
        self._run = run
        self._me = me
        self._frozen = False
        self._finality = threading.Lock()
        self.contributors = [0] * len(layout.chunks)  # 0: not final; else how many peers' values are in it

    # What a stage defines for itself.

    def own(self, chunk: int) -> torch.Tensor:
        """Return this peer's values, fp32 (n,). Read only."""
        raise NotImplementedError

    def _store(self, chunk: int, values: torch.Tensor) -> None:
        raise NotImplementedError

    def reference_hash(self, chunk: int) -> bytes:
        """Return 8 bytes that name the shared reference, zeros if there is none."""
        return NO_REFERENCE

    def settled(self, chunk: int) -> torch.Tensor | None:
        """Return the value that every holder of a final chunk has, if it can still be told."""
        return None

    # Coding.

    def size(self, chunk: int) -> int:
        bounds = self.layout.chunks[chunk]
        return bounds.stop - bounds.start

    def encode(self, chunk: int, codec: Codec, values: torch.Tensor) -> bytes:
        return codec.encode(values, codecs.chunk_seed(self._run, self.round, self.stage.value, chunk, self._me))

    def as_sent(self, chunk: int, own: torch.Tensor) -> torch.Tensor:
        """Return q(own): what others read when this peer sent `own`. Coding is seeded, so it can be done again."""
        if self.codec.exact:
            return own
        return self.codec.decode(self.encode(chunk, self.codec, own), own.numel())

    def decode(self, chunk: int, codec_id: int, payload: bytes) -> torch.Tensor:
        """Return the values of a payload, fp32 (n,). Raises FrameError."""
        return codecs.by_id(codec_id).decode(payload, self.size(chunk))

    # Pairwise: each side reduces for itself.

    def contribution(self, chunk: int) -> tuple[Codec, bytes]:
        return self.codec, self.encode(chunk, self.codec, self.own(chunk))

    def blend(self, chunk: int, codec_id: int, payload: bytes, weight: float) -> bool:
        """Finalise own + w (q(theirs) - q(own)): the mean of the pair is kept whatever the codec (ALGORITHM sec. 6)."""
        theirs = self.decode(chunk, codec_id, payload)
        own = self.own(chunk)
        theirs.sub_(self.as_sent(chunk, own)).mul_(weight).add_(own)
        return self._finalise(chunk, theirs, 2)

    # Owner-wise: an owner reduces for everyone.

    def contribute(self, chunk: int, agreed: bool) -> tuple[Form, Codec, bytes]:
        """Return a chunk coded for its owner; `agreed`: both hold the same reference."""
        return (Form.PLAIN, *self.contribution(chunk))

    def absorb(self, chunk: int, form: Form, codec_id: int, payload: bytes, sum_: torch.Tensor) -> None:
        """Add one contribution to an owner's running sum. Raises FrameError and then adds nothing."""
        sum_.add_(self.decode(chunk, codec_id, payload))

    def reduce(self, chunk: int, sum_: torch.Tensor, count: int) -> tuple[Form, Codec, bytes] | None:
        """Average `count` contributions in `sum_` with the owner's own, apply it here, return it coded for the others.

        None when the chunk was final or frozen before.
        """
        raise NotImplementedError

    def apply(self, chunk: int, form: Form, codec_id: int, payload: bytes, contributors: int) -> bool:
        """Apply an owner's result: the same bits as everyone else."""
        raise NotImplementedError

    # Finality.

    def _finalise(self, chunk: int, values: torch.Tensor, contributors: int) -> bool:
        with self._finality:
            if self._frozen or self.contributors[chunk]:
                return False
            self._store(chunk, values)
            self.contributors[chunk] = contributors
            return True

    def freeze(self) -> None:
        """Nothing is written after this returns; chunks that are not final stay local."""
        with self._finality:
            self._frozen = True


class StartingPoints(Quantity):
    """Mix1: x = mean of z. Owner-wise it is coded as the difference to the chunk's last mixed x (ALGORITHM sec. 6)."""

    stage = Stage.MIX1

    def __init__(
        self,
        layout: Layout,
        codec: Codec,
        run: bytes,
        round_: int,
        me: str,
        vectors: Vectors,
        guard: threading.Lock,
    ) -> None:
        """`guard` protects x from readers of the peer's state."""
        super().__init__(layout, codec, run, round_, me)
        self._vectors = vectors
        self._guard = guard
        self._hashes: dict[int, bytes] = {}
        self.squared_distance = 0.0  # sum over mixed chunks of |z - x|^2

    def _slice(self, vector: torch.Tensor, chunk: int) -> torch.Tensor:
        bounds = self.layout.chunks[chunk]
        return vector[bounds.start : bounds.stop]

    def own(self, chunk: int) -> torch.Tensor:
        return self._slice(self._vectors.z, chunk)

    def _store(self, chunk: int, values: torch.Tensor) -> None:
        target = self._slice(self._vectors.x, chunk)
        with self._guard:
            target.copy_(values)
        self._hashes.pop(chunk, None)
        self.squared_distance += float(values.sub(self.own(chunk)).square_().sum())

    def reference_hash(self, chunk: int) -> bytes:
        if self.codec.exact:
            return NO_REFERENCE
        if chunk not in self._hashes:
            self._hashes[chunk] = tensor_hash(self._slice(self._vectors.x, chunk))
        return self._hashes[chunk]

    def settled(self, chunk: int) -> torch.Tensor | None:
        return self._slice(self._vectors.x, chunk) if self.contributors[chunk] > 1 else None

    def contribute(self, chunk: int, agreed: bool) -> tuple[Form, Codec, bytes]:
        own = self.own(chunk)
        if self.codec.exact:
            return Form.PLAIN, self.codec, self.encode(chunk, self.codec, own)
        if agreed:
            moved = own - self._slice(self._vectors.x, chunk)
            return Form.DIFFERENCE, self.codec, self.encode(chunk, self.codec, moved)
        fallback = codecs.by_name("bf16")  # never raw z below 16 bit
        return Form.PLAIN, fallback, self.encode(chunk, fallback, own)

    def absorb(self, chunk: int, form: Form, codec_id: int, payload: bytes, sum_: torch.Tensor) -> None:
        values = self.decode(chunk, codec_id, payload)
        if not self.codec.exact and form is Form.PLAIN:
            values.sub_(self._slice(self._vectors.x, chunk))
        sum_.add_(values)

    def reduce(self, chunk: int, sum_: torch.Tensor, count: int) -> tuple[Form, Codec, bytes] | None:
        own = self.own(chunk)
        if self.codec.exact:
            mean = sum_.add_(own).div_(count + 1)
            payload = self.encode(chunk, self.codec, mean)
            return (Form.PLAIN, self.codec, payload) if self._finalise(chunk, mean, count + 1) else None
        reference = self._slice(self._vectors.x, chunk)
        mean = sum_.add_(own).sub_(reference).div_(count + 1)
        payload = self.encode(chunk, self.result_codec, mean)
        moved = self.result_codec.decode(payload, mean.numel())
        done = self._finalise(chunk, moved.add_(reference), count + 1)
        return (Form.DIFFERENCE, self.result_codec, payload) if done else None

    def apply(self, chunk: int, form: Form, codec_id: int, payload: bytes, contributors: int) -> bool:
        values = self.decode(chunk, codec_id, payload)
        if form is Form.DIFFERENCE:
            values.add_(self._slice(self._vectors.x, chunk))
        return self._finalise(chunk, values, contributors)


class OuterGradients(Quantity):
    """Mix2: Dm = mean of D = z - y. The parameters' own memory holds Dm once a chunk is final, so no copy is needed."""

    stage = Stage.MIX2

    def __init__(
        self,
        layout: Layout,
        codec: Codec,
        run: bytes,
        round_: int,
        me: str,
        z: torch.Tensor,
        parameters: Parameters,
        equal: bool,
    ) -> None:
        """`equal`: every peer applies an owner's result as it is, so that equal z stay equal (DiLoCo, no Mix1).

        Otherwise each peer keeps what its own coding lost, D - q(D), and the owner what coding the mean lost: the mean
        of D over the group is then kept with any codec.
        """
        super().__init__(layout, codec, run, round_, me)
        self._z = z
        self._parameters = parameters
        self._equal = equal

    def own(self, chunk: int) -> torch.Tensor:
        bounds = self.layout.chunks[chunk]
        delta = torch.empty(bounds.stop - bounds.start)
        self._parameters.read(bounds.start, bounds.stop, delta)
        return torch.sub(self._z[bounds.start : bounds.stop], delta, out=delta)

    def _store(self, chunk: int, values: torch.Tensor) -> None:
        bounds = self.layout.chunks[chunk]
        self._parameters.write(bounds.start, bounds.stop, values)

    def reference_hash(self, chunk: int) -> bytes:
        """Name z, where all peers should hold the same one: whoever differs from a chunk's owner finds out by this."""
        if not self._equal:
            return NO_REFERENCE
        bounds = self.layout.chunks[chunk]
        return tensor_hash(self._z[bounds.start : bounds.stop])

    def settled(self, chunk: int) -> torch.Tensor | None:
        if not self._equal or self.contributors[chunk] < 2:
            return None
        bounds = self.layout.chunks[chunk]
        value = torch.empty(bounds.stop - bounds.start)
        self._parameters.read(bounds.start, bounds.stop, value)
        return value

    def reduce(self, chunk: int, sum_: torch.Tensor, count: int) -> tuple[Form, Codec, bytes] | None:
        mean = sum_.add_(self.own(chunk)).div_(count + 1)
        payload = self.encode(chunk, self.result_codec, mean)
        result = self.result_codec.decode(payload, mean.numel())
        if not self._equal:
            lost = mean.sub_(result).mul_(count + 1)
            result.add_(lost)
        done = self._finalise(chunk, result, count + 1)
        return (Form.PLAIN, self.result_codec, payload) if done else None

    def apply(self, chunk: int, form: Form, codec_id: int, payload: bytes, contributors: int) -> bool:
        if form is Form.DIFFERENCE:
            raise FrameError("reference", "outer gradients have no reference")
        result = self.decode(chunk, codec_id, payload)
        if not self._equal:
            own = self.own(chunk)
            result.add_(own).sub_(self.as_sent(chunk, own))
        return self._finalise(chunk, result, contributors)


def tensor_hash(values: torch.Tensor) -> bytes:
    """Return 8 bytes over the exact bits of a contiguous fp32 CPU tensor."""
    return hashlib.sha256(values.numpy().data).digest()[:8]  # processors have instructions for it: 3 times blake2b
