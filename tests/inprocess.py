"""Peers of one process for tests: real rounds, mixing and catch-up over Loopback, one training thread each.

The trainer is a small stand-in whose steps are exactly repeatable; everything between trainers is the real thing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from peer.catchup import Asker, Donor, Shelf
from peer.config import RunSpec
from peer.layout import Layout
from peer.loopback import Loopback
from peer.membership import Member
from peer.metrics import Metrics
from peer.mixing import Links, Mixer, Pacer
from peer.network import Network
from peer.outer import Vectors
from peer.rounds import RoundReport, Rounds
from peer.trainer import StepResult
from peer.transport import Stage, StatePosition, StateRequest
from peer.waiting import Stop

SHAPES = (
    ("model.embed_tokens.weight", (48, 32)),
    ("model.layers.0.self_attn.q_proj.weight", (32, 32)),
    ("model.layers.0.mlp.up_proj.weight", (64, 32)),
    ("model.layers.1.self_attn.q_proj.weight", (32, 32)),
    ("model.norm.weight", (32,)),
    ("lm_head.weight", (48, 32)),
)


class Drift:
    """A trainer whose every step pulls the parameters towards a point of its own, a little differently each step."""

    def __init__(self, layout: Layout, start: torch.Tensor, seed: int) -> None:
        self.layout = layout
        self.data_wait_s = 0.0
        self.y = start.clone()
        self._generator = torch.Generator().manual_seed(seed)
        self._target = torch.randn(layout.n_params, generator=self._generator)
        self.pause: Callable[[int], None] = lambda step: None

    def step(self, swarm_step: int) -> StepResult:
        self.pause(swarm_step)
        noise = torch.randn(self.layout.n_params, generator=self._generator)
        self.y += 0.02 * (self._target - self.y) + 0.01 * noise
        return StepResult(loss=float((self._target - self.y).square().mean()), tokens=8, seconds=0.001, skipped=False)

    def read(self, start: int, stop: int, out: torch.Tensor) -> None:
        out.copy_(self.y[start:stop])

    def write(self, start: int, stop: int, values: torch.Tensor) -> None:
        self.y[start:stop] = values

    def twin(self) -> Drift:
        """Return a trainer that will do exactly the same."""
        copy = Drift.__new__(Drift)
        copy.layout, copy.y, copy._target, copy.data_wait_s = self.layout, self.y.clone(), self._target, 0.0
        copy._generator = torch.Generator()
        copy._generator.set_state(self._generator.get_state())
        copy.pause = lambda step: None
        return copy


@dataclass
class Stub:
    """A peer's view of the others: fixed, changed by the test."""

    members: tuple[Member, ...]
    position: tuple[int, int] = (0, 0)

    def roster(self, round_: int) -> tuple[Member, ...]:
        return self.members

    def publish(self, round_: int, step: int) -> None:
        self.position = (round_, step)


@dataclass
class Peer:
    """One peer and its parts; also the transport.Service that Loopback calls."""

    id: str
    spec: RunSpec
    trainer: Drift
    shelf: Shelf
    others: Stub
    metrics: Metrics
    network: Network
    net: Loopback
    stop: Stop = field(default_factory=Stop)

    def __post_init__(self) -> None:
        self.transport = self.net.transport(self.id, self.metrics.dropped)
        self.links = Links(self.spec.key, self.id, self.transport, self.network.coding, self.metrics, Pacer(0))
        self.mixer = self.network.ask(lambda: Mixer(self.links, self.network.loop))
        self.rounds = Rounds(
            self.spec, Member(self.id, self.id), self.trainer, self.shelf, self.others, self.metrics, self.stop
        )
        self.rounds.mixer = self.mixer
        self.trainer.pause = self._let_mix1_end
        self.donor = Donor(self.spec.key, self.shelf, self.where, self.network.coding, Pacer(0))

    def _let_mix1_end(self, step: int) -> None:
        """Hold the first step of a round until Mix1 has ended, as it would have in steps that take time."""
        round_, first = divmod(step, self.spec.round.steps)
        if first == 0 and self.rounds.mixer is not None:
            self.network.call(self._mix1_ends(round_), 30)

    async def _mix1_ends(self, round_: int) -> None:
        exchange = await self.mixer.exchange(round_, Stage.MIX1)
        if exchange is not None:
            await exchange.complete.wait()

    def where(self) -> StatePosition:
        return StatePosition(self.others.position[0], self.others.position[1], 0.001)

    async def on_exchange(self, stream: Any) -> None:
        await self.mixer.on_exchange(stream)

    def on_state(self, request: StateRequest) -> Any:
        return self.donor.give(request)

    def asker(self) -> Asker:
        return Asker(self.spec.key, self.shelf, self.transport, self.network.coding, self.metrics)


@dataclass
class Team:
    """Several peers on one loop."""

    net: Loopback
    network: Network
    peers: list[Peer]

    def run_round(self, round_: int, peers: list[Peer] | None = None) -> list[RoundReport]:
        """Run a round on all peers at once, each in a thread of its own."""
        chosen = self.peers if peers is None else peers
        with ThreadPoolExecutor(len(chosen)) as threads:
            return list(threads.map(lambda peer: peer.rounds.run(round_), chosen))

    def mean(self, vector: str) -> torch.Tensor:
        return torch.stack([getattr(peer.shelf.vectors, vector) for peer in self.peers]).double().mean(0)


def spec(**fields: Any) -> RunSpec:
    """Return a spec for these tests: short rounds, and a deadline that only a fault reaches."""
    return RunSpec().replaced(**{"round__steps": 3, "mixing__mix2__deadline": 20.0, **fields})


def layout() -> Layout:
    return Layout.of_shapes(SHAPES, 1024)


def start_point() -> torch.Tensor:
    """Return where all peers of a team start."""
    return torch.randn(layout().n_params, generator=torch.Generator().manual_seed(99))


@contextmanager
def team(run: RunSpec, size: int, shared_start: bool = True) -> Iterator[Team]:
    """Build peers a, b, c, ... that know each other."""
    shape = layout()
    network = Network()
    net = network.ask(Loopback)
    ids = [chr(ord("a") + i) for i in range(size)]
    members = tuple(Member(id_, id_, from_round=0, round=0) for id_ in ids)
    start = start_point()
    peers = []
    for number, id_ in enumerate(ids):
        own = start if shared_start else start + 0.1 * number
        vectors = Vectors(own.clone(), torch.zeros(shape.n_params), own.clone())
        trainer = Drift(shape, own, seed=number)
        peer = Peer(id_, run, trainer, Shelf.of(shape, vectors), Stub(members), Metrics(), network, net)
        peers.append(peer)
        network.ask(lambda id_=id_, peer=peer: net.serve(id_, peer, peer.metrics.dropped))
    try:
        yield Team(net, network, peers)
        assert network.ask(lambda: net.errors) == []
    finally:
        network.call(net.close(), 10)
        network.stop()
