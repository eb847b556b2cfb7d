"""Lane processes: they start pinned, answer, are missed when they die, and leave nothing."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from bench.kit.servers import ROOT
from serve import native
from serve.core.types import LaneId, LaneState, TaskId
from serve.errors import NotReady
from serve.ipc.messages import (
    LaneStarted,
    LoadModel,
    ModelFailed,
    ModelLoaded,
    Part,
    ProbeModel,
    RunTask,
    TaskDone,
    TaskError,
    TensorRef,
)
from serve.ipc.setup import DevicePlace
from serve.ipc.shared_pool import SharedPool
from serve.models.model_signature import Signature
from serve.models.repository import find
from serve.server.lanes import processes
from serve.server.lanes.listener import LaneDown, LaneUp
from serve.server.lanes.pool import LanePool
from serve.server.lanes.process_state import look
from serve.server.lanes.processes import allocator_facts, lane_environment
from tests.e2e.mischief import (
    DEAF,
    GARBAGE,
    HOLD,
    INTERRUPT,
    LONG,
    MEDDLE,
    NO_TEXT,
    ORPHAN,
    RAISE,
    ROW_LESS,
    ROW_MORE,
    SYS_EXIT,
    TELL,
    UNTELLABLE,
)
from tests.processes import PATIENCE_S, descendants, is_running, wait_for
from tests.server.conftest import assert_nothing_more_is_held, held_by_this_process

LANES = (LaneId(0), LaneId(1))
NODES, WIDTH, COLUMNS = 3, 4, 2
OUTPUT_OFFSET = 4096
#: Of the model `mischief`.
SIGNATURE = Signature(
    num_features=WIDTH, edge_dim=None, num_outputs=COLUMNS, rows="node",
    accepts_empty=True, accepts_edgeless=True, deterministic=True,
)  # fmt: skip
#: A main module without a guard, as the tests' own has none that would show.
MAIN = """
with open("{log}", "a") as log:
    print(__name__, file=log)
if __name__ == "__main__":
    import os
    from serve.server.lanes.listener import LaneUp
    from serve.server.lanes.pool import LanePool
    from serve.ipc.shared_pool import SharedPool

    shared = SharedPool(1 << 20)
    pool = LanePool(((min(os.sched_getaffinity(0)),),), shared, keep_bytes=0)
    pool.start()
    while not any(isinstance(said, LaneUp) for _, said in pool.poll(None)):
        pass
    pool.stop()
    shared.close()
