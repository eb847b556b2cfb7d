"""What processes import: the serving one never torch, which would cost memory and time."""

import signal
import subprocess
import sys

from serve.ipc.signals import LEFT_TO_MAIN, left_to_main_blocked

CODE = """
import sys
import serve.commands.serve, serve.cli, serve.client, serve.obs.cli_report, serve.server.engine
heavy = {"torch", "torch_geometric", "pandas", "matplotlib", "scipy"} & sys.modules.keys()
assert not heavy, f"imported: {heavy}"
"""


def assert_runs(code):
    """To its end: a process that ends its children at exit tells no exit code of its own."""
    code += 'print("to the end")'
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stdout == "to the end\n", done.stderr


def test_importing_the_server_imports_no_torch():
    subprocess.run([sys.executable, "-c", CODE], check=True)


LANE = """
import sys
from serve.lane import preload
import torch, torch_geometric
left_out = {"torch._dynamo", "torch_geometric.datasets"}
assert not left_out & sys.modules.keys()
# Whoever needs it gets it: PyG when asked about a compiled model, torch when it compiles.
assert torch_geometric.datasets.Planetoid.__name__ == "Planetoid"
from torch_geometric.datasets import KarateClub
assert torch_geometric.datasets.KarateClub is KarateClub
assert torch_geometric.is_torch_instance(torch.nn.Linear(1, 1), torch.nn.Linear)
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)).tolist() == [2, 2]
assert "torch._dynamo" in sys.modules
"""


def test_lanes_start_without_compiler_and_data_sets_and_can_still_use_them():
    assert_runs(LANE)


READER = """
import sys, types
from serve.lane import reader
def carried_out():
    assert "torch._dynamo" not in sys.modules
    print("torch_geometric" in sys.modules)
sys.modules["an_order"] = types.SimpleNamespace(main=carried_out)
sys.argv[1:] = ["an_order"]
reader.main()
"""


def test_files_are_read_without_compiler():
    done = subprocess.run([sys.executable, "-c", READER], capture_output=True, check=True)
    assert done.stdout == b"True\n"


FORKS = """
import gc, os
from serve.lane import preload
import numpy as np
assert gc.get_freeze_count() > 10_000
seen = set()
for _ in range(2):
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.write(writer, np.random.bytes(16))
        os._exit(0)
    seen.add(os.read(reader, 16))
    os.wait()
assert len(seen) == 2
"""


def test_lanes_share_what_the_fork_server_imported_but_not_its_random_numbers():
    assert_runs(FORKS)


MEASURED = """
import sys
from serve.lane import preload
from serve.lane.executors.choose import ExecutorOptions, choose
from serve.lane.executors.check import takes_narrow_edges
from serve.lane.measure.probe_signature import probe_signature
from serve.lane.measure.where_measured import Processor
from serve.lane.models.loader import load_model
from serve.models.repository import find
from serve.resources import configs_path
model = load_model(find(configs_path() / "models", "gat"))
signature = probe_signature(model)
fast = choose(model, signature, ExecutorOptions("csr")).loaded
assert takes_narrow_edges(fast, signature, Processor())
assert "torch._dynamo" not in sys.modules
"""


def test_models_are_measured_without_compiler():
    assert_runs(MEASURED)


FILES = """
import resource
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, most))
from serve.commands.tuning import tune_process
tune_process()
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, most)
"""


def test_the_server_may_open_as_many_files_as_the_system_lets_it():
    subprocess.run([sys.executable, "-c", FILES], check=True)


#: Prints the signal that ended the fork server; 0 when it ended by itself, as its pipe is closed.
ENDED_BY = """
server = forkserver._forkserver
os.close(server._forkserver_alive_fd)
print(os.WTERMSIG(os.waitpid(server._forkserver_pid, 0)[1]))
"""


def test_a_fork_server_ends_with_what_it_was_started_for():
    code = """
import os
from multiprocessing import forkserver
from serve.server.lanes.processes import fork_server
with fork_server():
    pass
"""
    done = subprocess.run([sys.executable, "-c", code + ENDED_BY], capture_output=True, check=True)
    assert int(done.stdout) == signal.SIGKILL, "which is all of the output"


def test_a_fork_server_ends_with_a_start_that_ctrl_c_interrupts():
    code = """
import os, signal
from multiprocessing import forkserver
from serve.server.lanes.processes import fork_server
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it in the background
start = forkserver.ensure_running
def start_and_interrupt():
    start()
    os.kill(os.getpid(), signal.SIGINT)
forkserver.ensure_running = start_and_interrupt
try:
    with fork_server():
        raise AssertionError("not interrupted")
except KeyboardInterrupt:
    pass
"""
    done = subprocess.run([sys.executable, "-c", code + ENDED_BY], capture_output=True, check=True)
    assert int(done.stdout) == signal.SIGKILL


def test_a_process_that_starts_outlives_ctrl_c_until_it_ignores_it():
    code = """
import sys
print("up", flush=True)
sys.stdin.readline()
from serve.ipc.signals import ignore_left_to_main
ignore_left_to_main()
print("there", flush=True)
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with left_to_main_blocked():
        started = subprocess.Popen([sys.executable, "-c", code], **pipes)
    assert started.stdout.readline() == "up\n"
    started.send_signal(signal.SIGINT)
    assert started.communicate("\n")[0] == "there\n"
    assert started.returncode == 0


def test_signals_that_were_blocked_before_a_process_started_stay_blocked():
    def blocked():
        return signal.pthread_sigmask(signal.SIG_BLOCK, ())

    before = blocked()
    with left_to_main_blocked():
        with left_to_main_blocked():
            pass
        assert set(LEFT_TO_MAIN) <= blocked()
    assert blocked() == before
