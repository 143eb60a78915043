"""`peer config check`: what a peer would run with, and where each value comes from."""

from __future__ import annotations

import json

import typer

from peer.cli.options import ConfigFile, Json, Overrides
from peer.config import Config, load

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback()
def _group() -> None:
    """Check a configuration and show where each value comes from."""


@app.command()
def check(config: ConfigFile = None, overrides: Overrides = None, as_json: Json = False) -> None:
    """Check the configuration and show the merged result with the origin of each value.

    Later wins: defaults, the file, the environment (PEER_ROUND__STEPS=20), --set.

    Example: peer config check --config peer.toml --set round.steps=20
    """
    merged = load(config, overrides=overrides or ())
    typer.echo(_as_json(merged) if as_json else _as_text(merged))


def _as_json(config: Config) -> str:
    return json.dumps(
        {"fingerprint": config.spec.fingerprint, "config": config.for_json(), "origins": dict(config.origins)}
    )


def _as_text(config: Config) -> str:
    rows = [(name, json.dumps(value), config.origins[name]) for name, value in config.shown().items()]
    left = max(len(name) for name, _, _ in rows)
    middle = min(40, max(len(value) for _, value, _ in rows))
    lines = [f"{name:{left}}  {value:{middle}}  {origin}" for name, value, origin in rows]
    return "\n".join([*lines, "", f"run spec {config.spec.fingerprint}"])
