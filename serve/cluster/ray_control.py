"""Ray as control plane: the one module that knows it. No request passes through Ray.

Ray Serve's controller, its proxies off, keeps a replica on each machine: starts, watches, replaces
and updates it. A replica starts today's server beside itself (``replica``) and tells the
coordinator of it, an actor on the head, which keeps the front and feeds it (``registry``). What
serves belongs to no process of Ray (``supervisor``): it goes on when Ray ends.

Plain actors can take the place of Serve's deployments: they are `_ServerReplica` and `deploy`.
"""

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import msgspec

from serve.cluster.coordinator import Coordinator
from serve.cluster.pool import Pool
from serve.cluster.registry import Announcement, SeatGiven, ServerRow, Standing
from serve.cluster.replica import Replica, ReplicaSpec, require_reachable, stop_limit_s
from serve.cluster.seating import parts_of, unseatable
from serve.cluster.server_need import server_need, unplaceable
from serve.config import load_config
from serve.config_settings import settings_of
from serve.core.cluster.probing import Probe
from serve.errors import ConfigError, ServeError
from serve.progress import Progress

try:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    from ray import serve as ray_serve
except ImportError:
    raise ConfigError("Ray is not installed: pip install 'gnnserve[cluster]'") from None

#: Ray's namespace of all clusters.
_NAMESPACE = "gnnserve"
_HEAD = {"node:__internal_head__": 0.001}
#: How often a replica looks at its server and tells the coordinator, and what that may take.
_LOOK_S, _TELL_S = 0.5, 5.0
#: A server that is silent for so many looks is replaced.
_MOST_SILENT = 20
_ASK_S = 30.0
#: A server that is on trial waits for no longer to learn whether it stays.
_TRIAL_S = 3600.0
#: A server waits no longer for a part that another has, or for servers of other parts.
_SEAT_S = 60.0
#: Servers that have not stopped by then are told of as an error.
_END_S = 600.0
_POLL_S = 0.2
#: The newest release of Ray that all tests have passed with.
_KNOWN_RAY = "2.60"


class ClusterStatus(msgspec.Struct, frozen=True):
    """A cluster as operators see it."""

    cluster: str
    #: `host:port` of the front.
    endpoint: str
    #: How many servers there are to be.
    wanted: int
    servers: list[ServerRow]
    #: What keeps it from having as many; empty when nothing does.
    problem: str
    #: Why the last update was taken back; empty when it was not.
    taken_back: str = ""
    #: Of the update that servers are to have been started by; empty for none.
    generation: str = ""

    @property
    def ready_count(self) -> int:
        """Servers that are ready and as they are to be."""
        return sum(
            row.state == "ready" and row.generation == self.generation for row in self.servers
        )


