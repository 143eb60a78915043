"""Builds what learns, from a run spec: tokenizer, text, model, trainer, and the vectors it starts with."""

from __future__ import annotations

import base64
from pathlib import Path

import torch

from peer import log, model, trainer
from peer.config import RunSpec, Settings
from peer.data import load_corpus
from peer.home import Home
from peer.outer import Vectors
from peer.trainer import Trainer

logger = log.get(__name__)


def begin_training(spec: RunSpec, settings: Settings, home: Home, starts: bool) -> tuple[RunSpec, Trainer]:
    """Build the trainer. The peer that starts the run completes the spec: the tokenizer's digest, the probe tokens."""
    logger.info("reading the text, building the model", data=spec.data.source, model=spec.model.path or spec.model.type)
    tokenizer = model.load_tokenizer(spec.tokenizer)
    if starts:
        spec = spec.replaced(tokenizer__digest=tokenizer.digest)
    if settings.trainer.kind == "emulated":
        return spec, trainer.EmulatedTrainer(spec, settings, model.shapes(spec, tokenizer), home.id)
    cache = Path(settings.storage.cache) if settings.storage.cache else home.cache
    corpus = load_corpus(spec.data, tokenizer, spec.model.context, cache)
    if starts and not spec.probe.ids:
        ids = corpus.heldout.probe_ids(spec.probe.tokens).numpy().astype("<i4").tobytes()
        spec = spec.replaced(probe__ids=base64.b64encode(ids).decode())
    return spec, trainer.ModelTrainer(spec, settings, model.build(spec, tokenizer), corpus, home.id)


def first_vectors(learner: Trainer) -> Vectors:
    """Return z, v and x of a peer that has trained nothing yet."""
    size = learner.layout.n_params
    z = torch.empty(size)
    learner.read(0, size, z)
    return Vectors(z, torch.zeros(size), z.clone())
