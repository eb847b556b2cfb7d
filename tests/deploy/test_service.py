"""The server tells a service manager how it does, and the unit that is shipped is sound."""

import re
import shutil
import socket
import subprocess

import pytest

from bench.kit.servers import ROOT, ServerProcess
from bench.kit.waiting import PATIENCE_S
from serve.commands.service_manager import ServiceManager

UNIT = ROOT / "configs" / "gnnserve.service"


class Manager:
    """The socket of a service manager; ``heard`` has all that came."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(address)
        self.socket.settimeout(PATIENCE_S)
        self.heard: list[str] = []

    def hear(self, until: str) -> list[str]:
        """Read until a message has the line `until`; return all messages so far."""
        while not any(until in message.splitlines() for message in self.heard):
            message = self.next()
            assert message is not None, f"{until} did not come, only {self.heard}"
            self.heard.append(message)
        return self.heard

    def next(self) -> str | None:
        """Return the next message; None when none comes."""
        try:
            return self.socket.recv(4096).decode()
        except TimeoutError:
            return None


@pytest.fixture
def manager(tmp_path):
    found = Manager(str(tmp_path / "notify"))
    yield found
    found.socket.close()


def test_a_manager_hears_the_steps_the_readiness_and_the_stop(manager, tmp_path):
    told = []
    mine = ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "notify")})
    progress = mine.watch(lambda step, fraction: told.append((step, fraction)))
    progress("calibrating gcn", 0.1)
    progress("calibrating gcn", 0.2)
    progress("starting lanes", 0.9)
    mine.ready("gRPC on port 5")
    mine.stopping("0 requests")
    heard = manager.hear("STOPPING=1")
    assert heard == [
        "STATUS=calibrating gcn", "STATUS=starting lanes", "READY=1\nSTATUS=gRPC on port 5",
        "STOPPING=1\nSTATUS=0 requests",
    ]  # fmt: skip
    assert len(told) == 3


def test_a_manager_hears_that_the_configuration_is_read_again(manager, tmp_path):
    mine = ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "notify")})
    with mine.reloading():
        pass  # not before it serves
    mine.ready("serves")
    with mine.reloading():
        pass
    mine.stopping("stops")
    with mine.reloading():
        pass  # nor once it stops
    heard = manager.hear("STOPPING=1")
    assert re.fullmatch(r"RELOADING=1\nMONOTONIC_USEC=\d+", heard[1])
    assert heard[2:] == ["READY=1", "STOPPING=1\nSTATUS=stops"]


def test_an_abstract_socket_is_reached():
    listener = Manager("\0gnnserve-test-notify")
    ServiceManager({"NOTIFY_SOCKET": "@gnnserve-test-notify"}).ready("")
    assert "READY=1" in listener.hear("READY=1")[0]
    listener.socket.close()


@pytest.mark.parametrize("address", ["", "{}/absent", "{}"])
def test_without_a_manager_nothing_happens(tmp_path, address):
    mine = ServiceManager({"NOTIFY_SOCKET": address.format(tmp_path), "WATCHDOG_USEC": "1000"})
    mine.ready("")
    mine.close()


def test_a_manager_that_reads_nothing_does_not_hold_up_the_server(manager, tmp_path):
    mine = ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "notify")})
    progress = mine.watch(lambda step, fraction: None)
    for number in range(10_000):
        progress(f"step {number}", 0.0)


def test_the_watchdog_is_fed_while_the_server_is_live(manager, tmp_path):
    live = True
    environment = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "20000"}
    mine = ServiceManager(environment, lambda: live)
    mine.ready("")
    manager.hear("WATCHDOG=1")
    live = False
    manager.socket.settimeout(0.5)
    assert len(list(iter(manager.next, None))) < 1000  # sent before; then there is silence
    mine.close()


def test_another_process_watchdog_is_not_fed(manager, tmp_path):
    mine = ServiceManager(
        {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "2", "WATCHDOG_PID": "1"}
    )
    mine.ready("")
    mine.stopping("")
    assert manager.hear("STOPPING=1") == ["READY=1\nSTATUS=", "STOPPING=1\nSTATUS="]
    mine.close()


def test_a_server_under_a_manager(manager, tmp_path):
    environment = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "200000"}
    with ServerProcess(tmp_path, environment=environment).starting() as server:
        heard = manager.hear("READY=1")
        status = f"STATUS=gRPC on port {server.grpc_port}, HTTP on port {server.http_port}"
        assert status in heard[-1].splitlines()
        assert any(re.match(r"STATUS=.*lane", message) for message in heard), heard
        manager.heard.clear()
        manager.hear("WATCHDOG=1")
    assert "STOPPING=1" in manager.hear("STOPPING=1")[-1]


needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemd-analyze", *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


@needs_systemd
def test_systemd_finds_no_fault_with_the_unit(tmp_path):
    unit = tmp_path / UNIT.name
    # The command must exist for the verification.
    unit.write_text(UNIT.read_text().replace("/opt/gnnserve/bin/gnnserve", "/bin/true"))
    done = analyze("verify", str(unit))
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@needs_systemd
def test_the_unit_exposes_little():
    done = analyze("security", "--offline=yes", "--threshold=30", str(UNIT))
    assert done.returncode == 0, done.stdout[-500:]


def test_the_unit_stops_later_than_the_server_does():
    text = UNIT.read_text()
    stop_s = int(re.search(r"TimeoutStopSec=(\d+)", text)[1])
    prod = (ROOT / "configs" / "prod.toml").read_text()
    limits = re.findall(r"^(?:shutdown_delay|drain_timeout|stop_timeout)_s = ([\d.]+)", prod, re.M)
    assert len(limits) == 3
    assert stop_s > sum(map(float, limits))
