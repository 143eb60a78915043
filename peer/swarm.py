"""Several peers on this machine: start them as processes of their own, watch them, end them, report.

The first one starts the run, the others join through it, and all wait for each other before the first round. The one
thing to get wrong: their end. A peer ends in order when asked, so it is asked first and killed only when it does not;
and when this process dies, its peers are asked by the system.
"""

from __future__ import annotations

import ctypes
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from peer import log
from peer.errors import PeerError, TransportError, UsageError
from peer.home import admin_address
from peer.rpc_client import ask_admin

START_TIMEOUT_S = 120.0  # from a process's start until it listens; imports alone take seconds on a busy machine
STOP_TIMEOUT_S = 30.0
ASK_TIMEOUT_S = 2.0
LOG_TAIL = 15

logger = log.get(__name__)


class PeerDied(PeerError):
    """A peer of the swarm ended before it should."""


@dataclass(slots=True)
class Child:
    """One peer's process."""

    name: str
    folder: Path
    process: subprocess.Popen[bytes]
    output: IO[bytes]

    @property
    def log_path(self) -> Path:
        return self.folder / "peer.log"

    def status(self) -> dict[str, Any] | None:
        """Ask it what it is doing; None while it cannot answer."""
        address = admin_address(self.folder) if self.process.poll() is None else None
        if address is None:
            return None
        try:
            answer = json.loads(ask_admin(address, ASK_TIMEOUT_S))
        except (TransportError, ValueError):
            return None
        return answer if isinstance(answer, dict) else None

    def rounds(self) -> int | None:
        """Return how many rounds lie behind it, once it has ended and said so."""
        try:
            summary = json.loads((self.folder / "summary.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        rounds = summary.get("round") if isinstance(summary, dict) else None
        return rounds if isinstance(rounds, int) else None

    def last_words(self) -> str:
        lines = self.log_path.read_text(errors="replace").splitlines()[-LOG_TAIL:]
        return "\n".join(f"  {line}" for line in lines)


class Swarm:
    """N peers in `out/peer-0` ... `out/peer-(N-1)`. `close` ends what still runs."""

    def __init__(self, peers: int, out: Path, arguments: Sequence[str]) -> None:
        """`arguments` go to every `peer run`. Raises UsageError when `out` holds an earlier swarm."""
        self.out = out
        self._arguments = list(arguments)
        self._names = [f"peer-{i}" for i in range(peers)]
        self.children: list[Child] = []
        taken = [name for name in self._names if (out / name).exists()]
        if taken:
            raise UsageError(f"{out} holds an earlier swarm ({taken[0]}); choose another --out, or remove it")
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--out {out} cannot be made: {error.strerror}") from error

    def start(self, told: Callable[[str], None], asked_to_end: Callable[[], bool]) -> None:
        """Start all peers. Raises PeerDied with the log's end when the first one does not come up."""
        first = self._spawn(self._names[0], [])
        told(f"{first.name} starting in {first.folder}")
        give_up_at = time.monotonic() + START_TIMEOUT_S
        while (status := first.status()) is None:
            if asked_to_end():
                return
            if first.process.poll() is not None:
                raise PeerDied(f"{first.name} ended with {first.process.returncode}:\n{first.last_words()}")
            if time.monotonic() > give_up_at:
                raise PeerDied(f"{first.name} did not come up in {START_TIMEOUT_S:g} s:\n{first.last_words()}")
            time.sleep(0.1)
        for name in self._names[1:]:
            self._spawn(name, ["--bootstrap", status["address"]])
        told(f"{first.name} listens at {status['address']}; {len(self._names) - 1} more joining through it")

    def _spawn(self, name: str, arguments: list[str]) -> Child:
        folder = self.out / name
        folder.mkdir(parents=True)
        output = (folder / "peer.log").open("wb")
        command = [sys.executable, "-m", "peer", "run", "--data-dir", str(folder), *self._arguments, *arguments]
        process = subprocess.Popen(  # noqa: S603 - our own command line
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C in the terminal is for us, and we ask them in order
            preexec_fn=_end_with_parent if sys.platform == "linux" else None,
        )
        child = Child(name, folder, process, output)
        self.children.append(child)
        return child

    def running(self) -> bool:
        return any(child.process.poll() is None for child in self.children)

    def ask_to_end(self) -> None:
        for child in self.children:
            if child.process.poll() is None:
                child.process.send_signal(signal.SIGTERM)

    def close(self) -> None:
        """End what still runs: asked first, killed after a while. Idempotent."""
        self.ask_to_end()
        give_up_at = time.monotonic() + STOP_TIMEOUT_S
        for child in self.children:
            try:
                child.process.wait(max(0.0, give_up_at - time.monotonic()))
            except subprocess.TimeoutExpired:
                logger.warning("killed, since it did not end when asked", peer=child.name)
                child.process.kill()
                child.process.wait()
            child.output.close()

    def exit_codes(self) -> dict[str, int]:
        return {child.name: child.process.returncode for child in self.children if child.process.returncode is not None}


def _end_with_parent() -> None:
    """Have the system ask this child to end when its parent dies, however that dies."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
