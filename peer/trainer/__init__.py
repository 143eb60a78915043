"""The inner loop: H steps of a round, on a real model or an emulated one."""

from __future__ import annotations

from peer.trainer.contract import StepResult, Trainer, TrainerState
from peer.trainer.emulated import EmulatedTrainer
from peer.trainer.inner import ModelTrainer, choose_device, learning_rate

__all__ = [
    "EmulatedTrainer",
    "ModelTrainer",
    "StepResult",
    "Trainer",
    "TrainerState",
    "choose_device",
    "learning_rate",
]
