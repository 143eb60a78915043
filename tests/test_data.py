"""Text to batches: same on every start, held-out text never trained on, bad sources named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from peer.config import DataSpec
from peer.data import Corpus, cache, corpus, load_corpus
from peer.data.heldout import HeldOut, is_held_out
from peer.data.stream import StreamedCorpus
from peer.errors import ConfigError, DataError
from peer.model import ByteTokenizer

CONTEXT = 8


def load(folder: Path, source: object, **fields: Any) -> Corpus:
    spec = DataSpec(source=str(source), **fields)
    loaded = load_corpus(spec, ByteTokenizer(), CONTEXT, folder / "cache")
    assert isinstance(loaded, Corpus)
    return loaded


def text_of(tokens: Any) -> str:
    return bytes(int(t) - 3 for t in tokens if t >= 3).decode(errors="replace")


def numbered(windows: int) -> Corpus:
    """A corpus whose token at i is i, so that a batch shows where it was taken."""
    tokens = np.arange(windows * CONTEXT + 1, dtype=np.uint32)
    return Corpus(tokens, HeldOut(tokens, CONTEXT), CONTEXT)


def lines(count: int, mark: str = "line") -> str:
    return "".join(f"{mark} {i}\n" for i in range(count))


def test_a_batch_is_a_function_of_seed_peer_and_position_alone():
    first, second = numbered(100), numbered(100)
    forward = [first.batch(0, "a", position, 4) for position in range(10)]
    backward = [second.batch(0, "a", position, 4) for position in reversed(range(10))][::-1]
    assert all(torch.equal(x, y) for x, y in zip(forward, backward, strict=True))
    assert not torch.equal(forward[3], first.batch(0, "b", 3, 4))
    assert not torch.equal(forward[3], first.batch(1, "a", 3, 4))


def test_a_pass_takes_every_window_once_and_the_next_takes_them_in_another_order():
    windows = 101 - 1
    starts = torch.cat([numbered(101).batch(0, "a", position, 10)[:, 0] for position in range(20)])
    first, second = starts[:windows], starts[windows:]
    assert len(set(first.tolist())) == len(set(second.tolist())) == windows
    assert set((first.diff() % CONTEXT).tolist()) == {0}  # one cut for a whole pass
    assert first.tolist() != second.tolist()


def test_targets_follow_inputs_by_one():
    batch = numbered(50).batch(0, "a", 0, 3)
    assert batch.shape == (3, CONTEXT + 1)
    assert batch.dtype == torch.int64
    assert torch.equal(batch[:, 1:], batch[:, :-1] + 1)


@pytest.mark.parametrize("tokens", [CONTEXT + 1, CONTEXT + 2, 2 * CONTEXT, 2 * CONTEXT + 1, 3 * CONTEXT + 1, 1000])
def test_batches_stay_inside_a_text_of_any_size(tokens):
    stored = np.arange(tokens, dtype=np.uint16)
    small = Corpus(stored, HeldOut(stored, CONTEXT), CONTEXT)
    for position in range(30):
        batch = small.batch(0, "a", position, 7)
        assert torch.equal(batch[:, 1:], batch[:, :-1] + 1)
        assert int(batch.max()) < tokens


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 17, 64, 1000])
def test_the_shuffle_is_a_permutation(n):
    keys = np.array([1, 2, 3, 4], np.uint64)
    assert sorted(corpus.shuffled(np.arange(n), n, keys).tolist()) == list(range(n))


def test_the_standard_library_is_the_default_text(tmp_path):
    loaded = load(tmp_path, "stdlib")
    assert len(loaded.train) > 5_000_000
    assert 0.005 < len(loaded.heldout.tokens) / len(loaded.train) < 0.05
    assert "import" in text_of(loaded.train[:10_000])


def test_the_default_text_needs_neither_datasets_nor_transformers(tmp_path):
    code = (
        "import sys, pathlib; from peer.config import DataSpec; from peer.data import load_corpus\n"
        "from peer.model import ByteTokenizer\n"
        "load_corpus(DataSpec(), ByteTokenizer(), 8, pathlib.Path(sys.argv[1]))\n"
        "sys.exit('datasets' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == 0


def test_documents_are_read_in_the_order_of_their_paths_and_end_with_the_end_token(tmp_path):
    source = tmp_path / "text"
    (source / "sub").mkdir(parents=True)
    for name in ("b.txt", "a.txt", "sub/c.md", ".hidden", "empty.txt"):
        (source / name).write_text(lines(20, name) if name != "empty.txt" else "")
    loaded = load(tmp_path, source, holdout=1e-9)
    whole = np.concatenate([loaded.train, loaded.heldout.tokens])
    found = text_of(whole)
    assert found.index("a.txt 0") < found.index("b.txt 0") < found.index("sub/c.md 0")
    assert ".hidden" not in found
    assert int((whole == ByteTokenizer.end).sum()) == 3
    assert loaded.facts == {"documents": 3, "replaced": 0, "empty": 1, "binary": 0}


def test_held_out_documents_are_chosen_by_content_and_never_trained_on(tmp_path):
    documents = [f"document number {i} says nothing much\n" for i in range(400)]
    for name, order in (("one", documents), ("two", [*reversed(documents), "one more document at the end\n"])):
        rows = "".join(json.dumps({"text": text}) + "\n" for text in order)
        (tmp_path / f"{name}.jsonl").write_text(rows)
    one, two = (load(tmp_path, tmp_path / f"{name}.jsonl", holdout=0.1) for name in ("one", "two"))
    parts = [set(text_of(c.heldout.tokens).splitlines()) for c in (one, two)]
    assert 15 < len(parts[0]) < 80
    assert parts[0] == parts[1] - {"one more document at the end"}
    assert not parts[0] & set(text_of(one.train).splitlines())


def test_the_share_held_out_is_what_was_asked_for():
    share = sum(is_held_out(f"text {i}", 0.2) for i in range(5000)) / 5000
    assert abs(share - 0.2) < 0.02


def test_a_text_too_small_to_have_held_out_documents_gives_its_end(tmp_path):
    (tmp_path / "one.txt").write_text(lines(30))
    loaded = load(tmp_path, tmp_path / "one.txt", holdout=1e-9)
    assert len(loaded.heldout.tokens) == CONTEXT + 1
    assert "line 29" in text_of(loaded.heldout.tokens)
    assert "line 29" not in text_of(loaded.train)


def test_one_long_file_is_several_documents(tmp_path):
    (tmp_path / "long.txt").write_text(lines(10_000) + "x" * 40_000)
    loaded = load(tmp_path, tmp_path / "long.txt", holdout=0.5)
    whole = text_of(loaded.train) + text_of(loaded.heldout.tokens)
    assert loaded.facts["documents"] > 5
    assert whole.count("line ") == 10_000
    assert whole.count("x") == 40_000


def test_bytes_that_are_no_text_are_replaced_and_binary_files_left_out(tmp_path, caplog):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "latin.txt").write_bytes(b"caf\xe9 " * 20)
    (tmp_path / "text" / "picture.png").write_bytes(b"\x89PNG\0\0\0")
    loaded = load(tmp_path, tmp_path / "text")
    assert loaded.facts == {"documents": 1, "replaced": 1, "empty": 0, "binary": 1}
    assert "�" in text_of(loaded.train)
    assert "not all of the data is text" in caplog.text


def test_json_lines_and_parquet_hold_the_same_text(tmp_path):
    from pyarrow import parquet, table

    texts = [f"row {i}: é日本" for i in range(50)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"id": 1, "body": text}) + "\n" for text in texts))
    parquet.write_table(table({"id": [1] * 50, "body": texts}), tmp_path / "rows.parquet")
    first, second = (load(tmp_path, tmp_path / f"rows.{kind}", field="body") for kind in ("jsonl", "parquet"))
    assert np.array_equal(first.train, second.train)
    assert "row 1: é日本" in text_of(first.train) + text_of(first.heldout.tokens)


def test_rows_without_text_are_counted(tmp_path):
    rows = [{"text": "some words to read"}, {"text": None}, {"text": ""}, {"text": "some more words"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    facts = load(tmp_path, tmp_path / "rows.jsonl").facts
    assert (facts["documents"], facts["empty"]) == (2, 2)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"", r"empty\.txt holds no text"),
        ("tiny.txt", b"abc", "holds 4 tokens, too few: training and evaluation need 18 with model.context 8"),
        ("rows.jsonl", b'{"body": "a", "id": 1}\n', r"data\.field: .*rows\.jsonl has no 'text'; it has body, id"),
        ("rows.jsonl", b'{"text": 5}\n', r"data\.field: 'text' of .*rows\.jsonl must hold text, got int"),
        ("rows.jsonl", b'{"text": "a"\n', r"rows\.jsonl cannot be read"),
        ("rows.jsonl", b"", r"rows\.jsonl holds no text"),
        ("rows.parquet", b"no parquet", r"rows\.parquet cannot be read"),
    ],
)
def test_a_source_that_cannot_be_used_is_named_with_what_is_wrong(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        load(tmp_path, tmp_path / name)


def test_sources_that_are_not_there_are_named(tmp_path):
    with pytest.raises(DataError, match=r"no file or folder .*nowhere"):
        load(tmp_path, tmp_path / "nowhere")
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match=r"no files in .*none"):
        load(tmp_path, tmp_path / "none")
    (tmp_path / "none" / "dangling.txt").symlink_to(tmp_path / "gone")
    with pytest.raises(DataError, match=r"dangling\.txt cannot be read: No such file"):
        load(tmp_path, tmp_path / "none")
    with pytest.raises(ConfigError, match="hf:NAME"):
        load(tmp_path, "hf:")


def test_tokens_are_made_once_and_again_when_a_file_changes(tmp_path):
    source = tmp_path / "a.txt"
    source.write_text(lines(50))
    load(tmp_path, source)
    made = sorted((tmp_path / "cache").glob("tokens-*/train"))
    times = [path.stat().st_mtime_ns for path in made]
    load(tmp_path, source)
    assert [path.stat().st_mtime_ns for path in made] == times
    source.write_text(lines(60))
    assert "line 59" in text_of(np.concatenate([(c := load(tmp_path, source)).train, c.heldout.tokens]))
    assert len(list((tmp_path / "cache").glob("tokens-*/train"))) == 2


def test_peers_that_start_together_share_one_whole_token_file(tmp_path):
    source = tmp_path / "a.txt"
    source.write_text(lines(2000))
    code = (
        "import sys, pathlib; from peer.config import DataSpec; from peer.data import load_corpus\n"
        "from peer.model import ByteTokenizer; print('ready', flush=True); sys.stdin.readline()\n"
        "c = load_corpus(DataSpec(source=sys.argv[1]), ByteTokenizer(), 8, pathlib.Path(sys.argv[2]))\n"
        "print(len(c.train), c.batch(0, 'a', 0, 4).sum().item())"
    )
    command = [sys.executable, "-c", code, str(source), str(tmp_path / "cache")]
    peers = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    for peer in peers:
        assert peer.stdout is not None
        assert peer.stdout.readline() == "ready\n"
    answers = {peer.communicate("go\n")[0] for peer in peers}
    assert len(answers) == 1
    assert not list((tmp_path / "cache").glob(".tokens-*"))


def test_a_damaged_or_abandoned_token_file_is_made_again(tmp_path, caplog):
    source = tmp_path / "a.txt"
    source.write_text(lines(50))
    whole = load(tmp_path, source).train.copy()
    folder = next((tmp_path / "cache").glob("tokens-*/train")).parent
    abandoned = folder.parent / f".{folder.name}.killed"
    abandoned.mkdir()
    (folder / "train").write_bytes(b"short")
    assert np.array_equal(load(tmp_path, source).train, whole)
    assert "damaged" in caplog.text
    assert not abandoned.exists()


def test_nothing_is_left_when_reading_fails(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(DataError):
        load(tmp_path, tmp_path / "empty.txt")
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] in ([], [".lock"])


def test_a_cache_folder_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "a.txt").write_text(lines(50))
    (tmp_path / "cache").write_text("a file, not a folder")
    with pytest.raises(DataError, match=f"token cache {tmp_path}/cache cannot be used"):
        load(tmp_path, tmp_path / "a.txt")


def test_waiting_for_another_peer_is_said(tmp_path, caplog):
    caplog.set_level("INFO")
    with cache._locked(tmp_path / "x.lock"):
        cache._locked(tmp_path / "x.lock")
    assert "waiting for another peer" in caplog.text


def test_held_out_batches_are_spread_and_never_more_than_there_is():
    tokens = np.arange(100 * (CONTEXT + 1), dtype=np.uint16)
    heldout = HeldOut(tokens, CONTEXT)
    batches = heldout.batches(2, 5)
    assert [len(batch) for batch in batches] == [5, 5]
    assert torch.cat(batches)[:, 0].tolist() == [i * 10 * (CONTEXT + 1) for i in range(10)]
    assert sum(len(batch) for batch in heldout.batches(1000, 8)) == 100
    assert heldout.probe_ids(20).tolist() == list(range(20))


def streamed(count: int = 300, holdout: float = 0.2, field: str = "text") -> StreamedCorpus:
    import datasets

    rows = datasets.Dataset.from_dict({field: [f"row {i:04d}" for i in range(count)]}).to_iterable_dataset()
    spec = DataSpec(source="hf:x", streaming=True, holdout=holdout)
    return StreamedCorpus(spec, rows, ByteTokenizer(), CONTEXT)


def test_a_stream_gives_the_same_batch_at_a_position_however_it_got_there():
    straight, resumed = streamed(), streamed()
    batches = [straight.batch(0, "a", position, 4) for position in range(6)]
    assert torch.equal(resumed.batch(0, "a", 4, 4), batches[4])
    assert torch.equal(resumed.batch(0, "a", 5, 4), batches[5])
    assert torch.equal(resumed.batch(0, "a", 1, 4), batches[1])
    assert not torch.equal(resumed.batch(0, "b", 1, 4), batches[1])


def test_a_stream_goes_round_again_and_never_trains_on_what_is_held_out():
    stream = streamed(100)
    held = {row for row in text_of(stream.heldout.tokens).split("row ") if row}
    read = "".join(text_of(stream.batch(0, "a", position, 4).flatten()) for position in range(60))
    rows = read.split("row ")[1:-1]
    assert held
    assert not held & set(rows)
    assert len(rows) > 2 * len(set(rows)) > 100


def test_a_stream_without_text_is_refused():
    with pytest.raises(DataError, match="has no 'text'; it has body"):
        streamed(field="body")
    with pytest.raises(DataError, match=r"held-out tokens.*data\.holdout"):
        streamed(3, holdout=1e-9)