"""


class Talk:
    """A pool, and everything its lanes said."""

    def __init__(self, cores: tuple[int, int] | None, places: tuple[DevicePlace, ...] = ()) -> None:
        self.shared = SharedPool(1 << 20)
        lane_cores = ((), ()) if cores is None else tuple((core,) for core in cores)
        self.pool = LanePool(lane_cores, self.shared, keep_bytes=64 << 20, places=places)
        self.said: list[tuple[LaneId, object]] = []

    def start(self) -> "Talk":
        self.pool.start()
        for lane_id in LANES:
            self.hear(lane_id, LaneUp)
        return self

    def hear(self, lane_id: LaneId, kind: type, patience_s: float = PATIENCE_S):
        """The next message of that kind from that lane."""
        give_up = time.monotonic() + patience_s
        while True:
            for number, (speaker, message) in enumerate(self.said):
                if speaker == lane_id and isinstance(message, kind):
                    del self.said[number]
                    return message
            assert time.monotonic() < give_up, f"lane {lane_id} never said {kind.__name__}"
            self.said += self.pool.poll(time.monotonic_ns() + 50_000_000)

    def load(self, trouble, lane_id: LaneId = LANES[0]) -> None:
        spec = find(trouble.root, "mischief")
        self.pool.send(lane_id, LoadModel("m", spec, SIGNATURE))
        assert self.hear(lane_id, ModelLoaded) == ModelLoaded("m")

    def load_wrong(self, trouble, lane_id: LaneId) -> ModelFailed:
        """Weights of other shapes than the signature says."""
        self.pool.send(lane_id, LoadModel("wrong", find(trouble.root, "gcn"), SIGNATURE))
        return self.hear(lane_id, ModelFailed)

    def run(
        self,
        word: float,
        lane_id: LaneId = LANES[0],
        task_id: int = 7,
    ):
        x = np.arange(NODES * WIDTH, dtype=np.float32).reshape(NODES, WIDTH)
        x[0, 0] = word
        self.shared.array(0, "float32", x.shape)[:] = x
        inputs = (
            TensorRef("x", "float32", x.shape, 0),
            TensorRef("edge_index", "int64", (2, 0), 2048),
        )
        part = Part(inputs, OUTPUT_OFFSET, 4 * NODES * COLUMNS)
        task = RunTask(task_id, "m", (part,), limit_bytes=1 << 30)
        self.pool.launch(lane_id, task)
        return x

    def end(self) -> None:
        self.pool.stop()
        self.shared.close()


@pytest.fixture
def talk(cores, monkeypatch):
    # Runs that are stopped end by themselves, however long that takes.
    monkeypatch.setattr("serve.server.lanes.pool._STOP_GRACE_NS", int(PATIENCE_S * 1e9))
    found = Talk(cores).start()
    yield found
    found.end()


@pytest.fixture(scope="module")
def lasting(cores):
    """One pool for all tests that leave its lanes as they were."""
    found = Talk(cores).start()
    yield found
    found.end()


@pytest.fixture
def unharmed(lasting, trouble):
    """The lasting pool with the model on its first lane; afterwards its lanes are the same ones."""
    lasting.load(trouble)
    # What lanes tell of their memory may come at any time.
    lasting.said.clear()
    before = lasting.pool.pids()
    yield lasting
    assert (lasting.pool.pids(), lasting.pool.restarts) == (before, 0)


def test_lanes_are_processes_of_their_own_pinned_to_their_cores(unharmed, cores):
    talk = unharmed
    pids = talk.pool.pids()
    assert pids.keys() == set(LANES)
    assert len({os.getpid(), *pids.values()}) == 3
    for lane_id, core in zip(LANES, cores, strict=True):
        assert os.sched_getaffinity(pids[lane_id]) == {core}


def test_a_lane_runs_a_task_on_the_shared_pool(unharmed, trouble):
    talk = unharmed
    x = talk.run(0.5)
    done = talk.hear(LANES[0], TaskDone)
    assert (done.task_id, done.rows, done.columns) == (7, (NODES,), COLUMNS)
    assert done.run_ns > 0
    found = talk.shared.array(OUTPUT_OFFSET, "float32", (NODES, COLUMNS))
    weights = trouble.module.state_dict()
    expected = x @ weights["linear.weight"].numpy().T + weights["linear.bias"].numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_what_a_model_raises_is_the_tasks_end_only(unharmed):
    talk = unharmed
    talk.run(RAISE)
    error = talk.hear(LANES[0], TaskError)
    assert (error.reason, error.message) == ("model_error", "ValueError: asked to fail at 3 nodes")
    talk.run(0.0)
    assert talk.hear(LANES[0], TaskDone).rows == (NODES,)


@pytest.mark.parametrize(
    ("word", "text"),
    [
        (SYS_EXIT, "SystemExit: 3"),
        (INTERRUPT, "KeyboardInterrupt"),
        (LONG, "ValueError: " + ("long " * 200)[: 1000 - len("ValueError: …")] + "…"),
        (UNTELLABLE, "Untellable, whose text cannot be told: it raises SystemExit"),
        (NO_TEXT, "ValueError: \\ud800"),
        (ROW_LESS, "model mischief:1: the output has 2 rows of 2; it must have 3 rows of 2"),
        (ROW_MORE, "model mischief:1: the output has 4 rows of 2; it must have 3 rows of 2"),
    ],
)
def test_whatever_a_model_does_wrong_costs_no_lane(unharmed, word, text):
    talk = unharmed
    talk.run(word)
    error = talk.hear(LANES[0], TaskError)
    assert error.reason == "model_error"
    assert error.message.startswith(text)
    talk.run(0.5, task_id=8)
    assert talk.hear(LANES[0], TaskDone).task_id == 8


def test_what_a_run_changes_of_torch_is_brought_back(unharmed):
    talk = unharmed
    talk.run(TELL)
    before = talk.hear(LANES[0], TaskError).message
    assert "float32 cpu" in before
    for _ in range(2):
        talk.run(MEDDLE)
        talk.hear(LANES[0], TaskDone)
        talk.run(TELL)
        assert talk.hear(LANES[0], TaskError).message == before


def test_a_model_that_does_not_load_is_told(unharmed, trouble):
    failed = unharmed.load_wrong(trouble, LANES[0])
    assert failed.key == "wrong"
    assert "shapes" in failed.message


def test_a_dead_lane_comes_back_later_each_time_unless_it_has_worked(talk, trouble, caplog):
    caplog.set_level(logging.WARNING, "serve.server.lanes.restarts")
    lane_id, other = LANES
    untouched = talk.pool.pids()[other]
    for restarts in (1, 2, 3):
        before = talk.pool.pids()[lane_id]
        os.kill(before, signal.SIGKILL)
        talk.hear(lane_id, LaneDown)
        talk.hear(lane_id, LaneUp)
        assert talk.pool.restarts == restarts
        assert talk.pool.pids()[lane_id] != before
    assert talk.pool.pids()[other] == untouched
    talk.load(trouble)
    talk.run(0.5)
    talk.hear(lane_id, TaskDone)
    talk.pool.ended(lane_id)
    os.kill(talk.pool.pids()[lane_id], signal.SIGKILL)
    talk.hear(lane_id, LaneDown)
    talk.hear(lane_id, LaneUp)
    told = [record.getMessage() for record in caplog.records]
    waits = ("0.05 s", "0.10 s", "0.20 s", "0.05 s")
    assert told == [f"lane 0: lost (signal 9); restart in {wait}" for wait in waits]


def test_a_lane_that_leaves_a_child_behind_is_missed_and_the_child_is_ended(talk, trouble):
    """It holds the lane's end of the channel, and the shared pool."""
    talk.load(trouble)
    talk.run(ORPHAN)
    talk.hear(LANES[0], LaneDown)
    (child,) = trouble.folder.glob("child.*")
    wait_for(lambda: not is_running(int(child.suffix[1:])), "the end of the child")
    child.unlink()
    talk.hear(LANES[0], LaneUp)


