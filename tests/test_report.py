"""The report holds what the peers left, and comes out whatever they left."""

from __future__ import annotations

import builtins
import json
import math
import struct

import pytest

from peer import report
from peer.errors import UsageError

SUMMARY = {
    "id": "ada",
    "exit_code": 0,
    "rounds": 3,
    "tokens": 3072,
    "loss_first": 5.0,
    "loss_last": 3.5,
    "eval_loss_last": 3.6,
    "utilization": 0.8,
    "mix1": {"full": 3, "degraded": 0, "failed": 0},
    "mix2": {"full": 2, "degraded": 1, "failed": 0},
    "sent_bytes": 1000,
    "received_bytes": 900,
    "predicted_sent_bytes": 1000,
    "js_distance_last": 0.1,
    "l2_distance_last": 2.0,
}


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def step(number, loss):
    return {"step": number, "round": number // 2, "loss": loss, "tokens": 512, "seconds": 0.1}


def round_(number, **more):
    row = {"round": number, "eval_loss": 4.0 - number / 10, "js": 0.3 / (number + 1), "l2": 4.0 / (number + 1)}
    return {**row, "mix1": "full", "mix2": "degraded", "utilization": 0.75, **more}


@pytest.fixture
def folder(tmp_path):
    """Make a peer's folder; None leaves a file out."""

    def make(name, summary=None, loss=(), rounds=()):
        path = tmp_path / name
        path.mkdir()
        for file, text in (
            ("summary.json", None if summary is None else json.dumps(summary)),
            ("loss.jsonl", None if loss is None else lines(loss)),
            ("rounds.jsonl", None if rounds is None else lines(rounds)),
        ):
            if text is not None:
                (path / file).write_text(text)
        return path

    return make


@pytest.fixture
def whole(folder):
    return folder("peer-0", SUMMARY, [step(n, 5 - n / 4) for n in range(6)], [round_(n) for n in range(3)])


def png_size(path):
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", head[16:24])


def test_the_report_folder_holds_a_summary_and_two_pictures(tmp_path, whole, folder):
    other = folder("peer-1", {**SUMMARY, "id": "bob", "js_distance_last": 0.3}, [step(0, 5.0)], [round_(0)])

    written = report.write(tmp_path / "out", [whole, other], "diloco", 12.5)

    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["consensus.png", "loss.png", "summary.json"]
    assert written.notes == ()
    assert json.loads((tmp_path / "out/summary.json").read_text()) == written.summary
    assert written.summary["preset"] == "diloco"
    assert written.summary["wall_seconds"] == 12.5
    assert written.summary["peers"][0] == SUMMARY
    assert written.summary["js_distance_last"] == pytest.approx(0.2)
    for name in report.PICTURES:
        width, height = png_size(tmp_path / "out" / name)
        assert width > 600
        assert height > 400


def test_a_killed_peer_is_reported_from_its_journals(tmp_path, folder):
    path = folder("peer-3", None, [step(n, 5.0 - n) for n in range(4)], [round_(0), round_(1, mix1="failed")])
    with (path / "loss.jsonl").open("a") as file:
        file.write('{"step": 4, "round": 2, "lo')

    written = report.write(tmp_path / "out", [path], "global-m1", 1.0, {"peer-3": -9})

    (peer,) = written.summary["peers"]
    assert peer["id"] == "peer-3"
    assert peer["exit_code"] == -9
    assert (peer["rounds"], peer["tokens"]) == (2, 4 * 512)
    assert (peer["loss_first"], peer["loss_last"], peer["eval_loss_last"]) == (5.0, 2.0, 3.9)
    assert peer["mix1"] == {"full": 1, "degraded": 0, "failed": 1}
    assert peer["mix2"] == {"full": 0, "degraded": 2, "failed": 0}
    assert peer["js_distance_last"] == pytest.approx(0.15)
    assert peer["sent_bytes"] is None
    assert "peer-3: summary.json cannot be read" in written.notes[0]
    assert png_size(tmp_path / "out/loss.png")


@pytest.mark.parametrize("content", ["", "{", "[]", "3", "null"])
def test_a_summary_that_is_none_is_noted_and_the_others_stand(tmp_path, whole, folder, content):
    path = folder("peer-1", None, [step(0, 5.0)], [round_(0)])
    (path / "summary.json").write_text(content)

    written = report.write(tmp_path / "out", [whole, path], "diloco", 1.0)

    assert [peer["id"] for peer in written.summary["peers"]] == ["ada", "peer-1"]
    assert len(written.notes) == 1


def test_a_folder_with_nothing_in_it_is_still_a_peer(tmp_path, folder):
    written = report.write(tmp_path / "out", [folder("peer-0", None, None, None)], "diloco", 1.0)

    (peer,) = written.summary["peers"]
    assert (peer["rounds"], peer["tokens"], peer["loss_last"], peer["utilization"]) == (0, 0, None, None)
    assert len(written.notes) == 3
    assert png_size(tmp_path / "out/consensus.png")


def test_a_step_done_again_after_a_restart_counts_once(tmp_path, folder):
    path = folder("peer-0", None, [step(0, 5.0), step(1, 4.0), step(1, 4.5), step(2, 3.0)], [round_(0), round_(0)])

    record = report.read(path, [])

    assert [(row["step"], row["loss"]) for row in record.steps] == [(0, 5.0), (1, 4.5), (2, 3.0)]
    assert len(record.rounds) == 1


def test_values_that_are_no_numbers_become_null(tmp_path, folder):
    path = folder("peer-0", {**SUMMARY, "loss_last": math.nan}, [step(0, math.inf)], [round_(0, js=None, l2=math.nan)])

    report.write(tmp_path / "out", [path], "diloco", 1.0)

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    summary = json.loads((tmp_path / "out/summary.json").read_text(), parse_constant=refuse)
    assert summary["peers"][0]["loss_last"] is None


def test_without_matplotlib_the_summary_is_written_and_a_note_says_why(tmp_path, whole, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)

    written = report.write(tmp_path / "out", [whole], "diloco", 1.0)

    assert [path.name for path in written.files] == ["summary.json"]
    assert len(written.notes) == 1
    assert "matplotlib is not installed" in written.notes[0]


def test_a_place_that_cannot_be_written_is_a_usage_error(tmp_path, whole):
    (tmp_path / "out").write_text("a file")

    with pytest.raises(UsageError, match="cannot write the report"):
        report.write(tmp_path / "out", [whole], "diloco", 1.0)


def test_held_out_marks_stand_where_they_were_measured_and_the_last_one_at_the_end(whole):
    from matplotlib.figure import Figure

    figure = Figure()
    report._draw_loss(figure, [report.read(whole, [])])

    curve, marks, _ = figure.axes[0].lines
    assert list(curve.get_xdata()) == [0, 1, 2, 3, 4, 5]
    assert list(marks.get_xdata()) == [0, 2, 4, 6]
    assert list(marks.get_ydata()) == pytest.approx([4.0, 3.9, 3.8, 3.6])
