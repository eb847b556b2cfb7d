"""`gnnserve simulate`: a generated workload, a recording or a journal on a virtual clock."""

import sys
from dataclasses import replace
from pathlib import Path

import msgspec
from rich.table import Table

from serve.commands.configured import device_of
from serve.commands.estimate import offline_estimators
from serve.config import Config
from serve.core.cluster.dispatch import DispatchParams
from serve.core.disciplines import get_discipline
from serve.core.params import SchedulerParams
from serve.core.policies import get_policy
from serve.core.types import TaskEstimate
from serve.errors import ConfigError
from serve.graphs.pool import GraphPool
from serve.journal import Journal, decode
from serve.models.repository import BrokenModel, scan
from serve.progress import Progress
from serve.recording import late_when_recorded, read_trace
from serve.sim.cluster import ClusterSetup, simulate_cluster
from serve.sim.device import Offered
from serve.sim.engine import simulate
from serve.sim.machine import MachineModel
from serve.sim.replay import budget_of, first_difference, recorded
from serve.sim.report import SimReport, summarize
from serve.sim.workload import BASELINES, make_system, mean_solo_ns, offered
from serve.terminal import Console
from serve.workload import PoolSpec, TraceHeader, build_trace, rate_for_rho, workload_tasks


def simulate_workload(
    config: Config,
    workload: str,
    rho: float,
    *,
    policy: str | None,
    discipline: str | None,
    requests: int,
    seed: int,
    pool: PoolSpec,
    devices: int,
    machines: int,
    front: str,
    progress: Progress,
) -> tuple[SimReport, str]:
    """Serve a workload on a virtual clock, with the times calibrated for `config`'s models.

    Its graphs have the sizes of those in `pool`. There are `machines` servers, each with `devices`
    devices like this machine's; `rho` is the load over all of them. Several are behind one front
    that routes by the rule `front`. `policy` may also name a baseline; policy and discipline are
    `config`'s unless given. Returns the report and its title. Raises ConfigError for an unknown
    name.
    """
    policy = policy or config.scheduling.policy
    discipline = discipline or config.scheduling.discipline
    if not 0 < rho < float("inf"):
        raise ConfigError(f"rho: {rho} must be finite and more than 0")
    device = device_of(config)
    setup = _setup(
        config, policy=policy, discipline=discipline, devices=devices, machines=machines,
        front=front,
    )  # fmt: skip
    models = _servable(config)
    tasks = workload_tasks(workload, GraphPool(pool).refs, seed, models)
    names = sorted({task.model for task in tasks})
    estimators = offline_estimators(config, device, names, progress)

    def estimator(model: str, num_nodes: int, num_edges: int) -> TaskEstimate:
        return estimators[model].estimate(num_nodes, num_edges)

    shapes = [(task.model, task.graph.num_nodes, task.graph.num_edges) for task in tasks]
    solo_s = mean_solo_ns(shapes, estimator) / 1e9
    header = TraceHeader(
        workload=workload,
        seed=seed,
        rate_hz=rate_for_rho(rho, solo_s, device.parallelism * devices * machines),
        rho=rho,
        mean_solo_s=solo_s,
    )
    progress("simulating", 1.0)
    trace = build_trace(header, tasks, count=requests)
    offers = offered(trace, estimator, config.scheduling.qos_factor)
    return _served(offers, setup), f"{workload} at ρ {rho:g}: {_system_title(policy, discipline)}"


def _system_title(policy: str, discipline: str) -> str:
    """Name what schedules; a baseline has no discipline that could be chosen."""
    return policy if policy in BASELINES else f"{policy}/{discipline}"


def _setup(
    config: Config, *, policy: str, discipline: str, devices: int, machines: int, front: str
) -> ClusterSetup:
    """Return `machines` servers like this one; raises ConfigError for an unknown name."""
    device = device_of(config)
    machine = MachineModel(
        cores=device.parallelism, budget_bytes=device.budget_bytes, devices=devices,
        policy=policy, discipline=discipline,
    )  # fmt: skip
    machine.system()  # which knows the names
    return ClusterSetup((machine,) * machines, DispatchParams(rule=front))


def _served(offers: list[Offered], setup: ClusterSetup) -> SimReport:
    """Serve the requests; a server that is alone has no front before it."""
    if len(setup.machines) > 1:
        return summarize(simulate_cluster(offers, setup))
    system = setup.machines[0].system()
    return simulate(offers, system.params, system.device)


