"""Commands about what was measured of models on this machine: `calibrate list|run|forget`."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.table import Table

from serve.commands.options import CONFIG_PATH, ConfigOption, SetOption
from serve.commands.steps import Steps
from serve.config import Config, load_config
from serve.config_settings import settings_of
from serve.errors import ConfigError, UnknownName
from serve.terminal import Console

if TYPE_CHECKING:  # the server's packages, which the client alone has not
    from serve.models.cache import CalibrationCache
    from serve.models.repository import ModelSpec

app = typer.Typer(help="List, renew or forget the calibrations of a configuration's models.")
_errors = Console(stderr=True)

NamesArgument = Annotated[list[str], typer.Argument(help="Models of the repository, by name.")]


class Calibrated(msgspec.Struct, frozen=True):
    """What is known of one version of a model."""

    model: str
    version: str
    #: Empty for a version that is not calibrated under this configuration.
    executor: str
    #: 95th percentile of |estimated ÷ measured run time − 1|; None when not calibrated.
    time_error: float | None
    #: What to know of it: a memory estimate that is an upper bound only, a busy machine.
    remarks: str


@app.command("list")
def list_command(
    config: ConfigOption = CONFIG_PATH,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    settings: SetOption = None,
) -> None:
    """List all versions of all models, and what is known of them on this machine."""
    loaded, cache = _opened(config, settings)
    found = [_described(spec, cache) for spec in _specs(loaded)]
    if as_json:
        typer.echo(msgspec.json.encode(found))
        return
    table = Table("model", "version", "executor", "time error", "remark")
    for one in found:
        error = "not calibrated" if one.time_error is None else f"{one.time_error:.1%}"
        table.add_row(one.model, one.version, one.executor, error, one.remarks)
    Console().print(table)


@app.command("run")
def run_command(
    names: NamesArgument, config: ConfigOption = CONFIG_PATH, settings: SetOption = None
) -> None:
    """Calibrate models anew; a server uses the result when it starts or loads them next."""
    from serve.commands.configured import device_of
    from serve.commands.estimate import offline_estimators
    from serve.models.repository import content_hash
    from serve.obs.log import setup_logging

    setup_logging(level="WARNING")
    loaded, cache = _opened(config, settings)
    specs = _specs(loaded, names)
    for spec in specs:
        cache.forget(content_hash(spec))
    with Steps(_errors) as steps:
        offline_estimators(loaded, device_of(loaded), names, steps.tell)
    for spec in specs:
        one = _described(spec, cache)
        typer.echo(f"{spec.key}: calibrated on {one.executor}")


@app.command("forget")
def forget_command(
    names: NamesArgument, config: ConfigOption = CONFIG_PATH, settings: SetOption = None
) -> None:
    """Delete calibrations; a server makes them again when it loads the models next."""
    from serve.models.repository import content_hash

    loaded, cache = _opened(config, settings)
    for spec in _specs(loaded, names):
        known = cache.forget(content_hash(spec))
        typer.echo(f"{spec.key}: {'forgotten' if known else 'was not calibrated'}")


def _opened(path: Path, settings: list[str] | None) -> tuple[Config, "CalibrationCache"]:
    from serve.commands.configured import calibration_cache, device_of

    loaded = load_config(path, settings_of(os.environ, settings or ()))
    return loaded, calibration_cache(loaded, device_of(loaded))


def _specs(config: Config, names: Iterable[str] = ()) -> list["ModelSpec"]:
    """Return the sound versions of these models, or of all; raises ConfigError for others."""
    from serve.models.repository import ModelSpec, scan, scan_model

    root, names = config.path(config.models.repository), tuple(names)
    try:
        found = [one for name in names for one in scan_model(root, name)] if names else scan(root)
    except UnknownName as error:
        raise ConfigError(str(error)) from error
    return [one for one in found if isinstance(one, ModelSpec)]


def _described(spec: "ModelSpec", cache: "CalibrationCache") -> Calibrated:
    from serve.models.repository import content_hash

    known = cache.get(content_hash(spec))
    if known is None:
        return Calibrated(spec.name, str(spec.version), "", None, "")
    found = known[1]
    return Calibrated(
        spec.name, str(spec.version), found.executor, found.time.error_p95, found.remarks
    )
