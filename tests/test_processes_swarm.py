"""`peer swarm` end to end on a small real model: what it reports, who may join it, how it ends, what it leaves."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import processes
import pytest
from processes import until

from peer.log import read_journal

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

ROUNDS = 3
SETTINGS = {**processes.SMALL_MODEL, "round.steps": 100, "start.timeout": '"60s"'}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return processes.corpus(tmp_path / "corpus")


@contextmanager
def swarm(place: Path, rounds: int, *more: str) -> Iterator[subprocess.Popen[str]]:
    """`peer swarm` of four in place/out. Its peers end with it, however it ends."""
    settings = processes.words(SETTINGS)
    arguments = ["swarm", "--peers", "4", "--rounds", str(rounds), "--out", "out", "--json", *settings, *more]
    with (place / "swarm.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "peer", *arguments],
            cwd=place,
            env=processes.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    with process:
        try:
            yield process
        finally:
            processes.end(process)


def conclude(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Wait for a swarm's end, which must be a good one; returns what it printed."""
    output, _ = process.communicate(timeout=processes.LONG_S)
    assert process.returncode == 0, output
    return dict(json.loads(output))


def test_a_swarm_of_four_mixes_in_full_and_its_export_is_the_model_it_reports(tmp_path: Path, corpus: Path) -> None:
    with swarm(tmp_path, ROUNDS, "--set", f'data.source="{corpus}"') as process:
        summary = conclude(process)

    assert len(summary["peers"]) == 4
    for peer in summary["peers"]:
        assert (peer["exit_code"], peer["rounds"]) == (0, ROUNDS)
        assert peer["mix1"] == peer["mix2"] == {"full": ROUNDS, "degraded": 0, "failed": 0}
        assert peer["sent_bytes"] == pytest.approx(peer["predicted_sent_bytes"], rel=0.05)
        assert peer["sent_bytes"] > 0
        assert peer["loss_last"] < peer["loss_first"]
    assert math.isfinite(summary["js_distance_last"])
    assert summary["js_distance_last"] > 0

    out = tmp_path / "out"
    assert json.loads((out / "summary.json").read_text())["peers"] == summary["peers"]
    for picture in ("loss.png", "consensus.png"):
        assert (out / picture).read_bytes().startswith(b"\x89PNG")
    for number in range(4):
        assert "Traceback" not in (out / f"peer-{number}" / "peer.log").read_text()

    done = processes.command("export", "--checkpoint", "out/peer-1", "--out", "model", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    reported = summary["peers"][1]["eval_loss_last"]
    assert _held_out_loss(tmp_path / "model", corpus, tmp_path / "cache") == pytest.approx(reported, rel=0.01)


def _held_out_loss(model: Path, corpus: Path, cache: Path) -> float:
    """Measure an exported folder with nothing of ours but the batches."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from peer.config import RunSpec
    from peer.data import load_corpus
    from peer.model import load_tokenizer

    loaded = AutoModelForCausalLM.from_pretrained(model)  # in evaluation mode
    assert AutoTokenizer.from_pretrained(model)("text")["input_ids"]
    spec = RunSpec().replaced(
        data__source=str(corpus),
        data__holdout=processes.SMALL_MODEL["data.holdout"],
        model__context=processes.SMALL_MODEL["model.context"],
    )
    text = load_corpus(spec.data, load_tokenizer(spec.tokenizer), spec.model.context, cache).heldout
    batches = text.batches(processes.SMALL_MODEL["eval.batches"], processes.SMALL_MODEL["inner.batch"])
    with torch.inference_mode():
        losses = [float(loaded(input_ids=b, labels=b).loss) for b in batches]
    return sum(losses) / len(losses)


def test_a_fifth_peer_joins_with_one_address_and_ctrl_c_ends_all_in_order(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with swarm(tmp_path, 1000) as process, processes.crew(tmp_path) as crew:

        def at_round(round_: int) -> dict[str, Any] | None:
            assert process.poll() is None, (tmp_path / "swarm.log").read_text()
            status = processes.ask(out / "peer-2")
            return status if status and status.get("round", -1) >= round_ else None

        met = until(lambda: at_round(4), "the swarm at round 4")
        fifth = crew.start("fifth", {"device.threads": 1, "eval.batches": 4}, "--bootstrap", met["address"])
        until(lambda: "run" in (fifth.status() or {}), "the fifth peer in the run")
        up_at = processes.ask(out / "peer-2")
        assert up_at is not None
        rows = until(lambda: [row for row in fifth.rounds() if row["members_mixed"] > 1], "the fifth peer mixing")
        assert rows[0]["round"] <= up_at["round"] + 2

        first = until(lambda: [row for row in fifth.rounds() if row["eval_loss"] is not None], "its held-out loss")[0]
        others = [_eval_loss(out / f"peer-{number}", first["round"]) for number in range(4)]
        assert first["eval_loss"] == pytest.approx(sum(others) / 4, rel=0.05)

        process.send_signal(signal.SIGINT)
        summary = conclude(process)
        assert [peer["exit_code"] for peer in summary["peers"]] == [0] * 4
        assert min(peer["rounds"] for peer in summary["peers"]) >= 4
        assert (out / "summary.json").exists()
        assert (out / "loss.png").exists()
        fifth.send(signal.SIGTERM)
        assert fifth.ended() == 0
        assert "Traceback" not in fifth.log


def _eval_loss(folder: Path, round_: int) -> float:
    """Wait for the held-out loss that a peer measured in a round."""

    def measured() -> list[float]:
        return [row["eval_loss"] for row in read_journal(folder / "rounds.jsonl") if row["round"] == round_]

    return until(measured, f"{folder.name} through round {round_}")[0]
