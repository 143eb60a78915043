"""What `peer export` writes, transformers loads: the mixed weights, the tokenizer, tied weights still tied."""

from __future__ import annotations

import errno
import json
import os

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from peer import checkpoint
from peer.checkpoint import Snapshot
from peer.cli import main as cli
from peer.config import RunSpec
from peer.errors import CheckpointError, UsageError
from peer.export import MARK, export
from peer.model import build
from peer.outer import Vectors
from peer.trainer import TrainerState

TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
}


def spec_of(tied):
    model = {"config": {**TINY, "tie_word_embeddings": tied}, "context": 16}
    return RunSpec.model_validate({"name": "night-run", "model": model})


class Trained:
    """A peer's storage folder with checkpoints of a tiny model in it."""

    def __init__(self, storage, tied):
        self.storage = storage
        self.spec = spec_of(tied)
        self.model = build(self.spec)
        self.n_params = self.model.layout.n_params

    def save(self, round_, **meta):
        generator = torch.Generator().manual_seed(round_)
        vectors = Vectors(*(torch.randn(self.n_params, generator=generator) * 0.1 for _ in "zvx"))
        about = {
            "spec": self.spec.canonical(),
            "fingerprint": self.spec.fingerprint,
            "layout": self.model.layout.digest.hex(),
            "step": 0,
            **meta,
        }
        path = checkpoint.save(self.storage / "checkpoints", Snapshot(round_, vectors, TrainerState({}, {}), about))
        return path, vectors

    def logits(self, weights, ids):
        self.model.layout.write(self.model.parameters, 0, self.n_params, weights)
        with torch.no_grad():
            return self.model.module.eval()(ids).logits


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def trained(request, tmp_path):
    return Trained(tmp_path / "peer-data", request.param)


@pytest.fixture
def untied(tmp_path):
    return Trained(tmp_path / "peer-data", tied=False)


IDS = torch.tensor([[10, 20, 30, 40, 50]])


def logits_of(folder):
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder)(IDS).logits


def test_transformers_loads_the_mixed_weights_and_gets_the_same_loss(trained, tmp_path):
    _, vectors = trained.save(7)

    done = export(trained.storage, tmp_path / "out")

    expected = trained.logits(vectors.x, IDS)
    logits = logits_of(tmp_path / "out")
    assert torch.allclose(logits, expected, atol=1e-5)
    loss, wanted = (torch.nn.functional.cross_entropy(each[0, :-1], IDS[0, 1:]) for each in (logits, expected))
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    assert (done.run, done.round, done.fingerprint) == ("night-run", 7, trained.spec.fingerprint)
    assert done.n_params == trained.n_params


def test_tied_weights_stay_tied_and_are_written_once(tmp_path):
    trained = Trained(tmp_path / "peer-data", tied=True)
    trained.save(1)

    export(trained.storage, tmp_path / "out")

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()
    assert (tmp_path / "out/model.safetensors").stat().st_size < 4 * trained.n_params + 10_000


def test_the_tokenizer_comes_along(untied, tmp_path):
    untied.save(1)

    export(untied.storage, tmp_path / "out")

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("hé", add_special_tokens=False).input_ids == [byte + 3 for byte in "hé".encode()]


def test_in_mid_round_the_weights_are_those_the_round_began_with(untied, tmp_path):
    _, vectors = untied.save(3, step=5)

    export(untied.storage, tmp_path / "out")

    assert torch.allclose(logits_of(tmp_path / "out"), untied.logits(vectors.z, IDS), atol=1e-5)


def test_the_card_names_run_round_and_fingerprint(untied, tmp_path):
    untied.save(12)

    export(untied.storage, tmp_path / "out")

    card = (tmp_path / "out/README.md").read_text()
    for part in ("night-run", "12 rounds", untied.spec.fingerprint):
        assert part in card


def test_whoever_may_read_one_file_may_read_all(untied, tmp_path):
    untied.save(1)

    export(untied.storage, tmp_path / "out")

    assert len({path.stat().st_mode for path in (tmp_path / "out").iterdir()}) == 1


# Where the checkpoint is.


def test_a_place_is_a_checkpoint_a_folder_of_them_or_a_storage_folder(untied, tmp_path):
    first, _ = untied.save(1)
    newest, _ = untied.save(2)

    for number, (place, found) in enumerate(
        ((untied.storage, newest), (untied.storage / "checkpoints", newest), (newest, newest), (first, first))
    ):
        assert export(place, tmp_path / f"out{number}").checkpoint == str(found)