def test_a_lane_that_says_nonsense_is_lost_and_the_other_is_not(talk, trouble):
    for lane_id in LANES:
        talk.load(trouble, lane_id)
    before = talk.pool.pids()
    talk.run(GARBAGE)
    talk.hear(LANES[0], LaneDown)
    talk.hear(LANES[0], LaneUp)
    talk.run(0.5, LANES[1])
    assert talk.hear(LANES[1], TaskDone).task_id == 7
    assert talk.pool.pids()[LANES[1]] == before[LANES[1]]


def test_who_listens_to_lanes_never_waits_for_a_fork_server(talk, trouble):
    """It takes seconds to start, and then whoever starts or frees a process waits for it."""
    talk.load(trouble, LANES[1])
    starting = processes._one_at_a_time
    starting.acquire()
    give_up = threading.Timer(PATIENCE_S, starting.release)
    give_up.start()
    try:
        os.kill(talk.pool.pids()[LANES[0]], signal.SIGKILL)
        talk.hear(LANES[0], LaneDown)
        talk.run(0.5, LANES[1])
        talk.hear(LANES[1], TaskDone)
        assert give_up.is_alive(), "it waited until that was over"
    finally:
        give_up.cancel()
        give_up.join()
        if starting.locked():
            starting.release()
    talk.hear(LANES[0], LaneUp)


def test_a_fork_server_that_does_not_answer_is_replaced(talk, monkeypatch):
    monkeypatch.setattr("serve.server.lanes.processes._FORK_WAIT_S", 0.5)
    before = talk.pool.pids()
    (server,) = {_parent(pid) for pid in before.values()}
    os.kill(server, signal.SIGSTOP)
    try:
        os.kill(before[LANES[0]], signal.SIGKILL)
        talk.hear(LANES[0], LaneDown)
        wait_for(lambda: not is_running(server), "its end")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(server, signal.SIGCONT)
    monkeypatch.undo()
    for lane_id in LANES:
        talk.hear(lane_id, LaneUp)
    assert set(talk.pool.pids().values()).isdisjoint(before.values())


