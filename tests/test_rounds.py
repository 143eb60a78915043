"""What a round does to z, v and x: equal to a reference, and what the theory promises."""

from __future__ import annotations

import inprocess
import pytest
import torch
from inprocess import Drift

from peer.outer import gamma_cap

GAMMA, MU = 0.7, 0.9
FP32 = {"mixing__mix1__codec": "fp32", "mixing__mix2__codec": "fp32"}


def reference_round(trainer: Drift, z: torch.Tensor, v: torch.Tensor, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One round of DiLoCo on one machine, written out on whole vectors."""
    trainer.y = z.clone()
    for step in range(steps):
        trainer.step(step)
    delta = z - trainer.y
    v = MU * v + delta
    return z - GAMMA * (delta + MU * v), v


def test_a_peer_without_others_is_bit_for_bit_diloco_on_one_machine() -> None:
    for mixer in (True, False):
        with inprocess.team(inprocess.spec(), 1) as team:
            peer = team.peers[0]
            if not mixer:
                peer.rounds.mixer = None
            twin = peer.trainer.twin()
            z, v = peer.shelf.vectors.z.clone(), torch.zeros(peer.shelf.layout.n_params)
            for round_ in range(3):
                team.run_round(round_)
                z, v = reference_round(twin, z, v, peer.spec.round.steps)
                assert torch.equal(peer.shelf.vectors.z, z)
                assert torch.equal(peer.shelf.vectors.v, v)
                assert torch.equal(peer.trainer.y, z)


@pytest.mark.parametrize("preset", ["diloco", "global-m1", "global-m1-local-m2", "local-m1-m2"])
def test_the_mean_of_peers_follows_the_reference_recursion(preset: str) -> None:
    fields = {"mixing__preset": preset, "mixing__mix1__codec": "fp32", "mixing__mix2__codec": "fp32"}
    run = inprocess.spec().of({**inprocess.spec().model_dump(), "mixing": {"preset": preset}})
    run = run.replaced(**{name: value for name, value in fields.items() if name != "mixing__preset"})
    gamma = gamma_cap(GAMMA, MU) if preset == "global-m1" else GAMMA
    with inprocess.team(run, 4) as team:
        zbar, vbar = team.mean("z"), team.mean("v")
        for round_ in range(3):
            starts = [peer.shelf.vectors.z.clone() for peer in team.peers]
            twins = [peer.trainer.twin() for peer in team.peers]
            reports = team.run_round(round_)
            for report in reports:
                assert {o.label for o in (report.mix1, report.mix2) if o} == {"full"}
            deltas = []
            for twin, z in zip(twins, starts, strict=True):
                twin.y = z.clone()
                for step in range(run.round.steps):
                    twin.step(step)
                deltas.append((z - twin.y).double())
            dbar = torch.stack(deltas).mean(0)
            vbar = MU * vbar + dbar
            zbar = zbar - gamma * (dbar + MU * vbar)
            assert relative(team.mean("z"), zbar) < 1e-6
            assert relative(team.mean("v"), vbar) < 1e-6


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("strategy", ["pair", "global"])
def test_mix2_keeps_the_mean_of_outer_gradients_with_any_codec(strategy: str, codec: str) -> None:
    run = inprocess.spec(mixing__mix2__codec=codec, mixing__mix2__strategy=strategy)
    with inprocess.team(run, 4) as team:
        starts = [peer.shelf.vectors.z.double() for peer in team.peers]
        twins = [peer.trainer.twin() for peer in team.peers]
        team.run_round(0)
        deltas = []
        for twin, z in zip(twins, starts, strict=True):
            for step in range(run.round.steps):
                twin.step(step)
            deltas.append(z - twin.y.double())
        # v was zero, so after one round it is exactly what Mix2 made of D.
        mixed = [peer.shelf.vectors.v.double() for peer in team.peers]
        assert relative(torch.stack(mixed).mean(0), torch.stack(deltas).mean(0)) < 1e-6
        spread_before = torch.stack(deltas).var(0).sum()
        assert torch.stack(mixed).var(0).sum() < 0.8 * spread_before


def relative(value: torch.Tensor, reference: torch.Tensor) -> float:
    return float((value - reference).norm() / reference.norm())


def test_peers_that_mix_globally_hold_the_same_x_bit_for_bit() -> None:
    for codec in ("fp32", "bf16", "int8", "int4"):
        with inprocess.team(inprocess.spec(mixing__mix1__codec=codec), 4) as team:
            for round_ in range(3):
                team.run_round(round_)
                first, *rest = [peer.shelf.vectors.x for peer in team.peers]
                assert all(torch.equal(first, x) for x in rest)


def test_diloco_keeps_all_starting_points_equal() -> None:
    run = inprocess.spec().of({**inprocess.spec().model_dump(), "mixing": {"preset": "diloco"}})
    with inprocess.team(run, 4) as team:
        for round_ in range(3):
            team.run_round(round_)
            first, *rest = [peer.shelf.vectors.z for peer in team.peers]
            assert all(torch.equal(first, z) for z in rest)


@pytest.mark.parametrize("preset", ["diloco", "global-m1", "global-m1-local-m2"])
def test_bytes_sent_are_those_the_plan_and_codecs_predict(preset: str) -> None:
    run = inprocess.spec().of({**inprocess.spec().model_dump(), "mixing": {"preset": preset}})
    with inprocess.team(run, 5) as team:
        planned = [0] * 5
        for round_ in range(3):
            reports = team.run_round(round_)
            planned = [total + report.planned_bytes for total, report in zip(planned, reports, strict=True)]
        assert [peer.metrics.totals()["sent_bytes"] for peer in team.peers] == planned
