"""How far this peer's predictions are from another member's: the JS distance, measured each round (ALGORITHM sec. 4).

Right after z is formed each peer predicts the same probe tokens and offers its most likely ones; each asks the next
member of the roster for its own and compares. The one thing to get wrong: both sides must be of the same round.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor

import numpy as np
import torch

from peer import consensus, log
from peer.errors import TransportError
from peer.membership import Member
from peer.metrics import Metrics
from peer.transport import TopK, Transport

ASK_EVERY_S = 0.5  # until the other has its own of this round
ASK_TIMES = 40
ASK_TIMEOUT_S = 5.0

logger = log.get(__name__)


class Agreement:
    """One peer's probe. Lives on the network loop; `show` hands it a round's predictions."""

    def __init__(
        self, run: bytes, me: str, transport: Transport, coding: Executor, metrics: Metrics, top_k: int
    ) -> None:
        self._run = run
        self._me = me
        self._transport = transport
        self._coding = coding
        self._metrics = metrics
        self._k = top_k
        self._shown: TopK | None = None
        self._asking: asyncio.Task[None] | None = None
        self.distances: dict[int, float] = {}  # by round; the last few

    async def show(self, round_: int, log_probs: torch.Tensor, roster: Sequence[Member]) -> None:
        """Offer this round's predictions (tokens, vocab) and compare with the next member's in the background."""
        loop = asyncio.get_running_loop()
        self._shown = await loop.run_in_executor(self._coding, self._coarse, round_, log_probs)
        if self._asking is not None:
            self._asking.cancel()
        partner = next_member(self._me, roster)
        if partner is None:
            self._metrics.js(None)
        else:
            self._asking = asyncio.create_task(self._compare(partner, round_, log_probs))

    def _coarse(self, round_: int, log_probs: torch.Tensor) -> TopK:
        tokens, vocabulary = log_probs.shape
        k = min(self._k, vocabulary)
        ids, top, tail = consensus.top_k(log_probs, k)
        return TopK(
            round_,
            tokens,
            k,
            ids.to(torch.int32).numpy().tobytes(),
            top.to(torch.float16).numpy().tobytes(),
            tail.to(torch.float32).numpy().tobytes(),
        )

    async def _compare(self, partner: Member, round_: int, log_probs: torch.Tensor) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(ASK_TIMES):
            try:
                theirs = await self._transport.top_k(partner.address, self._run, round_, ASK_TIMEOUT_S)
            except TransportError as error:
                logger.debug("probe not answered", member=partner.id, why=str(error))
                return
            if theirs is not None and theirs.round == round_:
                distance = await loop.run_in_executor(self._coding, self._distance, theirs, log_probs)
                if distance is None:
                    logger.warning("probe cannot be used", member=partner.id, round=round_)
                    return
                self._metrics.js(distance)
                self.distances[round_] = distance
                self.distances.pop(round_ - 8, None)
                return
            await asyncio.sleep(ASK_EVERY_S)

    @staticmethod
    def _distance(theirs: TopK, log_probs: torch.Tensor) -> float | None:
        tokens, vocabulary = log_probs.shape
        k = theirs.k
        sizes_fit = len(theirs.ids) == 4 * tokens * k and len(theirs.log_probs) == 2 * tokens * k
        if theirs.tokens != tokens or not 0 < k <= vocabulary or not sizes_fit or len(theirs.tail) != 4 * tokens:
            return None
        ids = torch.from_numpy(np.frombuffer(theirs.ids, np.int32).reshape(tokens, k).astype(np.int64))
        top = torch.from_numpy(np.frombuffer(theirs.log_probs, np.float16).reshape(tokens, k).astype(np.float32))
        tail = torch.from_numpy(np.frombuffer(theirs.tail, np.float32).copy())
        finite = bool(torch.isfinite(top).all() and torch.isfinite(tail).all())
        if not finite or int(ids.min()) < 0 or int(ids.max()) >= vocabulary or bool((top > 1e-2).any()):
            return None
        if float(tail.min()) < 0.0 or float(tail.max()) > 1.0:
            return None
        return float(consensus.coarse_js(ids, top, tail, log_probs).estimate)

    def on_top_k(self, run: bytes, round_: int) -> TopK | None:
        shown = self._shown
        return shown if shown is not None and run == self._run and shown.round == round_ else None


def next_member(me: str, roster: Sequence[Member]) -> Member | None:
    """Return the dialable member after `me` in the ring of ids, None if there is none."""
    others = sorted((m for m in roster if m.id != me and m.address), key=lambda m: (m.id <= me, m.id))
    return others[0] if others else None