def simulate_replay(
    config: Config,
    path: Path,
    speed: float,
    *,
    policy: str | None,
    discipline: str | None,
    devices: int,
    machines: int,
    front: str,
    progress: Progress,
) -> tuple[SimReport, str]:
    """Serve a trace or a server's recording on a virtual clock.

    Requests keep their order, distances (÷ `speed`), targets, priorities and tenants. Times are
    those calibrated for `config`'s models; policy and discipline are `config`'s unless given.
    Several machines are behind one front, as in ``simulate_workload``.
    Returns the report and its title. Raises ConfigError for a file that is neither, for a model
    that the repository lacks, and for unknown names.
    """
    if not 0 < speed < float("inf"):
        raise ConfigError(f"speed: {speed} must be finite and more than 0")
    policy = policy or config.scheduling.policy
    discipline = discipline or config.scheduling.discipline
    trace = read_trace(path, sampled=True).at_speed(speed)
    if trace.header.resident is not None or not trace.items:
        raise ConfigError(f"{path}: it has no request with a graph of its own or of known size")
    device = device_of(config)
    setup = _setup(
        config, policy=policy, discipline=discipline, devices=devices, machines=machines,
        front=front,
    )  # fmt: skip
    names = sorted({item.model for item in trace.items})
    if lacking := [name for name in names if name not in _servable(config)]:
        raise ConfigError(f"{path}: the repository has no model {', '.join(lacking)}")
    estimators = offline_estimators(config, device, names, progress)

    def estimator(model: str, num_nodes: int, num_edges: int) -> TaskEstimate:
        return estimators[model].estimate(num_nodes, num_edges)

    progress("simulating", 1.0)
    offers = offered(trace, estimator, config.scheduling.qos_factor)
    report = _served(offers, setup)
    with_speed = "" if speed == 1 else f" at {speed:g} × its speed"
    title = f"{path.name}{with_speed}: {_system_title(policy, discipline)}"
    late = late_when_recorded(path)
    return report, title if late is None else f"{title}, {late:.2%} late when recorded"


def _servable(config: Config) -> tuple[str, ...]:
    """Name the models that a server of this configuration would load; raises ConfigError."""
    wanted = config.models.load
    repository = config.path(config.models.repository)
    names = dict.fromkeys(
        found.name
        for found in scan(repository)
        if not isinstance(found, BrokenModel) and (not wanted or found.name in wanted)
    )
    if not names:
        raise ConfigError(f"models.repository: {repository} has no model to serve")
    return tuple(names)


# -- a journal ------------------------------------------------------------------------------------


def replay_journal(
    path: Path, policy: str | None, discipline: str | None
) -> tuple[str, SimReport, str]:
    """Compare today's scheduler with the journal at `path`, and simulate its requests.

    Returns three values. The first describes the first command that differs from the recorded one
    and is empty when none does. The second reports on the recorded requests under `policy` and
    `discipline`, None standing for the recorded ones. The third is its title. Raises ConfigError
    for a file that is no journal and for an unknown name.
    """
    journal = _read_journal(path)
    difference = first_difference(journal)
    text = ""
    if difference is not None:
        text = (
            f"call {difference.index}, {difference.event}: recorded "
            f"{difference.recorded.decode()}, replayed {difference.replayed.decode()}"
        )
    recording = recorded(journal)
    if policy in BASELINES:
        slots = journal.params.device.slots
        system = make_system(policy, "rolling", cores=slots, budget_bytes=1)
        params = system.params
        device_model = replace(recording.device, slowdown=system.device.slowdown)
    else:
        device_model = recording.device
        params = _replay_params(journal, policy, discipline, device_model.slowdown)
    late = recording.late / len(recording.requests)
    title = f"{path.name}, {late:.2%} late when recorded: {policy or params.policy}"
    report = simulate(recording.requests, params, device_model)
    return text, report, f"{title}/{params.discipline}"


def _read_journal(path: Path) -> Journal:
    try:
        with path.open("rb") as lines:
            return decode(lines, str(path))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error


def _replay_params(
    journal: Journal, policy: str | None, discipline: str | None, slowdown: tuple[float, ...]
) -> SchedulerParams:
    """The journal's parameters under another policy or discipline, with the measured `slowdown`."""
    params = replace(
        journal.params,
        policy=policy or journal.params.policy,
        discipline=discipline or journal.params.discipline,
    )
    get_policy(params.policy)
    get_discipline(params.discipline)
    first, *more = (
        replace(device, budget_bytes=budget_of(journal), slowdown=slowdown)
        for device in params.devices
    )
    return replace(params, device=first, more_devices=tuple(more))


# -- for people -----------------------------------------------------------------------------------


def print_simulation(found: SimReport, title: str, as_json: bool) -> None:
    """Print the report on stdout, as JSON or as a table."""
    if as_json:
        sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
    else:
        Console().print(_simulation_table(found, title))


def _simulation_table(found: SimReport, title: str) -> Table:
    table = Table(title=f"{title}, simulated", show_header=False, title_justify="left")
    over_qt = (found.latency_over_qt_p50, found.latency_over_qt_p90, found.latency_over_qt_p99)
    late = ", ".join(f"{cause} {count}" for cause, count in found.by_cause.items() if count)
    rows = (
        ("requests", f"{found.requests:,}, {found.completed:,} with a result"),
        ("late", f"{found.violations:,}, {found.violation_rate:.2%}"),
        ("late because of", late),
        ("latency ÷ target p50, p90, p99", ", ".join(f"{value:.2f}" for value in over_qt)),
        ("completion time (JCT) ÷ target, mean", f"{found.jct_over_qt_mean:.3f}"),
        ("queueing time (QUET) ÷ target, mean", f"{found.quet_over_qt_mean:.3f}"),
    )
    for name, value in rows:
        if value:
            table.add_row(name, value)
    return table
