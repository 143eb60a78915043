"""The inner loop: equal to a plain loop, the same twice, whole after bad batches and restarts."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from peer.config import InnerSpec, RunSpec, Settings
from peer.data import Corpus, HeldOut
from peer.errors import CheckpointError, ConfigError, DataError, TrainingError
from peer.model import build
from peer.trainer import ModelTrainer, StepResult, TrainerState, choose_device, learning_rate

CONTEXT = 16
TINY = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
TINY_GPT2 = {"n_embd": 16, "n_layer": 1, "n_head": 2}  # has dropout, so it draws random numbers


def spec(**sections: Any) -> RunSpec:
    model = {"context": CONTEXT, "config": TINY, **sections.pop("model", {})}
    inner = {"batch": 6, "lr": 1e-2, "warmup_steps": 3, **sections.pop("inner", {})}
    return RunSpec.of({"model": model, "inner": inner, "round": {"steps": 5, "count": 4}, **sections})


def corpus(seed: int = 0) -> Corpus:
    # A walk over few ids: there is something to learn.
    steps = np.random.default_rng(seed).integers(0, 3, 4000)
    tokens = (3 + np.cumsum(steps) % 20).astype(np.uint16)
    return Corpus(tokens[:3000], HeldOut(tokens[3000:], CONTEXT), CONTEXT)


@contextmanager
def training(
    run: RunSpec | None = None, settings: dict[str, Any] | None = None, tokens: Any = None, peer: str = "a"
) -> Iterator[ModelTrainer]:
    run = run or spec()
    trainer = ModelTrainer(run, Settings.model_validate(settings or {}), build(run), tokens or corpus(), peer)
    try:
        yield trainer
    finally:
        trainer.close()


def flat(trainer: ModelTrainer) -> torch.Tensor:
    out = torch.empty(trainer.layout.n_params)
    trainer.read(0, trainer.layout.n_params, out)
    return out


def losses(trainer: ModelTrainer, start: int, stop: int) -> list[float]:
    return [trainer.step(step).loss for step in range(start, stop)]


def test_steps_equal_those_of_a_plain_loop_bit_for_bit():
    run, text = spec(), corpus()
    model = build(run)
    module: Any = model.module
    decayed = [p for p in module.parameters() if p.ndim >= 2]
    plain = [p for p in module.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": run.inner.weight_decay}, {"params": plain, "weight_decay": 0.0}],
        betas=(run.inner.beta1, run.inner.beta2),
        fused=True,
    )
    expected = []
    for step in range(5):
        batch = text.batch(run.seed, "a", step, run.inner.batch)
        logits = module(input_ids=batch[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters, run.inner.clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(run.inner, step, 20)
        optimizer.step()
        expected.append(loss.item())
    reference = torch.empty(model.layout.n_params)
    model.layout.read(model.parameters, 0, model.layout.n_params, reference)
    with training(run, tokens=text) as trainer:
        assert losses(trainer, 0, 5) == expected
        assert torch.equal(flat(trainer), reference)


def test_two_trainers_from_the_same_start_agree_bit_for_bit_and_another_peer_does_not():
    run = spec(model={"type": "gpt2", "config": TINY_GPT2})
    curves = []
    for peer in ("a", "a", "b"):
        with training(run, peer=peer) as trainer:
            curves.append(losses(trainer, 0, 6))
    assert curves[0] == curves[1]
    assert curves[0] != curves[2]


def test_the_loss_falls():
    with training() as trainer:
        before = trainer.evaluate()
        losses(trainer, 0, 60)
        assert trainer.evaluate() < 0.6 * before


def test_a_step_counts_its_tokens_and_its_time():
    with training() as trainer:
        result = trainer.step(0)
    assert result.tokens == 6 * CONTEXT
    assert result.seconds > 0
    assert not result.skipped


@pytest.mark.parametrize("micro_batch", [1, 2, 3])
def test_accumulated_gradients_are_those_of_the_whole_batch(micro_batch):
    with training() as whole, training(settings={"device": {"micro_batch": micro_batch}}) as parts:
        assert math.isclose(whole.step(5).loss, parts.step(5).loss, rel_tol=1e-6)
        # The first moment after one step is the clipped gradient times 1 - beta1.
        for name, moment in whole.state().tensors.items():
            if ".exp_avg." in name:
                assert torch.allclose(moment, parts.state().tensors[name], rtol=1e-4, atol=1e-8)


def test_the_learning_rate_rises_to_its_peak_then_falls_to_its_floor():
    inner = InnerSpec(lr=1.0, warmup_steps=10, min_lr_ratio=0.1)
    rates = [learning_rate(inner, step, 110) for step in range(200)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == 1.0
    assert rates[60] == pytest.approx(0.55)
    assert rates[110:] == pytest.approx([0.1] * 90)
    assert all(a >= b for a, b in itertools.pairwise(rates[9:]))
    assert learning_rate(InnerSpec(lr=1.0, warmup_steps=0), 0, 1) == 1.0


def test_norms_and_biases_do_not_decay():
    run = spec(inner={"weight_decay": 10.0, "clip": 1e-30, "lr": 1e-2, "warmup_steps": 0})
    with training(run) as trainer:
        before = flat(trainer)
        trainer.step(0)
        after = flat(trainer)
        for entry in trainer.layout.entries:
            kept = torch.allclose(after[entry.start : entry.stop], before[entry.start : entry.stop], atol=1e-9)
            assert kept == (len(entry.shape) < 2), entry.name


class Poisoned:
    """Makes the weights no numbers for some steps, and mends them again."""

    def __init__(self, trainer: ModelTrainer) -> None:
        self.trainer, self.good = trainer, flat(trainer)

    def step(self, step: int) -> StepResult:
        self.trainer.write(0, 1000, torch.full((1000,), math.nan))
        try:
            return self.trainer.step(step)
        finally:
            self.trainer.write(0, len(self.good), self.good)


def test_a_step_that_is_no_number_is_skipped_and_leaves_no_trace():
    with training() as trainer:
        trainer.step(0)
        moments = {name: tensor.clone() for name, tensor in trainer.state().tensors.items()}
        before = flat(trainer)
        result = Poisoned(trainer).step(1)
        assert result.skipped
        assert math.isnan(result.loss)
        assert torch.equal(flat(trainer), before)
        assert all(torch.equal(tensor, moments[name]) for name, tensor in trainer.state().tensors.items())
        assert trainer.state().values["position"] == 2
        assert not trainer.step(2).skipped


def test_too_many_bad_steps_in_a_row_end_training_and_a_good_one_between_does_not():
    with training(settings={"trainer": {"max_nonfinite": 3}}) as trainer:
        poisoned = Poisoned(trainer)
        for step in (0, 1):
            poisoned.step(step)
        trainer.step(2)
        for step in (3, 4):
            poisoned.step(step)
        with pytest.raises(TrainingError, match=r"3 steps in a row .*step 5.*inner\.lr"):
            poisoned.step(5)


@pytest.mark.parametrize("model", [{}, {"type": "gpt2", "config": TINY_GPT2}])
def test_training_goes_on_from_a_saved_state_as_if_never_stopped(model):
    run = spec(model=model)
    with training(run) as trainer:
        losses(trainer, 0, 4)
        state = trainer.state()
        saved = TrainerState({name: t.clone() for name, t in state.tensors.items()}, dict(state.values))
        parameters = flat(trainer)
        expected = losses(trainer, 4, 9)
        last = flat(trainer)
    with training(run) as resumed:
        losses(resumed, 0, 2)
        resumed.write(0, len(parameters), parameters)
        resumed.load_state(saved)
        assert losses(resumed, 4, 9) == expected
        assert torch.equal(flat(resumed), last)


def test_evaluating_and_probing_do_not_change_what_follows():
    run = spec(model={"type": "gpt2", "config": TINY_GPT2})
    with training(run) as watched, training(run) as alone:
        torch.manual_seed(1)
        watched_losses = []
        for step in range(4):
            watched.evaluate()
            watched.probe()
            watched_losses.append(watched.step(step).loss)
        torch.manual_seed(1)
        assert losses(alone, 0, 4) == watched_losses


def test_a_state_of_another_model_is_refused_by_name():
    with training() as trainer:
        state = trainer.state()
        lacking = {name: t for name, t in state.tensors.items() if not name.endswith("lm_head.weight")}
        with pytest.raises(CheckpointError, match=r"lacks inner\.exp_avg\..*lm_head\.weight"):
            trainer.load_state(TrainerState(lacking, state.values))
        name = next(name for name in state.tensors if ".exp_avg." in name)
        with pytest.raises(CheckpointError, match="of another model"):
            trainer.load_state(TrainerState({**state.tensors, name: torch.zeros(3)}, state.values))
        with pytest.raises(CheckpointError, match="no data position"):
            trainer.load_state(TrainerState(state.tensors, {}))


@pytest.mark.slow
def test_a_compiled_trainer_sees_parameters_that_were_written(monkeypatch):
    # The backend that needs no C++ compiler; what is tested is which tensors a graph reads.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    with training(settings={"device": {"compile": True}}) as compiled, training() as plain:
        compiled.step(0)
        written = torch.randn(compiled.layout.n_params, generator=torch.Generator().manual_seed(1)) * 0.05
        for trainer in (compiled, plain):
            trainer.write(0, len(written), written)
        assert math.isclose(compiled.evaluate(), plain.evaluate(), rel_tol=1e-5)


def test_reading_and_writing_a_part_leaves_the_rest():
    with training() as trainer:
        before = flat(trainer)
        trainer.write(10, 700, torch.arange(690.0))
        after = flat(trainer)
        part = torch.empty(5)
        trainer.read(12, 17, part)
    assert part.tolist() == [2, 3, 4, 5, 6]
    assert torch.equal(after[:10], before[:10])
    assert torch.equal(after[700:], before[700:])


def test_the_probe_gives_one_distribution_a_token_whatever_the_context():
    run = spec(probe={"tokens": CONTEXT + 5})
    with training(run) as trainer:
        log_p = trainer.probe()
        assert log_p is not None
        assert log_p.shape == (CONTEXT + 5, 384)
        assert torch.allclose(log_p.exp().sum(-1), torch.ones(CONTEXT + 5))
        again = trainer.probe()
        assert again is not None
        assert torch.equal(log_p, again)


def test_probe_tokens_of_the_run_are_used_and_checked():
    import base64

    ids = base64.b64encode(np.array([5, 6, 7], "<i4").tobytes()).decode()
    with training(spec(probe={"ids": ids})) as trainer:
        assert (log_p := trainer.probe()) is not None
        assert len(log_p) == 3
    wrong = base64.b64encode(np.array([5, 9999], "<i4").tobytes()).decode()
    with (
        pytest.raises(ConfigError, match=r"probe\.ids must be tokens below 384, got 9999"),
        training(spec(probe={"ids": wrong})),
    ):
        pass


def test_a_device_that_is_not_there_is_refused():
    assert choose_device("cpu").type == "cpu"
    assert choose_device("auto").type in ("cpu", "cuda", "mps")
    with pytest.raises(ConfigError, match=r"device\.name .*'cuda:99'"):
        choose_device("cuda:99")


def test_bf16_keeps_fp32_parameters_and_comes_close():
    with training(settings={"device": {"dtype": "bf16"}}) as half, training() as full:
        assert math.isclose(half.step(0).loss, full.step(0).loss, rel_tol=0.02)
        assert half.state().tensors["inner.exp_avg." + half.layout.entries[0].name].dtype == torch.float32
        assert flat(half).dtype == torch.float32


def test_what_goes_wrong_with_the_data_ends_the_step():
    class Broken:
        heldout = corpus().heldout

        def batch(self, seed: int, peer_id: str, position: int, size: int) -> torch.Tensor:
            raise DataError("data.source: the disk is gone")

    with training(tokens=Broken()) as trainer, pytest.raises(DataError, match="the disk is gone"):
        trainer.step(0)
