"""What a round needs of a trainer, whatever it trains.

The one thing you would get wrong: y lives only inside a trainer. Others read it chunk by chunk and write it back;
nobody keeps a copy of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from peer.layout import Layout


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one inner step did. `seconds`: its time, without waiting for data."""

    loss: float
    tokens: int
    seconds: float
    skipped: bool = False


@dataclass(frozen=True, slots=True)
class TrainerState:
    """All that a trainer needs to go on, but the parameters: at the start of a round those are z.

    `tensors` are the trainer's own, on its device: write or copy them before the next step. `values` is plain JSON.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


class Trainer(Protocol):
    """Holds y, and moves it. Belongs to the main thread."""

    layout: Layout

    @property
    def data_wait_s(self) -> float:
        """Seconds steps have waited for data so far."""

    def step(self, swarm_step: int) -> StepResult:
        """Take one inner step; the learning rate is that of `swarm_step`. Raises TrainingError, DataError."""

    def read(self, start: int, stop: int, out: Tensor) -> None:
        """Copy y[start:stop] to `out`, fp32."""

    def write(self, start: int, stop: int, values: Tensor) -> None:
        """Set y[start:stop], in place."""

    def evaluate(self) -> float:
        """Return the mean held-out loss of the present parameters, nats a token."""

    def probe(self) -> Tensor | None:
        """Return log-probabilities (tokens, vocabulary) fp32 on the CPU for the run's probe tokens."""

    def state(self) -> TrainerState: ...

    def load_state(self, state: TrainerState) -> None:
        """Go on from a state of the same run. Raises CheckpointError when it is of another one."""

    def close(self) -> None:
        """End threads and break off a step that only waits. Idempotent, any thread."""
