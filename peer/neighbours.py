"""The other peers, as the course of this one sees them: a thread-safe face of what lives on the network loop."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Collection, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from peer.agreement import Agreement
from peer.catchup import Asker
from peer.errors import PeerError
from peer.membership import Member, Membership, roster
from peer.network import Network
from peer.transport import StatePosition
from peer.waiting import Stop

T = TypeVar("T")


class Interrupted(PeerError):
    """Asked to end while waiting: leads to an orderly end, not to an error."""

    exit_code = 0


def wait_unless_asked(network: Network, stop: Stop, work: Coroutine[Any, Any, T]) -> T:
    """Run something on the loop and wait for it. Raises Interrupted when asked to end meanwhile."""
    future = network.start(work)

    def cancel() -> None:
        future.cancel()

    forget = stop.on_ask(cancel)
    try:
        return future.result()
    except concurrent.futures.CancelledError:
        raise Interrupted("asked to end") from None
    finally:
        forget()


@dataclass(slots=True)
class Neighbours:
    """course.Swarm. Called from the training thread; `position` is read by the loop."""

    network: Network
    stop: Stop
    membership: Membership
    agreement: Agreement
    asker: Asker
    last_round: int  # of the run: who claims to be past it is made up, and is planned with by nobody
    position: tuple[int, int] = (-1, 0)  # round and step of this peer

    def view(self) -> tuple[Member, ...]:
        return self.network.ask(self.membership.view)

    def roster(self, round_: int) -> tuple[Member, ...]:
        return roster((member for member in self.view() if member.round <= self.last_round), round_)

    def publish(self, round_: int, step: int) -> None:
        self.position = (round_, step)

    def take_part_from(self, round_: int) -> None:
        at_round, step = self.position
        self.network.ask(lambda: self.membership.update_me(from_round=round_, round=at_round, step=step))

    def catch_up(self, donors: list[str]) -> StatePosition | None:
        return wait_unless_asked(self.network, self.stop, self.asker.catch_up(donors))

    def take(self, address: str, chunks: Collection[int], round_: int) -> bool:
        return wait_unless_asked(self.network, self.stop, self.asker.take(address, chunks, round_))

    def compare(self, round_: int, log_probs: torch.Tensor) -> None:
        self.network.start(self.agreement.show(round_, log_probs, self.roster(round_)))

    def distance(self, round_: int) -> float | None:
        return self.agreement.distances.get(round_)
