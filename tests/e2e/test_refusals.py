"""What cannot be served is refused with numbers and names, at start and at run time."""

import re
import shutil
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from bench.kit.servers import ROOT, ServerProcess
from serve import cli
from serve.client import Client
from serve.wire.messages import encode_request
from tests.e2e.support import GOOD, Troubled, assert_answers, infer, random_graph, raw_channel
from tests.processes import PATIENCE_S, metric, row, wait_for

BUDGET_BYTES = 256 << 20
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.fixture(scope="module")
def trouble(tmp_path_factory):
    """Two good models, and four that cannot be served, each for a reason of its own."""
    found = Troubled(tmp_path_factory.mktemp("repository"), "gcn")
    for name in ("torn", "misspelt", "missing", "homeless"):
        shutil.copytree(found.root / "gcn", found.root / name)
    weights = found.root / "torn" / "1" / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    config = found.root / "misspelt" / "config.toml"
    config.write_text(config.read_text().replace("factory", "factroy"))
    shutil.rmtree(found.root / "missing" / "1")
    config = found.root / "homeless" / "config.toml"
    config.write_text(config.read_text().replace("serve.models.zoo:gcn", "nowhere.to.be:found"))
    return found


@pytest.fixture(scope="module")
def narrow(tmp_path_factory, trouble):
    """A server with little of everything."""
    sections = {
        "server": {"max_queue": 2, "max_message": "8 MiB"},
        "device": {"memory_budget": f"{BUDGET_BYTES >> 20} MiB", "lanes": 2},
        # Which takes more memory than a message of that size could ask for otherwise.
        "models": {"executor": "eager"},
    }
    folder = tmp_path_factory.mktemp("narrow")
    with ServerProcess(folder, repository=trouble.root, sections=sections) as found:
        yield found


@pytest.fixture
def call(narrow):
    with raw_channel(narrow) as found:
        yield found
    assert_answers(narrow)
    wait_for(lambda: metric(narrow, "gnnserve_memory_reserved_bytes") == 0, "an empty ledger")


REASONS = {
    "torn": r"torn/1/weights\.safetensors",
    "misspelt": r"misspelt/config\.toml: unknown key 'model\.factroy'; did you mean 'model\.fac",
    "missing": r"missing: holds no version; expected .*missing/1/weights\.safetensors",
    "homeless": r"factory 'nowhere\.to\.be:found'.*No module named 'nowhere'",
}


@pytest.mark.parametrize(("name", "reason"), REASONS.items(), ids=REASONS)
def test_a_broken_model_says_why_and_harms_no_other(narrow, call, name, reason):
    with Client(narrow.target, timeout_s=PATIENCE_S) as client:
        told = {model.name: model for model in client.models()}
    assert told["gcn"].state == told["mischief"].state == "READY"
    assert told[name].state == "UNAVAILABLE"
    assert re.search(reason, told[name].reason), told[name].reason
    with tritonclient.grpc.InferenceServerClient(narrow.target) as client:
        assert not client.is_model_ready(name)
        with pytest.raises(InferenceServerException, match=reason):
            client.load_model(name)
    with pytest.raises(grpc.RpcError) as caught:
        infer(call, name, GOOD)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert re.search(reason, caught.value.details())


def test_a_message_over_the_limit_is_refused(call):
    message = encode_request("gcn", random_graph(70_000, 0).tensors)
    assert len(message) > 8 << 20
    with pytest.raises(grpc.RpcError) as caught:
        call(message, timeout=PATIENCE_S)
    assert caught.value.code() is EXHAUSTED
    assert re.search(rf"{len(message)} vs\. {8 << 20}", caught.value.details())


def test_a_task_over_the_budget_is_refused_with_both_numbers(narrow, call):
    graph = random_graph(1_000, 900_000, dtype="int32")
    with pytest.raises(grpc.RpcError) as caught:
        infer(call, "gcn", graph, tenant="big")
    assert caught.value.code() is EXHAUSTED
    found = re.search(r"needs (\d+) bytes, the device has (\d+)", caught.value.details())
    assert found, caught.value.details()
    need_bytes, has_bytes = map(int, found.groups())
    assert need_bytes > has_bytes
    # What lanes may keep and the weights of the models served are subtracted.
    left_bytes = BUDGET_BYTES * 7 // 8
    assert left_bytes * 0.99 < has_bytes < left_bytes
    assert "grpc-retry-pushback-ms" not in dict(caught.value.trailing_metadata())
    assert row(narrow, "tenant = ?", "big")["reason"] == "too_big"


