"""Options of a load run."""

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from loadgen.graph_files import names_own_graphs
from serve.errors import ConfigError
from serve.files import read_text
from serve.graphs.datasets import graph_name
from serve.profiles import parse_profile
from serve.workload import ARRIVALS, MIX, PoolSpec, parse_weights

#: Ids of a request unless told, and the most that a request of a load may have.
DEFAULT_IDS = "1-64"
MOST_IDS = 1_000_000
_MOST_TOKEN_BYTES = 4096
#: Variable with the folder of real graphs.
DATA_VARIABLE = "GNNSERVE_DATA"


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Options of one run: a trace to replay, or a workload with a rate or ρ and a length."""

    #: HOST:PORT of the server's gRPC port.
    target: str
    #: A model that the server has, or `mix` of all that are ready.
    workload: str = MIX
    #: Models that `mix` leaves out.
    without: tuple[str, ...] = ()
    #: Requests per second.
    rate_hz: float | None = None
    #: Offered load instead of a rate, which then follows from the server's estimates.
    rho: float | None = None
    #: Measure the solo times for `rho` at the client, including transport and the generator.
    end_to_end: bool = False
    duration_s: float | None = None
    requests: int | None = None
    arrivals: str = "poisson"
    #: How the rate changes over the duration, see ``serve.profiles``; empty for not at all.
    profile: str = ""
    #: Requests kept in flight, each followed by another (a closed loop), instead of a rate.
    in_flight: int | None = None
    seed: int = 0
    #: Tenants of the requests, with weights as in `a=3,b=1`; empty for none.
    tenant: str = ""
    #: Of each request; 0 for the server's own.
    priority: int = 0
    #: Target of each request instead of the server's own.
    target_ms: float | None = None
    #: Files with tokens: one for all requests, or `TENANT=FILE` for those of a tenant.
    token_files: tuple[str, ...] = ()
    #: Certificates of the authorities to trust, in a PEM file; the connection is then encrypted.
    ca: Path | None = None
    #: Graph of the server whose nodes are asked about; empty to send subgraphs.
    graph: str = ""
    #: Type of these nodes, in a graph with several.
    node_type: str = ""
    #: Number of ids in a request: one number, or the fewest and the most, as 1-64.
    ids: str = ""
    #: Fan-outs as the request parameter; empty for the model's own.
    fanouts: str = ""
    #: Settings of the graph pool.
    pool: PoolSpec = field(default_factory=PoolSpec)
    #: Graphs of one's own, in a file or a folder; or a folder of the datasets of the pool. With a
    #: graph of the server only the environment may name them, for other runs.
    data: Path | None = None
    #: Trace to replay.
    trace: Path | None = None
    #: Send recorded requests with their payloads, where the recording has them.
    payloads: bool = True
    #: How many times as fast the trace is sent.
    speed: float = 1.0
    #: File to write the trace to.
    save_trace: Path | None = None
    #: Time limit of each request from its intended send time.
    timeout_s: float = 30.0

    @property
    def graphs(self) -> PoolSpec:
        """Recipe for the graphs: those of the pool, or those that `data` names."""
        if self.data is None or not names_own_graphs(self.data):
            return self.pool
        return msgspec.structs.replace(self.pool, datasets=(graph_name(self.data),))

    def check(self) -> None:
        """Raise ConfigError when the options contradict each other."""
        if self.trace is None:
            if self.speed != 1:
                raise ConfigError(f"speed {self.speed:g}: only a trace to replay has one")
            if (self.rate_hz, self.rho, self.in_flight).count(None) != 2:
                raise ConfigError(
                    "give either a rate or rho, or requests in flight, or a trace to replay"
                )
            if self.duration_s is None and self.requests is None:
                raise ConfigError("give a duration, a number of requests, or a trace to replay")
            _one_of("arrivals", self.arrivals, ARRIVALS)
            if self.end_to_end and self.rho is None:
                raise ConfigError("end-to-end: only rho needs solo times")
            parse_profile(self.profile, self.duration_s)
            self._check_closed()
        elif self.end_to_end or self.rate_hz is not None or self.rho is not None:
            raise ConfigError("a trace has its own send times: give no rate and no rho with it")
        self._check_resident()
        self._check_asked()
        if self.without and (self.workload != MIX or self.trace is not None):
            raise ConfigError(f"without {', '.join(self.without)}: only {MIX} has several models")
        for name in (
            "rate_hz",
            "rho",
            "duration_s",
            "requests",
            "timeout_s",
            "speed",
            "target_ms",
            "in_flight",
        ):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(
                    f"{name.partition('_')[0]}: {value} must be finite and more than 0"
                )

    def _check_closed(self) -> None:
        """Raise ConfigError for what a closed loop has no use for."""
        if self.in_flight is None:
            return
        for told, value in (
            ("rate-profile", self.profile),
            ("arrivals", "" if self.arrivals == "poisson" else self.arrivals),
            ("save-trace", self.save_trace),
        ):
            if value:
                raise ConfigError(f"{told} {value}: has no meaning with requests in flight")

    def _check_asked(self) -> None:
        """Raise ConfigError for tenants, priorities and tokens that make no sense."""
        given = self.tenant or self.priority or self.target_ms is not None
        if self.trace is not None and (given or self.profile or self.in_flight is not None):
            raise ConfigError(
                "a trace has its own times, tenants, priorities and targets: give no rate-profile, "
                "in-flight, tenant, priority and target-ms with it"
            )
        if self.priority < 0:
            raise ConfigError(f"priority: {self.priority} must be at least 0")
        tenants = parse_shares("tenant", self.tenant)
        for name, _ in map(_named_file, self.token_files):
            if name and name not in tenants and self.trace is None:
                raise ConfigError(f"token-file {name}=…: no request is of tenant '{name}'")

    def tokens(self) -> dict[str, str]:
        """Return the tokens by tenant, under "" that of all others; raises ConfigError."""
        found: dict[str, str] = {}
        for name, file in map(_named_file, self.token_files):
            try:
                found[name] = read_text(Path(file), _MOST_TOKEN_BYTES).strip()
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"token-file {file}: cannot be read: {error}") from None
            if not found[name] or len(found[name].split()) != 1:
                raise ConfigError(f"token-file {file}: it holds no token")
        return found

    @property
    def id_range(self) -> tuple[int, int]:
        """Fewest and most ids of a request; raises ConfigError."""
        low, mark, high = (self.ids or DEFAULT_IDS).partition("-")
        try:
            fewest, most = int(low), int(high if mark else low)
        except ValueError:
            fewest, most = 0, 0
        if not 1 <= fewest <= most <= MOST_IDS:
            raise ConfigError(
                f"ids: '{self.ids}' is neither a number from 1 to {MOST_IDS} nor two of them, the"
                " fewest first, as 1-64"
            )
        return fewest, most

    def _check_resident(self) -> None:
        """Raise ConfigError for options of subgraphs and of node ids that do not go together."""
        if not self.graph:
            for name in ("node_type", "ids", "fanouts"):
                if value := getattr(self, name):
                    told = name.replace("_", "-")
                    raise ConfigError(
                        f"{told} {value}: has no meaning without a graph of the server"
                    )
            return
        if self.data is not None and str(self.data) != os.environ.get(DATA_VARIABLE):
            raise ConfigError(
                f"data {self.data}: has no meaning with graph {self.graph}, which the server has"
            )
        if self.trace is not None:
            raise ConfigError(f"graph {self.graph}: a trace says what it asks about")
        _ = self.id_range


def address(option: str, text: str) -> tuple[str, int]:
    """Return host and port of `HOST:PORT`; raises ConfigError, which names the option."""
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"{option} {text}: it is not HOST:PORT, as 127.0.0.1:5557")
    return host, int(port)


def require_writable(files: Mapping[str, Path | None]) -> None:
    """Raise ConfigError for a file, by its option, that cannot be written after the run."""
    for option, path in files.items():
        if path is None:
            continue
        if not path.parent.is_dir():
            raise ConfigError(f"{option}: {path}: the folder {path.parent} does not exist")
        if path.is_dir():
            raise ConfigError(f"{option}: {path}: it is a folder")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ConfigError(f"{option}: {path}: it may not be written")


def parse_shares(what: str, text: str) -> dict[str, float]:
    """Return names with weights, as in `a=3,b=1` or `a,b`; raises ConfigError."""
    parts = [part if "=" in part else f"{part}=1" for part in text.split(",") if part.strip()]
    return parse_weights(",".join(parts), what)


def _named_file(text: str) -> tuple[str, str]:
    """Return tenant and file of `TENANT=FILE`, and an empty tenant for `FILE`."""
    name, mark, file = text.partition("=")
    return (name, file) if mark else ("", text)


def _one_of(name: str, value: str, known: Iterable[str]) -> None:
    if value not in known:
        raise ConfigError(f"{name} '{value}' is not one of {', '.join(known)}")
