"""The configuration file: TOML, decoded strictly into frozen structs (see ``tables``).

All that is wrong with it is told at once, in one ``ConfigError``. Relative paths are resolved
against the file's folder. The core never sees these structs: it is handed small parameter objects
made from them.
"""

import ipaddress
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from serve.core.types import Nanos
from serve.errors import ConfigError
from serve.toml_tables import Section, decode_sound, read_toml

Port = Annotated[int, Meta(ge=0, le=65535)]
Count = Annotated[int, Meta(ge=1)]
Positive = Annotated[float, Meta(gt=0)]

_DEFAULT_CACHE = "~/.cache/gnnserve"
_UNITS = {"B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
          "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}  # fmt: skip


class ServerConfig(Section, frozen=True):
    """Where to listen and what to accept."""

    host: str = "127.0.0.1"
    grpc_port: Port = 8001
    http_port: Port = 8002
    #: Largest gRPC message taken or sent.
    max_message: str = "64 MiB"
    #: Requests accepted and not yet answered; more are refused with a retry hint.
    max_queue: Count = 512
    #: How long lanes may take to start, and a model to load or to be compiled.
    start_timeout_s: Positive = 150.0
    #: How long the message of a call may take to arrive once the call has begun.
    receive_timeout_s: Positive = 10.0
    #: How long a stop waits for accepted requests before it gives up on them.
    drain_timeout_s: Positive = 30.0
    #: What a stop may take besides; then the process ends by force, with exit code 1.
    stop_timeout_s: Positive = 5.0
    #: How long a run may take before it is stopped and answered with an error, by the time that it
    #: had a core; None: 60 s or 200 times its estimate, whichever is more.
    max_run_s: Positive | None = None
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
    def max_run_ns(self) -> Nanos | None:
        """`max_run_s` in nanoseconds."""
        return None if self.max_run_s is None else Nanos(int(self.max_run_s * 1e9) + 1)

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
    #: Have `auto` compile models before they serve, some 10 s each when first seen, with g++.
    compile: bool = False

    @property
    def cache_limit_bytes(self) -> int:
        """`cache_limit` in bytes."""
        return parse_bytes(self.cache_limit, "models.cache_limit")


class DeviceConfig(Section, frozen=True):
    """What the lanes run on and how much of it they may use."""

    kind: Literal["auto", "cpu", "cuda"] = "auto"
    #: Budget for weights and running tasks; None: what the device has, on a processor within the
    #: limits of the server's control groups, less a reserve.
    memory_budget: str | None = None
    #: Resident execution slots of each device; None: by device (CPU: by the cores, or by the CPU
    #: quota if that is smaller). GPU: up to 28.
    lanes: Count | None = None
    #: What a lane's process may hold between runs beyond its models, as a model leaks, before it is
    #: started anew; None: what lanes keep, and each its part of a quarter of the budget, at least
    #: 128 MiB. Not for lanes on a GPU.
    max_lane_memory: str | None = None
    #: Niceness of lanes that compute. With 19 the server's own threads take a core before them, and
    #: so does any other program of the same session or control group; 0 shares evenly.
    lane_niceness: Annotated[int, Meta(ge=0, le=19)] = 19
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

    @property
    def max_lane_memory_bytes(self) -> int | None:
        """`max_lane_memory` in bytes, None when left to the device."""
        if self.max_lane_memory is None:
            return None
        return parse_bytes(self.max_lane_memory, "device.max_lane_memory")


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
    config, problems = read_config(path)
    if problems:
        raise ConfigError("\n".join(problems))
    return config


def read_config(path: Path) -> tuple[Config, list[str]]:
    """Return what of the file at `path` is right, and everything that is wrong with it.

    What is wrong has its default. Raises ConfigError when there is no such file, or no TOML in it.
    """
    table = read_toml(path)
    found, problems = decode_sound(table, Config, str(path), hidden=frozenset({"base"}))
    config = msgspec.structs.replace(found or Config(), base=path.parent.resolve())
    return config, [*problems, *(f"{path}: {rule}" for rule in _broken_rules(config))]


def _broken_rules(config: Config) -> Iterator[str]:
    """Rules that one key does not show, as far as they are broken."""
    from serve.core.disciplines import DISCIPLINES
    from serve.core.policies import POLICIES

    scheduling = config.scheduling
    for key, value, known in (
        ("policy", scheduling.policy, POLICIES),
        ("discipline", scheduling.discipline, DISCIPLINES),
    ):
        if value not in known:
            yield f"scheduling.{key}: '{value}' is not one of {', '.join(sorted(known))}"
    sizes: list[Callable[[], object]] = [
        lambda: config.server.max_message_bytes,
        lambda: config.device.memory_budget_bytes,
        lambda: config.device.max_lane_memory_bytes,
        lambda: config.models.cache_limit_bytes,
        *(lambda graph=graph: graph.hot_memory_bytes for graph in config.graph),
    ]
    for size in sizes:
        try:
            size()
        except ConfigError as error:
            yield str(error)
    ports = config.server.grpc_port, config.server.http_port
    if ports[0] == ports[1] != 0:
        yield f"server.grpc_port and server.http_port are both {ports[0]}; they must differ"
    for index, graph in enumerate(config.graph):
        if (graph.file is None) == (graph.dataset is None):
            both = "both given" if graph.file is not None else "both missing"
            yield f"graph[{index}].file and graph[{index}].dataset are {both}; give one"
        if not graph.name:
            yield f"graph[{index}].name: it is empty"
    names = [graph.name for graph in config.graph]
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            yield f"graph: the name '{name}' is given more than once"
