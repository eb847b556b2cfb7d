"""The journal of a server: what its scheduler was told, when, and what it answered.

JSON lines: a header with the scheduler's parameters, then one line per call of
``Scheduler.handle`` in order, and one when an answer has left the server. As the scheduler has no
other input, giving a fresh one the same events must bring the same commands: ``serve.sim.replay``
checks that. ``serve.obs.journal`` writes journals; this is the format, and pure.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, get_args

import msgspec

from serve.core.commands import AnswerTask, Command
from serve.core.events import Event
from serve.core.jobs.types import JobRules
from serve.core.params import DeviceFacts, SchedulerParams
from serve.core.types import Nanos, TaskEstimate, TaskId
from serve.errors import ConfigError
from serve.undecodable import UNDECODABLE

_FORMAT = "gnnserve-journal-1"
_EVENTS: dict[str, type[Event]] = {kind.__name__: kind for kind in get_args(Event)}
ValueT = TypeVar("ValueT")


class _Header(msgspec.Struct, frozen=True, kw_only=True):
    format: str = _FORMAT
    params: msgspec.Raw
    #: Whether the scheduler was given a function that estimates unions.
    merges: bool = False


class _Row(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    at_ns: int
    #: Name of an event and its fields; both missing when `left` is given.
    event: str = ""
    fields: msgspec.Raw = msgspec.Raw(b"{}")
    #: [name of a command, its fields], in order.
    commands: msgspec.Raw = msgspec.Raw(b"[]")
    #: What the scheduler was told of unions while it decided.
    unions: tuple[TaskEstimate | None, ...] = ()
    #: The task whose answer left the server.
    left: int | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """Call of the scheduler."""

    at_ns: Nanos
    event: Event
    #: What it answered, encoded as `encode_commands` does it.
    commands: bytes
    #: What `SchedulerParams.unions` returned meanwhile, call by call.
    unions: tuple[TaskEstimate | None, ...] = ()


@dataclass(frozen=True, slots=True)
class AnswerLeft:
    """An answer was handed to the transport."""

    at_ns: Nanos
    task_id: TaskId


@dataclass(frozen=True, slots=True)
class Journal:
    """Journal of everything that one scheduler went through."""

    #: Without `unions`, which is no data.
    params: SchedulerParams
    merges: bool
    rows: tuple[Step | AnswerLeft, ...]

    @property
    def steps(self) -> Iterator[Step]:
        """The calls, in order."""
        return (row for row in self.rows if isinstance(row, Step))


def encode_header(params: SchedulerParams) -> bytes:
    """Return the first line."""
    data = msgspec.Raw(msgspec.json.encode(replace(params, unions=None)))
    return _line(_Header(params=data, merges=params.unions is not None))


def encode_step(
    at_ns: int,
    event: Event,
    commands: Sequence[Command],
    unions: Sequence[TaskEstimate | None] = (),
) -> bytes:
    """Return the line of one call."""
    row = _Row(
        at_ns=at_ns,
        event=type(event).__name__,
        fields=msgspec.Raw(msgspec.json.encode(event)),
        commands=msgspec.Raw(encode_commands(commands)),
        unions=tuple(unions),
    )
    return _line(row)


def encode_left(at_ns: int, task_id: TaskId) -> bytes:
    """Return the line of an answer that left."""
    return _line(_Row(at_ns=at_ns, left=task_id))


def encode_commands(commands: Iterable[Command]) -> bytes:
    """Return commands as JSON, which is equal exactly for equal sequences."""
    rows = []
    for command in commands:
        kinds = [type(command).__name__]
        if isinstance(command, AnswerTask):
            kinds.append(type(command.outcome).__name__)
        rows.append((*kinds, command))
    return msgspec.json.encode(rows)


def commands_of(step: Step) -> list[tuple[str, dict[str, Any]]]:
    """Return each command's name and fields."""
    return [(row[0], row[-1]) for row in msgspec.json.decode(step.commands)]


def decode(lines: Iterable[bytes], where: str = "journal") -> Journal:
    """Read what the functions above wrote; raises ConfigError with `where` and the line's number.

    A last line that was cut off, as of a server that was killed, is left out.
    """
    numbered = enumerate(lines, 1)
    _, first = next(numbered, (1, b""))
    header = _decoded(first, _Header, where, 1)
    if header.format != _FORMAT:
        raise ConfigError(f"{where}, line 1: format {header.format!r} is not {_FORMAT!r}")
    params = _params(header.params, where)
    rows = (_entry(line, where, number) for number, line in numbered if line.endswith(b"\n"))
    return Journal(params, header.merges, tuple(rows))


def _params(data: msgspec.Raw, where: str) -> SchedulerParams:
    """Read all fields but the function, for which msgspec has no type."""
    facts = _decoded(data, dict[str, Any], where, 1)
    facts.pop("unions", None)
    try:
        device = msgspec.convert(facts.pop("device", None), DeviceFacts)
        more = msgspec.convert(facts.pop("more_devices", ()), tuple[DeviceFacts, ...])
        jobs = msgspec.convert(facts.pop("jobs", {}), JobRules)
        return SchedulerParams(device=device, more_devices=more, jobs=jobs, **facts)
    except (msgspec.ValidationError, TypeError, ValueError) as error:
        raise ConfigError(f"{where}, line 1: {error}") from error


def _entry(line: bytes, where: str, number: int) -> Step | AnswerLeft:
    row = _decoded(line, _Row, where, number)
    if row.left is not None:
        return AnswerLeft(Nanos(row.at_ns), TaskId(row.left))
    kind = _EVENTS.get(row.event)
    if kind is None:
        raise ConfigError(f"{where}, line {number}: unknown event {row.event!r}")
    event = _decoded(row.fields, kind, where, number)
    return Step(Nanos(row.at_ns), event, bytes(row.commands), row.unions)


def _decoded(data: bytes | msgspec.Raw, kind: type[ValueT], where: str, number: int) -> ValueT:
    try:
        return msgspec.json.decode(data, type=kind)
    except UNDECODABLE as error:
        raise ConfigError(f"{where}, line {number}: {error}") from error


def _line(row: msgspec.Struct) -> bytes:
    return msgspec.json.encode(row) + b"\n"