def test_a_full_queue_says_when_to_try_again(narrow, call, trouble):
    with ThreadPoolExecutor(2) as threads:
        with trouble.holding() as graph:
            held = [threads.submit(infer, call, "mischief", graph) for _ in range(2)]
            wait_for(lambda: len(trouble.running()) == 2, "two running tasks")
            with pytest.raises(grpc.RpcError) as caught:
                infer(call, "gcn", GOOD, tenant="late")
        assert caught.value.code() is EXHAUSTED
        assert "2 requests are waiting or running, at most 2 may be" in caught.value.details()
        assert int(dict(caught.value.trailing_metadata())["grpc-retry-pushback-ms"]) >= 1
        for one in held:
            assert one.result().outputs["output"].shape == (3, 2)
    assert row(narrow, "tenant = ?", "late")["reason"] == "queue_full"


# -- at start ---------------------------------------------------------------------------------


def serve(config, *arguments: str, command: str = "serve") -> subprocess.CompletedProcess[str]:
    """Run a command that is to fail."""
    return subprocess.run(
        [sys.executable, "-m", "serve", command, "--config", str(config), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def refused(config, *, monkeypatch, command: str = "serve") -> int:
    """Run a command in this process that is to fail before it builds anything; return its code."""
    monkeypatch.setattr(sys, "argv", ["gnnserve", command, "--config", str(config)])
    monkeypatch.setattr("serve.commands.serve.Application", None)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code


@pytest.mark.parametrize("command", ["serve", "check"])
def test_an_unknown_key_is_named_with_its_nearest(tmp_path, command):
    config = ServerProcess(tmp_path, sections={"scheduling": {"polcy": "fifo"}}).config
    done = serve(config, command=command)
    assert (done.returncode, done.stdout) == (2, "")
    assert "unknown key 'scheduling.polcy'; did you mean 'scheduling.policy'?" in done.stderr
    assert str(config) in done.stderr


@pytest.mark.parametrize(
    ("section", "key", "value", "words"),
    [
        ("scheduling", "policy", "lifo", r"scheduling\.policy: 'lifo' is not one of .*fifo"),
        ("scheduling", "qos_factor", 0.5, r"scheduling\.qos_factor: .*1\.0"),
        ("server", "grpc_port", 70_000, r"server\.grpc_port: .*65535"),
        ("server", "max_queue", "many", r"server\.max_queue: .*int.*str"),
        ("device", "memory_budget", "much", r"device\.memory_budget: 'much' is not a size"),
        ("device", "kind", "tpu", r"device\.kind: .*tpu"),
        ("models", "load", "gcn", r"models\.load"),
    ],
)
def test_a_wrong_value_is_named_with_its_rule(
    tmp_path, monkeypatch, capsys, section, key, value, words
):
    config = ServerProcess(tmp_path, sections={section: {key: value}}).config
    code = refused(config, monkeypatch=monkeypatch)
    told = capsys.readouterr()
    assert (code, told.out) == (2, "")
    assert re.search(words, told.err), told.err


def test_a_repository_that_is_not_there_is_named(tmp_path):
    done = serve(ServerProcess(tmp_path, sections={"models": {"repository": "/nowhere"}}).config)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.search(r"/nowhere: .*models\.repository", done.stderr), done.stderr


@pytest.mark.parametrize("name", ["grpc_port", "http_port"])
def test_a_taken_port_is_named(tmp_path, name):
    server = ServerProcess(tmp_path)
    port = getattr(server, name)
    with socket.create_server(("127.0.0.1", port)):
        done = serve(server.config)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"server.{name}: cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "in use" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path.mkdir(), "it is a folder"),
        (lambda path: path.write_bytes(b"not a database" * 99), "file is not a database"),
        (lambda path: path.parent.rmdir(), "does not exist"),
    ],
)
def test_a_database_that_cannot_be_written_is_named(tmp_path, make, words):
    path = tmp_path / "folder" / "report.db"
    path.parent.mkdir()
    make(path)
    done = serve(ServerProcess(tmp_path, sections={"report": {"database": str(path)}}).config)
    assert (done.returncode, done.stdout) == (2, "")
    assert str(path) in done.stderr
    assert words in done.stderr
