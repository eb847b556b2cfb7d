"""A real server in a process of its own, for end-to-end tests and benches."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType

from msgspec.structs import replace

from bench.kit.result import ROOT
from bench.kit.waiting import PATIENCE_S, wait_for
from serve.config import Config
from serve.workload import PoolSpec

_START_TIMEOUT_S = 2 * PATIENCE_S
#: It includes the time to drain.
_STOP_TIMEOUT_S = 2 * PATIENCE_S
#: Outside the ephemeral range: such a port could be taken before the server listens there.
_PORTS = range(10_000, 32_000)


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on now."""
    found: set[int] = set()
    while len(found) < count:
        port = random.SystemRandom().choice(_PORTS)
        with socket.socket() as one, suppress(OSError):
            one.bind(("127.0.0.1", port))
            found.add(port)
    return list(found)


def takes_connections(port: int) -> bool:
    """Return True when somebody listens on the port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def listening(command: str) -> Iterator[tuple[int, int]]:
    """Run `python -m command`, `{port}` in it filled in; yield its process id and port.

    It listens by then, and is ended afterwards. Raises AssertionError with what it wrote when it
    ends before it listens.
    """
    (port,) = free_ports(1)
    arguments = command.format(port=port).split()
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *arguments], cwd=ROOT, stdout=log, stderr=log
        )
        try:
            wait_for(
                lambda: takes_connections(port) or process.poll() is not None,
                f"{command} listens",
            )
            if process.poll() is not None:
                log.seek(0)
                said = log.read()[-2000:]
                raise AssertionError(f"{command} ended with code {process.returncode}:\n{said}")
            yield process.pid, port
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


#: `models.calibration_s` of tests and quick runs, which so share what is cached.
SHORT_CALIBRATION_S = 1.0
#: Environment of commands of tests, for the same.
SHORT_CALIBRATIONS = {"GNNSERVE__MODELS__CALIBRATION_S": str(SHORT_CALIBRATION_S)}


class ServerProcess:
    """`gnnserve serve` with a configuration of its own in `folder`; ready when entered.

    `module` is what Python runs, with its arguments, in `checkout` with the `.venv` there, or else
    here. With `own_group` it leads a process group, so that a signal reaches all of its processes.
    Calibrations are short, for tests; with `usual_calibrations` they are a server's usual ones.
    """

    #: `device.lane_niceness` of all; None: the server's default. Tests set it to 0, so that lanes
    #: get their share of a core beside any other program.
    lane_niceness: int | None = None
    #: Let models write in the repository, as those of tests do to tell what they did.
    models_write = False
    #: `server.front` of all; None: the server's default.
    front: str | None = None
    #: True in quick runs of benches: all calibrations are short, and in the user's cache.
    quick = False

    def __init__(
        self,
        folder: Path,
        *,
        policy: str = "sqtf",
        discipline: str = "rolling",
        repository: Path = ROOT / "configs" / "models",
        sections: dict[str, dict[str, object]] | None = None,
        graphs: tuple[dict[str, object], ...] = (),
        environment: dict[str, str] | None = None,
        own_group: bool = False,
        module: tuple[str, ...] = ("serve", "serve"),
        checkout: Path | None = None,
        usual_calibrations: bool = False,
    ) -> None:
        self.folder = folder
        self.grpc_port, self.http_port = free_ports(2)
        self.target = f"127.0.0.1:{self.grpc_port}"
        self.database = folder / "report.db"
        self.log = folder / "server.log"
        table: dict[str, dict[str, object]] = {
            "server": {
                "grpc_port": self.grpc_port,
                "http_port": self.http_port,
                "drain_timeout_s": PATIENCE_S,
            },
            "models": {"repository": str(repository)},
            "device": {"memory_budget": "2 GiB"},
            "scheduling": {"policy": policy, "discipline": discipline},
            "report": {"database": str(self.database)},
        }
        if checkout is None:  # another may be older than these keys
            if not usual_calibrations or self.quick:
                table["models"]["calibration_s"] = SHORT_CALIBRATION_S
            # However busy the machine is, stops end in order, and runs may be held.
            table["server"]["stop_timeout_s"] = 60
            table["server"]["start_timeout_s"] = _START_TIMEOUT_S
            table["server"]["max_run_s"] = _START_TIMEOUT_S
            if self.front is not None:
                table["server"]["front"] = self.front
            if self.models_write:
                table["device"]["lane_writes"] = [str(repository)]
            if self.lane_niceness is not None:
                table["device"]["lane_niceness"] = self.lane_niceness
        for name, values in (sections or {}).items():
            table.setdefault(name, {}).update(values)
        if self.quick:
            table["models"].pop("cache", None)
        self.config = folder / "server.toml"
        text = "".join(_section(name, table[name]) for name in table)
        text += "".join(_section("[graph]", graph) for graph in graphs)
        self.config.write_text(text)
        self._calibrates = usual_calibrations and not self.quick and checkout is None
        self._environment = {**os.environ, **(environment or {})}
        self._own_group = own_group
        python = sys.executable if checkout is None else str(checkout / ".venv" / "bin" / "python")
        self._command = [python, "-m", *module, "--config", str(self.config)]
        self._checkout = checkout or ROOT
        self._lines: list[str]
        self._ready: threading.Event
        self.process: subprocess.Popen[str] | None = None

    def __enter__(self) -> "ServerProcess":
        if self._calibrates:
            self._calibrate()
        self.start()
        try:
            self.wait_ready()
        except BaseException:
            self.kill()
            raise
        return self

    def _calibrate(self) -> None:
        """Calibrate models that are not: a server would do it while it serves, beside requests."""
        # Lanes as of a bench's servers, whatever their discipline.
        config = ("--config", str(self.config), "--set", "scheduling.discipline=preemptive")
        command = [sys.executable, "-m", "serve", "calibrate"]

        def told(*arguments: str) -> str:
            done = subprocess.run(
                [*command, *arguments, *config], cwd=ROOT, env=self._environment,
                stdout=subprocess.PIPE, text=True, check=True,
            )  # fmt: skip
            return done.stdout

        known = json.loads(told("list", "--json"))
        if missing := {one["model"] for one in known if one["time_error"] is None}:
            told("run", *sorted(missing))

    @contextmanager
    def starting(self) -> Iterator["ServerProcess"]:
        """Start it without waiting until it is ready; see `wait_ready`."""
        with ExitStack() as stack:
            self.start()
            stack.push(self.__exit__)
            yield self

    def start(self) -> None:
        """Start the process, for the caller to stop; after its end also once more."""
        self._lines, self._ready = [], threading.Event()
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                self._command,
                cwd=self._checkout,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=self._environment,
                start_new_session=self._own_group,
            )
        arguments = (self.process, self._lines, self._ready)
        threading.Thread(target=_read, args=arguments, daemon=True).start()

    @property
    def said_ready(self) -> bool:
        """True once it has printed `ready`."""
        return "ready\n" in self._lines

    @property
    def stdout_lines(self) -> tuple[str, ...]:
        """Lines that it has printed."""
        return tuple(self._lines)

    def wait_ready(self) -> None:
        """Return once it has printed `ready`."""
        self._ready.wait(_START_TIMEOUT_S)
        if not self.said_ready:
            raise AssertionError(f"the server is not ready:\n{self.log.read_text()}")

    @property
    def pid(self) -> int:
        """Process id of the main process."""
        assert self.process is not None
        return self.process.pid

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process is not None and self.process.poll() is None:
            code = self.stop()
            assert kind is not None or code == 0, f"exit {code}:\n{self.log.read_text()}"

    def stop(self) -> int:
        """Send SIGTERM; return the exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        """Return the exit code of a server that was told to stop."""
        assert self.process is not None
        try:
            return self.process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the server does not stop:\n{self.log.read_text()}") from None

    def kill(self) -> None:
        """Send SIGKILL."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(PATIENCE_S)


def _read(process: "subprocess.Popen[str]", told: list[str], ready: threading.Event) -> None:
    """Keep what a server prints, and tell when it is ready or has ended."""
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            told.append(line)
            if line == "ready\n":
                ready.set()
    ready.set()


def calibrated_as_asked(config: Config) -> Config:
    """Return the configuration, in quick runs with short calibrations."""
    if not ServerProcess.quick:
        return config
    return replace(config, models=replace(config.models, calibration_s=SHORT_CALIBRATION_S))


def usual_graphs() -> PoolSpec:
    """Return the graphs that benches ask about, in quick runs few and small ones.

    Every process that sends them makes them anew, which takes seconds for all.
    """
    return PoolSpec(datasets=("pubmed",), count=5) if ServerProcess.quick else PoolSpec()


def _section(name: str, values: dict[str, object]) -> str:
    lines = [f"[{name}]"]
    for key, value in values.items():
        text = str(value).lower() if isinstance(value, bool) else repr(value)
        lines.append(f"{key} = {text}".replace("'", '"'))
    return "\n".join(lines) + "\n\n"
