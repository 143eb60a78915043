"""Does Mix1 in flight slow training? Step time with a Mix1 in progress, over step time with none.

    python -m tests.bench.step_time [--json] [--rounds N] [--rate MBIT] [--mixed PARAMETERS] [--switch-ms MS]

One process is the measured peer: a real ModelTrainer with one torch thread on the main thread; beside it, as in the
daemon, network loop, gRPC server and client, coding executor and Mixer. A second process is its partner, which mixes
and does not train. Sends are paced to 100 Mbit/s in both, so the measured peer sends and receives at that rate.
The models are small, so their own exchange would be over within a step or two: what is mixed is a vector of its own
beside the model, large enough to be in flight for all the steps of a block. Blocks of steps with Mix1 and without it
alternate (none, mix, none, mix, ..., none), all in one run.

    model      small: the default Llama. wide: larger matrices, so fewer and longer torch calls
    ratio      median step with Mix1 / median step with none; the target is 1.05 at most
    elsewhere  the same ratio when two other processes mix: what the machine's shared cores and caches cost any trainer.
               The rest of `ratio` is what mixing in the trainer's own process costs (interpreter lock, heap)
    spread     lower and upper quartile of the ratios of each block to its two neighbours
    cpu_s/GB   CPU seconds of the process outside the training thread, over payload bytes sent and received
    mbit/s     payload sent while mixing

Both processes share the machine. On two cores the partner's half of the work, too, runs on the core that is not
training. Anything else that runs meanwhile shows in the spread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import peer
from peer import codec, layout, model, plan
from peer.config import RunSpec, Settings
from peer.data import load_corpus
from peer.metrics import Metrics
from peer.mixing import Links, Mix, Mixer, Pacer, StartingPoints
from peer.network import Network
from peer.outer import Vectors
from peer.plan import Party
from peer.rpc_client import GrpcTransport
from peer.rpc_server import Server
from peer.trainer import ModelTrainer

ROOT = Path(__file__).parents[2]
TARGET = 1.05
BLOCK_S = 3.0
WARM_S = 3.0
ME, PARTNER, THIRD = "measured", "partner", "third"
MODELS: dict[str, dict[str, Any]] = {
    "small": {},
    "wide": {
        "model__config": {
            "hidden_size": 384,
            "intermediate_size": 1024,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "num_key_value_heads": 6,
            "tie_word_embeddings": False,
        },
        "inner__batch": 4,
    },
}


class Exchanges:
    """The side of a peer that mixes: network thread, gRPC both ways, Mixer, and a vector."""

    def __init__(self, name: str, codec_name: str, rate_bps: int, parameters: int) -> None:
        self.name = name
        self.codec = codec.by_name(codec_name)
        size = layout.chunk_elements(parameters, self.codec.bits / 8, 1 << 20)
        self.layout = layout.Layout.of_shapes((("model.embed_tokens.weight", (parameters,)),), size)
        x = torch.empty(parameters).normal_(0, 0.02, generator=torch.Generator().manual_seed(0))
        moved = torch.empty(parameters).normal_(0, 1e-4, generator=torch.Generator().manual_seed(len(name)))
        self.vectors = Vectors(moved.add_(x), torch.zeros(0), x)
        self.run = RunSpec().key
        self.metrics = Metrics()
        self.network = Network()
        self.transport = self.network.ask(lambda: GrpcTransport(on_drop=self.metrics.dropped))
        links = Links(self.run, name, self.transport, self.network.coding, self.metrics, Pacer(rate_bps))
        self.mixer = self.network.ask(lambda: Mixer(links, self.network.loop))
        self.server = self.network.ask(Server)
        port = self.network.call(self.server.start(self, "127.0.0.1:0", self.metrics.dropped))
        self.address = f"127.0.0.1:{port}"

    def start(self, round_: int, other: str, address: str) -> Mix:
        parties = [Party(self.name), Party(other)]
        sizes = [chunk.size for chunk in self.layout.chunks]
        points = StartingPoints(self.layout, self.codec, self.run, round_, self.name, self.vectors, threading.Lock())
        planned = plan.plan("global", self.run, round_, points.stage.value, parties, self.name, sizes)
        mix = self.mixer.start(planned, points, {other: address})
        assert mix is not None
        return mix

    def traffic(self) -> tuple[int, int]:
        """Return payload bytes sent and received so far."""
        totals = self.metrics.totals()
        return totals["sent_bytes"], totals["received_bytes"]

    def close(self) -> None:
        self.network.call(self.transport.close())
        self.network.call(self.server.stop(0.0))
        self.network.stop()

    # transport.Service, as far as a Mix1 calls it.

    async def on_exchange(self, stream: Any) -> None:
        await self.mixer.on_exchange(stream)

    async def on_gossip(self, message: Any) -> Any:
        raise NotImplementedError

    async def on_join(self, request: Any) -> Any:
        raise NotImplementedError

    async def on_top_k(self, run: bytes, round_: int) -> Any:
        raise NotImplementedError

    def on_state(self, request: Any) -> AsyncIterator[Any]:
        raise NotImplementedError


class Partner:
    """A peer in another process. Takes part in each round it is told of."""

    def __init__(self, name: str, codec_name: str, rate_bps: int, parameters: int) -> None:
        command = [sys.executable, "-m", "tests.bench.step_time", "--partner", name]
        command += ["--codec", codec_name, "--rate", str(rate_bps / 1e6), "--mixed", str(parameters)]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.address = self._answer()

    def start(self, round_: int, other: str, address: str) -> None:
        assert self._process.stdin is not None
        print(round_, other, address, file=self._process.stdin, flush=True)

    def end_round(self) -> None:
        label = self._answer()
        assert label == "full", label

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def be_partner(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    exchanges = Exchanges(arguments.partner, arguments.codec, int(arguments.rate * 1e6), arguments.mixed)
    print(exchanges.address, flush=True)
    for line in sys.stdin:
        round_, other, address = line.split()
        mix = exchanges.start(int(round_), other, address)
        mix.wait(600)
        print(mix.close().label, flush=True)
    exchanges.close()


@dataclass
class Block:
    """Steps taken in a row under one condition."""

    steps_s: list[float] = field(default_factory=list)
    wall_s: float = 0.0
    beside_s: float = 0.0  # CPU time of the threads that do not train
    bytes: tuple[int, int] = (0, 0)

    @property
    def median_s(self) -> float:
        return statistics.median(self.steps_s)


class Measured:
    """The measured peer."""

    def __init__(self, model_name: str, exchanges: Exchanges, folder: Path) -> None:
        fields = {"data__source": str(Path(peer.__file__).parent), "round__count": 1000, **MODELS[model_name]}
        spec = RunSpec().replaced(**fields)
        tokenizer = model.load_tokenizer(spec.tokenizer)
        corpus = load_corpus(spec.data, tokenizer, spec.model.context, folder)
        self.exchanges = exchanges
        self.trainer = ModelTrainer(spec, Settings(), model.build(spec, tokenizer), corpus, ME)
        self._step = 0

    def block(self, seconds: float) -> Block:
        block = Block()
        sent, received = self.exchanges.traffic()
        began, process, own = time.perf_counter(), time.process_time(), time.thread_time()
        while time.perf_counter() - began < seconds:
            block.steps_s.append(self.trainer.step(self._step).seconds)
            self._step += 1
        block.wall_s = time.perf_counter() - began
        block.beside_s = (time.process_time() - process) - (time.thread_time() - own)
        now = self.exchanges.traffic()
        block.bytes = (now[0] - sent, now[1] - received)
        return block


def measure(model_name: str, codec_name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run alternating blocks on one model and one codec."""
    rate_bps = int(arguments.rate * 1e6)
    exchanges = Exchanges(ME, codec_name, rate_bps, arguments.mixed)
    partner, third = (Partner(name, codec_name, rate_bps, arguments.mixed) for name in (PARTNER, THIRD))
    with tempfile.TemporaryDirectory() as folder:
        measured = Measured(model_name, exchanges, Path(folder))
        measured.block(WARM_S)
        alone, here, elsewhere = [measured.block(BLOCK_S)], [], []
        for round_ in range(0, 2 * arguments.rounds, 2):
            partner.start(round_, ME, exchanges.address)
            mix = exchanges.start(round_, PARTNER, partner.address)
            here.append(measured.block(BLOCK_S))
            if exchanges.network.ask(mix._exchange.complete.is_set):
                raise SystemExit("Mix1 ended before the block of steps did: raise --mixed")
            mix.wait(600)
            partner.end_round()
            outcome = mix.close()
            assert outcome.label == "full", outcome
            alone.append(measured.block(BLOCK_S))
            partner.start(round_ + 1, THIRD, third.address)
            third.start(round_ + 1, PARTNER, partner.address)
            elsewhere.append(measured.block(BLOCK_S))
            partner.end_round()
            third.end_round()
            alone.append(measured.block(BLOCK_S))
        measured.trainer.close()
    for process in (partner, third):
        process.close()
    exchanges.close()
    return {"model": model_name, "codec": codec_name, **compared(alone, here, elsewhere)}


