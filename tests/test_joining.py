"""Getting in: whose answer counts, and what is said when nobody answers."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from peer.errors import JoinError, RefusedError, Unreachable
from peer.joining import join
from peer.membership import Member
from peer.transport import JoinReply, JoinRequest, Transport

REQUEST = JoinRequest(1, Member("newcomer", "here:1"), "", {})
WELCOME = JoinReply("{}", ())


class Doors:
    """Each address answers with the next of its answers, the last one for ever."""

    def __init__(self, **answers: list[Exception | JoinReply]) -> None:
        self.answers = answers
        self.asked: list[str] = []

    async def join(self, address: str, request: JoinRequest, timeout_s: float) -> JoinReply:
        self.asked.append(address)
        answers = self.answers[address]
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def ask(doors: Any, timeout_s: float = 10.0) -> JoinReply:
    return asyncio.run(join(cast("Transport", doors), list(doors.answers), REQUEST, timeout_s))


def test_silence_is_asked_again_until_a_member_answers() -> None:
    doors = Doors(a=[Unreachable("nobody")], b=[Unreachable("starting"), Unreachable("starting"), WELCOME])
    assert ask(doors) is WELCOME
    assert doors.asked == ["a", "b"] * 3


def test_where_another_run_lives_by_now_the_next_address_is_asked() -> None:
    doors = Doors(a=[RefusedError("its run spec differs")], b=[WELCOME])
    assert ask(doors) is WELCOME


def test_a_refusal_is_final_when_nobody_else_lets_the_peer_in() -> None:
    refusal = RefusedError("its run spec differs", {"round.steps": ("7", "20")})
    doors = Doors(a=[Unreachable("nobody")], b=[refusal], c=[RefusedError("too")])
    with pytest.raises(RefusedError) as raised:
        ask(doors)
    assert raised.value is refusal
    assert doors.asked == ["a", "b", "c"]


def test_when_the_time_is_up_every_address_is_named_with_its_last_reason() -> None:
    doors = Doors(a=[Unreachable("starting"), Unreachable("refused")], b=[Unreachable("no route")])
    with pytest.raises(JoinError) as raised:
        ask(doors, timeout_s=0.3)
    assert dict(raised.value.attempts) == {"a": "refused", "b": "no route"}
