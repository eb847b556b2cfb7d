"""`gnnserve check`: find the errors that would keep a server from serving, without starting it.

Reads files, writes to folders, and binds and releases the ports. Builds every model, loads its
weights and runs it on a few small graphs, in processes of their own that end with the check.
"""

import errno
import os
import socket
import sqlite3
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

import msgspec
import numpy as np

from serve.access.front_stamps import read_key
from serve.access.tokens import read_tokens
from serve.cluster.stores_file import read_stores
from serve.commands.configured import certificate_files, device_of
from serve.config import Config, SchedulingConfig, read_config
from serve.config_settings import Setting
from serve.core.disciplines import DISCIPLINES
from serve.errors import ConfigError, ServeError
from serve.files import printable
from serve.graphs.sharing import read_parts
from serve.models.cache import require_own
from serve.models.repository import BrokenModel, ModelSpec, scan, unknown_names
from serve.obs.schema import check_ours
from serve.progress import Progress
from serve.server.trial import Trials

#: Time limit for the look-up of a host name.
_RESOLVE_TIMEOUT_S = 15.0


class CheckReport(msgspec.Struct):
    """The findings of a check, as lines for people; each names the file and the key."""

    #: The models and graphs found.
    fine: list[str] = msgspec.field(default_factory=list)
    #: Findings that keep the server or a model from serving.
    errors: list[str] = msgspec.field(default_factory=list)
    #: Findings that may be intended.
    warnings: list[str] = msgspec.field(default_factory=list)

    def gather(self, check: Callable[[], Iterator[str]], where: str = "") -> None:
        """Add the problems that `check` yields or raises to the errors, each after `where`."""
        try:
            for problem in check():
                self.errors.append(where + problem)
        except ServeError as error:
            self.errors.extend(where + line for line in str(error).splitlines())


def check_config(
    path: Path, progress: Progress, *, settings: Sequence[Setting] = (), fast: bool = False
) -> CheckReport:
    """Check the configuration at `path` and everything that it names.

    `settings` replace values of the file. With `fast` only files are read: no port is bound and no
    model is built.
    """
    report = CheckReport()
    try:
        config, report.errors[:] = read_config(path, settings)
    except ConfigError as error:
        report.errors.append(printable(str(error)))
        return report
    where = f"{path}: "
    budget_bytes = _budget_bytes(config, report, where)
    report.gather(lambda: _wrong_files(config), where)
    report.gather(lambda: _wrong_tokens(config), where)
    report.gather(lambda: _wrong_certificates(config), where)
    report.gather(lambda: _wrong_graphs(config, report), where)
    report.gather(lambda: _wrong_rows(config, report, where), where)
    report.gather(lambda: _wrong_cache(config), where)
    if not os.access(_nearest_existing(config.cache_path()), os.W_OK):
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


def print_findings(found: CheckReport, path: Path, as_json: bool) -> None:
    """Print the report as JSON on stdout, or as lines: problems on stderr, the rest on stdout.

    Models and graphs are listed only when there is no error.
    """
    if as_json:
        sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
        return
    for severity, lines in (("error", found.errors), ("warning", found.warnings)):
        for line in lines:
            sys.stderr.write(f"{severity}: {line}\n")
    if not found.errors:
        sys.stdout.write("\n".join([*found.fine, f"{path}: ok"]) + "\n")


def _budget_bytes(config: Config, report: CheckReport, where: str) -> int | None:
    """Return the memory budget; None when an error in the configuration leaves it open."""
    # Values with an error, reported before, are replaced by their defaults.
    device, scheduling = config.device, config.scheduling
    wrong_sizes = {
        key: None
        for key in ("memory_budget", "max_lane_memory")
        if any(f": device.{key}: " in problem for problem in report.errors)
    }
    device = msgspec.structs.replace(device, **wrong_sizes)
    if scheduling.discipline not in DISCIPLINES:
        scheduling = SchedulingConfig()
    try:
        found = device_of(msgspec.structs.replace(config, device=device, scheduling=scheduling))
    except ServeError as error:
        report.errors.append(f"{where}{error}")
        return None
    return None if "memory_budget" in wrong_sizes else found.budget_bytes


# -- files and folders ----------------------------------------------------------------------------


def _wrong_files(config: Config) -> Iterator[str]:
    """Yield a problem for each file that the server could not write."""
    database = config.path(config.report.database)
    if problem := _cannot_write(database) or _not_ours(database):
        yield f"report.database: {problem}"
    for key in ("journal", "access_log", "record"):
        name = getattr(config.report, key)
        if name is not None and (problem := _cannot_write(config.path(name))):
            yield f"report.{key}: {problem}"


def _wrong_tokens(config: Config) -> Iterator[str]:
    """Yield every problem of the tokens file."""
    if config.auth.tokens_file is not None:
        try:
            read_tokens(config.path(config.auth.tokens_file))
        except ConfigError as error:
            yield from (f"auth.tokens_file: {line}" for line in str(error).splitlines())


def _wrong_cache(config: Config) -> Iterator[str]:
    """Raise ConfigError when others may write to the cache; yields nothing."""
    require_own(config.cache_path())
    yield from ()


def _wrong_certificates(config: Config) -> Iterator[str]:
    """Raise ConfigError when the files for encryption cannot be used; yields nothing."""
    if (files := certificate_files(config)) is not None:
        files.load()
    yield from ()


