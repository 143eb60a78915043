"""The emulated trainer: takes its time, moves everything, promises nothing about learning."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from peer.config import RunSpec, Settings
from peer.errors import CheckpointError
from peer.model import shapes
from peer.trainer import EmulatedTrainer, TrainerState


def flat(trainer: EmulatedTrainer) -> torch.Tensor:
    out = torch.empty(trainer.layout.n_params)
    trainer.read(0, trainer.layout.n_params, out)
    return out


def emulated(step_time: float = 0.0, peer: str = "a", seed: int = 0) -> EmulatedTrainer:
    run = RunSpec.of({"seed": seed, "model": {"context": 16}})
    settings = Settings.model_validate({"trainer": {"kind": "emulated", "step_time": step_time}})
    return EmulatedTrainer(run, settings, shapes(run), peer)


def test_emulated_peers_start_alike_and_move_apart():
    one, same, other = emulated(), emulated(), emulated(peer="b")
    assert torch.equal(flat(one), flat(other))
    for trainer in (one, same, other):
        for step in range(3):
            trainer.step(step)
    assert torch.equal(flat(one), flat(same))
    assert not torch.equal(flat(one), flat(other))
    assert not torch.equal(flat(emulated(seed=1)), flat(emulated()))


def test_an_emulated_step_moves_every_parameter_a_little():
    trainer = emulated()
    before = flat(trainer)
    trainer.step(0)
    moved = (flat(trainer) - before).abs()
    assert float((moved > 0).float().mean()) > 0.999
    assert float(moved.max()) < 1e-2


def test_an_emulated_step_lasts_its_time():
    trainer = emulated(step_time=0.05)
    seconds = [trainer.step(step).seconds for step in range(3)]
    assert min(seconds) >= 0.05
    assert min(seconds) < 0.2


def test_closing_breaks_off_an_emulated_step():
    trainer = emulated(step_time=3600)
    closing = threading.Timer(0.05, trainer.close)
    closing.start()
    start = time.monotonic()
    trainer.step(0)
    assert time.monotonic() - start < 60


def test_an_emulated_trainer_goes_on_from_its_state():
    trainer = emulated()
    for step in range(3):
        trainer.step(step)
    state, y = trainer.state(), flat(trainer)
    trainer.step(3)
    resumed = emulated()
    resumed.load_state(state)
    resumed.write(0, len(y), y)
    assert resumed.evaluate() == pytest.approx(2 + 4 / (1 + 3 / 50))
    resumed.step(3)
    assert torch.equal(flat(resumed), flat(trainer))
    with pytest.raises(CheckpointError, match="not of an emulated trainer"):
        resumed.load_state(TrainerState())


def test_the_emulated_loss_only_falls_and_there_is_nothing_to_probe():
    trainer = emulated()
    curve = [trainer.step(step).loss for step in range(20)]
    assert curve == sorted(curve, reverse=True)
    assert trainer.probe() is None
