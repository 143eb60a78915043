"""Logs are one line an event, and journals lose nothing but what never reached the disk."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import re
import threading
import warnings

import pytest

from peer import log
from peer.errors import UsageError


@pytest.fixture
def logged():
    """Configure logging onto a buffer, and leave logging as it was."""
    root, ours = logging.getLogger(), logging.getLogger("peer")
    before = root.level, ours.level, list(root.handlers)
    stream = io.StringIO()

    def configure(level="info", format_="json", to=stream):
        log.configure(level, format_, to)
        return stream

    yield configure
    root.setLevel(before[0])
    ours.setLevel(before[1])
    root.handlers[:] = before[2]
    logging.captureWarnings(False)


def lines(stream):
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_an_event_is_one_json_line_with_its_fields(logged):
    stream = logged()
    log.get("peer.rounds").info("round done", round=3, loss=2.5, members=("a", "b"))
    (line,) = lines(stream)
    moment = line.pop("time")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", moment)
    assert line == {
        "level": "info",
        "logger": "peer.rounds",
        "event": "round done",
        "round": 3,
        "loss": 2.5,
        "members": ["a", "b"],
    }


def test_json_lines_are_strict_json_whatever_comes_in(logged):
    stream = logged()
    value = {"nan": float("nan"), "key": b"\x01\xff", "nested": [float("inf"), {1: object}], "text": "a\nb\ud800"}
    log.get("peer.x").info("odd", time="mine", level="mine", **value)
    (line,) = stream.getvalue().splitlines()
    read = json.loads(line, parse_constant=pytest.fail)
    assert (read["event"], read["time"] == "mine", read["level"], read["level_"]) == ("odd", False, "info", "mine")
    assert (read["nan"], read["key"], read["nested"][0]) == (None, "01ff", None)


def test_people_get_a_short_line_and_strangers_cannot_forge_one(logged):
    stream = logged(format_="human")
    log.get("peer.x").warning("dropped", reason="a\n12:00:00 error   all is lost", loss=1.23456789, empty="")
    (line,) = stream.getvalue().splitlines()
    assert re.match(r"\d\d:\d\d:\d\d warning dropped  reason=\"a\\n12:00:00", line)
    assert line.endswith('loss=1.2346  empty=""')


def test_auto_is_for_people_on_a_terminal_only(logged):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    logged(format_="auto", to=terminal)
    log.get("peer.x").info("hello", a=1)
    assert terminal.getvalue().rstrip().endswith("hello  a=1")
    stream = logged(format_="auto")
    log.get("peer.x").info("hello")
    assert lines(stream)[0]["event"] == "hello"


def test_less_severe_events_and_other_libraries_chatter_are_left_out(logged):
    stream = logged("info")
    log.get("peer.x").debug("no")
    logging.getLogger("grpc").info("no")
    logging.getLogger("grpc").warning("percent %s", "yes")
    assert [line["event"] for line in lines(stream)] == ["percent yes"]
    logged("debug")
    log.get("peer.x").debug("now")
    assert lines(stream)[-1]["event"] == "now"


def test_a_bug_comes_with_its_traceback_in_one_json_line(logged):
    stream = logged()
    try:
        _ = 1 / 0
    except ZeroDivisionError:
        log.get("peer.x").bug("servicer failed", round=1)
    (line,) = lines(stream)
    assert "ZeroDivisionError: division by zero" in line["traceback"]
    logged(format_="human")
    try:
        _ = 1 / 0
    except ZeroDivisionError:
        log.get("peer.x").bug("servicer failed")
    assert stream.getvalue().rstrip().endswith("ZeroDivisionError: division by zero")


def test_a_percent_sign_in_an_event_is_only_text(logged):
    stream = logged()
    log.get("peer.x").info("100 % of %s")
    assert lines(stream)[0]["event"] == "100 % of %s"


def test_python_warnings_become_events(logged):
    stream = logged()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old", stacklevel=1)
    assert "old" in lines(stream)[0]["event"]


def test_a_full_disk_behind_stderr_is_survived_in_silence(logged, capsys):
    class Full(io.StringIO):
        def write(self, text):
            raise OSError(errno.ENOSPC, "No space left on device")

    logged(to=Full())
    log.get("peer.x").error("lost")
    assert capsys.readouterr().err == ""


# ---- journals


@pytest.fixture
def path(tmp_path):
    return tmp_path / "data" / "loss.jsonl"


def test_what_was_written_is_read_back_by_the_next_process(path):
    journal = log.Journal(path)
    journal.write({"step": 1, "loss": 0.1 + 0.2})
    assert path.read_text() == '{"step":1,"loss":0.30000000000000004}\n'
    journal.close()
    again = log.Journal(path)
    again.write({"step": 2, "loss": float("nan")})
    assert again.read() == [{"step": 1, "loss": 0.1 + 0.2}, {"step": 2, "loss": None}]
    again.close()


@pytest.mark.parametrize("torn", ['{"step":2,"lo', "x" * 200_000, "\x00\x00"])
def test_a_torn_last_line_is_cut_off_and_the_rest_stays(path, torn):
    path.parent.mkdir()
    path.write_text('{"step":1}\n' + torn)
    journal = log.Journal(path)
    journal.write({"step": 2})
    journal.close()
    assert path.read_text() == '{"step":1}\n{"step":2}\n'


def test_a_file_that_is_nothing_but_torn_becomes_empty(path):
    path.parent.mkdir()
    path.write_text('{"st')
    log.Journal(path).close()
    assert path.read_text() == ""


def test_records_after_a_step_are_dropped_on_resume_and_writing_goes_on(path):
    journal = log.Journal(path)
    for step in range(5):
        journal.write({"step": step})
    journal.keep(lambda record: record["step"] < 2)
    journal.write({"step": 2})
    assert [record["step"] for record in journal.read()] == [0, 1, 2]
    journal.close()
    assert [entry.name for entry in path.parent.iterdir()] == ["loss.jsonl"]


def test_a_rewrite_that_fails_leaves_the_journal_as_it_was(path, monkeypatch):
    journal = log.Journal(path)
    journal.write({"step": 1})

    def full(file):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        journal.keep(lambda record: False)
    journal.write({"step": 2})
    assert [record["step"] for record in journal.read()] == [1, 2]
    assert [entry.name for entry in path.parent.iterdir()] == ["loss.jsonl"]
    journal.close()


def test_a_full_disk_costs_records_and_one_warning_not_the_run(path, monkeypatch, logged):
    stream = logged()
    journal = log.Journal(path)
    journal.write({"step": 1})
    write = os.write
    with monkeypatch.context() as broken:
        broken.setattr(os, "write", lambda file, data: write(file, data[: len(data) // 2]))  # half of it still fits
        journal.write({"step": 2})

        def full(file, data):
            raise OSError(errno.ENOSPC, "No space left on device")

        broken.setattr(os, "write", full)
        journal.write({"step": 3})
    journal.write({"step": 4})
    assert [record["step"] for record in journal.read()] == [1, 4]
    assert path.read_text().count("\n") == 2
    assert journal.lost == 2
    assert [line["level"] for line in lines(stream)] == ["warning"]
    journal.close()


def test_threads_never_mix_their_lines(path):
    journal = log.Journal(path)

    def write(thread):
        for n in range(200):
            journal.write({"thread": thread, "n": n, "pad": "x" * 300})

    threads = [threading.Thread(target=write, args=(t,)) for t in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    records = journal.read()
    journal.close()
    assert len(records) == 800
    for thread in range(4):
        assert [record["n"] for record in records if record["thread"] == thread] == list(range(200))


def test_lines_that_are_no_records_are_left_out_and_a_missing_file_is_empty(path):
    assert log.read_journal(path) == []
    path.parent.mkdir()
    path.write_bytes(b'{"a":1}\n\xff\xfe\n[1]\nnull\n{"a":2}\n{"a"')
    assert log.read_journal(path) == [{"a": 1}, {"a": 2}]


def test_a_journal_that_cannot_be_opened_is_the_operators_to_mend(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write the journal"):
        log.Journal(tmp_path / "file" / "loss.jsonl")
