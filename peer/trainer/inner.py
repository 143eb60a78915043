"""The inner loop on a real model: AdamW, warm-up and cosine, accumulation, one step at a time.

Parameters are fp32 whatever the forward pass runs in, and are written in place, so that a compiled graph sees them. The
one thing you would get wrong: a step that meets a loss or gradient that is no number changes nothing but the data
position; the optimizer must not see it, or one bad batch poisons its moments for good.
"""

from __future__ import annotations

import base64
import hashlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from peer import log
from peer.config import DeviceSettings, InnerSpec, RunSpec, Settings
from peer.data import Prefetcher, TokenSource
from peer.errors import CheckpointError, ConfigError, TrainingError
from peer.model import LanguageModel
from peer.trainer.contract import StepResult, TrainerState

_MOMENTS = ("exp_avg", "exp_avg_sq")
_log = log.get(__name__)


def learning_rate(inner: InnerSpec, step: int, total_steps: int) -> float:
    """Return the learning rate of a swarm step: a linear rise, then half a cosine down to the floor."""
    if step < inner.warmup_steps:
        return inner.lr * (step + 1) / inner.warmup_steps
    progress = min(1.0, (step - inner.warmup_steps) / max(1, total_steps - inner.warmup_steps))
    return inner.lr * (inner.min_lr_ratio + (1 - inner.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress)))