def test_all_lanes_come_back_when_the_fork_server_is_killed(talk):
    """They go with it, as they would with the server."""
    pids = talk.pool.pids()
    parents = {_parent(pid) for pid in pids.values()}
    assert len(parents) == 1
    socket = Path(processes.forkserver._forkserver._forkserver_address)
    assert socket.is_socket()
    os.kill(parents.pop(), signal.SIGKILL)
    for lane_id in LANES:
        talk.hear(lane_id, LaneDown)
        talk.hear(lane_id, LaneUp)
    assert set(talk.pool.pids().values()).isdisjoint(pids.values())
    assert not socket.exists()


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_lane_is_stopped_in_the_middle_and_goes_on(talk, trouble):
    talk.load(trouble)
    with trouble.holding() as graph:
        talk.run(graph.x[0, 0])
        pid = wait_for(trouble.running, "a running task").pop()
        talk.pool.suspend(LANES[0])
        wait_for(lambda: _state(pid) == "T", "the stopped process")
        assert talk.pool.look(LANES[0], TaskId(7)).state is LaneState.STOPPED
        talk.pool.resume(LANES[0])
        wait_for(lambda: _state(pid) in "RS", "the process going on")
    assert talk.hear(LANES[0], TaskDone).rows == (NODES,)


def stop_and_hear(talk, task_id: int = 7) -> TaskError:
    talk.pool.stop_run(LANES[0], TaskId(task_id))
    error: TaskError = talk.hear(LANES[0], TaskError)
    talk.pool.ended(LANES[0])
    return error


def test_a_run_is_stopped_and_the_lane_goes_on(talk, trouble):
    talk.load(trouble)
    with trouble.holding():
        talk.run(HOLD)
        wait_for(trouble.running, "a running task")
        assert stop_and_hear(talk).reason == "stopped"
        assert not trouble.running()
    talk.run(0.5, task_id=8)
    assert talk.hear(LANES[0], TaskDone).task_id == 8


def test_a_suspended_run_is_stopped_too(talk, trouble):
    talk.load(trouble)
    with trouble.holding():
        talk.run(HOLD)
        wait_for(trouble.running, "a running task")
        talk.pool.suspend(LANES[0])
        assert stop_and_hear(talk).reason == "stopped"


def test_a_stop_is_for_the_task_it_names(talk, trouble):
    talk.load(trouble)
    with trouble.holding():
        talk.run(HOLD)
        wait_for(trouble.running, "a running task")
        talk.pool.stop_run(LANES[0], TaskId(6))
    assert talk.hear(LANES[0], TaskDone).task_id == 7


def test_a_stop_that_comes_before_the_run_ends_it_too(talk, trouble):
    talk.load(trouble)
    talk.pool.suspend(LANES[0])
    talk.run(0.5)
    assert stop_and_hear(talk).reason == "stopped"


def test_a_run_that_does_not_end_when_stopped_costs_its_lane(talk, trouble, monkeypatch):
    monkeypatch.setattr("serve.server.lanes.pool._STOP_GRACE_NS", 100_000_000)
    talk.load(trouble)
    with trouble.holding():
        talk.run(DEAF)
        wait_for(trouble.running, "a running task")
        talk.pool.stop_run(LANES[0], TaskId(7))
        talk.hear(LANES[0], LaneDown)
        talk.hear(LANES[0], LaneUp)


def test_sending_to_a_dead_lane_raises_nothing(talk):
    os.kill(talk.pool.pids()[LANES[0]], signal.SIGKILL)
    for _ in range(3):
        talk.run(0.0)
    talk.hear(LANES[0], LaneDown)
    talk.run(0.0)
    talk.hear(LANES[0], LaneUp)


def test_a_lane_that_takes_no_more_messages_is_lost(talk, trouble, caplog):
    """So that a task whose message had no room is handed over instead of waited for."""
    talk.load(trouble)
    pid = talk.pool.pids()[LANES[0]]
    talk.pool.suspend(LANES[0])
    wait_for(lambda: _state(pid) == "T", "the stopped process")
    spec = find(trouble.root, "mischief")
    while "cannot be reached" not in caplog.text:
        talk.pool.send(LANES[0], LoadModel("m", spec, SIGNATURE))
    talk.run(0.0)
    talk.hear(LANES[0], LaneDown)
    talk.hear(LANES[0], LaneUp)


