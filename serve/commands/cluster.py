"""`gnnserve cluster up|status|drain|update|down`: servers on several machines, as one."""

import secrets
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.table import Table

from serve.cluster.front import Front
from serve.cluster.pool import Pool, bounds_of, digest_of, update_of
from serve.cluster.replica import Replica, ReplicaSpec, Running
from serve.cluster.stores_file import read_stores
from serve.config import load_config
from serve.config_settings import settings_of
from serve.errors import ConfigError, ServeError
from serve.progress import Progress
from serve.terminal import Console
from serve.units import parse_duration

if TYPE_CHECKING:
    from serve.cluster.ray_control import ClusterStatus

#: Servers of `--local` end this long after the command, if that is killed.
_LOCAL_LEASE_S = 10.0
_LOOK_S = 0.2


def pool_of(
    name: str,
    config: Path,
    settings: list[str] | None,
    replicas: str,
    host: str,
    port: int,
    cpus: float,
    gpus: float,
    lease: str,
) -> Pool:
    """Return how a cluster is to be; raises ConfigError for a name or a lease that is none."""
    if not name.replace("-", "").isalnum():
        raise ConfigError(f"--name '{name}': letters, digits and '-' only")
    lease_s = parse_duration(lease, "--lease")
    spec = ReplicaSpec(name, str(config.resolve()), tuple(settings or ()), "", lease_s)
    least, most = bounds_of(replicas)
    return Pool(spec, least, host, port, cpus, gpus, least, most, digest_of(spec.config))


def up_on_ray(pool: Pool, address: str, progress: Progress) -> "ClusterStatus":
    """Have a cluster be so; raises ConfigError."""
    from serve.cluster import ray_control

    with ray_control.connected(address):
        name = pool.spec.cluster
        if ray_control.has(name):  # servers that an update started stay
            known = ray_control.pool_of(name)
            spec = msgspec.structs.replace(pool.spec, generation=known.spec.generation)
            replicas = min(max(known.replicas, pool.least), pool.most)
            digest = known.digest if spec == known.spec else pool.digest
            pool = msgspec.structs.replace(pool, spec=spec, replicas=replicas, digest=digest)
        return ray_control.deploy(pool, progress)


def up_local(pool: Pool, on_ready: Callable[[list[Running]], None], progress: Progress) -> None:
    """Serve on this machine until SIGINT or SIGTERM; tells `on_ready` the servers when all are."""
    over = threading.Event()
    for ending in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ending, lambda _number, _frame: over.set())
    with tempfile.TemporaryDirectory(prefix="gnnserve-cluster-") as folder:
        key, key_file = secrets.token_urlsafe(32), Path(folder) / "front.key"
        key_file.touch(mode=0o600)
        key_file.write_text(key)
        settings = (*pool.spec.settings, f"cluster.front_key_file={key_file}")
        spec = msgspec.structs.replace(pool.spec, lease_s=_LOCAL_LEASE_S, settings=settings)
        replicas = [
            Replica(
                msgspec.structs.replace(spec, settings=(*settings, *own)),
                "127.0.0.1",
                Path(folder) / str(number),
            )
            for number, own in enumerate(parts_of_local(pool))
        ]
        front = Front(pool.host, pool.port, (), Path(folder), key)
        try:
            front.start()
            for number, replica in enumerate(replicas):
                progress(f"starting server {number + 1} of {pool.replicas}", number / pool.replicas)
                replica.start(lambda: _require_on(over, front, replicas))
                running = [one.running for one in replicas if one.running is not None]
                servers = [one.address for one in running]
                front.change(servers)
                for one in replicas:
                    one.know(servers)
            said = False
            while not over.wait(_LOOK_S):
                _require_on(over, front, replicas)
                if not said and front.ready_count == len(replicas):
                    said = True
                    on_ready(running)
        except _Interrupted:
            pass
        finally:
            front.stop()
            for replica in replicas:
                replica.stop()


