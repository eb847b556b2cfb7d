"""Everything that would keep a server of a configuration from serving, found without starting it.

Files are read, folders written to, addresses bound and let go again. Every model is built, gets its
weights and runs on a few small graphs, in processes of their own that end with the check.
"""

import errno
import os
import socket
import sqlite3
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import msgspec

from serve.app import device_of
from serve.config import Config, SchedulingConfig, read_config
from serve.core.disciplines import DISCIPLINES
from serve.errors import ConfigError, ServeError
from serve.files import printable
from serve.models.repository import BrokenModel, ModelSpec, scan, unknown_names
from serve.obs.schema import check_ours
from serve.server.trial import Trials

Progress = Callable[[str, float], None]

#: A name is looked up for so long at most.
_RESOLVE_TIMEOUT_S = 15.0


class Report(msgspec.Struct):
    """What a check found: lines for people, each with the file and the key that it is about."""

    #: What serves as it is.
    fine: list[str] = msgspec.field(default_factory=list)
    #: What keeps a server, or a model, from serving.
    errors: list[str] = msgspec.field(default_factory=list)
    #: What may be so on purpose.
    warnings: list[str] = msgspec.field(default_factory=list)

    def gather(self, check: Callable[[], Iterator[str]], where: str = "") -> None:
        """Add as errors what `check` yields or raises; `where` stands before each."""
        try:
            for problem in check():
                self.errors.append(where + problem)
        except ServeError as error:
            self.errors.extend(where + line for line in str(error).splitlines())


def check(path: Path, progress: Progress, *, fast: bool = False) -> Report:
    """Look at the configuration at `path` and at all that it names.

    With `fast`, files only: no address is bound and no model is built.
    """
    report = Report()
    try:
        config, report.errors[:] = read_config(path)
    except ConfigError as error:
        report.errors.append(printable(str(error)))
        return report
    where = f"{path}: "
    budget_bytes = _budget_bytes(config, report, where)
    report.gather(lambda: _wrong_files(config), where)
    report.gather(lambda: _wrong_graphs(config, report), where)
    if not os.access(_nearest(config.cache_path()), os.W_OK):
        report.warnings.append(
            f"{where}models.cache: {config.cache_path()} cannot be written, so every start"
            " calibrates every model"
        )
    if not fast:
        _try_addresses(config, report, where)
    report.gather(lambda: _wrong_models(config, where, budget_bytes, report, progress, fast))
    for lines in (report.fine, report.errors, report.warnings):
        lines[:] = map(printable, lines)
    return report


def _budget_bytes(config: Config, report: Report, where: str) -> int | None:
    """What the device has for models and tasks; None when it cannot be told."""
    # What was not understood was told.
    device, scheduling = config.device, config.scheduling
    wrong_size = any(": device.memory_budget: " in problem for problem in report.errors)
    if wrong_size:
        device = msgspec.structs.replace(device, memory_budget=None)
    if scheduling.discipline not in DISCIPLINES:
        scheduling = SchedulingConfig()
    try:
        found = device_of(msgspec.structs.replace(config, device=device, scheduling=scheduling))
    except ServeError as error:
        report.errors.append(f"{where}{error}")
        return None
    return None if wrong_size else found.budget_bytes


# -- files and folders ----------------------------------------------------------------------------


def _wrong_files(config: Config) -> Iterator[str]:
    """What is wrong with files that the server writes."""
    database = config.path(config.report.database)
    if problem := _cannot_write(database) or _not_ours(database):
        yield f"report.database: {problem}"
    if config.report.journal is not None:
        journal = config.path(config.report.journal)
        if problem := _cannot_write(journal):
            yield f"report.journal: {problem}"


def _cannot_write(path: Path) -> str:
    """Why the file can be neither made nor written; empty when it can."""
    if path.is_dir():
        return f"{path}: it is a folder"
    if os.path.lexists(path) and not path.is_file():
        return f"{path}: it is not a regular file"
    if not path.parent.is_dir():
        return f"{path}: its folder {path.parent} does not exist"
    if path.exists() and not os.access(path, os.W_OK):
        return f"{path}: it cannot be written"
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            return ""
    except OSError as error:
        return f"{path}: its folder cannot be written: {error.strerror}"