class _ServerReplica:
    """Replica of Ray Serve: the server of the machine that it is on."""

    def __init__(self, spec: ReplicaSpec) -> None:
        self._replica = Replica(spec, ray.util.get_node_ip_address())
        self._coordinator: Any = None
        self._spec = spec
        self._problem: Exception | None = None
        self._drained = False
        self._seated = True
        self._silent = 0
        try:
            if self._goes_on() is False:
                raise ServeError("another update has begun, or this one was taken back")
            if self._replica.needs_seat:
                self._take_seat()
            self._replica.start(self._tell_at_start)
            self._await_trial()
        except BaseException as error:
            self._leave()
            with suppress(ray.exceptions.RayError, ValueError):
                self._ask("not_started", spec.generation, str(error))
            raise
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="watch server", daemon=True)
        self._watcher.start()

    def check_health(self) -> None:
        """Raise what is wrong with the server; Serve asks, and replaces the replica then."""
        if self._problem is not None:
            raise self._problem

    def __del__(self) -> None:
        """End the server in order: Serve wants this replica no more."""
        over = getattr(self, "_over", None)
        if over is None:
            return  # its server did not start
        over.set()
        self._watcher.join()
        self._leave()

    def _take_seat(self) -> None:
        """Have a part of the graphs that are shared out; raises ServeError."""
        give_up_s = time.monotonic() + _SEAT_S
        told = "the coordinator does not answer"
        while True:
            with suppress(ray.exceptions.RayError, ValueError):
                found: SeatGiven | str = self._ask(
                    "take_seat", self._replica.seat_asked(machine_name())
                )
                if isinstance(found, SeatGiven) and found.stores:
                    self._replica.sit(found.seat, found.stores)
                    return
                told = found if isinstance(found, str) else "other parts have no server yet"
            if time.monotonic() > give_up_s:
                raise ServeError(f"there is no part for this server: {told}")
            time.sleep(_LOOK_S)

    def _await_trial(self) -> None:
        """Serve while the update that started this server is on trial; raises ServeError.

        Serve updates the next server once this returns.
        """
        give_up_s = time.monotonic() + _TRIAL_S
        while (goes_on := self._goes_on()) is not True:
            if goes_on is False:
                raise ServeError("the update was taken back")
            if time.monotonic() > give_up_s:
                raise ServeError(f"nobody said in {_TRIAL_S:g} s whether the update stays")
            time.sleep(_LOOK_S)
            self._tell(self._replica.look())
            self._replica.require_kept()

    def _goes_on(self) -> bool | None:
        """See ``PoolKeeper.goes_on``; None when there is no coordinator to be asked."""
        try:
            found: bool | None = self._ask("goes_on", self._spec.generation)
        except (ray.exceptions.RayError, ValueError):
            return None
        return found

    def _tell_at_start(self) -> None:
        """Tell of the server while it starts; raises ServeError when it is wanted no more."""
        self._tell()
        if self._goes_on() is False:
            raise ServeError("the update was given up")

    def _leave(self) -> None:
        self._replica.stop()
        running, seat = self._replica.running, self._replica.seat
        with suppress(ray.exceptions.RayError, ValueError):
            if running is not None:
                self._ask("left", running.address, running.incarnation)
            if seat is not None:
                self._ask("leave_seat", seat.address)

    def _watch(self) -> None:
        while not self._over.wait(_LOOK_S):
            found = self._replica.look()
            self._silent = self._silent + 1 if found is Probe.SILENT else 0
            try:
                self._replica.require_kept()
                if self._silent >= _MOST_SILENT:
                    raise ServeError(f"the server said nothing for {_MOST_SILENT} looks")
                if not self._seated:
                    raise ServeError("another server has its part of the graphs")
                self._problem = None
            except ServeError as error:
                self._problem = error
            self._tell(found)

    def _tell(self, found: Probe = Probe.NOT_READY) -> None:
        """Tell the coordinator of the server, and learn of the others and whether it is drained."""
        running = self._replica.running
        if running is None:
            return
        said = Announcement(
            running.address,
            running.http_address,
            running.incarnation,
            machine_name(),
            running.fingerprint,
            ready=found is Probe.READY,
            drained=self._drained,
            generation=self._spec.generation,
            figures=self._replica.figures(),
            seat=running.seat,
        )
        try:
            standing: Standing = self._ask("announce", said)
        except (ray.exceptions.RayError, ValueError):
            return  # there is no coordinator now
        self._drained, self._seated = standing.drained, standing.seated
        self._replica.know(standing.servers, standing.drained_servers)
        if standing.seated:
            self._replica.know_stores(standing.stores)

    def _ask(self, method: str, *arguments: object) -> Any:
        try:
            if self._coordinator is None:
                self._coordinator = _coordinator(self._spec.cluster)
            return ray.get(getattr(self._coordinator, method).remote(*arguments), timeout=_TELL_S)
        except (ray.exceptions.RayError, ValueError):
            self._coordinator = None
            raise