def choose_device(name: str) -> torch.device:
    """Return the device of that name, for "auto" the best there is. Raises ConfigError when it is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    device = torch.device(name)
    there = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available()), "cpu": 1}
    if (device.index or 0) >= there[device.type]:
        raise ConfigError("device.name", f"must be a device of this machine, got {name!r}, which it has not")
    return device


class ModelTrainer:
    """Trains a real model with AdamW."""

    def __init__(
        self, spec: RunSpec, settings: Settings, model: LanguageModel, corpus: TokenSource, peer_id: str
    ) -> None:
        self.layout = model.layout
        self._spec, self._settings, self._corpus, self._peer_id = spec, settings, corpus, peer_id
        self._device = choose_device(settings.device.name)
        self._module = model.module.to(self._device)
        self._vocab_size, self._context = model.vocab_size, model.context
        self._parameters = model.parameters  # `to` moves their data and keeps the objects
        self._optimizer = _adamw(self._parameters, spec.inner, self._device)
        self._bf16 = _uses_bf16(settings.device, self._device)
        self._forward = torch.compile(self._plain_forward) if settings.device.compile else self._plain_forward
        self._total_steps = spec.round.count * spec.round.steps
        self._micro_batch = settings.device.micro_batch or spec.inner.batch
        self._nonfinite_in_row = 0
        held_out = corpus.heldout.batches(settings.eval.batches, spec.inner.batch)
        self._eval_batches = [self._to_device(batch) for batch in held_out]
        self._probe_rows, self._probe_count = self._probe_input()
        self._batches = self._batches_from(0)
        self._waited_before_s = 0.0
        # Dropout draws from the global generator, each peer from its own stream of it.
        seed = hashlib.blake2b(f"{spec.seed}/{peer_id}".encode(), digest_size=7, person=b"peer dropout").digest()
        torch.manual_seed(int.from_bytes(seed, "little"))

    @property
    def data_wait_s(self) -> float:
        return self._waited_before_s + self._batches.waited_s

    def step(self, swarm_step: int) -> StepResult:
        """As Trainer. On a GPU it waits once for the device, to learn whether loss and gradients are numbers."""
        batch = self._batches.next()
        start = time.perf_counter()
        batch = self._to_device(batch)
        rows = len(batch)
        loss = torch.zeros((), device=self._device)
        for at in range(0, rows, self._micro_batch):
            part = batch[at : at + self._micro_batch]
            part_loss = self._loss(part) * (len(part) / rows)
            part_loss.backward()  # type: ignore[no-untyped-call]
            loss += part_loss.detach()
        norm = nn.utils.clip_grad_norm_(self._parameters, self._spec.inner.clip)
        loss_value, norm_value = torch.stack([loss, norm]).tolist()
        skipped = not (math.isfinite(loss_value) and math.isfinite(norm_value))
        if not skipped:
            rate = learning_rate(self._spec.inner, swarm_step, self._total_steps)
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._count_nonfinite(skipped, swarm_step, loss_value, norm_value)
        return StepResult(loss_value, rows * self._context, time.perf_counter() - start, skipped)

    def read(self, start: int, stop: int, out: Tensor) -> None:
        self.layout.read(self._parameters, start, stop, out)

    def write(self, start: int, stop: int, values: Tensor) -> None:
        self.layout.write(self._parameters, start, stop, values)

    def evaluate(self) -> float:
        with _evaluating(self._module):
            losses = [self._loss(batch) * len(batch) for batch in self._eval_batches]
        return float(torch.stack(losses).sum()) / sum(len(batch) for batch in self._eval_batches)

    def probe(self) -> Tensor | None:
        with _evaluating(self._module), self._autocast():
            logits = self._module(input_ids=self._probe_rows, use_cache=False).logits
        flat = logits.reshape(-1, logits.shape[-1])[: self._probe_count]
        return functional.log_softmax(flat.float(), dim=-1).cpu()

    def state(self) -> TrainerState:
        tensors = {"rng.cpu": torch.get_rng_state()}
        if self._device.type != "cpu":
            tensors["rng.device"] = _device_rng(self._device)
        states = [self._optimizer.state[parameter] for parameter in self._parameters]
        tensors["inner.step"] = torch.stack([state["step"].cpu() for state in states])
        for entry, state in zip(self.layout.entries, states, strict=True):
            tensors.update({f"inner.{moment}.{entry.name}": state[moment] for moment in _MOMENTS})
        values = {"position": self._batches.position, "nonfinite_in_row": self._nonfinite_in_row}
        return TrainerState({**tensors, **self._buffers()}, values)

    def load_state(self, state: TrainerState) -> None:
        own = self.state().tensors
        _check_same(own, state.tensors)
        if not isinstance(position := state.values.get("position"), int):
            raise CheckpointError(f"the trainer's state has no data position, but {position!r}")
        for name, tensor in own.items():
            if name.startswith(("inner.exp", "buffer.")):
                tensor.copy_(state.tensors[name])
        for parameter, step in zip(self._parameters, state.tensors["inner.step"], strict=True):
            self._optimizer.state[parameter]["step"].copy_(step)
        torch.set_rng_state(state.tensors["rng.cpu"].cpu())
        if self._device.type != "cpu" and "rng.device" in state.tensors:
            _set_device_rng(self._device, state.tensors["rng.device"].cpu())
        self._nonfinite_in_row = int(state.values.get("nonfinite_in_row", 0))
        self._batches.stop()
        self._waited_before_s += self._batches.waited_s
        self._batches = self._batches_from(position)

    def close(self) -> None:
        self._batches.stop()

    def _loss(self, tokens: Tensor) -> Tensor:
        with self._autocast():
            return self._forward(tokens)

    def _plain_forward(self, tokens: Tensor) -> Tensor:
        """Mean loss over a batch (rows, context + 1)."""
        logits = self._module(input_ids=tokens[:, :-1], use_cache=False).logits
        return functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self._device.type, torch.bfloat16) if self._bf16 else nullcontext()

    def _count_nonfinite(self, skipped: bool, swarm_step: int, loss: float, norm: float) -> None:
        self._nonfinite_in_row = self._nonfinite_in_row + 1 if skipped else 0
        if not skipped:
            return
        _log.warning("step skipped", step=swarm_step, loss=loss, gradient_norm=norm, in_row=self._nonfinite_in_row)
        if self._nonfinite_in_row >= self._settings.trainer.max_nonfinite:
            raise TrainingError(
                f"{self._nonfinite_in_row} steps in a row had a loss or gradient that is no number (step {swarm_step}: "
                f"loss {loss}, gradient norm {norm}); a lower inner.lr or more inner.warmup_steps may help"
            )

    def _batches_from(self, position: int) -> Prefetcher:
        seed, peer_id, size, pin = self._spec.seed, self._peer_id, self._spec.inner.batch, self._device.type == "cuda"

        def make(at: int) -> Tensor:
            batch = self._corpus.batch(seed, peer_id, at, size)
            return batch.pin_memory() if pin else batch

        return Prefetcher(make, position)

    def _to_device(self, batch: Tensor) -> Tensor:
        return batch.to(self._device, non_blocking=True)

    def _probe_input(self) -> tuple[Tensor, int]:
        """Return the probe tokens as rows of one context, the last filled up: a causal model does not look there."""
        probe = self._spec.probe
        if probe.ids:
            ids = torch.from_numpy(np.frombuffer(base64.b64decode(probe.ids), "<i4").astype(np.int64))
        else:
            ids = self._corpus.heldout.probe_ids(probe.tokens).long()
        if int(ids.max()) >= self._vocab_size or int(ids.min()) < 0:
            raise ConfigError("probe.ids", f"must be tokens below {self._vocab_size}, got {int(ids.max())}")
        rows = functional.pad(ids, (0, -len(ids) % self._context)).view(-1, self._context)
        return self._to_device(rows), len(ids)

    def _buffers(self) -> Mapping[str, Tensor]:
        saved = self._module.state_dict(keep_vars=True)
        return {f"buffer.{name}": b for name, b in self._module.named_buffers() if name in saved}


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """No gradients and no dropout, so no random number is drawn; training mode again after it."""
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        module.train()


def _adamw(parameters: Sequence[nn.Parameter], inner: InnerSpec, device: torch.device) -> torch.optim.AdamW:
    """Return AdamW with its state in place, to copy a saved one into. Norms and biases do not decay."""
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": inner.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    fused = device.type in ("cpu", "cuda")
    optimizer = torch.optim.AdamW(groups, lr=inner.lr, betas=(inner.beta1, inner.beta2), fused=fused)
    for parameter in parameters:
        step = torch.zeros((), device=device if fused else "cpu")
        moments = {moment: torch.zeros_like(parameter, memory_format=torch.preserve_format) for moment in _MOMENTS}
        optimizer.state[parameter] = {"step": step, **moments}
    return optimizer


def _uses_bf16(settings: DeviceSettings, device: torch.device) -> bool:
    if settings.dtype == "auto":
        return device.type == "cuda" and torch.cuda.is_bf16_supported()
    return settings.dtype == "bf16"


def _check_same(own: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    """The device's generator may be missing: a run may move to another device."""
    for name, tensor in own.items():
        if name == "rng.device":
            continue
        if name not in other:
            raise CheckpointError(f"the trainer's state lacks {name}")
        if other[name].shape != tensor.shape and not name.startswith("rng."):
            shapes = f"{tuple(other[name].shape)}, not {tuple(tensor.shape)}"
            raise CheckpointError(f"the trainer's state has {name} of shape {shapes}: it is of another model")


def _device_rng(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.mps.get_rng_state()


def _set_device_rng(device: torch.device, state: Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.mps.set_rng_state(state)
