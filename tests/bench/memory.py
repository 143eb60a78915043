"""Memory of a peer: its peak over that of the same trainer with mixing off.

    python -m tests.bench.memory [--json] [--peers 2 4] [--rounds N]

Runs real `peer run` processes on a model of 100 million parameters (fp32, no GPU, emulated steps), all mixing with the
default preset, each saving a checkpoint after every round. Half way one more peer joins and takes its state from the
first one, whose memory is measured to its end. The base is the same trainer alone in a bare process: the same imports,
the same steps, no network and no vectors.

    extra      (peak - base) / the model's fp32 bytes. z, v and x are 3.0; the limit is 3.2 (invariant I8)

The figure is anonymous memory: RssAnon from /proc/PID/status, sampled every 20 ms, which is what the process itself
allocated. VmHWM, the kernel's own peak, is shown beside it (in JSON): it also counts pages of libraries and of the
interpreter's files, which both processes share with the page cache and which come and go with what was last read.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from peer.home import admin_address

ROOT = Path(__file__).parents[2]
LIMIT = 3.2
SAMPLE_S = 0.02
START_S = 120.0
MODEL = {  # 99.1 million parameters
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 14,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "vocab_size": 384,
}
STEPS, STEP_S = 20, 0.3


def settings(rounds: int) -> list[str]:
    """Return the flags of every peer: what the base runs with, too."""
    config = "{" + ", ".join(f"{key} = {value}" for key, value in MODEL.items()) + "}"
    values = {
        "trainer.kind": "emulated",
        "trainer.step_time": f"{1000 * STEP_S:g}ms",
        "model.config": config,
        "round.steps": str(STEPS),
        "round.count": str(rounds),
        "device.threads": "1",
        "log.level": "info",
    }
    return [part for key, value in values.items() for part in ("--set", f"{key}={value}")]


class Watch:
    """Samples a process's memory until it ends."""

    def __init__(self, pid: int) -> None:
        self.anon_bytes = 0  # highest seen
        self.hwm_bytes = 0
        self.curve: list[tuple[float, int]] = []
        self._status = Path(f"/proc/{pid}/status")
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (now := self._read()) is not None:
            anon, self.hwm_bytes = now
            self.curve.append((time.monotonic() - self._began, anon))
            self.anon_bytes = max(self.anon_bytes, anon)
            time.sleep(SAMPLE_S)

    def _read(self) -> tuple[int, int] | None:
        try:
            lines = self._status.read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            return None
        sizes = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith(("RssAnon", "VmHWM"))}
        if len(sizes) < 2:  # a zombie has none
            return None
        return 1024 * int(sizes["RssAnon"]), 1024 * int(sizes["VmHWM"])

    def ended(self) -> None:
        self._thread.join()


def be_base(steps: int, flags: list[str]) -> None:
    """The trainer alone: what the daemon imports, one EmulatedTrainer, steps and evaluations, nothing else."""
    import torch

    import peer.daemon  # noqa: F401 - for what it takes in memory
    from peer import config, model
    from peer.trainer import EmulatedTrainer

    loaded = config.load(overrides=flags)
    torch.set_num_threads(1)
    spec = loaded.spec
    tokenizer = model.load_tokenizer(spec.tokenizer)
    trainer = EmulatedTrainer(spec, loaded.settings, model.shapes(spec, tokenizer), "base")
    for step in range(steps):
        trainer.step(step)
    print(trainer.layout.n_params, flush=True)


def base(rounds: int) -> tuple[Watch, int]:
    """Return the memory of the trainer alone, and the number of parameters."""
    command = [sys.executable, "-m", "tests.bench.memory", "--base", *settings(rounds)[1::2]]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    watch = Watch(process.pid)
    answer, _ = process.communicate()
    watch.ended()
    if process.returncode:
        raise SystemExit("the base failed")
    return watch, int(answer)


class Peers:
    """`peer run` processes, the first one watched."""

    def __init__(self, folder: Path, flags: list[str]) -> None:
        self._folder = folder
        self._flags = flags
        self._processes: list[subprocess.Popen[bytes]] = []
        self._environment = os.environ | {"COLUMNS": "200"}

    def start(self, *flags: str) -> subprocess.Popen[bytes]:
        home = self.home(len(self._processes))
        home.mkdir()
        command = [sys.executable, "-m", "peer", "run", "--data-dir", str(home), *self._flags, *flags]
        with (home / "peer.log").open("wb") as output:
            process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, env=self._environment)
        self._processes.append(process)
        return process

    def home(self, number: int) -> Path:
        return self._folder / f"peer-{number}"

    def status(self, number: int) -> dict[str, Any]:
        """Wait until a peer answers, and return what it says."""
        from peer.errors import TransportError
        from peer.rpc_client import ask_admin

        give_up_at = time.monotonic() + START_S
        while time.monotonic() < give_up_at:
            self.check(number)
            address = admin_address(self.home(number))
            try:
                answer = json.loads(ask_admin(address, 2.0)) if address else {}
            except (TransportError, ValueError):
                answer = {}
            if answer.get("address"):
                return answer
            time.sleep(0.2)
        raise SystemExit(f"peer {number} does not answer")

    def check(self, number: int) -> None:
        code = self._processes[number].poll()
        if code is not None:
            raise SystemExit(f"peer {number} ended with {code}:\n{self.log(number)}")

    def log(self, number: int) -> str:
        return (self.home(number) / "peer.log").read_text(errors="replace")

    def close(self) -> None:
        for process in self._processes:
            process.send_signal(signal.SIGTERM)
        for process in self._processes:
            process.wait(60)

    def journal(self, number: int) -> list[dict[str, Any]]:
        try:
            return [json.loads(line) for line in (self.home(number) / "rounds.jsonl").read_text().splitlines()]
        except FileNotFoundError:
            return []


