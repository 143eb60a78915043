"""A trainer that only takes the time and moves the parameters: for benchmarks and rehearsals of a swarm.

Shapes are the real model's, so everything around a step (exchanges, memory, checkpoints) is real. The one thing you
would get wrong: its loss is made up, a falling curve of the step alone. It says nothing about learning.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from peer.config import RunSpec, Settings
from peer.errors import CheckpointError
from peer.model import Shape, layout_of
from peer.trainer.contract import StepResult, TrainerState

_PIECE = 1 << 17  # elements moved at once: half a MiB of noise stays in the processor's cache
_NOISE = 1e-4  # standard deviation of a step's movement


class EmulatedTrainer:
    """Takes a set time a step and adds seeded noise to every parameter of a model of these shapes."""

    def __init__(self, spec: RunSpec, settings: Settings, shapes: Sequence[Shape], peer_id: str) -> None:
        self.layout = layout_of(spec, shapes)
        self.data_wait_s = 0.0
        self._seed = f"{spec.seed}/{peer_id}"
        self._step_time_s = settings.trainer.step_time
        self._tokens = spec.inner.batch * spec.model.context
        self._closed = threading.Event()
        self._steps = 0
        self._swarm_step = 0
        self._y = torch.empty(self.layout.n_params)
        for start in range(0, self.layout.n_params, _PIECE):  # all peers start from the same point
            self._piece(start).normal_(0.0, 0.02, generator=_generator(f"{spec.seed}/start/{start}"))
        self._noise = torch.empty(2 * _PIECE)

    def step(self, swarm_step: int) -> StepResult:
        """As Trainer. Lasts the set time, or as long as moving the parameters takes where that is longer."""
        start = time.perf_counter()
        self._move()
        self._steps += 1
        self._swarm_step = swarm_step + 1
        self._closed.wait(max(0.0, start + self._step_time_s - time.perf_counter()))
        return StepResult(self.evaluate(), self._tokens, time.perf_counter() - start)

    def read(self, start: int, stop: int, out: Tensor) -> None:
        out.copy_(self._y[start:stop])

    def write(self, start: int, stop: int, values: Tensor) -> None:
        self._y[start:stop].copy_(values)

    def evaluate(self) -> float:
        """Return the made-up loss: 6 at first, falling towards 2, half way after 50 steps."""
        return 2.0 + 4.0 / (1.0 + self._swarm_step / 50)

    def probe(self) -> Tensor | None:
        """Return None: there is no model to ask."""
        return None

    def state(self) -> TrainerState:
        return TrainerState({}, {"steps": self._steps, "swarm_step": self._swarm_step})

    def load_state(self, state: TrainerState) -> None:
        steps, swarm_step = state.values.get("steps"), state.values.get("swarm_step")
        if not isinstance(steps, int) or not isinstance(swarm_step, int):
            raise CheckpointError("the trainer's state is not of an emulated trainer")
        self._steps, self._swarm_step = steps, swarm_step

    def close(self) -> None:
        self._closed.set()

    def _move(self) -> None:
        """Add a step's noise: one small draw, cut for each piece at a place of its own, so that no two move alike."""
        generator = _generator(f"{self._seed}/{self._steps}")
        self._noise.normal_(0.0, _NOISE, generator=generator)
        starts = range(0, self.layout.n_params, _PIECE)
        cuts = torch.randint(0, _PIECE, (len(starts),), generator=generator).tolist()
        for start, cut in zip(starts, cuts, strict=True):
            piece = self._piece(start)
            piece.add_(self._noise[cut : cut + len(piece)])

    def _piece(self, start: int) -> Tensor:
        return self._y[start : start + _PIECE]


def _generator(seed: str) -> torch.Generator:
    digest = hashlib.blake2b(seed.encode(), digest_size=7, person=b"peer emulated").digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))
