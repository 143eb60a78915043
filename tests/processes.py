"""Real peers for tests: `python -m peer run` as processes of their own, on ports that the system chooses.

A test waits for what it needs by looking at a peer's journals and at its admin service, each time with a limit, and
never for a time. The one thing to get wrong: what is left behind. Every process started here is ended here, by its own
id, also when the test fails, and a stopped one too.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from peer.errors import TransportError
from peer.home import admin_address
from peer.log import read_journal
from peer.rpc_client import ask_admin

T = TypeVar("T")

LONG_S = 150.0  # more than anything here takes on a busy machine with two cores
LOOK_EVERY_S = 0.05

SMALL_MODEL: Mapping[str, Any] = {
    "model.config": "{hidden_size=64,intermediate_size=128,num_hidden_layers=2,num_key_value_heads=4}",
    "model.context": 64,
    "inner.batch": 8,
    "data.holdout": 0.1,
    "device.threads": 1,
    "eval.batches": 4,
}
EMULATED: Mapping[str, Any] = {"trainer.kind": '"emulated"', "trainer.step_time": '"100ms"', "eval.every": 0}


def until(condition: Callable[[], T | None], what: str, timeout_s: float = LONG_S) -> T:
    """Return what `condition` returns as soon as it is true of something; fail saying `what` never came."""
    give_up_at = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < give_up_at, f"never came in {timeout_s:g} s: {what}"
        time.sleep(LOOK_EVERY_S)
    return found


def environment() -> dict[str, str]:
    """Return this process's environment without settings for peers, and without the hub."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PEER_")}
    return {**kept, "HF_HUB_OFFLINE": "1"}


def words(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as `--set` arguments; values are TOML."""
    return [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]


def command(*arguments: str, cwd: Path, timeout_s: float = LONG_S) -> subprocess.CompletedProcess[str]:
    """Run a command of `peer` to its end."""
    return subprocess.run(
        [sys.executable, "-m", "peer", *arguments],
        cwd=cwd,
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def corpus(folder: Path, files: int = 60) -> Path:
    """Make a small folder of real text: some of the standard library's sources."""
    folder.mkdir()
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:files]
    for source in sources:
        (folder / f"{source.stem}.txt").write_bytes(source.read_bytes())
    return folder


@dataclass(eq=False)
class Peer:
    """One `peer run` and its folder. Started again it goes on in the same folder."""

    folder: Path
    arguments: list[str]
    process: subprocess.Popen[bytes]

    @property
    def log(self) -> str:
        return self.folder.with_suffix(".log").read_text(errors="replace")

    def events(self, event: str) -> list[dict[str, Any]]:
        """Return the log's lines about one event, of all its lives."""
        return [line for line in _json_lines(self.log) if line.get("event") == event]

    def rounds(self) -> list[dict[str, Any]]:
        return read_journal(self.folder / "rounds.jsonl")

    def losses(self) -> list[dict[str, Any]]:
        return read_journal(self.folder / "loss.jsonl")

    def summary(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "summary.json").read_text()))

    def status(self) -> dict[str, Any] | None:
        """Ask it; None while it cannot answer. Fails when it has ended on its own."""
        assert self.process.poll() is None, f"{self.folder.name} ended with {self.process.returncode}:\n{self.log}"
        return ask(self.folder)

    def at(self, round_: int, step: int = 0) -> dict[str, Any]:
        """Wait until it is at least there; returns its status."""

        def there() -> dict[str, Any] | None:
            status = self.status()
            return status if status and (status.get("round", -1), status.get("step", 0)) >= (round_, step) else None

        return until(there, f"{self.folder.name} at round {round_}, step {step}")

    def address(self) -> str:
        """Wait until it listens."""
        return str(until(self.status, f"{self.folder.name} listening")["address"])

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """kill -9, and gone."""
        self.process.kill()
        self.process.wait(LONG_S)

    def ended(self) -> int:
        """Wait for it to end; returns its exit code."""
        try:
            return self.process.wait(LONG_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.folder.name} does not end:\n{self.log}") from None


@dataclass
class Crew:
    """The peers of one test."""

    place: Path
    peers: dict[str, Peer] = field(default_factory=dict)

    def start(self, name: str, settings: Mapping[str, Any], *arguments: str) -> Peer:
        folder = self.place / name
        all_arguments = ["run", "--data-dir", str(folder), *words(settings), *arguments]
        peer = Peer(folder, all_arguments, self._spawn(folder, all_arguments))
        self.peers[name] = peer
        return peer

    def restart(self, peer: Peer, *arguments: str) -> None:
        """Start a peer that has ended again, as it was started or with other arguments."""
        assert peer.process.poll() is not None
        peer.arguments = list(arguments) or peer.arguments
        peer.process = self._spawn(peer.folder, peer.arguments)

    def _spawn(self, folder: Path, arguments: list[str]) -> subprocess.Popen[bytes]:
        with folder.with_suffix(".log").open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "peer", *arguments],
                cwd=self.place,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def close(self) -> None:
        for peer in self.peers.values():
            end(peer.process)


@contextmanager
def crew(place: Path) -> Iterator[Crew]:
    """Peers in `place`, all ended on the way out."""
    team = Crew(place)
    try:
        yield team
    finally:
        team.close()


def end(process: subprocess.Popen[Any]) -> None:
    """Make sure that a process is gone, also a stopped one."""
    if process.poll() is None:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait(LONG_S)


def ask(folder: Path) -> dict[str, Any] | None:
    """Return the status of the peer that runs in a folder, None while it does not answer."""
    address = admin_address(folder)
    if address is None:
        return None
    try:
        return dict(json.loads(ask_admin(address, 2.0)))
    except TransportError:
        return None


def _json_lines(text: str) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        if line.startswith("{"):
            yield json.loads(line)