def _not_ours(path: Path) -> str:
    """Why the file is no database of a report; empty when it is one, or is to be made."""
    if not path.exists():
        return ""
    try:
        uri = f"{path.resolve().as_uri()}?mode=ro"
        with closing(sqlite3.connect(uri, uri=True, timeout=5.0)) as database:
            check_ours(database, path, may_be_empty=True)
    except ConfigError as error:
        return str(error)
    except sqlite3.Error as error:
        return f"{path}: cannot be used: {error}"
    return ""


def _nearest(path: Path) -> Path:
    """The folder itself, or the nearest above it that exists."""
    return next((one for one in (path, *path.parents) if one.exists()), Path("/"))


def _wrong_graphs(config: Config, report: Report) -> Iterator[str]:
    for index, graph in enumerate(config.graph):
        source = graph.dataset
        for key, value in (("file", graph.file), ("folder", graph.folder)):
            if value is not None and not config.path(value).exists():
                yield f"graph[{index}].{key}: {config.path(value)}: no such file or folder"
            elif key == "file" and value is not None:
                source = str(config.path(value))
        report.fine.append(f"graph {graph.name}: {source}")


# -- addresses ------------------------------------------------------------------------------------


def _try_addresses(config: Config, report: Report, where: str) -> None:
    """Listen where the server is to listen, for a moment."""
    host = config.server.host
    try:
        family = _family_of(host)
    except OSError as error:
        report.errors.append(
            f"{where}server.host: '{host}' is no address that can be found:"
            f" {error.strerror or error}"
        )
        return
    for key in ("grpc_port", "http_port"):
        port: int = getattr(config.server, key)
        try:
            socket.create_server((host, port), family=family).close()
        except OSError as error:
            told = f"cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}"
            if error.errno == errno.EADDRINUSE:
                # Perhaps by the server that is to be started anew with this configuration.
                report.warnings.append(f"{where}server.{key}: {told}")
            elif error.errno == errno.EADDRNOTAVAIL:
                report.errors.append(f"{where}server.host: {told}")
                return
            else:
                report.errors.append(f"{where}server.{key}: {told}")


def _family_of(host: str) -> socket.AddressFamily:
    """Address family of a name; raises OSError when it has none, or cannot be asked for in time."""
    found: list[socket.AddressFamily] = []
    failed: list[OSError] = []

    def look_up() -> None:
        try:
            found.append(socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0])
        except OSError as error:
            failed.append(error)
        except UnicodeError as error:
            failed.append(OSError(errno.EINVAL, str(error)))

    # The look-up itself has no limit; nobody waits for the thread.
    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(_RESOLVE_TIMEOUT_S)
    if found:
        return found[0]
    raise failed[0] if failed else TimeoutError(f"no answer within {_RESOLVE_TIMEOUT_S:g} s")


# -- models ---------------------------------------------------------------------------------------


def _wrong_models(
    config: Config,
    where: str,
    budget_bytes: int | None,
    report: Report,
    progress: Progress,
    fast: bool,
) -> Iterator[str]:
    """What is wrong with the models that are to be loaded, each version by itself."""
    root, wanted = config.path(config.models.repository), config.models.load
    try:
        unknown = unknown_names(root, wanted)
    except ConfigError as error:
        yield f"{where}{error}"
        return
    yield from (where + line for line in unknown)
    specs = []
    # One that breaks all versions of a model is told once.
    told: dict[str, None] = {}
    for found in scan(root):
        if wanted and found.name not in wanted:
            continue
        if isinstance(found, BrokenModel):
            told.update(dict.fromkeys(found.reason.splitlines()))
        else:
            specs.append(found)
    yield from told
    weights_bytes = sum(spec.weights_bytes for spec in specs)
    if budget_bytes is not None and weights_bytes > budget_bytes:
        yield (
            f"{where}device.memory_budget: weights of all models take {weights_bytes} bytes,"
            f" the device has {budget_bytes}"
        )
    if not specs and not told:
        report.warnings.append(f"{where}models.repository: {root} holds no model")
    if not fast:
        yield from _failed_trials(specs, report, progress)
    report.fine.extend(
        f"model {spec.name} version {spec.version}: {spec.weights_bytes} bytes" for spec in specs
    )


def _failed_trials(specs: list[ModelSpec], report: Report, progress: Progress) -> Iterator[str]:
    if not specs:
        return
    with Trials() as trials:
        for index, spec in enumerate(specs):
            progress(f"trying {spec.key}", index / len(specs))
            try:
                trials.run(spec)
            except ServeError as error:
                told = str(error)
                yield told if spec.folder in told else f"{spec.config_file}: {told}"
