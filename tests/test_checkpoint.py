"""Checkpoints: whole or not there, never a step lost that was saved, and in little memory."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from peer import checkpoint, tensorfile
from peer.checkpoint import Snapshot, load_latest, save
from peer.errors import CheckpointError
from peer.outer import Vectors
from peer.trainer import TrainerState

SIZE = 1000
FINGERPRINT = "f" * 64
LAYOUT = bytes(range(16))


def vectors(seed=0, size=SIZE):
    generator = torch.Generator().manual_seed(seed)
    return Vectors(*(torch.randn(size, generator=generator) for _ in "zvx"))


def snapshot(round_=1, seed=None, **meta):
    generator = torch.Generator().manual_seed(round_)
    tensors = {
        "moment": torch.randn(7, 3, generator=generator),
        "half": torch.randn(5, generator=generator).bfloat16(),
        "step": torch.tensor(12.0),
        "rng.cpu": generator.get_state(),
        "nothing": torch.zeros(0),
        "transposed": torch.arange(6).reshape(2, 3).t(),
    }
    values = {"position": 4711, "lr": 0.1 + 0.2, "seen": [1, 2]}
    about = {"fingerprint": FINGERPRINT, "layout": LAYOUT.hex(), "spec": "{}", "peer": "ada", **meta}
    return Snapshot(round_, vectors(round_ if seed is None else seed), TrainerState(tensors, values), about)


def assert_same(one, other):
    assert one.round == other.round
    assert one.meta == other.meta
    assert one.trainer.values == other.trainer.values
    assert one.trainer.tensors.keys() == other.trainer.tensors.keys()
    for name, tensor in one.trainer.tensors.items():
        assert tensor.dtype == other.trainer.tensors[name].dtype, name
        assert torch.equal(tensor, other.trainer.tensors[name]), name
    for name in ("z", "v", "x"):
        assert torch.equal(getattr(one.vectors, name), getattr(other.vectors, name)), name


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def damage(file, how):
    content = bytearray(file.read_bytes())
    if how == "cut":
        file.write_bytes(content[: len(content) // 2])
    elif how == "altered":
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    elif how == "empty":
        file.write_bytes(b"")
    else:
        file.unlink()


@contextmanager
def disk_full_at(octets):
    """Writes past this many bytes of a file fail, as they do on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (octets, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# What is saved comes back.


def test_everything_comes_back_bit_for_bit(tmp_path):
    saved = snapshot(12)

    path = save(tmp_path, saved)

    assert path == tmp_path / "round-00000012"
    assert names(path) == ["inner.safetensors", "meta.json", "vectors.safetensors"]
    assert_same(checkpoint.load(path), saved)
    assert_same(load_latest(tmp_path, FINGERPRINT, LAYOUT), saved)


def test_the_safetensors_library_reads_what_is_written(tmp_path):
    saved = snapshot()

    path = save(tmp_path, saved)

    assert torch.equal(load_file(path / "vectors.safetensors")["z"], saved.vectors.z)
    read = load_file(path / "inner.safetensors")
    for name, tensor in saved.trainer.tensors.items():
        assert torch.equal(read[name], tensor), name


def test_given_vectors_are_filled_in_place(tmp_path):
    saved = snapshot()
    save(tmp_path, saved)
    own = vectors(99)
    before = own.z.data_ptr()

    loaded = load_latest(tmp_path, into=own)

    assert loaded.vectors is own
    assert own.z.data_ptr() == before
    assert torch.equal(own.z, saved.vectors.z)


def test_a_trainer_without_tensors_can_be_saved(tmp_path):
    save(tmp_path, Snapshot(1, vectors(), TrainerState({}, {}), {}))

    assert load_latest(tmp_path).trainer == TrainerState({}, {})


def test_what_is_loaded_can_be_changed_without_changing_the_file(tmp_path):
    path = save(tmp_path, snapshot())
    checkpoint.load(path).trainer.tensors["moment"].zero_()

    assert_same(checkpoint.load(path), snapshot())


def test_a_folder_that_is_not_there_holds_no_checkpoint(tmp_path):
    assert load_latest(tmp_path / "none") is None


def test_a_round_saved_again_replaces_nothing_and_is_the_newest(tmp_path):
    save(tmp_path, snapshot(3, seed=1))
    again = snapshot(3, seed=2)

    path = save(tmp_path, again)

    assert path.name == "round-00000003.1"
    assert_same(load_latest(tmp_path), again)
    assert save(tmp_path, snapshot(3), keep=1).name == "round-00000003.2"
    assert names(tmp_path) == ["round-00000003.2"]


# Retention.


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_are_kept_and_no_more(tmp_path, keep):
    for round_ in range(1, 8):
        save(tmp_path, snapshot(round_), keep)

    assert names(tmp_path) == [f"round-{round_:08d}" for round_ in range(8 - keep, 8)]


def test_what_is_ahead_of_the_course_is_set_aside_not_lost(tmp_path):
    save(tmp_path, snapshot(100))

    save(tmp_path, snapshot(3), keep=1)

    assert names(tmp_path) == ["aside-round-00000100", "round-00000003"]
    assert load_latest(tmp_path).round == 3


def test_an_old_one_that_cannot_be_removed_does_not_fail_the_save(tmp_path, monkeypatch, caplog):
    save(tmp_path, snapshot(1))

    def refuse(path, ignore_errors=False):
        if not ignore_errors:
            raise PermissionError(1, "not permitted", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refuse)
        save(tmp_path, snapshot(2), keep=1)

    assert "cannot be removed" in caplog.text
    assert load_latest(tmp_path).round == 2
    save(tmp_path, snapshot(3), keep=1)
    assert names(tmp_path) == ["round-00000003"]


# Damage.


@pytest.mark.parametrize("how", ["cut", "altered", "empty", "missing"])
@pytest.mark.parametrize("file", ["vectors.safetensors", "inner.safetensors", "meta.json"])
def test_a_damaged_newest_is_named_and_the_one_before_it_used(tmp_path, caplog, file, how):
    save(tmp_path, snapshot(1))
    damage(save(tmp_path, snapshot(2)) / file, how)

    loaded = load_latest(tmp_path, FINGERPRINT, LAYOUT)

    assert_same(loaded, snapshot(1))
    fields = [record.peer_fields for record in caplog.records if hasattr(record, "peer_fields")]
    assert fields[0]["checkpoint"] == str(tmp_path / "round-00000002")
    assert file in fields[0]["why"]


def test_a_damaged_one_never_counts_as_kept(tmp_path):
    save(tmp_path, snapshot(1))
    damage(save(tmp_path, snapshot(2)) / "vectors.safetensors", "altered")
    assert load_latest(tmp_path).round == 1

    save(tmp_path, snapshot(2), keep=2)

    assert names(tmp_path) == ["aside-round-00000002", "round-00000001", "round-00000002"]
    assert_same(load_latest(tmp_path), snapshot(2))


def test_when_all_are_damaged_there_is_none_and_all_are_kept_for_a_look(tmp_path):
    for round_ in (1, 2):
        damage(save(tmp_path, snapshot(round_)) / "meta.json", "cut")

    assert load_latest(tmp_path) is None
    assert names(tmp_path) == ["aside-round-00000001", "aside-round-00000002"]


def test_an_altered_number_in_meta_json_is_damage(tmp_path):
    path = save(tmp_path, snapshot(2))
    content = json.loads((path / "meta.json").read_text())
    content["round"] = 3
    (path / "meta.json").write_text(json.dumps(content))

    with pytest.raises(CheckpointError, match=r"meta\.json was altered"):
        checkpoint.load(path)


@pytest.mark.parametrize(
    "header",
    [b"{", b"[]", b"3", b'{"z":{}}', b'{"z":{"dtype":"F32","shape":[1],"data_offsets":[0,4000]}}'],
)
def test_a_tensor_file_that_makes_no_sense_is_a_checkpoint_error(tmp_path, header):
    file = tmp_path / "t.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))

    with pytest.raises(CheckpointError):
        tensorfile.read_into(file, {"z": torch.empty(1)})


def test_a_header_longer_than_the_file_is_not_allocated(tmp_path):
    file = tmp_path / "t.safetensors"
    file.write_bytes((1 << 60).to_bytes(8, "little") + b"{}")

    with pytest.raises(CheckpointError, match="header of"):
        tensorfile.spans(file)


def test_tensors_of_another_form_are_not_filled(tmp_path):
    file = tmp_path / "t.safetensors"
    tensorfile.write(file, {"z": torch.ones(4)})

    for wrong in ({"z": torch.empty(5)}, {"z": torch.empty(4, dtype=torch.float64)}, {"y": torch.empty(4)}):
        with pytest.raises(CheckpointError, match="expected"):
            tensorfile.read_into(file, wrong)


# Another run, another model.


def test_a_foreign_run_is_refused_with_both_fingerprints(tmp_path):
    save(tmp_path, snapshot(1))
    path = save(tmp_path, snapshot(2, fingerprint="a" * 64))

    with pytest.raises(CheckpointError) as refused:
        load_latest(tmp_path, FINGERPRINT, LAYOUT)

    for part in (str(path), "a" * 64, FINGERPRINT):
        assert part in str(refused.value)
    assert path.exists()


def test_a_foreign_model_is_refused_with_both_layouts(tmp_path):
    save(tmp_path, snapshot(1))

    with pytest.raises(CheckpointError) as refused:
        load_latest(tmp_path, FINGERPRINT, bytes(16))

    assert LAYOUT.hex() in str(refused.value)
    assert bytes(16).hex() in str(refused.value)


def test_vectors_of_another_size_are_refused_untouched(tmp_path):
    save(tmp_path, snapshot(1))
    own = vectors(5, size=SIZE + 1)

    with pytest.raises(CheckpointError, match="1000 parameters, this one 1001"):
        load_latest(tmp_path, into=own)

    assert torch.equal(own.z, vectors(5, size=SIZE + 1).z)


# Disks that say no.


def test_a_full_disk_leaves_the_earlier_ones_whole_and_no_debris(tmp_path):
    save(tmp_path, snapshot(1))

    with disk_full_at(4096), pytest.raises(CheckpointError, match="cannot save round 2"):
        save(tmp_path, snapshot(2), keep=1)

    assert names(tmp_path) == ["round-00000001"]
    assert_same(load_latest(tmp_path), snapshot(1))
    save(tmp_path, snapshot(2), keep=1)
    assert names(tmp_path) == ["round-00000002"]


def test_a_folder_that_cannot_be_written_is_a_checkpoint_error(tmp_path):
    (tmp_path / "file").write_text("")

    for folder in (tmp_path / "file", tmp_path / "file" / "checkpoints"):
        with pytest.raises(CheckpointError, match="cannot save"):
            save(folder, snapshot())
        with pytest.raises(CheckpointError, match="cannot save"):
            checkpoint.check_space(folder, 1000)


def test_a_folder_gone_read_only_keeps_what_it_has(tmp_path, monkeypatch):
    save(tmp_path, snapshot(1))

    def refuse(path, *_, **__):
        raise OSError(30, "Read-only file system", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", refuse)
        with pytest.raises(CheckpointError, match="Read-only file system"):
            save(tmp_path, snapshot(2))

    assert_same(load_latest(tmp_path), snapshot(1))


def test_what_json_cannot_hold_is_our_bug_and_leaves_no_debris(tmp_path):
    with pytest.raises(TypeError):
        save(tmp_path, snapshot(1, oops=object()))

    assert names(tmp_path) == []


def test_too_little_space_is_known_at_the_start(tmp_path, monkeypatch):
    for round_ in (1, 2):
        save(tmp_path, snapshot(round_))
    held = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(0, 0, 10_000_000 - held))

    checkpoint.check_space(tmp_path / ".", 2_500_000, keep=3)
    with pytest.raises(CheckpointError, match=r"has 10 MB free and needs 12 MB more, for 3 checkpoints of 3 MB"):
        checkpoint.check_space(tmp_path, 2_900_000, keep=3)
    assert names(tmp_path) == ["round-00000001", "round-00000002"]


# Kills.


def test_debris_of_the_dead_is_removed_and_what_is_in_use_is_not(tmp_path):
    dead = tmp_path / f"{checkpoint.PARTIAL}dead"
    dead.mkdir()
    (dead / "vectors.safetensors").write_bytes(b"half")
    live = tmp_path / f"{checkpoint.PARTIAL}live"
    live.mkdir()
    lock = os.open(live, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        save(tmp_path, snapshot(1))
        assert names(tmp_path) == [live.name, "round-00000001"]
    finally:
        os.close(lock)
    load_latest(tmp_path)
    assert names(tmp_path) == ["round-00000001"]