def compared(alone: list[Block], here: list[Block], elsewhere: list[Block]) -> dict[str, Any]:
    """Put the blocks side by side. They came as alone[0], here[0], alone[1], elsewhere[0], alone[2], here[1], ..."""
    without, with_, beside = (
        statistics.median(s for block in blocks for s in block.steps_s) for blocks in (alone, here, elsewhere)
    )
    ratios = [
        block.median_s / statistics.mean((alone[2 * i].median_s, alone[2 * i + 1].median_s))
        for i, block in enumerate(here)
    ]
    low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else (ratios[0],) * 3
    idle = sum(block.beside_s for block in alone) / sum(block.wall_s for block in alone)
    wall_s = sum(block.wall_s for block in here)
    sent, received = (sum(block.bytes[i] for block in here) for i in (0, 1))
    network_s = sum(block.beside_s for block in here) - idle * wall_s
    return {
        "step_ms_alone": 1e3 * without,
        "step_ms_mixing": 1e3 * with_,
        "ratio": with_ / without,
        "ratio_elsewhere": beside / without,
        "ratio_quartiles": [low, high],
        "block_ratios": ratios,
        "steps": sum(len(block.steps_s) for block in here),
        "cpu_s_per_gb": network_s / ((sent + received) / 1e9),
        "cpu_share": network_s / wall_s,
        "sent_mbit_s": 8e-6 * sent / wall_s,
        "received_mbit_s": 8e-6 * received / wall_s,
        "met": with_ / without <= TARGET,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Step time with Mix1 in flight over step time with none.")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument("--rounds", type=int, default=8, help="blocks with Mix1 for each model and codec (8)")
    parser.add_argument("--rate", type=float, default=100.0, help="sends, Mbit/s (100)")
    parser.add_argument("--mixed", type=int, default=50_000_000, help="parameters in the mixed vector (50 million)")
    parser.add_argument("--model", choices=sorted(MODELS), action="append", help="only this one; may be repeated")
    parser.add_argument("--codec", choices=codec.NAMES, help="only this one (int8 and bf16)")
    parser.add_argument("--switch-ms", type=float, help="the interpreter's switch interval, to try")
    parser.add_argument("--partner", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.partner:
        be_partner(arguments)
        return
    torch.set_num_threads(1)
    if arguments.switch_ms:
        sys.setswitchinterval(arguments.switch_ms / 1e3)
    codecs = [arguments.codec] if arguments.codec else ["int8", "bf16"]
    results = []
    if not arguments.json:
        print(
            f"{'model':6} {'codec':6} {'alone':>9} {'mixing':>9} {'ratio':>6} {'spread':>11} {'elsewhere':>9} "
            f"{'cpu_s/GB':>9} {'mbit/s':>7} {'steps':>6}  target"
        )
    for model_name in arguments.model or ["small", "wide"]:
        for codec_name in codecs:
            result = measure(model_name, codec_name, arguments)
            results.append(result)
            if not arguments.json:
                print(row(result), flush=True)
    if arguments.json:
        facts = {"benchmark": "step_time", "target": TARGET, "rate_mbit_s": arguments.rate}
        print(json.dumps({**facts, "parameters_mixed": arguments.mixed, "results": results}))


def row(result: dict[str, Any]) -> str:
    low, high = result["ratio_quartiles"]
    return (
        f"{result['model']:6} {result['codec']:6} {result['step_ms_alone']:6.1f} ms {result['step_ms_mixing']:6.1f} ms "
        f"{result['ratio']:6.3f} {low:5.3f}-{high:5.3f} {result['ratio_elsewhere']:9.3f} "
        f"{result['cpu_s_per_gb']:9.2f} {result['sent_mbit_s']:7.1f} {result['steps']:6}  "
        f"{'<=' if result['met'] else '>'} {TARGET}"
    )


if __name__ == "__main__":
    main()
