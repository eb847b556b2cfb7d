"""What models may do with files, on a server with everything that is worth reading."""

import socket
import tempfile
from pathlib import Path

import grpc
import pytest
import torch

from bench.kit.servers import ServerProcess
from tests.e2e import harm
from tests.e2e.harmed import graph
from tests.e2e.support import infer, raw_channel
from tests.e2e.test_isolation import write
from tests.processes import http_get

MODELS = {"plain": "", "vandal": "model", "friend": "team"}


class Guarded:
    """A server, and what a model on it can reach."""

    def __init__(self, server, repository: Path, call) -> None:
        self.server, self.repository, self._call = server, repository, call

    def told(self, deed, paths=(), model="vandal") -> str:
        """Return what the model says that it could do."""
        (self.repository / model / "wanted").write_text("\n".join(map(str, paths)))
        with pytest.raises(grpc.RpcError) as caught:
            infer(self._call, model, graph(deed))
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        return caught.value.details()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("guarded")
    torch.manual_seed(0)
    module = harm.build()
    for name, isolation in MODELS.items():
        write(folder / "models", name, isolation, module)
    sections = {
        "device": {"lanes": 1, "memory_budget": "1 GiB", "lane_writes": []},
        "report": {"journal": str(folder / "journal"), "access_log": str(folder / "log")},
    }
    with (
        ServerProcess(folder, repository=folder / "models", sections=sections) as server,
        raw_channel(server) as call,
    ):
        yield Guarded(server, folder / "models", call)


def secrets(guarded) -> list[Path]:
    """Files that the server needs and models do not."""
    folder = guarded.server.folder
    return [
        guarded.server.config,
        *folder.glob("report.db*"),
        folder / "journal",
        folder / "log",
        guarded.repository / "friend" / "config.toml",
        guarded.repository / "friend" / "1" / "weights.safetensors",
        guarded.repository / "plain" / "model.py",
    ]


def test_the_server_s_files_and_those_of_other_domains_are_not_read(guarded):
    wanted = secrets(guarded)
    assert all(map(Path.is_file, wanted))
    assert len(wanted) >= 8
    assert "read []" in guarded.told(harm.read_named_files, wanted)


def test_a_model_reads_its_own_folder_and_what_anybody_reads(guarded):
    own = [guarded.repository / "vandal" / "config.toml", "/usr/bin/env", harm.__file__]
    assert f"read {[str(one) for one in own]}" in guarded.told(harm.read_named_files, own)


def test_models_of_one_domain_read_each_other_s_files(guarded):
    told = guarded.told(harm.read_named_files, secrets(guarded), model="friend")
    own = [str(one) for one in secrets(guarded) if "friend" in one.parts]
    assert f"read {own}" in told


def test_models_write_to_temporary_folders_of_their_own_alone(guarded):
    inside = guarded.repository / "vandal" / "new"
    modes = [path.stat().st_mode for path in secrets(guarded)]
    with tempfile.NamedTemporaryFile() as others:
        system = ["/dev/sda", "/proc/sys/kernel/core_pattern", "/etc/gnnserve.test"]
        wanted = [*secrets(guarded), inside, others.name, *system]
        assert "wrote []" in guarded.told(harm.write_named_files, wanted)
    assert not inside.exists()
    assert [path.stat().st_mode for path in secrets(guarded)] == modes
    assert all(path.stat().st_mtime > 0 for path in secrets(guarded))
    assert "wrote ['/dev/null']" in guarded.told(harm.write_named_files, ["/dev/null"])


def test_no_process_is_looked_into_or_signalled(guarded):
    """Also those of the same trust domain, and the lane's own parent."""
    assert "reached []" in guarded.told(harm.look_into_processes)


def test_no_socket_is_connected_to(guarded):
    path = guarded.server.folder / "listens"
    with socket.socket(socket.AF_UNIX) as listening, socket.socket(socket.AF_UNIX) as other:
        listening.bind(str(path))
        listening.listen()
        assert "PermissionError" in guarded.told(harm.connect_to_a_file, [path])
        other.connect(str(path))  # others may


def test_what_the_system_allows_is_told(guarded):
    assert "gnnserve_lanes_unconfined 0.0" in http_get(guarded.server, "/metrics")[1]
    assert "models may do more" not in guarded.server.log.read_text()