def machine_name() -> str:
    """Return the name of this machine: its host's, and the beginning of Ray's id of it."""
    return f"{os.uname().nodename}-{ray.get_runtime_context().get_node_id()[:6]}"


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Have a connection to a Ray cluster; raises ConfigError when there is none.

    What Ray prints goes to standard error: standard output is for what the user asked.
    """
    with redirect_stdout(sys.stderr):
        _connect(address)
        try:
            yield
        finally:
            ray.shutdown()


def _connect(address: str) -> None:
    if address != "auto":
        _require_listener(address)  # Ray itself would try for minutes
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    try:
        ray.init(
            address=address, namespace=_NAMESPACE, log_to_driver=False,
            logging_level=logging.ERROR, configure_logging=True,
        )  # fmt: skip
    except (ConnectionError, ray.exceptions.RayError) as error:
        raise ConfigError(
            f"no Ray cluster at '{address}': start one by `ray start --head` ({error})"
        ) from error


def _require_listener(address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _TELL_S):
            return
    except (OSError, ValueError) as error:
        raise ConfigError(f"no Ray cluster at '{address}': {error}") from error


def deploy(pool: Pool, progress: Progress) -> ClusterStatus:
    """Have the cluster be as `pool` says and return when it is; raises ConfigError.

    Servers that run already and are the same stay; others are updated one after the other.
    """
    spec = pool.spec
    config = load_config(Path(spec.config), settings_of({}, spec.settings))
    pool = msgspec.structs.replace(pool, parts=parts_of(config))
    before = pool_of(spec.cluster) if has(spec.cluster) else None
    if problem := unseatable(pool, before):
        raise ConfigError(problem)
    need = server_need(config, on_gpus=pool.gpus > 0)
    machines = {
        f"{node['NodeName']}-{node['NodeID'][:6]}": int(node["Resources"].get("memory", 0))
        for node in ray.nodes()
        if node["Alive"] and node["Resources"].get("CPU", 0) >= pool.cpus
    }
    if problem := unplaceable(need, pool.replicas, machines):
        raise ConfigError(problem)
    for node in ray.nodes():
        if node["Alive"]:
            require_reachable(config, node["NodeManagerAddress"])
    if pool.reads_figures and config.report.database is None:
        raise ConfigError(
            "report.database: what servers do is read from it, to follow load and to try updates; "
            "set it, or a fixed --replicas and --trial 0"
        )
    progress("starting the coordinator", 0.0)
    coordinator = _new_coordinator(spec.cluster)
    _got(coordinator.keep.remote(pool))
    _wait_until_settled(coordinator)
    _deploy(pool)
    limit_s = pool.replicas * (config.server.start_timeout_s + stop_limit_s(config))
    return _wait_until_served(spec.cluster, limit_s + pool.trial_s, progress)


def _deploy(pool: Pool) -> None:
    """Have Serve start, update and end servers until they are as `pool` says."""
    spec = pool.spec
    config = load_config(Path(spec.config), settings_of({}, spec.settings))
    need = server_need(config, on_gpus=pool.gpus > 0)
    ray_serve.start(proxy_location="Disabled")
    deployment = ray_serve.deployment(
        _ServerReplica,
        name="server",
        num_replicas=pool.replicas,
        max_replicas_per_node=1,
        ray_actor_options={
            "num_cpus": pool.cpus, "num_gpus": pool.gpus, "memory": need.total_bytes,
        },
        health_check_period_s=1.0,
        health_check_timeout_s=10.0,
        graceful_shutdown_timeout_s=stop_limit_s(config) + _TELL_S,
        graceful_shutdown_wait_loop_s=0.1,
        max_constructor_retry_count=3,
    )  # fmt: skip
    target = ray_serve.RunTarget(
        target=versioned(deployment, pool.version).bind(spec),
        name=_application(spec.cluster),
        route_prefix=None,
    )
    ray_serve.run_many(
        [target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False
    )


def versioned(deployment: Any, version: str) -> Any:
    """Return a deployment whose servers stay while its version does; raises ConfigError.

    Without a version Serve takes every deployment for another one and starts all servers anew. Its
    public way to one, a declarative configuration, needs Ray's dashboard and deletes all declared
    applications that the configuration leaves out, so those of other clusters and users.
    """
    try:
        found = deployment.options(version=version, _internal=True)
        kept = found.version
    except (TypeError, ValueError, AttributeError) as error:
        kept = error
    if kept != version:
        raise ConfigError(
            f"Ray {ray.__version__}: its deployments take no version ({kept}), so every change "
            f"would start all servers anew; install Ray {_KNOWN_RAY}, which is tried"
        )
    return found


def status(cluster: str) -> ClusterStatus:
    """Return what coordinator and Serve know; raises ConfigError when there is no such cluster."""
    coordinator = _known_coordinator(cluster)
    asked = [getattr(coordinator, what).remote() for what in ("pool", "rows", "problem", "trial")]
    pool, rows, problem, (trial, taken_back) = _got(asked)
    found = ray_serve.status().applications.get(_application(cluster))
    if found is None:
        problem = "Serve does not know it"
    if found is not None and str(found.status.value) != "RUNNING":
        parts = [found.message, *(one.message for one in found.deployments.values())]
        problem = f"{found.status.value}: {' '.join(part for part in parts if part)}"
    problem = trial or problem
    return ClusterStatus(
        cluster, pool.endpoint, pool.replicas, rows, problem, taken_back, pool.spec.generation
    )


def has(cluster: str) -> bool:
    """Return True when there is a cluster of the name."""
    try:
        _coordinator(cluster)
    except ValueError:
        return False
    return True


def pool_of(cluster: str) -> Pool:
    """Return how a cluster is to be; raises ConfigError when there is none of the name."""
    found: Pool = _got(_known_coordinator(cluster).pool.remote())
    return found


def drain(cluster: str, machine: str, *, back: bool) -> list[str]:
    """Send a machine no new requests, or again; returns its servers' addresses.

    Raises UnknownName for a machine that is not in the cluster.
    """
    found: list[str] = _got(_known_coordinator(cluster).drain.remote(machine, back=back))
    return found


def down(cluster: str) -> None:
    """End all servers of a cluster in order, then its front; raises ServeError."""
    coordinator = _known_coordinator(cluster)
    name = _application(cluster)
    _got(coordinator.leave_alone.remote())
    _wait_until_settled(coordinator)
    ray_serve.delete(name, _blocking=False)
    give_up_s = time.monotonic() + _END_S
    while name in (left := ray_serve.status().applications):
        if time.monotonic() > give_up_s:
            raise ServeError(f"cluster '{cluster}' has not ended in {_END_S:g} s: {left[name]}")
        time.sleep(_POLL_S)
    if not left:
        ray_serve.shutdown()
    _got(coordinator.end.remote())
    ray.kill(coordinator)


def _wait_until_settled(coordinator: Any) -> None:
    """Return once no server of an update that was given up is left, or it had its time."""
    while not _got(coordinator.is_settled.remote()):
        time.sleep(_POLL_S)


def _wait_until_served(cluster: str, limit_s: float, progress: Progress) -> ClusterStatus:
    give_up_s = time.monotonic() + limit_s
    while True:
        found = status(cluster)
        ready = found.ready_count
        told = found.problem if found.problem.startswith("an update is on trial") else ""
        said = f"{ready} of {found.wanted} servers are ready{told and '; '}{told}"
        progress(said, ready / max(1, found.wanted))
        if not found.problem and ready >= found.wanted:
            return found
        if found.problem.startswith("DEPLOY_FAILED") or time.monotonic() > give_up_s:
            raise ConfigError(
                f"cluster '{cluster}': {ready} of {found.wanted} servers are ready. {found.problem}"
            )
        time.sleep(_POLL_S)


def _application(cluster: str) -> str:
    return f"gnnserve-{cluster}"


def _got(asked: Any, limit_s: float = _ASK_S) -> Any:
    """Return what an actor answers; raises what it raised, or ServeError when it does not."""
    try:
        return ray.get(asked, timeout=limit_s)
    except ray.exceptions.RayTaskError as error:
        raise (error.cause if isinstance(error.cause, ServeError) else error) from None
    except ray.exceptions.RayError as error:
        raise ServeError(f"Ray does not answer: {error}") from error


def _coordinator(cluster: str) -> Any:
    """Return the coordinator of a cluster; raises ValueError when there is none."""
    return ray.get_actor(_application(cluster), namespace=_NAMESPACE)


def _known_coordinator(cluster: str) -> Any:
    try:
        return _coordinator(cluster)
    except ValueError:
        raise ConfigError(f"there is no cluster '{cluster}': start one by `cluster up`") from None


def _new_coordinator(cluster: str) -> Any:
    """Return the coordinator of a cluster, on the head, where it comes back when it is lost."""
    return (
        ray.remote(Coordinator)
        .options(
            name=_application(cluster), namespace=_NAMESPACE, lifetime="detached",
            get_if_exists=True, num_cpus=0, resources=_HEAD, max_concurrency=8,
            max_restarts=-1, max_task_retries=3,
        )
        .remote(cluster, _deploy)
    )  # fmt: skip
