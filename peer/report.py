"""The report of a swarm: one summary and two pictures, from what each peer left in its folder.

A peer may have been killed: any of its files may be missing, end in half a line, or hold a step twice, once from before
the restart and once from after. The one thing to get wrong: a report that fails because of one such peer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peer import log
from peer.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

logger = log.get(__name__)

Row = Mapping[str, Any]
PICTURES = ("loss.png", "consensus.png")
NO_MIXES = {"full": 0, "degraded": 0, "failed": 0}


@dataclass(frozen=True, slots=True)
class Record:
    """What one peer left. Steps and rounds ascend, each once."""

    id: str
    summary: Row
    steps: tuple[Row, ...]
    rounds: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """The summary as written, the files beside it, and what the reader should know about both."""

    summary: dict[str, Any]
    files: tuple[Path, ...]
    notes: tuple[str, ...]


def write(
    out: Path,
    folders: Sequence[Path],
    preset: str,
    wall_seconds: float,
    exit_codes: Mapping[str, int] | None = None,
) -> Report:
    """Write summary.json, loss.png and consensus.png to `out`.

    `exit_codes` maps the name of a peer's folder to what its process ended with, and wins over the peer's own word.
    Without matplotlib the pictures are left out and a note says so. UsageError if `out` cannot be written.
    """
    notes: list[str] = []
    records = [read(folder, notes) for folder in folders]
    codes = [(exit_codes or {}).get(folder.name) for folder in folders]
    summary = json.loads(log.to_json(summarise(records, codes, preset, wall_seconds)))  # no NaN
    text = json.dumps(summary, indent=1)
    files = [out / "summary.json"]
    try:
        out.mkdir(parents=True, exist_ok=True)
        _put(files[0], lambda path: path.write_text(text, encoding="utf-8"))
        try:
            from matplotlib.figure import Figure
        except ImportError:
            notes.append(f'no {" and ".join(PICTURES)}: matplotlib is not installed (pip install "peer[report]")')
        else:
            for name, draw in zip(PICTURES, (_draw_loss, _draw_consensus), strict=True):
                figure = Figure(figsize=(8, 5), layout="constrained")
                draw(figure, records)
                _put(out / name, partial(figure.savefig, dpi=120, format="png"))
                files.append(out / name)
    except OSError as error:
        raise UsageError(f"cannot write the report in {out}: {error}") from error
    for note in notes:
        logger.warning("report incomplete", why=note)
    return Report(summary, tuple(files), tuple(notes))


def read(folder: Path, notes: list[str]) -> Record:
    """Read what a peer left; what is missing or broken is added to `notes`."""
    summary: Row = {}
    try:
        content = json.loads((folder / "summary.json").read_bytes())
        summary = dict(content.items())
    except (OSError, ValueError, AttributeError) as error:
        notes.append(f"{folder.name}: summary.json cannot be read, its journals stand in for it: {_reason(error)}")
    steps = _rows(folder / "loss.jsonl", "step", notes)
    rounds = _rows(folder / "rounds.jsonl", "round", notes)
    return Record(str(summary.get("id") or folder.name), summary, steps, rounds)


def summarise(
    records: Sequence[Record], codes: Sequence[int | None], preset: str, wall_seconds: float
) -> dict[str, Any]:
    """Return the object that `peer swarm --json` prints. Values that are unknown or not finite are null."""
    peers = [_summary_of(record, code) for record, code in zip(records, codes, strict=True)]
    return {
        "preset": preset,
        "peers": peers,
        **{
            name: _mean(peer[name] for peer in peers)
            for name in ("js_distance_last", "l2_distance_last", "eval_loss_last")
        },
        "wall_seconds": wall_seconds,
    }


def _summary_of(record: Record, code: int | None) -> dict[str, Any]:
    losses = [loss for row in record.steps if (loss := _finite(row.get("loss"))) is not None]
    from_logs = {
        "id": record.id,
        "exit_code": None,
        "rounds": len(record.rounds),
        "tokens": sum(int(_finite(row.get("tokens")) or 0) for row in record.steps),
        "loss_first": losses[0] if losses else None,
        "loss_last": losses[-1] if losses else None,
        "eval_loss_last": _last(record.rounds, "eval_loss"),
        "utilization": _mean(row.get("utilization") for row in record.rounds),
        "mix1": _count(record.rounds, "mix1"),
        "mix2": _count(record.rounds, "mix2"),
        "sent_bytes": None,
        "received_bytes": None,
        "predicted_sent_bytes": None,
        "js_distance_last": _last(record.rounds, "js"),
        "l2_distance_last": _last(record.rounds, "l2"),
    }
    known = {key: value for key, value in record.summary.items() if value is not None}
    return {**from_logs, **known, **({} if code is None else {"exit_code": code})}


def _rows(path: Path, key: str, notes: list[str]) -> tuple[Row, ...]:
    """Records by ascending `key`; of several with the same one the last, which is what a resumed peer did."""
    rows: dict[int, Row] = {}
    try:
        for record in log.read_journal(path):
            if isinstance(record.get(key), int):
                rows[record[key]] = record
    except OSError as error:
        notes.append(f"{path.parent.name}: {path.name} cannot be read: {_reason(error)}")
    else:
        if not rows:
            notes.append(f"{path.parent.name}: {path.name} is missing or empty")
    return tuple(rows[at] for at in sorted(rows))


def _draw_loss(figure: Figure, records: Sequence[Record]) -> None:
    axes = figure.subplots()
    for number, record in enumerate(records):
        steps = [row["step"] for row in record.steps]
        losses = [_or_nan(row.get("loss")) for row in record.steps]
        (line,) = axes.plot(steps, losses, color=f"C{number % 10}", linewidth=0.9, alpha=0.75, label=record.id[:16])
        # Measured where a round starts; reversed, so that each round's first step stays.
        starts = {row.get("round"): row["step"] for row in reversed(record.steps)}
        held_out = [
            (starts[row["round"]], loss)
            for row in record.rounds
            if row["round"] in starts and (loss := _finite(row.get("eval_loss"))) is not None
        ]
        if steps and (last := _finite(record.summary.get("eval_loss_last"))) is not None:
            held_out.append((steps[-1] + 1, last))
        if held_out:
            axes.plot(*zip(*held_out, strict=True), "o", color=line.get_color(), markersize=4, markeredgecolor="black")
    axes.plot([], [], "o", color="white", markersize=4, markeredgecolor="black", label="held-out")
    axes.set_xlabel("inner step")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title("Training loss of every peer")
    _finish(axes, len(records) + 1)


def _draw_consensus(figure: Figure, records: Sequence[Record]) -> None:
    panels = figure.subplots(2, 1, sharex=True)
    for axes, key, label in zip(panels, ("js", "l2"), ("JS distance", "L2 distance"), strict=True):
        drawn = 0
        for number, record in enumerate(records):
            points = [(row["round"], value) for row in record.rounds if (value := _finite(row.get(key))) is not None]
            if points:
                style = {"color": f"C{number % 10}", "linewidth": 0.9, "markersize": 3}
                axes.plot(*zip(*points, strict=True), "o-", label=record.id[:16], **style)
                drawn += 1
        axes.set_ylabel(label)
        if drawn:
            axes.set_ylim(bottom=0)
            _finish(axes, drawn if key == "js" else 0)
        else:
            axes.text(0.5, 0.5, "not measured", ha="center", transform=axes.transAxes)
    panels[0].set_title("Distance of every peer from those it compared itself with")
    panels[1].set_xlabel("round")
    panels[1].xaxis.get_major_locator().set_params(integer=True)


def _finish(axes: Any, entries: int) -> None:
    axes.grid(visible=True, alpha=0.3)
    if entries:
        axes.legend(fontsize="small", ncols=1 + (entries - 1) // 9)


def _put(path: Path, fill: Callable[[Path], object]) -> None:
    """Whoever watches the folder sees a file whole or not at all."""
    aside = path.with_name(f".{path.name}.partial")
    try:
        fill(aside)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def _count(rounds: Sequence[Row], stage: str) -> dict[str, int]:
    outcomes = [row.get(stage) for row in rounds]
    return {outcome: outcomes.count(outcome) for outcome in NO_MIXES}


def _last(rows: Sequence[Row], key: str) -> float | None:
    values = [value for row in rows if (value := _finite(row.get(key))) is not None]
    return values[-1] if values else None


def _mean(values: Iterable[object]) -> float | None:
    known = [finite for value in values if (finite := _finite(value)) is not None]
    return sum(known) / len(known) if known else None


def _finite(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _or_nan(value: object) -> float:
    finite = _finite(value)
    return math.nan if finite is None else finite


def _reason(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
