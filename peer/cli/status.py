"""`peer status`: what the peer running here is doing."""

from __future__ import annotations

import json
from typing import Any

import typer

from peer.cli.admin import AdminAddress, DataDir, ask
from peer.cli.options import Json


def status(data_dir: DataDir = "peer-data", address: AdminAddress = None, as_json: Json = False) -> None:
    """Show what the peer running here is doing.

    Example: peer status --data-dir peer-data
    """
    answer = ask(data_dir, address)
    typer.echo(json.dumps(answer) if as_json else _as_text(answer))


def _as_text(answer: dict[str, Any]) -> str:
    head = (
        f"peer {answer['id']} at {answer['address'] or 'no address others can dial'}, up {answer['up_seconds']:.0f} s"
    )
    if "run" not in answer:
        return f"{head}\nstarting: not in a run yet"
    totals = answer["totals"]
    alive = sum(member["state"] == "alive" for member in answer["members"])
    lines = [
        head,
        f"run {answer['run']} ({answer['fingerprint'][:16]}), preset {answer['preset']}",
        f"round {answer['round']} of {answer['rounds']}, step {answer['step']} of {answer['steps']}",
        f"loss {_number(totals['loss_last'])}, held out {_number(answer['eval_loss'])}, {totals['tokens']:,} tokens",
        f"utilisation {_number(totals['utilization'], 2)}, JS distance {_number(totals['js_distance'])}",
        *(f"{stage}: {_mixes(totals[stage])}" for stage in ("mix1", "mix2")),
        f"members: {alive} alive of {len(answer['members'])} known (`peer members` lists them)",
    ]
    if alive > 1 and not sum(sum(totals[stage].values()) for stage in ("mix1", "mix2")):
        lines.append("no mix has ended yet: the first one ends with the first round")
    return "\n".join(lines)


def _mixes(counts: dict[str, int]) -> str:
    return ", ".join(f"{counts[outcome]} {outcome}" for outcome in ("full", "degraded", "failed"))


def _number(value: float | None, digits: int = 4) -> str:
    return "not measured" if value is None else f"{value:.{digits}f}"
