"""The prefetcher: in order, a few ahead, and gone when told."""

from __future__ import annotations

import threading

import pytest
import torch

from peer.data import Prefetcher
from peer.errors import DataError


def test_the_prefetcher_hands_out_positions_in_order_and_makes_only_a_few_ahead():
    made: list[int] = []
    reached = threading.Event()

    def make(position: int) -> torch.Tensor:
        made.append(position)
        if position == 12:
            reached.set()
        return torch.tensor(position)

    batches = Prefetcher(make, position=7, depth=3)
    assert [int(batches.next()) for _ in range(3)] == [7, 8, 9]
    assert batches.position == 10
    assert reached.wait(10)
    batches.stop()
    batches.stop()
    assert made == [7, 8, 9, 10, 11, 12]


def test_the_prefetcher_measures_how_long_it_was_waited_for():
    let_go = threading.Event()

    def make(position: int) -> torch.Tensor:
        let_go.wait(10)
        return torch.tensor(position)

    batches = Prefetcher(make)
    threading.Timer(0.05, let_go.set).start()
    assert int(batches.next()) == 0
    batches.stop()
    assert 0.02 < batches.waited_s < 5


def test_the_prefetcher_stops_after_the_batch_it_is_making():
    started, let_go = threading.Event(), threading.Event()
    made: list[int] = []

    def make(position: int) -> torch.Tensor:
        made.append(position)
        started.set()
        let_go.wait(10)
        return torch.tensor(position)

    batches = Prefetcher(make)
    assert started.wait(10)
    stopping = threading.Thread(target=batches.stop)
    stopping.start()
    let_go.set()
    stopping.join(10)
    assert not stopping.is_alive()
    assert made[0] == 0
    assert len(made) < 4


def test_what_goes_wrong_in_the_prefetcher_surfaces_at_its_position():
    def make(position: int) -> torch.Tensor:
        if position == 1:
            raise DataError("the disk is gone")
        return torch.tensor(position)

    batches = Prefetcher(make)
    assert int(batches.next()) == 0
    with pytest.raises(DataError, match="the disk is gone"):
        batches.next()
    assert batches.position == 1
    batches.stop()
