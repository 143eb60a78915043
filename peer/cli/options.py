"""Options that several commands share, so that they are spelt and explained once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="Configuration file (TOML), as `peer init` writes it.", metavar="FILE")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="One setting, such as round.steps=20. Beats file and environment.", metavar="A.B=C"),
]
Json = Annotated[bool, typer.Option("--json", help="Write one JSON object to stdout.")]
