"""Waiting that can be ended: being asked to stop, and results from the network thread.

The one thing to get wrong: a process can be stopped for minutes (SIGSTOP, a laptop's sleep) while its clock runs on.
When it wakes, a limit has passed although nobody was slow; so a limit counts only after a second look.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class Stop:
    """Asked to end. Waits that can be long hang their wake-up here."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self._wake: list[Callable[[], None]] = []

    def ask(self) -> None:
        """From a signal handler or any thread."""
        self.asked.set()
        for wake in list(self._wake):
            wake()

    def on_ask(self, wake: Callable[[], None]) -> Callable[[], None]:
        """Call `wake` when asked to end; returns how to take it back."""
        self._wake.append(wake)
        if self.asked.is_set():
            wake()

        def forget() -> None:
            if wake in self._wake:
                self._wake.remove(wake)

        return forget


def result_of(future: Future[T], limit_s: float) -> T:
    """Return a future's result, TimeoutError when it takes longer than `limit_s` of this process running."""
    try:
        return future.result(limit_s)
    except TimeoutError:
        if future.done():
            raise  # the work's own
        return future.result(limit_s)
