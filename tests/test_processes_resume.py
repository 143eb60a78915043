"""A lone peer that is killed, robbed of its newest checkpoint, or asked to end goes on as if nothing had happened."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path

import processes
import pytest
from processes import Crew, Peer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

STEPS, ROUNDS = 30, 5
SETTINGS = {**processes.SMALL_MODEL, "round.steps": STEPS, "round.count": ROUNDS, "log.format": '"json"'}


def start(crew: Crew, name: str, corpus: Path) -> Peer:
    """Start a peer of one identity: what a peer trains on goes by who it is."""
    folder = crew.place / name
    folder.mkdir()
    (folder / "identity.json").write_text(json.dumps({"id": "same", "started": 0}))
    return crew.start(name, {**SETTINGS, "data.source": f'"{corpus}"'})


def test_a_kill_a_damaged_checkpoint_and_a_request_to_end_leave_no_trace_in_the_losses(
    tmp_path: Path,
) -> None:
    corpus = processes.corpus(tmp_path / "corpus")
    chance = random.Random(20)
    with processes.crew(tmp_path) as crew:
        undisturbed = start(crew, "undisturbed", corpus)
        peer = start(crew, "disturbed", corpus)

        peer.at(2, chance.randrange(STEPS))
        peer.kill()
        newest, before = sorted((peer.folder / "checkpoints").glob("round-*"), reverse=True)
        _flip_a_bit(newest / "vectors.safetensors")
        crew.restart(peer)
        reached = peer.at(3, chance.randrange(1, STEPS))
        (resumed,) = peer.events("resuming")
        assert resumed["round"] == int(before.name.removeprefix("round-"))
        (damaged,) = peer.events("checkpoint damaged, looking at the one before it")
        assert damaged["checkpoint"] == str(newest)
        assert str(newest / "vectors.safetensors") in damaged["why"]

        peer.send(signal.SIGTERM)
        assert peer.ended() == 0
        crew.restart(peer)
        assert [peer.ended(), undisturbed.ended()] == [0, 0]
        (_, resumed) = peer.events("resuming")
        assert (resumed["round"], resumed["step"]) >= (reached["round"], reached["step"]) > (3, 0)

        curve = [(row["step"], row["loss"]) for row in undisturbed.losses()]
        assert len(curve) == STEPS * ROUNDS
        assert [(row["step"], row["loss"]) for row in peer.losses()] == curve
        held_out = {row["round"]: row["eval_loss"] for row in undisturbed.rounds()}
        assert len(held_out) == ROUNDS
        measured = {row["round"]: row["eval_loss"] for row in peer.rounds()}
        measured[resumed["round"]] = held_out[resumed["round"]]  # resumed in the middle, where nothing is measured
        assert measured == held_out
        assert peer.summary()["eval_loss_last"] == undisturbed.summary()["eval_loss_last"]
        assert "Traceback" not in peer.log


def _flip_a_bit(file: Path) -> None:
    with file.open("r+b") as content:
        content.seek(-1, 2)
        last = content.read(1)[0]
        content.seek(-1, 2)
        content.write(bytes([last ^ 1]))
