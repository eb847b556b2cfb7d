"""The configuration file: TOML, decoded strictly into frozen structs (see ``tables``).

One ``ConfigError`` reports every mistake in the file. Relative paths are resolved against the
file's folder. The core never sees these structs; it gets small parameter objects made from them.
"""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from serve.config_cluster import ClusterConfig, broken_rules, is_loopback
from serve.config_device import DeviceConfig
from serve.config_settings import Setting, apply_settings, keys_of
from serve.core.types import Nanos
from serve.errors import ConfigError
from serve.toml_tables import Count, Section, decode_sound, read_toml
from serve.units import parse_bytes, parse_duration

Port = Annotated[int, Meta(ge=0, le=65535)]
#: Times in seconds. The system's clocks and waits take no more than some weeks.
Positive = Annotated[float, Meta(gt=0, le=1e6)]
NotNegative = Annotated[float, Meta(ge=0, le=1e6)]
#: Front end of the gRPC port; see `server.front`.
FrontKind = Literal["auto", "native", "python"]

_MOST_MESSAGE_BYTES = 2**31 - 1
#: A smaller database would hold no useful number of rows.
_LEAST_DATABASE_BYTES = 2**20
#: Keys that hold a size in memory or on disk.
SIZE_KEYS = frozenset(
    {
        "server.max_message",
        "server.max_receiving",
        "server.max_receiving_of_connection",
        "models.cache_limit",
        "device.memory_budget",
        "device.max_lane_memory",
        "device.max_lane_files",
        "report.journal_size",
        "report.record_size",
        "report.record_payloads_size",
        "training.memory",
        "training.max_files",
    }
)
#: Keys whose new values a running server takes when it reads its configuration again.
RELOADABLE = frozenset(
    {
        "server.max_queue",
        "server.ready_when",
        "server.shutdown_delay_s",
        "server.drain_timeout_s",
        "server.stop_timeout_s",
        "server.max_run_s",
        "scheduling.qos_factor",
        "scheduling.shed_late",
        "report.keep",
        "report.max_size",
        "report.access_log_share",
        "log.format",
        "log.level",
        "traces.share",
    }
)
#: Fields of the configuration that are no keys of the file.
NO_KEYS = frozenset({"base", "file"})


class TlsConfig(Section, frozen=True):
    """Section `[server.tls]`: encryption of the gRPC and HTTP ports, with files in PEM format."""

    #: Certificate of the server, followed by those of the authorities up to the root.
    certificate: str | None = None
    #: Private key of the certificate.
    key: str | None = None
    #: Certificates of the authorities whose clients may connect; with it every client must show a
    #: certificate, whose alternative name is its principal. Lists of revoked certificates in the
    #: same file count, on the native front end and over HTTP.
    client_ca: str | None = None


