"""Getting into a swarm: ask one address after another until a member lets this peer in.

The one thing to get wrong: a refusal is final, silence is not. Silence is asked again with growing, jittered pauses
until the time is up; then every address is named with what was wrong there. A refusal counts once the other addresses
have been asked too: where a member once was, another run may live by now.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from pathlib import Path

from peer import log
from peer.config import Config, RunSpec
from peer.errors import JoinError, RefusedError, TransportError, UsageError
from peer.transport import JoinReply, JoinRequest, Transport

ASK_TIMEOUT_S = 5.0
LONGEST_PAUSE_S = 4.0

logger = log.get(__name__)


async def join(transport: Transport, addresses: Sequence[str], request: JoinRequest, timeout_s: float) -> JoinReply:
    """Return the first member's answer. Raises RefusedError, or JoinError when none answered in `timeout_s`."""
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + timeout_s
    jitter = random.Random(request.member.id)
    pause_s = 0.25
    wrong: dict[str, str] = {}
    while True:
        refusal: RefusedError | None = None
        for address in addresses:
            try:
                return await transport.join(address, request, min(ASK_TIMEOUT_S, timeout_s))
            except RefusedError as error:
                logger.info("refused", address=address, why=error.reason)
                refusal = refusal or error
            except TransportError as error:
                why = str(error).removeprefix(f"{address}: ")
                if wrong.get(address) != why:
                    logger.info("bootstrap does not answer", address=address, why=why)
                wrong[address] = why
        if refusal is not None:
            raise refusal
        left_s = give_up_at - loop.time()
        if left_s <= 0:
            raise JoinError(list(wrong.items()))
        await asyncio.sleep(min(left_s, jitter.uniform(0.05, pause_s)))
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def check_paths(config: Config, spec: RunSpec) -> None:
    """Raise UsageError where a swarm's spec names files of this machine that its operator did not name.

    What is read is trained on, and what is trained on can be read out of the gradients: a stranger must not choose it.
    """
    named = {"data.source": spec.data.source, "model.path": spec.model.path, "tokenizer.path": spec.tokenizer.path}
    for name, value in named.items():
        here = value.startswith(("/", ".", "~")) or Path(value).exists()
        if value and here and config.origins.get(name, "default") == "default":
            raise UsageError(
                f"the swarm's {name} is {value!r}, which names files of this machine; if the run may read them, "
                f"say so with --set {name}={json.dumps(value)}"
            )
