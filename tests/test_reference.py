"""A real peer with no network against DiLoCo written out as a plain loop over the model (I6)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from peer.catchup import Shelf
from peer.config import RunSpec, Settings
from peer.data import Corpus, HeldOut
from peer.membership import Member
from peer.metrics import Metrics
from peer.model import build
from peer.outer import Vectors
from peer.rounds import Rounds
from peer.trainer import ModelTrainer, learning_rate
from peer.waiting import Stop

ROUNDS, STEPS, CONTEXT = 3, 6, 16
MODEL = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


class Nobody:
    """A swarm of one."""

    def roster(self, round_: int) -> tuple[Member, ...]:
        return (Member("a", "", from_round=0, round=round_),)

    def publish(self, round_: int, step: int) -> None:
        pass


def run_spec(tied: bool) -> RunSpec:
    model = {"context": CONTEXT, "config": {**MODEL, "tie_word_embeddings": tied}}
    inner = {"batch": 4, "lr": 1e-2, "warmup_steps": 3}
    return RunSpec.of({"model": model, "inner": inner, "round": {"steps": STEPS, "count": ROUNDS}})


def text() -> Corpus:
    moves = np.random.default_rng(0).integers(0, 3, 4000)
    tokens = (3 + np.cumsum(moves) % 20).astype(np.uint16)
    return Corpus(tokens[:3000], HeldOut(tokens[3000:], CONTEXT), CONTEXT)


def plain_diloco(run: RunSpec, corpus: Corpus) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Return parameters by name, and the loss of every step, of one-worker DiLoCo: only the data code is ours."""
    module: Any = build(run).module
    named = dict(module.named_parameters())
    decayed = [p for p in named.values() if p.ndim >= 2]
    others = [p for p in named.values() if p.ndim < 2]
    inner = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": run.inner.weight_decay}, {"params": others, "weight_decay": 0.0}],
        betas=(run.inner.beta1, run.inner.beta2),
        fused=True,
    )
    z = {name: p.detach().clone() for name, p in named.items()}
    v = {name: torch.zeros_like(p) for name, p in z.items()}
    losses = []
    for step in range(ROUNDS * STEPS):
        batch = corpus.batch(run.seed, "a", step, run.inner.batch)
        logits = module(input_ids=batch[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        inner.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(in_layout_order(run, named), run.inner.clip)
        for group in inner.param_groups:
            group["lr"] = learning_rate(run.inner, step, ROUNDS * STEPS)
        inner.step()
        losses.append(loss.item())
        if (step + 1) % STEPS == 0:
            with torch.no_grad():
                for name, p in named.items():
                    delta = z[name] - p
                    v[name] = run.outer.momentum * v[name] + delta
                    z[name] = z[name] - run.outer.lr * (delta + run.outer.momentum * v[name])
                    p.copy_(z[name])
    return z, losses


def in_layout_order(run: RunSpec, named: dict[str, torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """The norm of all gradients is a sum, and floating-point sums depend on their order."""
    return [named[entry.name] for entry in build(run).layout.entries]


def test_a_peer_alone_is_bit_for_bit_a_plain_loop_for_tied_and_untied_weights() -> None:
    for tied in (False, True):
        run, corpus = run_spec(tied), text()
        expected, expected_losses = plain_diloco(run, corpus)
        trainer = ModelTrainer(run, Settings(), build(run), corpus, "a")
        size = trainer.layout.n_params
        z = torch.empty(size)
        trainer.read(0, size, z)
        shelf = Shelf.of(trainer.layout, Vectors(z, torch.zeros(size), z.clone()))
        rounds = Rounds(run, Member("a", ""), trainer, shelf, Nobody(), Metrics(), Stop())
        losses = [loss for round_ in range(ROUNDS) for _, loss, _, _ in rounds.run(round_).losses]
        trainer.close()
        assert losses == expected_losses
        for entry in trainer.layout.entries:
            assert torch.equal(shelf.vectors.z[entry.start : entry.stop].view(entry.shape), expected[entry.name])