def swarm(peers: int, rounds: int, folder: Path) -> tuple[Watch, dict[str, Any]]:
    """Run a swarm and a joiner; return the first peer's memory and what shows that it did all it should."""
    team = Peers(folder, [*settings(rounds), "--set", f"start.members={peers}"])
    try:
        first = team.start()
        watch = Watch(first.pid)
        address = team.status(0)["address"]
        for _ in range(peers - 1):
            team.start("--bootstrap", address)
        while not team.journal(0):
            team.check(0)
            time.sleep(0.2)
        team.start("--bootstrap", address)
        first.wait(600)
        watch.ended()
        if first.returncode:
            raise SystemExit(f"the first peer ended with {first.returncode}:\n{team.log(0)}")
        journal, joined = team.journal(0), team.journal(peers)
        checkpoints = sorted(path.name for path in (team.home(0) / "checkpoints").glob("round-*"))
    finally:
        team.close()
    did = {
        "exit_code": first.returncode,
        "mix1": [record["mix1"] for record in journal],
        "mix2": [record["mix2"] for record in journal],
        "members_mixed": [record["members_mixed"] for record in journal],
        "joiner_rounds": [record["round"] for record in joined],
        "checkpoints": checkpoints,
        "caught_up": "caught up" in team.log(peers),
    }
    return watch, did


def main() -> None:
    parser = argparse.ArgumentParser(description="Peak memory of a peer over its trainer alone.")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument("--peers", type=int, nargs="+", default=[2, 4], help="sizes of swarm (2 4)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds each (5)")
    parser.add_argument("--curve", type=Path, help="write the watched peers' memory over time there, as JSON")
    parser.add_argument("--base", nargs="+", metavar="SETTING", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.base:
        be_base(3 * STEPS, arguments.base)
        return
    alone, parameters = base(arguments.rounds)
    model_bytes = 4 * parameters
    results = []
    curves = {"base": alone.curve}
    if not arguments.json:
        print(
            f"{parameters / 1e6:.1f} million parameters, {model_bytes / 2**20:.0f} MiB; "
            f"trainer alone {alone.anon_bytes / 2**20:.0f} MiB"
        )
        print(f"{'peers':>5} {'peak':>9} {'extra':>6}  limit")
    for peers in arguments.peers:
        with tempfile.TemporaryDirectory(prefix="peer-memory-") as folder:
            watch, did = swarm(peers, arguments.rounds, Path(folder))
        extra = (watch.anon_bytes - alone.anon_bytes) / model_bytes
        result = {
            "peers": peers,
            "extra": extra,
            "met": extra <= LIMIT,
            "extra_by_hwm": (watch.hwm_bytes - alone.hwm_bytes) / model_bytes,
            "peak_bytes": watch.anon_bytes,
            "hwm_bytes": watch.hwm_bytes,
            **did,
        }
        results.append(result)
        curves[f"{peers} peers"] = watch.curve
        if not arguments.json:
            print(
                f"{peers:5} {watch.anon_bytes / 2**20:5.0f} MiB {extra:6.3f}  "
                f"{'<=' if result['met'] else '>'} {LIMIT}; {shown(did)}",
                flush=True,
            )
    if arguments.curve:
        arguments.curve.write_text(json.dumps(curves))
    if arguments.json:
        facts = {"benchmark": "memory", "limit": LIMIT, "parameters": parameters, "base_bytes": alone.anon_bytes}
        print(json.dumps({**facts, "base_hwm_bytes": alone.hwm_bytes, "results": results}))


def shown(did: dict[str, Any]) -> str:
    mixes = ", ".join(f"{stage} {'/'.join(map(str, did[stage]))}" for stage in ("mix1", "mix2"))
    joiner = "joiner caught up" if did["caught_up"] else "JOINER DID NOT CATCH UP"
    return f"{mixes}; {joiner}; {len(did['checkpoints'])} checkpoints kept"


if __name__ == "__main__":
    main()
