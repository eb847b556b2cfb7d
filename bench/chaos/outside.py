"""A server under chaos seen from outside: its processes by role, its metrics, what it holds."""

import os
import re
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc

from bench.chaos.client import connect
from bench.chaos.world import WITH_SOURCE, World
from bench.kit.processes import descendants
from bench.kit.servers import ServerProcess
from serve.pb import grpc_service_pb2 as pb
from serve.pb import grpc_service_pb2_grpc as stubs

_POOL, _COPY = "memfd:gnnserve-pool", "memfd:gnnserve-model"
#: A server that is asked for its state and does not answer for so long is told as not answering.
_PROBE_S = 2.0


class Outside:
    """Looks at one server, with the administrator's token."""

    def __init__(self, world: World, server: ServerProcess) -> None:
        self.server = server
        self._scratch, self._region_name = world.scratch, world.region_name
        self._metadata = (("authorization", f"Bearer {world.admin}"),)
        self._tls = ssl.create_default_context(cafile=str(world.authority))
        self._channel = connect(world, server.target)
        self.stub = stubs.GRPCInferenceServiceStub(self._channel)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def fork_server(self) -> int | None:
        """Return the process that starts lanes, if there is one now."""
        found = self._below("forkserver")
        parents = {pid for pid in found if descendants(pid)} or set(found)
        return min(parents, default=None)

    def lanes(self) -> list[int]:
        """Return the lanes' processes: those that have the pool mapped."""
        return sorted(pid for pid in descendants(self.server.pid) if _maps(pid, _POOL))

    def gateway(self) -> int | None:
        """Return the process that serves the HTTP port, if there is one now."""
        return min(self._below("serve.rest.run"), default=None)

    def calibrators(self) -> list[int]:
        """Return what the fork server started and is no lane."""
        parent = self.fork_server()
        below = descendants(parent) if parent else {}
        return [pid for pid in below if not _maps(pid, _POOL)]

    def _below(self, words: str) -> list[int]:
        return [pid for pid, command in descendants(self.server.pid).items() if words in command]

    def get(self, path: str, timeout_s: float = _PROBE_S) -> tuple[int, str]:
        """Return status and body of a path of the HTTP port; status 0 when there is no answer."""
        headers = dict(self._metadata)
        request = urllib.request.Request(
            f"https://127.0.0.1:{self.server.http_port}{path}", headers=headers
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout_s, context=self._tls) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except (OSError, ValueError):
            return 0, ""

    def metrics(self, timeout_s: float = _PROBE_S) -> dict[str, float]:
        """Return all metrics, `name{labels}` as they are written; empty when there is no answer."""
        status, text = self.get("/metrics", timeout_s)
        if status != 200:
            return {}
        return {name: float(value) for name, value in re.findall(r"^(\w.*) (\S+)$", text, re.M)}

    def port_answers(self) -> bool:
        """Return True when the gRPC port answers a call now."""
        try:
            self.stub.ServerLive(pb.ServerLiveRequest(), timeout=_PROBE_S)
        except grpc.RpcError:
            return False
        return True

    def forget_regions(self) -> None:
        """Have the server give up the regions of all clients."""
        status = pb.SystemSharedMemoryStatusRequest()
        known = self.stub.SystemSharedMemoryStatus(status, timeout=30, metadata=self._metadata)
        for name in known.regions:
            request = pb.SystemSharedMemoryUnregisterRequest(name=name)
            self.stub.SystemSharedMemoryUnregister(request, timeout=30, metadata=self._metadata)

    def regions(self) -> int:
        """Return the number of descriptors of clients' regions that the main process holds."""
        return self._open(self._region_name)

    def copies(self) -> int:
        """Return the number of copies of models' files that the main process holds."""
        return self._open(_COPY)

    def copies_of_served(self) -> int:
        """Return how many copies the versions that are loaded need: of weights and source."""
        names = [model.name for model in self.index() if model.state == "READY"]
        return len(names) + sum(name in WITH_SOURCE for name in names)

    def index(self) -> Iterable[pb.RepositoryIndexResponse.ModelIndex]:
        """Return every version in the repository, with its state."""
        request = pb.RepositoryIndexRequest()
        found: pb.RepositoryIndexResponse = self.stub.RepositoryIndex(
            request, timeout=30, metadata=self._metadata
        )
        return found.models

    def _open(self, name: str) -> int:
        """Return the number of the main process's descriptors of files whose names hold this."""
        folder = Path(f"/proc/{self.server.pid}/fd")
        found = 0
        for fd in os.listdir(folder):
            with suppress(OSError):
                found += name in os.readlink(folder / fd)
        return found

    def sample(self) -> dict[str, Any]:
        """Return what the server holds now."""
        pid = self.server.pid
        found: dict[str, Any] = {"at": time.monotonic_ns(), "pid": pid} | held_by(pid)
        # Versions come and go, so their copies are compared with what is served, at the end.
        found["fds"] -= self.copies()
        found["processes"] = len(descendants(pid))
        found["lanes"] = {
            lane: held | {"temporary_files": _files_below(self._scratch.glob(f"*/process-{lane}"))}
            for lane in self.lanes()
            if (held := held_by(lane))
        }
        gateways = [pid for pid in (self.gateway(),) if pid is not None]
        found["gateways"] = {gateway: held_by(gateway) for gateway in gateways}
        found["shared_files"] = sum(
            name.startswith(self._region_name) for name in os.listdir("/dev/shm")
        )
        of_lanes = sum(held["temporary_files"] for held in found["lanes"].values())
        found["temporary_files"] = _files_below([self._scratch]) - of_lanes
        with suppress(OSError):
            found["database_bytes"] = self.server.database.stat().st_size
        found["port_answers"] = self.port_answers()
        found["ready"] = self.get("/v2/health/ready")[0]
        metrics = self.metrics()
        for name in ("gnnserve_lanes_up", "gnnserve_memory_reserved_bytes", "gnnserve_queue_depth"):
            found[name] = metrics.get(name)
        found["calls"] = calls(metrics)
        return found


def calls(metrics: dict[str, float]) -> float | None:
    """Return the messages of inference that the native front has taken, refused ones included."""
    if not metrics:
        return None
    ways = [f'gnnserve_front_calls_total{{way="{way}"}}' for way in ("plain", "message")]
    # Those of messages that were taken whole, as `malformed` and `no_thread`, are counted already.
    reasons = ("unread", "no_message", "message_size", "receiving_bytes")
    ways += [f'gnnserve_transport_refused_total{{reason="{reason}"}}' for reason in reasons]
    return sum(metrics.get(name, 0.0) for name in ways)


def held_by(pid: int) -> dict[str, int]:
    """Return what a process holds, nothing when it is gone.

    Resident memory in bytes, that part of it which no other process shares, descriptors, threads.
    """
    folder = Path(f"/proc/{pid}")
    try:
        resident, shared = map(int, (folder / "statm").read_text().split()[1:3])
        page_bytes = os.sysconf("SC_PAGE_SIZE")
        return {
            "rss_bytes": resident * page_bytes,
            "private_bytes": (resident - shared) * page_bytes,
            "fds": len(os.listdir(folder / "fd")),
            "threads": len(os.listdir(folder / "task")),
        }
    except (OSError, IndexError):
        return {}


def _files_below(folders: Iterable[Path]) -> int:
    return sum(len(files) for folder in folders for _, _, files in os.walk(folder))


def _maps(pid: int, name: str) -> bool:
    try:
        return name in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False