def _wrong_rows(config: Config, report: CheckReport, where: str) -> Iterator[str]:
    """Yield what keeps graphs from being shared out; raises ConfigError for the files."""
    rows = config.cluster.rows
    if rows.listen is None or not config.shares_graphs:
        return
    if find_spec("zmq") is None:
        yield "cluster.rows: pyzmq is not installed: pip install 'gnnserve[cluster]'"
    if rows.key_file is not None:
        read_key(config.path(rows.key_file))
    known = {
        graph.name: np.unique(read_parts(config.path(graph.parts)))
        for graph in config.graph
        if graph.parts is not None and config.path(graph.parts).exists()
    }
    for name, parts in known.items():
        if rows.part > parts[-1]:
            yield f"cluster.rows.part is {rows.part}, and graph '{name}' has parts 0 to {parts[-1]}"
    if rows.servers_file is None:
        report.warnings.append(
            f"{where}cluster.rows.servers_file is missing: `gnnserve cluster up` writes one for"
            " servers on Ray, and `gnnserve serve` does not start without"
        )
        return
    stores = read_stores(config.path(rows.servers_file))
    if (address := rows.address or rows.listen) not in stores:
        yield (
            f"cluster.rows.servers_file: it does not name this server, {address}; see"
            " cluster.rows.address"
        )
    for name, parts in known.items():
        for part in parts[~np.isin(parts, [*stores.values(), rows.part])].tolist():
            yield f"cluster.rows.servers_file: no server holds part {part} of graph '{name}'"


def _cannot_write(path: Path) -> str:
    """Return why the file cannot be written, or created; empty when it can."""
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
    """Return why the file is no report database; empty when it is one or does not exist."""
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


def _nearest_existing(path: Path) -> Path:
    """Return `path`, or its nearest parent that exists."""
    return next((folder for folder in (path, *path.parents) if folder.exists()), Path("/"))


def _wrong_graphs(config: Config, report: CheckReport) -> Iterator[str]:
    """Yield a problem for each graph whose file or folder does not exist; list every graph."""
    for index, graph in enumerate(config.graph):
        source = graph.dataset
        for key, value in (("file", graph.file), ("folder", graph.folder), ("parts", graph.parts)):
            if value is not None and not config.path(value).exists():
                yield f"graph[{index}].{key}: {config.path(value)}: no such file or folder"
            elif key == "file" and value is not None:
                source = str(config.path(value))
        report.fine.append(f"graph {graph.name}: {source}")


# -- addresses ------------------------------------------------------------------------------------


def _try_addresses(config: Config, report: CheckReport, where: str) -> None:
    """Bind the server's ports and release them."""
    host = config.server.host
    try:
        family = _family_of(host)
    except OSError as error:
        report.errors.append(
            f"{where}server.host: '{host}' cannot be resolved: {error.strerror or error}"
        )
        return
    for key in ("grpc_port", "http_port"):
        port: int = getattr(config.server, key)
        try:
            socket.create_server((host, port), family=family).close()
        except OSError as error:
            problem = f"cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}"
            if error.errno == errno.EADDRINUSE:
                # Perhaps the server that this configuration is to restart.
                report.warnings.append(f"{where}server.{key}: {problem}")
            elif error.errno == errno.EADDRNOTAVAIL:
                report.errors.append(f"{where}server.host: {problem}")
                return
            else:
                report.errors.append(f"{where}server.{key}: {problem}")


def _family_of(host: str) -> socket.AddressFamily:
    """Resolve a host name to its address family; raises OSError, also when that takes too long."""
    found: list[socket.AddressFamily] = []
    failed: list[OSError] = []

    def look_up() -> None:
        try:
            found.append(socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0])
        except OSError as error:
            failed.append(error)
        except UnicodeError as error:
            failed.append(OSError(errno.EINVAL, str(error)))

    # getaddrinfo takes no time limit, so it runs in a thread that may be left behind.
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
    report: CheckReport,
    progress: Progress,
    fast: bool,
) -> Iterator[str]:
    """Yield the problems of the models to load, each version by itself."""
    root, wanted = config.path(config.models.repository), config.models.load
    try:
        unknown = unknown_names(root, wanted)
    except ConfigError as error:
        yield f"{where}{error}"
        return
    yield from (where + line for line in unknown)
    specs = []
    # An ordered set: a problem of a whole model is found again in each of its versions.
    broken: dict[str, None] = {}
    for found in scan(root):
        if wanted and found.name not in wanted:
            continue
        if isinstance(found, BrokenModel):
            broken.update(dict.fromkeys(found.reason.splitlines()))
        else:
            specs.append(found)
    yield from broken
    weights_bytes = sum(spec.weights_bytes for spec in specs)
    if budget_bytes is not None and weights_bytes > budget_bytes:
        yield (
            f"{where}device.memory_budget: the weights of all models take {weights_bytes} bytes,"
            f" more than the {budget_bytes} of the device"
        )
    if not specs and not broken:
        report.warnings.append(f"{where}models.repository: {root} holds no model")
    if not fast:
        yield from _failed_trials(specs, progress)
    report.fine.extend(
        f"model {spec.name} version {spec.version}: {spec.weights_bytes} bytes" for spec in specs
    )


def _failed_trials(specs: list[ModelSpec], progress: Progress) -> Iterator[str]:
    """Build and run each model; yield a problem for each that fails."""
    if not specs:
        return
    with Trials() as trials:
        for index, spec in enumerate(specs):
            progress(f"trying {spec.key}", index / len(specs))
            try:
                trials.run(spec)
            except ServeError as error:
                problem = str(error)
                yield problem if spec.folder in problem else f"{spec.config_file}: {problem}"
