"""The background thread that owns all networking: one event loop, and the coding executor beside it.

The one thing to get wrong: what lives on the loop is only touched there. The training thread comes in through `call`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from peer.waiting import result_of

T = TypeVar("T")

CODERS = 1  # 200 Mbit/s each way on two busy cores; a second one takes cores from training and holds chunks of its own
CODER_NICENESS = 10  # a trainer that wants the core gets it; when it waits, for Mix2, coders have the core anyway
STOP_TIMEOUT_S = 5.0


class Network:
    """A running loop. `stop` ends it."""

    def __init__(self) -> None:
        _keep_freed_memory()
        self.loop = asyncio.new_event_loop()
        self.coding = _coders()
        self._thread = threading.Thread(target=self._run, name="network", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin something on the loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def call(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run something on the loop and wait for it. Not from the loop's own thread."""
        future = self.start(work)
        try:
            return future.result() if timeout_s is None else result_of(future, timeout_s)
        except TimeoutError:
            future.cancel()
            raise

    def ask(self, question: Callable[[], T]) -> T:
        """Evaluate something short on the loop."""

        async def answer() -> T:
            return question()

        return self.call(answer(), STOP_TIMEOUT_S * 4)

    def stop(self) -> None:
        """Cancel what still runs and end the thread, in bounded time. Idempotent."""
        if self.loop.is_closed():
            return
        with contextlib.suppress(TimeoutError):  # the thread is a daemon: what does not end now ends with the process
            self.call(self._cancel_all(), STOP_TIMEOUT_S)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(STOP_TIMEOUT_S)
        self.coding.shutdown(wait=False, cancel_futures=True)
        if not self._thread.is_alive():
            self.loop.close()

    async def _cancel_all(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_TIMEOUT_S / 2)


def _coders() -> ThreadPoolExecutor:
    """Return the executor, its threads running, each with one torch thread: the other cores belong to the trainer.

    Some math libraries keep one count for the whole process; the trainer's is therefore set again after theirs.
    """
    threads = torch.get_num_threads()
    all_here = threading.Barrier(CODERS + 1)
    coding = ThreadPoolExecutor(CODERS, "coding", initializer=_become_coder)
    for _ in range(CODERS):
        coding.submit(all_here.wait)
    all_here.wait()
    torch.set_num_threads(threads)
    return coding


def _become_coder() -> None:
    """Of a coding thread: compute with one core, and give way to the training thread.

    The loop's own thread does not give way: it holds the interpreter lock, for which training would wait.
    """
    torch.set_num_threads(1)
    if sys.platform == "linux":  # where a thread has a niceness of its own; elsewhere this would be the process's
        thread = threading.get_native_id()
        niceness = max(CODER_NICENESS, os.getpriority(os.PRIO_PROCESS, thread))  # less of it takes a privilege
        os.setpriority(os.PRIO_PROCESS, thread, niceness)


def _keep_freed_memory() -> None:
    """Have glibc reuse the memory of chunks and frames, and keep all of it in one heap.

    By default each buffer of a MiB or more is mapped, filled with zeros page by page and unmapped, which is half of the
    CPU time of gRPC; and each thread's heap keeps holes of its own, where a chunk is rarely freed by who made it.
    """
    m_trim_threshold, m_mmap_threshold, m_arena_max = -1, -3, -8
    _glibc("mallopt", m_mmap_threshold, 32 << 20)
    _glibc("mallopt", m_trim_threshold, 16 << 20)  # more of it would count against the memory a peer may take
    _glibc("mallopt", m_arena_max, 1)


def give_back_memory() -> None:
    """Return freed memory to the system: holes that an exchange left would else add up. Takes milliseconds."""
    _glibc("malloc_trim", 0)


def _glibc(name: str, *arguments: int) -> None:
    """Call a function of the C library; nothing where that is another one."""
    if sys.platform == "linux" and (function := getattr(ctypes.CDLL(None), name, None)) is not None:
        function(*arguments)