def test_a_lane_does_not_import_the_main_module(tmp_path):
    """It may take long, and do things that only the server should."""
    main = tmp_path / "main.py"
    main.write_text(MAIN.format(log=tmp_path / "imports"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, main], env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "imports").read_text() == "__main__\n"


def test_a_calibrator_that_dies_says_so(talk, trouble, tmp_path):
    folder = tmp_path / "deadly"
    folder.mkdir()
    for name in ("config.toml", "1/weights.safetensors"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes((trouble.folder / name).read_bytes())
    (folder / "model.py").write_text("import os\nos._exit(5)\n")
    before = descendants(os.getpid()).keys()
    with talk.pool.calibrator() as calibrator:
        assert isinstance(calibrator.receive(PATIENCE_S), LaneStarted)
        calibrator.send(ProbeModel(find(tmp_path, "deadly"), 1.0, 1 << 20))
        with pytest.raises(NotReady, match="died"):
            calibrator.receive(PATIENCE_S)
    assert descendants(os.getpid()).keys() <= before


def test_a_calibrator_that_yields_stands_still_while_a_lane_executes_on_its_core(talk, trouble):
    talk.load(trouble)

    def stands(calibrator):
        seen = look(calibrator.pid)
        return seen is not None and seen.state is LaneState.STOPPED

    with talk.pool.calibrator(yields=True) as early, talk.pool.calibrator() as other:
        for calibrator in (early, other):
            assert isinstance(calibrator.receive(PATIENCE_S), LaneStarted)
        talk.run(0.5)
        wait_for(lambda: stands(early), "it to stand still")
        with talk.pool.calibrator(yields=True) as late:
            assert not stands(other)
            talk.hear(LANES[0], TaskDone)
            talk.pool.ended(LANES[0])
            assert isinstance(late.receive(PATIENCE_S), LaneStarted)
            wait_for(lambda: not stands(early), "it to go on")
        talk.run(0.5, LANES[0], task_id=8)
        wait_for(lambda: stands(early), "it to stand still again")
    assert talk.hear(LANES[0], TaskDone).task_id == 8


@pytest.mark.parametrize("killed_before", [False, True])
def test_stopping_leaves_nothing(cores, killed_before):
    """Also when a lane is just being started again."""
    Talk(cores).start().end()  # the fork server is this process's, and stays
    before = held_by_this_process()
    talk = Talk(cores).start()
    pids = talk.pool.pids().values()
    assert all(map(is_running, pids))
    if killed_before:
        os.kill(talk.pool.pids()[LANES[0]], signal.SIGKILL)
        talk.hear(LANES[0], LaneDown)
        while talk.pool.restarts == 0:
            talk.said += talk.pool.poll(time.monotonic_ns() + 10_000_000)
    talk.end()
    assert not any(map(is_running, pids))
    assert_nothing_more_is_held(before)


def test_what_changes_the_allocator_changes_its_facts(monkeypatch):
    facts = allocator_facts(64 << 20)
    assert "MALLOC_MMAP_MAX_=0" in facts
    assert facts == allocator_facts(70 << 20)
    assert facts != allocator_facts(16 << 20)
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    assert facts != allocator_facts(64 << 20)


def test_without_the_meter_lanes_start_all_the_same_and_the_log_says_so(monkeypatch, caplog):
    caplog.set_level(logging.WARNING, "serve.server.lanes.pool")
    monkeypatch.setenv("LD_PRELOAD", "")
    monkeypatch.setattr(native, "meter_library_path", lambda: None)
    with lane_environment():
        assert os.environ["LD_PRELOAD"] == ""
        assert os.environ["MALLOC_MMAP_MAX_"] == "0"
    assert "MALLOC_MMAP_MAX_" not in os.environ
    assert "without the memory meter: peaks are not measured" in caplog.text


def test_lanes_that_are_pinned_to_no_core_run_anywhere():
    """As under a CPU quota."""
    talk = Talk(None).start()
    try:
        for lane_id in LANES:
            assert os.sched_getaffinity(talk.pool.pids()[lane_id]) == os.sched_getaffinity(0)
    finally:
        talk.end()