def parts_of_local(pool: Pool) -> list[tuple[str, ...]]:
    """Return what each server's configuration says of its own: its part of shared-out graphs.

    That is a line each of `cluster.rows.servers_file`; nothing where no graph is shared out. Raises
    ConfigError.
    """
    config = load_config(Path(pool.spec.config), settings_of({}, pool.spec.settings))
    servers_file = config.cluster.rows.servers_file
    if not config.shares_graphs:
        return [()] * pool.replicas
    if servers_file is None:
        raise ConfigError(
            f"--local {pool.replicas}: cluster.rows.servers_file is missing, which names the"
            " servers of all parts"
        )
    stores = read_stores(config.path(servers_file))
    if len(stores) != pool.replicas:
        raise ConfigError(
            f"--local {pool.replicas}: cluster.rows.servers_file names {len(stores)} servers"
        )
    return [
        (
            f"cluster.rows.listen={address}",
            f"cluster.rows.address={address}",
            f"cluster.rows.part={part}",
        )
        for address, part in stores.items()
    ]


class UpdateTakenBack(ServeError):
    """An update of a cluster did worse than what it was to replace, and is undone."""


class _Interrupted(Exception):
    """A signal came while servers start."""


def _require_on(over: threading.Event, front: Front, replicas: list[Replica]) -> None:
    """Renew what is kept; raises _Interrupted, or ConfigError when something has ended."""
    if over.is_set():
        raise _Interrupted
    if front.failure is not None:
        raise ConfigError(front.failure)
    for replica in replicas:
        replica.renew()


def pages_told(running: Sequence[Running]) -> list[str]:
    """Return lines that tell where each server's live page is, and how to have one of all."""
    lines = [
        f"server {number}: gRPC at {one.address}, live page at http://{one.http_address}/"
        for number, one in enumerate(running, 1)
    ]
    servers = " ".join(f"--server {one.http_address}" for one in running)
    return [*lines, f"one page of all: gnnserve cluster page {servers}"]


def status(name: str, address: str) -> "ClusterStatus":
    """Return what is known of a cluster; raises ConfigError when there is none of the name."""
    from serve.cluster import ray_control

    with ray_control.connected(address):
        return ray_control.status(name)


def drain(name: str, address: str, machine: str, *, back: bool) -> list[str]:
    """Send a machine no new requests, or again; returns the addresses of its servers."""
    from serve.cluster import ray_control

    with ray_control.connected(address):
        return ray_control.drain(name, machine, back=back)


def update(
    name: str,
    address: str,
    config: Path | None,
    replicas: str | None,
    settings: list[str] | None,
    trial: str,
    progress: Progress,
) -> "ClusterStatus":
    """Start every server of a cluster anew, with what is given in place of what it was.

    The first is on `trial` for a time, where there are others to compare it with. Raises
    UpdateTakenBack when it did worse, or did not start.
    """
    from serve.cluster import ray_control

    with ray_control.connected(address):
        before = ray_control.pool_of(name)
        spec = before.spec
        after = msgspec.structs.replace(
            spec,
            config=spec.config if config is None else str(config.resolve()),
            settings=spec.settings if settings is None else tuple(settings),
            generation=str(time.time_ns()),
        )
        pool = update_of(before, after, 0.0 if trial == "0" else parse_duration(trial, "--trial"))
        if replicas is not None:
            least, most = bounds_of(replicas)
            count = min(max(pool.replicas, least), most)
            pool = msgspec.structs.replace(pool, replicas=count, least=least, most=most)
        found = ray_control.deploy(pool, progress)
    if found.taken_back:
        raise UpdateTakenBack(f"the update was taken back: {found.taken_back}")
    return found


def down(name: str, address: str, progress: Progress) -> None:
    """End a cluster; raises ConfigError when there is none of the name."""
    from serve.cluster import ray_control

    with ray_control.connected(address):
        progress("ending the servers in order", 0.0)
        ray_control.down(name)


def show(found: "ClusterStatus", as_json: bool) -> None:
    """Print a cluster."""
    if as_json:
        sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
        return
    console = Console()
    table = Table()
    shares = any(row.part is not None for row in found.servers)
    for heading in ("machine", "gRPC", "HTTP", "state", "started with", *(["part"] * shares)):
        table.add_column(heading)
    for row in found.servers:
        part = ["" if row.part is None else str(row.part)] * shares
        table.add_row(row.machine, row.address, row.http_address, row.state, row.fingerprint, *part)
    console.print(table)
    ready = sum(row.state == "ready" for row in found.servers)
    console.print(f"{found.endpoint} answers for {ready} of {found.wanted} servers.")
    for told in (found.problem, found.taken_back and f"taken back: {found.taken_back}"):
        if told:
            console.print(told, soft_wrap=True)
