"""What this peer answers to others: one object with a method for each call, and no logic of its own kind.

The server listens before the peer knows which run it is in, so that its port is known and taken; until `open` is called
everybody is told to come back later.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

from peer import log
from peer.agreement import Agreement
from peer.catchup import Donor
from peer.config import RunSpec, differing
from peer.errors import RefusedError, TransportError, Unreachable
from peer.membership import Member, Membership, State
from peer.mixing import Mixer
from peer.probe import Probe
from peer.transport import (
    Gossip,
    JoinReply,
    JoinRequest,
    StateChunk,
    StatePosition,
    StateRequest,
    Stream,
    TopK,
    Transport,
)

PROTOCOL = 1
PING_TIMEOUT_S = 1.0

logger = log.get(__name__)


@dataclass(frozen=True, slots=True)
class Inside:
    """The parts that answer, once there are any."""

    spec: RunSpec
    membership: Membership
    probe: Probe
    mixer: Mixer
    donor: Donor
    agreement: Agreement
    transport: Transport


class PeerService:
    """transport.Service. Used on the network loop."""

    def __init__(self) -> None:
        self._inside: Inside | None = None

    def open(self, inside: Inside) -> None:
        self._inside = inside

    def _ready(self) -> Inside:
        if self._inside is None:
            raise Unreachable("this peer is still starting")
        return self._inside

    async def on_exchange(self, stream: Stream) -> None:
        await self._ready().mixer.on_exchange(stream)

    async def on_gossip(self, message: Gossip) -> Gossip:
        return await self._ready().probe.on_gossip(message)

    async def on_top_k(self, run: bytes, round_: int) -> TopK | None:
        return self._ready().agreement.on_top_k(run, round_)

    async def on_state(self, request: StateRequest) -> AsyncIterator[StatePosition | StateChunk]:
        async for item in self._ready().donor.give(request):
            yield item

    async def on_join(self, request: JoinRequest) -> JoinReply:
        inside = self._ready()
        if request.protocol != PROTOCOL:
            raise RefusedError(f"protocol {request.protocol} is spoken by the newcomer, {PROTOCOL} here")
        differences = differing(request.fields, inside.spec.fields())
        if differences:
            logger.info("newcomer refused", member=request.member.id, fields=sorted(differences))
            raise RefusedError("its run spec differs", differences)
        await self._check_identity(inside, request.member)
        inside.probe.learn([request.member])
        return JoinReply(inside.spec.canonical(), inside.membership.view())

    async def _check_identity(self, inside: Inside, newcomer: Member) -> None:
        """Two live peers with one identity would be mixed as one (a copied storage folder)."""
        if newcomer.id == inside.membership.me.id:
            raise RefusedError(
                f"identity {newcomer.id} is this member's own: give each peer a storage folder of its own"
            )
        known = inside.membership.get(newcomer.id)
        if known is None or known.state is not State.ALIVE or known.address in ("", newcomer.address):
            return
        ping = Gossip(inside.spec.key, inside.membership.me.id, (inside.membership.me,))
        try:
            answer = await inside.transport.gossip(known.address, ping, PING_TIMEOUT_S)
        except (TransportError, RefusedError):
            return
        if answer.sender == newcomer.id:
            raise RefusedError(
                f"identity {newcomer.id} is in use at {known.address}: give each peer a storage folder of its own"
            )
