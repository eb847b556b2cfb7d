"""Commands about the versions of a model: `model pin|unpin|split|shadow|rollback|versions`."""

from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.table import Table

from serve.commands.server_access import (
    DEFAULT_TARGET,
    CaOption,
    JsonOption,
    NameArgument,
    TargetOption,
    TokenOption,
    server_client,
)
from serve.errors import ConfigError
from serve.terminal import Console

if TYPE_CHECKING:
    from serve.client import SplitFacts, VersionsFacts

VersionArgument = Annotated[int, typer.Argument(help="A version that is loaded.", min=1)]
_errors = Console(stderr=True)


def add_to(app: typer.Typer) -> None:
    """Add the commands to `gnnserve model`."""
    for name, command in (
        ("versions", versions_command),
        ("pin", pin_command),
        ("unpin", unpin_command),
        ("split", split_command),
        ("shadow", shadow_command),
        ("rollback", rollback_command),
    ):
        app.command(name)(command)


def roles(facts: "VersionsFacts") -> dict[str, str]:
    """Return what each version of a model does for requests that name none."""
    rules = facts.rules
    shares = rules.split or ({facts.main: 100.0} if facts.main else {})
    found = {version: f"{percent:g} %" for version, percent in shares.items()}
    if rules.canary:
        found[rules.canary] += ", canary"
    if rules.shadow:
        found[rules.shadow] = f"shadow of {rules.shadow_percent:g} %"
    return found


def versions_command(
    name: Annotated[str, typer.Argument(help="A model; all that are loaded without it.")] = "",
    target: TargetOption = DEFAULT_TARGET,
    token: TokenOption = None,
    ca: CaOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show which versions answer the requests that name none."""
    with server_client(target, token, ca) as client:
        found: tuple[VersionsFacts, ...] = client.versions(name)
    if as_json:
        typer.echo(msgspec.json.encode(found))
        return
    table = Table("model", "now", "before", "note")
    for each in found:
        before = "" if each.previous is None else _told(each.previous)
        note = each.taken_back and f"canary taken back: {each.taken_back}"
        if (runs := each.shadow) is not None:
            note += (
                f"{note and '; '}shadow: {runs.compared} compared, {runs.different} different, at "
                f"most {runs.most_relative:.2g} of the greatest element; {runs.failed} failed, "
                f"{runs.skipped} skipped"
            )
        table.add_row(each.model, _told(each.rules), before, note or each.not_kept)
    Console().print(table)


def pin_command(
    name: NameArgument,
    version: VersionArgument,
    target: TargetOption = DEFAULT_TARGET,
    token: TokenOption = None,
    ca: CaOption = None,
) -> None:
    """Have one version answer all requests that name none."""
    with server_client(target, token, ca) as client:
        _show(client.split(name, {version: 100.0}))


def unpin_command(
    name: NameArgument,
    target: TargetOption = DEFAULT_TARGET,
    token: TokenOption = None,
    ca: CaOption = None,
) -> None:
    """Have the newest version that loads answer again; ends a pin or a split."""
    with server_client(target, token, ca) as client:
        _show(client.split(name, {}))


def split_command(
    name: NameArgument,
    shares: Annotated[
        list[str],
        typer.Argument(metavar="VERSION=PERCENT...", help="Shares, in all 100: 1=90 2=10."),
    ],
    canary: Annotated[
        int,
        typer.Option(help="The version that loses its share when it does worse than the others."),
    ] = 0,
    target: TargetOption = DEFAULT_TARGET,
    token: TokenOption = None,
    ca: CaOption = None,
) -> None:
    """Share the requests that name no version out by their ids."""
    split = _shares(shares)
    with server_client(target, token, ca) as client:
        _show(client.split(name, split, canary=canary))


def shadow_command(
    name: NameArgument,
    version: Annotated[int, typer.Argument(help="A version that is loaded; 0 ends it.", min=0)],
    percent: Annotated[float, typer.Option(help="Share of the requests, in percent.")] = 100.0,
    target: TargetOption = DEFAULT_TARGET,
    token: TokenOption = None,
    ca: CaOption = None,
) -> None:
    """Have a version run requests once more, for nobody, while nothing else is to be done."""
    with server_client(target, token, ca) as client:
        _show(client.shadow(name, version, percent=percent))


def rollback_command(
    name: NameArgument,
    target: TargetOption = DEFAULT_TARGET,
    token: TokenOption = None,
    ca: CaOption = None,
) -> None:
    """Go back to the rules before the last change; once more goes forward again."""
    with server_client(target, token, ca) as client:
        _show(client.roll_back(name))


def _show(facts: "VersionsFacts") -> None:
    typer.echo(f"{facts.model}: {_told(facts.rules)}")
    if facts.not_kept:
        _errors.print(f"note: until the server ends: {facts.not_kept}", soft_wrap=True)


def _told(rules: "SplitFacts") -> str:
    """Return the rules in one line."""
    shares = " ".join(f"{version}={percent:g}" for version, percent in rules.split.items())
    parts = [shares or "the newest that loads"]
    if rules.canary:
        parts.append(f"canary {rules.canary}")
    if rules.shadow:
        parts.append(f"shadow {rules.shadow} of {rules.shadow_percent:g} %")
    return ", ".join(parts)


def _shares(given: list[str]) -> dict[int, float]:
    """Return percent by version; raises ConfigError."""
    found: dict[int, float] = {}
    for text in given:
        version, equals, percent = text.partition("=")
        try:
            number, share = int(version), float(percent)
        except ValueError:
            equals = ""
        if not equals or number in found:
            raise ConfigError(f"{text!r}: shares are written VERSION=PERCENT, each version once")
        found[number] = share
    return found
