"""What an operator can get wrong, against the real command: the exit code, and a message that says what would do."""

from __future__ import annotations

import json
import re
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import processes
import pytest
from processes import Crew, Peer, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

HOST = {**processes.SMALL_MODEL, **processes.EMULATED, "round.steps": 1000, "log.format": '"json"'}


@pytest.fixture(scope="module")
def crew(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    with processes.crew(tmp_path_factory.mktemp("peers")) as team:
        yield team


@pytest.fixture(scope="module")
def host(crew: Crew) -> Peer:
    """A running peer that others may get in the way of."""
    peer = crew.start("host", HOST)
    peer.at(0, 1)
    return peer


@pytest.fixture
def taken() -> Iterator[str]:
    """An address that is in use."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def free() -> str:
    """An address nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{listener.getsockname()[1]}"


def run(place: Path, *arguments: str) -> tuple[int, str]:
    """Run `peer run` to its end; returns its exit code and what it said."""
    done = processes.command("run", "--data-dir", str(place / "mine"), *arguments, cwd=place)
    assert "Traceback" not in done.stderr, done.stderr
    assert done.stdout == ""
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--set", "round.stepz=3"], ["round.stepz", "did you mean round.steps?"]),
        (["--set", "round.steps=0"], ["round.steps", "0"]),
        (["--config", "nowhere.toml"], ["nowhere.toml", "No such file"]),
        (["--listen", "0.0.0.0:0"], ["0.0.0.0:0", "--insecure"]),
        (["--listen", "127.0.0.1"], ["127.0.0.1", "port"]),
    ],
)
def test_a_wrong_setting_exits_2_before_anything_is_started(
    tmp_path: Path, arguments: list[str], said: list[str]
) -> None:
    code, words = run(tmp_path, *arguments)
    assert code == 2
    assert all(word in words for word in said), words
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize("flag", ["--listen", "--metrics"])
def test_a_port_in_use_exits_2_and_names_it(tmp_path: Path, taken: str, flag: str) -> None:
    code, words = run(tmp_path, flag, taken)
    assert code == 2
    assert taken in words
    assert "in use" in words


def test_a_corpus_without_text_exits_2(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "empty.txt").touch()
    code, words = run(tmp_path, "--set", f'data.source="{corpus}"')
    assert code == 2
    assert str(corpus) in words


def test_a_tokenizer_that_cannot_be_read_exits_2(tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{")
    code, words = run(tmp_path, "--set", f'tokenizer.path="{folder}"')
    assert code == 2
    assert str(folder) in words


def test_a_folder_of_a_running_peer_exits_2(tmp_path: Path, host: Peer) -> None:
    code, words = run(tmp_path, "--data-dir", str(host.folder))
    assert code == 2
    assert str(host.folder) in words
    assert "in use by another peer" in words


def test_when_no_bootstrap_answers_every_address_is_named_with_its_reason(tmp_path: Path, free: str) -> None:
    nowhere = "no-such-host.invalid:7400"
    asked = ["--bootstrap", free, "--bootstrap", nowhere, "--set", 'network.join_timeout="2s"']
    code, words = run(tmp_path, *asked)
    assert code == 3
    answers = {line.split(": ")[0].strip(): line for line in words.splitlines() if line.startswith("  ")}
    assert set(answers) == {free, nowhere}, words
    assert "refused" in answers[free].lower()


def test_another_run_spec_exits_4_and_names_the_fields(tmp_path: Path, host: Peer) -> None:
    different = ["--set", "round.steps=7", "--set", "outer.lr=0.5"]
    code, words = run(tmp_path, "--bootstrap", host.address(), *different)
    assert code == 4
    assert "round.steps: ours 7, the swarm's 1000" in words
    assert "outer.lr: ours 0.5, the swarm's 0.7" in words
    assert host.process.poll() is None


def test_status_and_members_tell_of_the_running_peer(tmp_path: Path, host: Peer) -> None:
    there = ["--data-dir", str(host.folder)]
    told = processes.command("status", *there, "--json", cwd=tmp_path)
    assert told.returncode == 0, told.stderr
    status = json.loads(told.stdout)
    assert status["pid"] == host.process.pid
    listed = processes.command("members", *there, "--json", cwd=tmp_path)
    assert listed.returncode == 0, listed.stderr
    (member,) = json.loads(listed.stdout)
    assert (member["id"], member["address"], member["state"]) == (status["id"], host.address(), "alive")


@pytest.mark.parametrize("command", ["status", "members"])
def test_without_a_running_peer_status_and_members_say_how_to_start_one(tmp_path: Path, command: str) -> None:
    told = processes.command(command, "--data-dir", "mine", cwd=tmp_path)
    assert (told.returncode, told.stdout) == (1, "")
    assert "peer run --data-dir mine" in told.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc to see which signals are handled")
def test_asked_to_end_while_it_is_still_loading_a_peer_ends_with_0(crew: Crew) -> None:
    peer = crew.start("early", HOST)
    caught = re.compile(r"^SigCgt:\s*([0-9a-f]+)$", re.MULTILINE)

    def handled() -> bool:
        found = caught.search(Path(f"/proc/{peer.process.pid}/status").read_text())
        return found is not None and bool(int(found[1], 16) >> (signal.SIGHUP - 1) & 1)

    until(handled, "signals handled")
    peer.send(signal.SIGHUP)
    assert (peer.ended(), peer.log) == (0, "")
    assert not peer.folder.exists()


def test_a_second_ctrl_c_ends_at_once_with_130(crew: Crew) -> None:
    peer = crew.start("hasty", {**HOST, "trainer.step_time": '"60s"'})
    until(lambda: (peer.status() or {}).get("round") == 0, "a step that lasts longer than anybody wants to wait")

    def asked_again() -> bool:
        peer.send(signal.SIGINT)  # two that come at once are one to the system
        return peer.process.poll() is not None

    until(asked_again, "the end")
    assert peer.ended() == 130