def test_a_damaged_newest_is_named_and_the_one_before_it_exported(untied, tmp_path):
    before, _ = untied.save(1)
    newest, _ = untied.save(2)
    os.truncate(newest / "vectors.safetensors", 100)

    done = export(untied.storage, tmp_path / "out")

    assert done.checkpoint == str(before)
    assert len(done.damaged) == 1
    assert str(newest) in done.damaged[0]
    assert newest.exists()  # a running peer's folder is left as it is


def test_with_none_whole_every_damaged_one_is_named_and_nothing_written(untied, tmp_path):
    paths = [untied.save(round_)[0] for round_ in (1, 2)]
    for path in paths:
        (path / "meta.json").unlink()

    with pytest.raises(CheckpointError) as failed:
        export(untied.storage, tmp_path / "out")

    assert all(str(path) in str(failed.value) for path in paths)
    assert not (tmp_path / "out").exists()


def test_a_place_without_checkpoints_says_what_was_looked_for(tmp_path):
    with pytest.raises(CheckpointError, match=r"no checkpoint in .*nowhere.*round-\*"):
        export(tmp_path / "nowhere", tmp_path / "out")


def test_a_model_that_is_built_otherwise_here_is_refused_with_both_layouts(untied, tmp_path):
    untied.save(1, layout="ab" * 16)

    with pytest.raises(CheckpointError) as refused:
        export(untied.storage, tmp_path / "out")

    assert "ab" * 16 in str(refused.value)
    assert untied.model.layout.digest.hex() in str(refused.value)


# Where it goes.


def test_an_earlier_export_is_replaced_as_a_whole(untied, tmp_path):
    out = tmp_path / "out"
    untied.save(1)
    export(untied.storage, out)
    (out / "left.txt").write_text("from before")
    untied.save(2)

    export(untied.storage, out)

    assert json.loads((out / MARK).read_text())["round"] == 2
    assert not (out / "left.txt").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "peer-data"]


def test_a_foreign_folder_is_replaced_only_by_force(untied, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    untied.save(1)

    with pytest.raises(UsageError, match="--force"):
        export(untied.storage, out)
    assert [path.name for path in out.iterdir()] == ["thesis.tex"]

    export(untied.storage, out, force=True)
    assert (out / "model.safetensors").is_file()


@pytest.mark.parametrize("inside", [".", "..", "checkpoints", "checkpoints/export"])
def test_even_force_does_not_replace_the_checkpoints(untied, tmp_path, inside):
    path, _ = untied.save(1)

    with pytest.raises(UsageError, match="choose another folder"):
        export(untied.storage, untied.storage / inside, force=True)

    assert checkpoint.load(path).round == 1


def test_a_file_in_the_way_is_a_usage_error(untied, tmp_path):
    (tmp_path / "out").write_text("")
    untied.save(1)

    for out in (tmp_path / "out", tmp_path / "out" / "deeper"):
        with pytest.raises(UsageError, match="out"):
            export(untied.storage, out)


@pytest.mark.parametrize("parent_writable", [True, False])
def test_a_mount_point_is_filled_file_by_file(untied, tmp_path, monkeypatch, parent_writable):
    out = tmp_path / "mounted"
    out.mkdir()
    untied.save(1)
    rename = type(out).rename

    def busy(path, target):
        if out in (path, target):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(out))
        return rename(path, target)

    monkeypatch.setattr(type(out), "rename", busy)
    monkeypatch.setattr(os, "access", lambda path, mode: parent_writable)

    export(untied.storage, out)

    assert AutoModelForCausalLM.from_pretrained(out)
    assert not [path.name for path in (*out.iterdir(), *tmp_path.iterdir()) if path.name.startswith(".")]


# The command.


def test_the_command_prints_one_json_object(untied, tmp_path, capsys):
    untied.save(4)

    code = cli.main(["export", "--checkpoint", str(untied.storage), "--out", str(tmp_path / "out"), "--json"])

    assert code == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["round"] == 4
    assert answer["out"] == str(tmp_path / "out")


def test_the_command_says_in_words_what_it_did_and_what_it_passed_over(untied, tmp_path, capsys):
    untied.save(4)
    newest, _ = untied.save(5)
    (newest / "inner.safetensors").unlink()

    assert cli.main(["export", "--checkpoint", str(untied.storage), "--out", str(tmp_path / "out")]) == 0

    said = capsys.readouterr().out
    assert "night-run after 4 rounds" in said
    assert str(newest) in said


def test_the_command_fails_with_a_line_and_a_code(tmp_path, capsys):
    assert cli.main(["export", "--checkpoint", str(tmp_path / "none"), "--out", str(tmp_path / "out")]) == 1
    assert cli.main(["export", "--checkpoint", str(tmp_path), "--out", str(tmp_path)]) == 2
    assert "no checkpoint in" in capsys.readouterr().err
