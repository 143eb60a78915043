"""The next batches, made in a thread while the trainer computes.

The one thing you would get wrong: a batch in the queue has not been trained on. `position` is that of the next batch to
be handed out, and is what a checkpoint keeps.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor


class Prefetcher:
    """Hands out make(position), make(position + 1), ... in order. One consumer thread."""

    def __init__(self, make: Callable[[int], Tensor], position: int = 0, depth: int = 4) -> None:
        self.position = position
        self.waited_s = 0.0  # time `next` had to wait for a batch
        self._make = make
        self._worker = ThreadPoolExecutor(1, "batches")
        self._coming: deque[Future[Tensor]] = deque(
            self._worker.submit(make, position + ahead) for ahead in range(depth)
        )

    def next(self) -> Tensor:
        """Return the batch at `position` and move on. Raises what making it raised."""
        coming = self._coming.popleft()
        self._coming.append(self._worker.submit(self._make, self.position + len(self._coming) + 1))
        if not coming.done():
            start = time.perf_counter()
            try:
                coming.result()
            finally:
                self.waited_s += time.perf_counter() - start
        batch = coming.result()
        self.position += 1
        return batch

    def stop(self) -> None:
        """Drop what is queued and end the thread, after the batch it is making. Idempotent."""
        self._worker.shutdown(wait=True, cancel_futures=True)
