"""Training beside requests, with a real server: what comes of it, and what it costs nobody."""

import os
import re
import shutil
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
from safetensors.numpy import load_file

from bench.kit.servers import ServerProcess
from gnnserve import Client
from serve.client import Mismatched, NotFound
from tests.e2e.support import GOOD, REPOSITORY, Reference, run_python
from tests.processes import wait_for

GRAPH = {"name": "community", "dataset": "community"}
TRAINING = {"workers": 1, "memory": "128 MiB", "checkpoint_s": 0.1}
#: Many more than are done beside requests, before the server stops.
EPOCHS = 100


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    root = tmp_path_factory.mktemp("trained") / "models"
    shutil.copytree(REPOSITORY / "gcn", root / "gcn")
    return root


@pytest.fixture(scope="module")
def server(repository, tmp_path_factory):
    sections = {"training": TRAINING, "scheduling": {"policy": "slack"}}
    found = ServerProcess(
        tmp_path_factory.mktemp("training"),
        policy="slack",
        discipline="preemptive",
        repository=repository,
        sections=sections,
        graphs=(GRAPH,),
    )
    with found:
        yield found


@pytest.fixture
def client(server):
    with Client(server.target) as found:
        yield found


@contextmanager
def asked(server, readers=2):
    """Clients that ask with short pauses; their answers. None may fail."""
    answers, stop = [], threading.Event()

    def ask():
        with Client(server.target) as client:
            while not stop.wait(0.01):
                given = client.infer("gcn", x=GOOD.x, edge_index=GOOD.edge_index, version="1")
                answers.append(given.output)

    with ThreadPoolExecutor(readers) as threads:
        asking = [threads.submit(ask) for _ in range(readers)]
        try:
            yield answers
        finally:
            stop.set()
        for one in asking:
            one.result()


def trainers(server):
    """Process ids of all processes that have trained, in order."""
    found = re.findall(r"job \d+: process (\d+) trains", server.log.read_text())
    return [int(pid) for pid in found]


def reached(client, job_id, epochs):
    """Wait until the job has done so many epochs."""
    for job in client.watch_job(job_id):
        if job.epochs_done >= epochs:
            return
    raise AssertionError(f"ended before: {job}")


def weights(repository, version):
    return load_file(repository / "gcn" / str(version) / "weights.safetensors")


@pytest.mark.slow
def test_kills_restarts_and_pauses_change_no_answer_and_no_weight(server, repository):
    """The same training twice: disturbed in all ways, and left alone."""
    expected = Reference()("gcn", GOOD)
    with Client(server.target) as client:
        job = client.train("gcn", "community", epochs=EPOCHS, seed=3, fresh=True)
        with asked(server) as answers:
            reached(client, job.job_id, 2)
            (first,) = trainers(server)
            os.kill(first, signal.SIGKILL)
            wait_for(lambda: len(trainers(server)) == 2, "another process")
            reached(client, job.job_id, 5)
            more = len(answers)
            wait_for(lambda: len(answers) > more + 20, "answers beside the job")
            (now,) = client.jobs()
            assert not now.ended, "it has to go on after the restart"
    assert server.stop() == 0
    for answer in answers:
        np.testing.assert_allclose(answer, expected, rtol=0, atol=1e-4)
    server.start()
    server.wait_ready()
    with Client(server.target) as client:
        *_, done = client.watch_job(job.job_id)
        assert (done.state, done.epochs_done, done.version) == ("done", EPOCHS, 2), done
        *_, again = client.watch_job(
            client.train("gcn", "community", epochs=EPOCHS, seed=3, fresh=True).job_id
        )
        assert (again.state, again.version) == ("done", 3), again
        assert again.accuracy == done.accuracy > 0.9
        answer = client.infer("gcn", x=GOOD.x, edge_index=GOOD.edge_index)
        assert answer.version == "3"
    ours, theirs = weights(repository, 2), weights(repository, 3)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert np.array_equal(tensor, theirs[name])


@pytest.mark.slow
def test_a_job_is_cancelled_and_the_command_line_tells_of_it(server, client, tmp_path):
    command = ["-m", "serve"]
    said = run_python(
        [*command, "train", "gcn", "--graph", "community", "--epochs", "100000", "--no-wait",
         "--target", server.target],
        tmp_path,
    )  # fmt: skip
    number = int(re.match(r"job (\d+): gcn on community, 100000 epochs", said)[1])
    reached(client, number, 3)
    job = ["job", "cancel", str(number), "--target", server.target]
    said = run_python([*command, *job], tmp_path)
    assert re.fullmatch(rf"job {number}: cancelled after \d+ of 100000 epochs\n", said)
    assert "cancelled" in run_python([*command, "job", "list", "--target", server.target], tmp_path)
    *_, last = client.watch_job(number)
    assert last.state == "cancelled"


@pytest.mark.slow
def test_what_cannot_be_trained_is_refused(client):
    with pytest.raises(NotFound, match="unknown model 'gat'"):
        client.train("gat", "community", epochs=1)
    with pytest.raises(NotFound, match="unknown graph 'cora'"):
        client.train("gcn", "cora", epochs=1)
    with pytest.raises(NotFound, match="there is no job 99"):
        client.cancel_job(99)


@pytest.mark.slow
def test_a_job_that_needs_too_much_fails_with_the_numbers(repository, tmp_path):
    sections = {"training": {"workers": 1, "memory": "1 MiB"}}
    with (
        ServerProcess(tmp_path, repository=repository, sections=sections, graphs=(GRAPH,)) as small,
        Client(small.target) as client,
    ):
        job = client.train("gcn", "community", epochs=1)
        *_, last = client.watch_job(job.job_id)
        assert last.state == "failed"
        assert re.fullmatch(r"needs \d+ bytes, there are 1048576 for training", last.message), (
            last.message
        )


@pytest.mark.slow
def test_a_job_that_takes_too_much_disk_fails(repository, tmp_path):
    sections = {"training": TRAINING | {"max_files": "1 KiB"}}
    with (
        ServerProcess(tmp_path, repository=repository, sections=sections, graphs=(GRAPH,)) as small,
        Client(small.target) as client,
    ):
        job = client.train("gcn", "community", epochs=100_000)
        *_, last = client.watch_job(job.job_id)
        assert last.state == "failed"
        assert re.fullmatch(
            r"its files take \d+ bytes beside its graph, of 1024 \(training\.max_files\)",
            last.message,
        ), last.message
        assert [job.state for job in client.jobs()] == ["failed"]


@pytest.mark.slow
def test_without_workers_nothing_is_trained(repository, tmp_path):
    with (
        ServerProcess(tmp_path, repository=repository, graphs=(GRAPH,)) as none,
        Client(none.target) as client,
        pytest.raises(Mismatched, match=r"trains nothing: training\.workers is 0"),
    ):
        client.train("gcn", "community", epochs=1)
