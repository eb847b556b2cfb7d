"""The configuration file: TOML, decoded strictly into frozen structs.

An unknown key, a wrong type or a value out of range is a ``ConfigError`` that names the file,
the key and the rule, and for an unknown key the nearest right one. Relative paths are resolved
against the file's folder. The core never sees these structs: it is handed small parameter
objects made from them.
"""

import difflib
import ipaddress
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from serve.errors import ConfigError

Port = Annotated[int, Meta(ge=0, le=65535)]
Count = Annotated[int, Meta(ge=1)]
Positive = Annotated[float, Meta(gt=0)]
StructT = TypeVar("StructT", bound=msgspec.Struct)

_DEFAULT_CACHE = "~/.cache/gnnserve"
_UNITS = {"B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
          "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}  # fmt: skip


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of every table of the file."""


class ServerConfig(Section, frozen=True):
    """Where to listen and what to accept."""

    host: str = "127.0.0.1"
    grpc_port: Port = 8001
    http_port: Port = 8002
    #: Largest gRPC message taken or sent.
    max_message: str = "64 MiB"
    #: Requests accepted and not yet answered; more are refused with a retry hint.
    max_queue: Count = 512
    #: How long a stop waits for accepted requests before it gives up on them.
    drain_timeout_s: Positive = 30.0
    #: Take tensors from shared memory objects of this host, and write answers there: anything in
    #: /dev/shm that the server may open. `auto`: when it listens on a loopback address only.
    shared_memory: Literal["auto", "on", "off"] = "auto"
    #: Refuse features that hold NaN or infinity.
    reject_nonfinite: bool = True

    @property
    def max_message_bytes(self) -> int:
        """`max_message` in bytes."""
        return parse_bytes(self.max_message, "server.max_message")

    @property
    def offers_shared_memory(self) -> bool:
        """`shared_memory`, decided."""
        if self.shared_memory != "auto":
            return self.shared_memory == "on"
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


class ModelsConfig(Section, frozen=True):
    """Which models to serve."""

    #: Folder in the model repository format.
    repository: str = "models"
    #: Names to load at start; empty: every model found.
    load: tuple[str, ...] = ()
    #: Where calibrations are kept; None: the user's cache folder.
    cache: str | None = None
    #: What calibrations and compiled models may take there; those not used for long go first.
    cache_limit: str = "2 GiB"
    #: What timing a new model may take; its memory is measured in less than a second besides.
    calibration_s: Positive = 6.0
    #: How models are run: `eager` as PyG wrote them, `csr` over sorted edges, `compiled` and
    #: `csr_compiled` the same as machine code, or for each model the fastest that agrees with PyG.
    #: On CUDA nothing is compiled.
    executor: Literal["auto", "eager", "csr", "compiled", "csr_compiled"] = "auto"
    #: Whether `auto` compiles models, some 10 s each when first seen, with g++: before they serve,
    #: or `background`: while they do, on what lanes leave of one core.
    compile: bool | Literal["background"] = False

    @property
    def cache_limit_bytes(self) -> int:
        """`cache_limit` in bytes."""
        return parse_bytes(self.cache_limit, "models.cache_limit")


class DeviceConfig(Section, frozen=True):
    """What the lanes run on and how much of it they may use."""

    kind: Literal["auto", "cpu", "cuda"] = "auto"
    #: Budget for weights and running tasks; None: what the device has, less a reserve.
    memory_budget: str | None = None
    #: Resident execution slots of each device; None: by device (CPU: one per core). GPU: up to 28.
    lanes: Count | None = None
    #: Whether runs on a GPU whose shapes recur are captured and replayed, where that gains.
    cuda_graphs: Literal["auto", "off"] = "auto"
    #: GPUs to serve on, in CUDA's order; None: all of the first one's model.
    gpus: Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(min_length=1)] | None = None

    @property
    def memory_budget_bytes(self) -> int | None:
        """`memory_budget` in bytes, None when left to the device."""
        if self.memory_budget is None:
            return None
        return parse_bytes(self.memory_budget, "device.memory_budget")


class SchedulingConfig(Section, frozen=True):
    """How requests are planned and run."""

    policy: str = "slack"
    discipline: str = "preemptive"
    window: Literal["adaptive", "fixed"] = "adaptive"
    #: Length of a fixed window.
    window_ms: Positive = 10.0
    #: QoS target as a multiple of the estimated solo time.
    qos_factor: Annotated[float, Meta(ge=1.0)] = 2.0
    #: Run waiting requests of one model as one where that saves time and no target.
    merge: bool = True
    #: While more work comes than the lanes can do, refuse at once what would be late.
    shed_late: bool = False


class ReportConfig(Section, frozen=True):
    """Where the QoS report is kept."""

    database: str = "gnnserve.db"
    #: File for everything the scheduler is told and answers, to be replayed; None: not kept.
    journal: str | None = None


class GraphConfig(Section, frozen=True):
    """A graph held by the server, for requests by node id; `file` or `dataset`, not both."""

    name: str
    #: An .npz archive, a .safetensors file, or a folder of .npy files.
    file: str | None = None
    #: `community`, or a dataset of the paper: its file where `folder` has one, else generated.
    dataset: str | None = None
    folder: str | None = None
    #: Of the nodes and edges of a generated dataset, this share.
    scale: Annotated[float, Meta(gt=0, le=1)] = 1.0
    #: Add the reverse of every edge; loops and repeats are then dropped.
    undirected: bool = False
    #: Type that features which are no small whole numbers are kept in.
    feature_dtype: Literal["float32", "float16"] = "float32"
    #: Leave features in a file and map it; `auto`: when they take over a quarter of the device.
    memory_map: Literal["auto", "always", "never"] = "auto"
    #: Memory of each GPU for the features that are asked for most: `auto`, `off`, or a size.
    hot_memory: str = "auto"

    @property
    def hot_memory_bytes(self) -> int | None:
        """`hot_memory` in bytes, 0 for `off`, None when left to the server."""
        if self.hot_memory in ("auto", "off"):
            return None if self.hot_memory == "auto" else 0
        return parse_bytes(self.hot_memory, f"graph.hot_memory of '{self.name}'")


class Config(Section, frozen=True):
    """The whole file."""

    server: ServerConfig = ServerConfig()
    models: ModelsConfig = ModelsConfig()
    device: DeviceConfig = DeviceConfig()
    scheduling: SchedulingConfig = SchedulingConfig()
    report: ReportConfig = ReportConfig()
    graph: tuple[GraphConfig, ...] = ()
    #: Folder of the file; relative paths in it start here.
    base: Path = Path()

    def cache_path(self) -> Path:
        """Folder of what is kept from one start to the next."""
        return self.path(self.models.cache or _DEFAULT_CACHE)

    def path(self, value: str) -> Path:
        """`value` as a path, resolved against the file's folder."""
        return (self.base / Path(value).expanduser()).resolve()


def parse_bytes(text: str, key: str) -> int:
    """Bytes in a size such as `"4 GiB"`, `"512MB"` or `"1048576"`.

    Raises ConfigError naming `key` when `text` is no size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = (match[2].upper() or "B") if match else ""
    if match is None or unit not in _UNITS:
        raise ConfigError(f"{key}: {text!r} is not a size; write a number and a unit: '4 GiB'")
    size_bytes = int(float(match[1]) * _UNITS[unit])
    if size_bytes <= 0:
        raise ConfigError(f"{key}: {text!r} must be more than 0 bytes")
    return size_bytes


def load_config(path: Path) -> Config:
    """Read, decode and cross-check the file at `path`; raises ConfigError."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    config: Config = decode_table(table, Config, str(path), hidden=frozenset({"base"}))
    config = msgspec.structs.replace(config, base=path.parent.resolve())
    _check(config, path)
    return config


def decode_table(
    table: dict[str, Any], kind: type[StructT], where: str, hidden: frozenset[str] = frozenset()
) -> StructT:
    """Decode a TOML table into `kind`; a ConfigError starts with `where` and names the key."""
    _refuse_unknown(table, kind, where, "", hidden)
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        text = str(error)
        rule, _, key = text.partition(" - at `$.")
        raise ConfigError(f"{where}: {key.rstrip('`') or 'file'}: {rule}") from error


def _refuse_unknown(
    table: dict[str, Any], kind: type, where: str, prefix: str, hidden: frozenset[str]
) -> None:
    """Walk `table` beside the struct `kind` and refuse the first key it does not have."""
    fields = {f.encode_name: f.type for f in msgspec.structs.fields(kind)}
    known = [name for name in fields if name not in hidden]
    for key, value in table.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f"did you mean '{prefix}{near[0]}'?" if near else f"known: {', '.join(known)}"
            raise ConfigError(f"{where}: unknown key '{prefix}{key}'; {hint}")
        inner = fields[key]
        if isinstance(value, dict) and isinstance(inner, type) and issubclass(inner, Section):
            _refuse_unknown(value, inner, where, f"{prefix}{key}.", frozenset())
        if isinstance(value, list) and key == "graph":
            for index, row in enumerate(row for row in value if isinstance(row, dict)):
                _refuse_unknown(row, GraphConfig, where, f"graph[{index}].", frozenset())


def _check(config: Config, path: Path) -> None:
    """Rules over more than one key, and names that must be registered."""
    from serve.core.disciplines import DISCIPLINES
    from serve.core.policies import POLICIES

    scheduling = config.scheduling
    for key, value, known in (
        ("policy", scheduling.policy, POLICIES),
        ("discipline", scheduling.discipline, DISCIPLINES),
    ):
        if value not in known:
            raise ConfigError(
                f"{path}: scheduling.{key}: '{value}' is not one of {', '.join(sorted(known))}"
            )
    try:
        _ = config.server.max_message_bytes, config.device.memory_budget_bytes
        _ = config.models.cache_limit_bytes
        _ = [graph.hot_memory_bytes for graph in config.graph]
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    ports = config.server.grpc_port, config.server.http_port
    if ports[0] == ports[1] != 0:
        raise ConfigError(
            f"{path}: server.grpc_port and server.http_port are both {ports[0]}; they must differ"
        )
    for index, graph in enumerate(config.graph):
        if (graph.file is None) == (graph.dataset is None):
            both = "both given" if graph.file is not None else "both missing"
            raise ConfigError(
                f"{path}: graph[{index}].file and graph[{index}].dataset are {both}; give one"
            )
        if not graph.name:
            raise ConfigError(f"{path}: graph[{index}].name: it is empty")
    names = [graph.name for graph in config.graph]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{path}: graph: the name '{name}' is given more than once")