class ServerConfig(Section, frozen=True):
    """Section `[server]`: addresses, and limits on requests and on stopping."""

    host: str = "127.0.0.1"
    #: Listen without encryption on an address that other machines reach.
    insecure: bool = False
    tls: TlsConfig = TlsConfig()
    #: File of the Unix socket for administrators, which a server has that does not let everybody
    #: do everything. None: a file that `gnnserve model` finds by the gRPC port.
    admin_socket: str | None = None
    grpc_port: Port = 8001
    #: Front end of the gRPC port: `python` is gRPC's own, `native` compiled code over libnghttp2
    #: with gRPC behind it, `auto` is `native` where that library is installed.
    front: FrontKind = "auto"
    http_port: Port = 8002
    #: Offer inference and model control on the HTTP port too, by a process of its own; without it
    #: the port has health, metrics and the report only.
    rest: bool = True
    #: Largest gRPC message that the server receives or sends.
    max_message: str = "64 MiB"
    #: Memory of calls that are not complete, of their places in staging memory, and of answers that
    #: are not sent, each, of all clients of the native front. None: 4 times `max_message`, at least
    #: 64 MiB.
    max_receiving: str | None = None
    #: The same of one connection. None: half of `max_receiving`.
    max_receiving_of_connection: str | None = None
    #: Most requests accepted and not yet answered; another is refused with a retry hint.
    max_queue: Count = 512
    #: Time limit for starting the lanes, and for loading or compiling one model.
    start_timeout_s: Positive = 150.0
    #: Models that must serve before the server is ready: `all` that it loads at start, whether they
    #: then load or not, or `any` one. Each model answers requests as soon as it has loaded.
    ready_when: Literal["all", "any"] = "all"
    #: Connections to the native front's port at once, and those of them from one address (of IPv6,
    #: one network of 64 bits). A newcomer beyond gets the place of one that is idle, if there is.
    max_connections: Count = 1024
    max_connections_of_peer: Count = 256
    #: Time for a call's message to arrive after the call began. It has longer while it comes with
    #: 64 KiB a second and more, except on the Python front.
    receive_timeout_s: Positive = 10.0
    #: Time after a signal to stop in which the server still serves but is not ready, so that load
    #: balancers send their requests elsewhere before it refuses them.
    shutdown_delay_s: NotNegative = 0.0
    #: Time that a stop waits for the accepted requests before it gives up on them.
    drain_timeout_s: Positive = 30.0
    #: Time for the rest of a stop; after it the process ends by force, with exit code 1.
    stop_timeout_s: Positive = 5.0
    #: Time limit of a run, counted while it has a core; a run beyond it is stopped and answered
    #: with an error. None: 60 s or 200 times the estimate, whichever is more.
    max_run_s: Positive | None = None
    #: Read inputs from shared memory objects of this host and write outputs there. A client may
    #: name any object in /dev/shm that the server may open. `auto`: only while the server listens
    #: on a loopback address.
    shared_memory: Literal["auto", "on", "off"] = "auto"
    #: Refuse features that contain NaN or infinity.
    reject_nonfinite: bool = True

    @property
    def max_message_bytes(self) -> int:
        """`max_message` in bytes."""
        size_bytes = parse_bytes(self.max_message, "server.max_message")
        if size_bytes > _MOST_MESSAGE_BYTES:
            raise ConfigError(
                f"server.max_message: {self.max_message!r} must be less than 2 GiB, as gRPC has no "
                "larger messages"
            )
        return size_bytes

    @property
    def max_receiving_bytes(self) -> int:
        """`max_receiving` in bytes, its default decided."""
        if self.max_receiving is None:
            return max(4 * self.max_message_bytes, 64 << 20)
        return self._of_a_message(self.max_receiving, "server.max_receiving")

    @property
    def max_receiving_bytes_of_connection(self) -> int:
        """`max_receiving_of_connection` in bytes, its default decided."""
        if (given := self.max_receiving_of_connection) is None:
            return max(self.max_receiving_bytes // 2, self.max_message_bytes)
        return self._of_a_message(given, "server.max_receiving_of_connection")

    def _of_a_message(self, text: str, key: str) -> int:
        """Return a size in which the largest message has room; raises ConfigError."""
        size_bytes = parse_bytes(text, key)
        if size_bytes < self.max_message_bytes:
            largest = f"server.max_message {self.max_message!r}"
            raise ConfigError(f"{key}: {text!r} is less than {largest}")
        return size_bytes

    @property
    def max_run_ns(self) -> Nanos | None:
        """`max_run_s` in nanoseconds."""
        return None if self.max_run_s is None else Nanos(int(self.max_run_s * 1e9) + 1)

    @property
    def offers_shared_memory(self) -> bool:
        """True when clients may use shared memory: `shared_memory`, with `auto` decided."""
        if self.shared_memory != "auto":
            return self.shared_memory == "on"
        return self.on_loopback

    @property
    def on_loopback(self) -> bool:
        """True when only this machine reaches the server."""
        return is_loopback(self.host)


class AuthConfig(Section, frozen=True):
    """Section `[auth]`: who may call what."""

    #: File of the tokens, which `gnnserve token` writes; read again when it changes. None: calls
    #: need no token.
    tokens_file: str | None = None
    #: Let tokens with the role `admin` administer the server through the gRPC and HTTP ports, not
    #: through the admin socket alone.
    admin_on_port: bool = False


class ModelsConfig(Section, frozen=True):
    """Section `[models]`: which models to serve, and how they are calibrated and run."""

    #: Folder in the model repository format.
    repository: str = "models"
    #: Names of the models to load at start; empty: all.
    load: tuple[str, ...] = ()
    #: Look at the repository every few seconds, and load what is new or has changed in it.
    watch: bool = False
    #: Folder of the calibrations and compiled models; None: the user's cache folder.
    cache: str | None = None
    #: Most bytes of calibrations and compiled models; the least recently used are deleted first.
    cache_limit: str = "2 GiB"
    #: Time for timing a new model. Measuring its memory takes less than a second more.
    calibration_s: Positive = 6.0
    #: Executor of the models: `eager` is PyG's own code and `csr` has kernels over sorted edges;
    #: `compiled` and `csr_compiled` are these two compiled to machine code. `auto`: for each model
    #: the fastest whose outputs agree with PyG's. Nothing is compiled on CUDA.
    executor: Literal["auto", "eager", "csr", "compiled", "csr_compiled"] = "auto"
    #: Let `auto` try compiled executors too. Each new model is then compiled with g++ before it
    #: serves, which takes some 10 s.
    compile: bool = False

    @property
    def cache_limit_bytes(self) -> int:
        """`cache_limit` in bytes."""
        return parse_bytes(self.cache_limit, "models.cache_limit")


class SchedulingConfig(Section, frozen=True):
    """Section `[scheduling]`: how requests are planned and run."""

    policy: str = "slack"
    discipline: str = "preemptive"
    window: Literal["adaptive", "fixed"] = "adaptive"
    #: Length of a fixed window.
    window_ms: Annotated[float, Meta(ge=0.001, le=1e6)] = 10.0
    #: QoS target of a request, as a multiple of its estimated solo time.
    qos_factor: Annotated[float, Meta(ge=1.0, le=1e6)] = 2.0
    #: Merge waiting requests of one model into one run where that saves time and breaks no target.
    merge: bool = True
    #: Under overload, refuse at once a request that would be late.
    shed_late: bool = False


class TrainingConfig(Section, frozen=True):
    """Section `[training]`: training of models beside requests, on what these leave."""

    #: Jobs that train at once, each in a process of its own; 0: none.
    workers: Annotated[int, Meta(ge=0, le=64)] = 0
    #: Memory for all of them, which requests then do not have.
    memory: str = "256 MiB"
    #: Order of jobs: that of a policy for requests.
    policy: str = "lmcf"
    #: `strict`: a job runs only while there is no request; `governed`: beside requests, too, as
    #: far as these are expected to stay in time.
    slack: Literal["governed", "strict"] = "strict"
    #: `csr`: known layers run over kernels with gradients; `eager`: PyG's own code runs.
    executor: Literal["csr", "eager"] = "csr"
    #: Time between checkpoints, at most what a job loses when its process ends.
    checkpoint_s: Positive = 10.0
    #: Disk that each job may take, its graph apart.
    max_files: str = "1 GiB"
    #: Folder for jobs and their checkpoints.
    folder: str = "training"

    @property
    def memory_bytes(self) -> int:
        """`memory` in bytes; 0 without workers."""
        return parse_bytes(self.memory, "training.memory") if self.workers else 0

    @property
    def max_files_bytes(self) -> int:
        """`max_files` in bytes."""
        return parse_bytes(self.max_files, "training.max_files")


class ReportConfig(Section, frozen=True):
    """Section `[report]`: the files that record what the server did."""

    database: str = "gnnserve.db"
    #: Age at which rows of the database are deleted, such as "30d"; None: at no age.
    keep: str | None = None
    #: Size of the database beyond which its oldest rows are deleted; `off`: it may grow for ever.
    max_size: str = "2 GiB"
    #: File for every event and command of the scheduler, to replay them; None: no journal.
    journal: str | None = None
    #: Size of the journal at which it ends.
    journal_size: str = "1 GiB"
    #: File for a line of JSON about each finished request; None: no access log.
    access_log: str | None = None
    #: Share of the requests answered in time that get such a line; late and failed ones always do.
    access_log_share: Annotated[float, Meta(ge=0, le=1)] = 1.0
    #: File for sizes and times of the requests, to replay them; emptied at each start. None: no
    #: recording.
    record: str | None = None
    #: Share of the requests that are recorded.
    record_share: Annotated[float, Meta(ge=0, le=1)] = 1.0
    #: Size of the recording at which it ends.
    record_size: str = "64 MiB"
    #: Record the tensors of these requests too, in a file beside the recording.
    record_payloads: bool = False
    #: Size of that file at which it ends.
    record_payloads_size: str = "1 GiB"
    #: Inputs whose values are zeros in it.
    record_redacted: tuple[str, ...] = ()

    @property
    def journal_bytes(self) -> int:
        """`journal_size` in bytes."""
        return parse_bytes(self.journal_size, "report.journal_size")

    @property
    def record_payloads_bytes(self) -> int:
        """`record_payloads_size` in bytes."""
        return parse_bytes(self.record_payloads_size, "report.record_payloads_size")

    @property
    def record_bytes(self) -> int:
        """`record_size` in bytes."""
        return parse_bytes(self.record_size, "report.record_size")

    @property
    def keep_ns(self) -> int | None:
        """`keep` in ns; None when rows are kept at any age."""
        if self.keep is None:
            return None
        return int(parse_duration(self.keep, "report.keep") * 1e9)

    @property
    def max_size_bytes(self) -> int | None:
        """`max_size` in bytes; None when the database may grow for ever."""
        if self.max_size == "off":
            return None
        size_bytes = parse_bytes(self.max_size, "report.max_size")
        if size_bytes < _LEAST_DATABASE_BYTES:
            raise ConfigError(f"report.max_size: {self.max_size!r} is less than 1 MiB")
        return size_bytes


class LogConfig(Section, frozen=True):
    """Section `[log]`: what the server writes to standard error."""

    #: Format of a line; `auto`: text on a terminal, one JSON object a line elsewhere.
    format: Literal["auto", "json", "text"] = "auto"
    #: Lowest level that is written; the environment variable `GNNSERVE_LOG` comes before it.
    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"


class TracesConfig(Section, frozen=True):
    """Section `[traces]`: traces of requests for OpenTelemetry."""

    #: URL of a receiver of OTLP over gRPC, such as "http://localhost:4317"; None: no traces.
    endpoint: str | None = None
    #: Share of the requests that are traced though their clients name no span. Clients that send
    #: `traceparent` decide by themselves.
    share: Annotated[float, Meta(ge=0, le=1)] = 0.01


class GraphConfig(Section, frozen=True):
    """Section `[[graph]]`: a resident graph, for requests by node ids; `file` or `dataset`."""

    name: str
    #: An .npz archive, a .safetensors file, or a folder of .npy files.
    file: str | None = None
    #: `community`, `academic`, or a dataset of the paper: read from its file in `folder`, else
    #: generated.
    dataset: str | None = None
    folder: str | None = None
    #: Share of the nodes and edges of a generated dataset.
    scale: Annotated[float, Meta(gt=0, le=1)] = 1.0
    #: Add the reverse of every edge and drop self-loops and repeated edges.
    undirected: bool = False
    #: Stored type of the features, unless all are small whole numbers, which are stored as uint8.
    feature_dtype: Literal["float32", "float16"] = "float32"
    #: Leave the features in a file and map it; `auto`: when they exceed a quarter of the device.
    memory_map: Literal["auto", "always", "never"] = "auto"
    #: Memory of each GPU for the features that are asked for most: `auto`, `off`, or a size.
    hot_memory: str = "auto"
    #: File with the part of each node, of `gnnserve graph partition --out`: the graph is shared out
    #: over the servers of `[cluster.rows]`. None: all of it is here.
    parts: str | None = None
    #: What of a part is on its servers alone: the features of its nodes, or `all`, which is their
    #: in-edges too.
    share: Literal["features", "all"] = "features"
    #: Share of the nodes, those with most out-edges, that are on all of these servers.
    hot_share: Annotated[float, Meta(ge=0, le=1)] = 0.0

    @property
    def hot_memory_bytes(self) -> int | None:
        """`hot_memory` in bytes, 0 for `off`, None when left to the server."""
        if self.hot_memory in ("auto", "off"):
            return None if self.hot_memory == "auto" else 0
        return parse_bytes(self.hot_memory, f"graph.hot_memory of '{self.name}'")


class EffectiveValue(msgspec.Struct, frozen=True):
    """A configuration key as the server reads it."""

    key: str
    value: object
    #: `file`, `default`, `--set`, or the environment variable.
    source: str
    #: A running server takes a new value when it reads its configuration again.
    reloadable: bool


class Config(Section, frozen=True):
    """The whole configuration file."""

    server: ServerConfig = ServerConfig()
    auth: AuthConfig = AuthConfig()
    models: ModelsConfig = ModelsConfig()
    device: DeviceConfig = DeviceConfig()
    scheduling: SchedulingConfig = SchedulingConfig()
    training: TrainingConfig = TrainingConfig()
    report: ReportConfig = ReportConfig()
    log: LogConfig = LogConfig()
    traces: TracesConfig = TracesConfig()
    cluster: ClusterConfig = ClusterConfig()
    graph: tuple[GraphConfig, ...] = ()
    #: The file's folder, from which relative paths start. Not a key of the file.
    base: Path = Path()
    #: The file itself; None for a configuration without one. Not a key of the file.
    file: Path | None = None

    @property
    def shares_graphs(self) -> bool:
        """True when there are graphs that are shared out over several servers."""
        return any(graph.parts is not None for graph in self.graph)

    def cache_path(self) -> Path:
        """Return the folder of the calibration cache, in the user's cache folder by default."""
        if self.models.cache is not None:
            return self.path(self.models.cache)
        # The XDG Base Directory Specification wants relative paths ignored.
        user = Path(os.environ.get("XDG_CACHE_HOME", ""))
        return self.path(str(user if user.is_absolute() else "~/.cache")) / "gnnserve"

    def path(self, value: str) -> Path:
        """Return `value` as a path, resolved against the file's folder."""
        return (self.base / Path(value).expanduser()).resolve()


def load_config(path: Path, settings: Sequence[Setting] = ()) -> Config:
    """Read, decode and cross-check the file at `path`; raises ConfigError with every mistake.

    `settings` replace values of the file.
    """
    config, problems = read_config(path, settings)
    if problems:
        raise ConfigError("\n".join(problems))
    return config


def read_config(path: Path, settings: Sequence[Setting] = ()) -> tuple[Config, list[str]]:
    """Return the configuration at `path` and a message for each mistake in it.

    `settings` replace values of the file. A key with a mistake has its default value. Raises
    ConfigError when the file cannot be read or is not TOML.
    """
    return _read(path, settings)[:2]


def _read(
    path: Path, settings: Sequence[Setting]
) -> tuple[Config, list[str], dict[str, Any], dict[str, str]]:
    """Return what `read_config` does, the table, and the keys that settings decided."""
    try:
        written = read_toml(path)
    except ConfigError as error:
        if path.exists():
            raise
        advice = f"`gnnserve init {path.name}` writes one, --config names another"
        raise ConfigError(f"{error}; {advice}") from error
    table, origins, wrong = apply_settings(written, settings, Config)
    found, problems = decode_sound(table, Config, str(path), hidden=NO_KEYS)
    config = msgspec.structs.replace(
        found or Config(), base=path.parent.resolve(), file=path.absolute()
    )
    # A rule is broken by what decided its key.
    rules = (
        f"{next((origin for key, origin in origins.items() if key in rule), path)}: {rule}"
        for rule in _broken_rules(config)
    )
    return config, [*wrong, *problems, *rules], table, origins


def effective_values(path: Path, settings: Sequence[Setting] = ()) -> list[EffectiveValue]:
    """Return every key with its value and where that comes from, in the order of the sections.

    Raises ConfigError with every mistake.
    """
    config, problems, table, origins = _read(path, settings)
    if problems:
        raise ConfigError("\n".join(problems))
    found = []
    for key, _ in keys_of(Config):
        value: Any = config
        place: Any = table
        for name in key.split("."):
            value = getattr(value, name)
            place = place.get(name) if isinstance(place, dict) else None
        given = "default" if place is None else "file"
        source = origins.get(key, given)
        found.append(EffectiveValue(key, msgspec.to_builtins(value), source, key in RELOADABLE))
    for index, graph in enumerate(config.graph):
        row = table["graph"][index]
        for name, value in msgspec.to_builtins(graph).items():
            given = "file" if name in row else "default"
            found.append(EffectiveValue(f"graph[{index}].{name}", value, given, False))
    return found


def _broken_rules(config: Config) -> Iterator[str]:
    """Yield a message for each broken rule that decoding does not check."""
    from serve.core.disciplines import DISCIPLINES
    from serve.core.policies import POLICIES

    scheduling = config.scheduling
    for key, value, known in (
        ("policy", scheduling.policy, POLICIES),
        ("discipline", scheduling.discipline, DISCIPLINES),
    ):
        if value not in known:
            yield f"scheduling.{key}: '{value}' is not one of {', '.join(sorted(known))}"
    if config.training.policy not in POLICIES:
        listed = ", ".join(sorted(POLICIES))
        yield f"training.policy: '{config.training.policy}' is not one of {listed}"
    sizes: list[Callable[[], object]] = [
        lambda: config.server.max_message_bytes,
        lambda: config.server.max_receiving_bytes,
        lambda: config.server.max_receiving_bytes_of_connection,
        lambda: config.device.memory_budget_bytes,
        lambda: config.device.max_lane_memory_bytes,
        lambda: config.models.cache_limit_bytes,
        lambda: config.device.max_lane_files_bytes,
        lambda: config.training.memory_bytes,
        lambda: config.training.max_files_bytes,
        lambda: config.report.keep_ns,
        lambda: config.report.max_size_bytes,
        lambda: config.report.journal_bytes,
        lambda: config.report.record_bytes,
        lambda: config.report.record_payloads_bytes,
        lambda: config.cluster.rows.log_bytes,
        *(lambda graph=graph: graph.hot_memory_bytes for graph in config.graph),
    ]
    wrong: dict[str, None] = {}  # each once, though one size may be a part of another
    for size in sizes:
        try:
            size()
        except ConfigError as error:
            wrong[str(error)] = None
    yield from wrong
    if config.report.record_payloads and config.report.record is None:
        yield "report.record_payloads: payloads lie beside a recording; name it in report.record"
    if config.cluster.servers_file is not None and config.server.tls.certificate is not None:
        yield "cluster.servers_file: servers pass on without the encryption of server.tls"
    yield from broken_rules(config.cluster.rows, config.graph)
    endpoint = config.traces.endpoint
    if endpoint is not None and not re.fullmatch(r"https?://[^/\s]+/?", endpoint):
        yield f"traces.endpoint: '{endpoint}' is no URL such as http://localhost:4317"
    ports = config.server.grpc_port, config.server.http_port
    if ports[0] == ports[1] != 0:
        yield f"server.grpc_port and server.http_port are both {ports[0]}; they must differ"
    server, tls = config.server, config.server.tls
    if (tls.certificate is None) != (tls.key is None):
        yield "server.tls.certificate and server.tls.key go together; one is missing"
    if tls.client_ca is not None and tls.certificate is None:
        yield "server.tls.client_ca: it needs server.tls.certificate and server.tls.key"
    if not (server.on_loopback or server.insecure) and tls.certificate is None:
        yield (
            f"server.host: '{server.host}' is reached by other machines; set "
            "server.tls.certificate and server.tls.key, or server.insecure = true where the "
            "network is trusted"
        )
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
