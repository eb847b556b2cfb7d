"""Options that several commands take."""

from pathlib import Path
from typing import Annotated

import typer

ConfigOption = Annotated[Path, typer.Option("--config", help="The configuration file (TOML).")]
CONFIG_PATH = Path("gnnserve.toml")
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Use this value for a configuration key, such as server.host=0.0.0.0; repeatable. "
        "Environment variables such as GNNSERVE__SERVER__HOST do the same.",
    ),
]
