"""Checkpoints of a process that dies at the worst moment, and what saving costs in memory."""

from __future__ import annotations

import random
import subprocess
import sys
from contextlib import contextmanager

import pytest

from peer.checkpoint import PARTIAL, candidates, load_latest

# Saves in children, so that importing is paid for once. One line a child: how it dies, and where it saves.
#   operation N: at its Nth file operation, by SIGKILL;  moment S: after S seconds, by a signal that is not caught
SAVE_AND_DIE = """
import os, signal, sys
from pathlib import Path
import torch
from peer.checkpoint import Snapshot, load_latest, save
from peer.outer import Vectors
from peer.trainer import TrainerState

def save_one(folder, round_, size, keep):
    vectors = Vectors(*(torch.full((size,), float(round_)) for _ in "zvx"))
    save(folder, Snapshot(round_, vectors, TrainerState({"m": torch.full((9,), float(round_))}, {}), {}), keep)

def die_at_operation(number):
    left = [number]
    def count(event, _):
        if event == "open" or event.startswith(("os.", "shutil.", "fcntl.")):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(count)

torch.set_num_threads(1)
for line in sys.stdin:
    how, number, folder = line.split()
    child = os.fork()
    if child == 0:
        folder = Path(folder)
        last = load_latest(folder)
        round_ = last.round if last else 0
        if how == "operation":
            die_at_operation(int(number))
            save_one(folder, round_ + 1, 1000, keep=1)
            os._exit(0)
        signal.setitimer(signal.ITIMER_REAL, float(number))
        while True:
            round_ += 1
            save_one(folder, round_, 200_000, keep=1)
            print("saved", round_, flush=True)
    _, status = os.waitpid(child, 0)
    print("ended", status, flush=True)
"""


@contextmanager
def saver():
    """Yield a function that has a child save until it dies; it returns the child's last whole round and its status."""
    process = subprocess.Popen(
        [sys.executable, "-c", SAVE_AND_DIE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )

    def die(how, number, folder):
        print(how, number, folder, file=process.stdin, flush=True)
        saved = 0
        while line := process.stdout.readline():
            word, value = line.split()
            if word == "ended":
                return saved, int(value)
            saved = int(value)
        raise AssertionError("the saving process is gone")

    with process:
        yield die
        process.stdin.close()


def assert_whole(snapshot):
    values = [getattr(snapshot.vectors, name) for name in "zvx"] + [snapshot.trainer.tensors["m"]]
    assert [value.unique().tolist() for value in values] == [[snapshot.round]] * 4


def debris(folder):
    return [path.name for path in folder.iterdir() if path.name.startswith(PARTIAL)]


@pytest.mark.slow
def test_a_kill_at_any_file_operation_leaves_a_whole_checkpoint_and_no_growing_debris(tmp_path):
    with saver() as die:
        assert die("operation", 10**9, tmp_path) == (0, 0)
        rounds = []
        for operation in range(1, 100):
            _, status = die("operation", operation, tmp_path)
            assert len(debris(tmp_path)) <= 2  # one in the making, one being removed
            assert candidates(tmp_path)
            found = load_latest(tmp_path)
            assert_whole(found)
            assert debris(tmp_path) == []
            rounds.append(found.round)
            if status == 0:
                break

    assert operation > 10
    assert rounds == sorted(rounds)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("aside-")]
    assert [path.name for path in tmp_path.iterdir()] == [f"round-{rounds[-1]:08d}"]


@pytest.mark.slow
def test_a_kill_at_any_moment_loses_nothing_that_was_saved(tmp_path):
    moments = random.Random(2026)
    last = 0
    with saver() as die:
        for _ in range(15):
            saved, status = die("moment", moments.uniform(0.02, 0.2), tmp_path)
            assert status != 0
            assert len(debris(tmp_path)) <= 2
            found = load_latest(tmp_path)
            last = max(last, saved)
            if found is None:
                assert last == 0
            else:
                assert_whole(found)
                assert found.round >= last

    assert last > 0
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("aside-")]


MEASURE_MEMORY = """
import sys
from pathlib import Path
import torch
from peer.checkpoint import Snapshot, load_latest, save
from peer.outer import Vectors
from peer.trainer import TrainerState

def most():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024

folder, size = Path(sys.argv[1]), int(sys.argv[2])
z = torch.ones(size)
vectors = Vectors(z, z.view(-1), z.view(-1))  # one storage: what counts is what is added to it
small = torch.ones(1000)
save(folder, Snapshot(1, Vectors(small, small, small), TrainerState({}, {}), {}))  # whatever is loaded once
load_latest(folder)
before = most()
save(folder, Snapshot(2, vectors, TrainerState({"m": z}, {}), {}))
saved = most()
loaded = load_latest(folder, into=vectors)
print(saved - before, most() - saved, loaded.vectors.z.sum().item() / size)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_saving_and_loading_need_no_second_copy(tmp_path):
    size = 10_000_000  # 40 MB a vector

    done = subprocess.run(
        [sys.executable, "-c", MEASURE_MEMORY, str(tmp_path), str(size)], capture_output=True, text=True, check=True
    )

    save_mb, load_mb, mean = map(float, done.stdout.split())
    assert save_mb < 16
    assert load_mb < 16
    assert mean == 1.0
