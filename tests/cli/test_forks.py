"""The command's process may fork without losing the threads of its gRPC server."""

import os
import subprocess
import sys

import pytest

#: Without what switches the handlers off for all tests.
_ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "GRPC_ENABLE_FORK_SUPPORT"}

#: In place of the command line: a server whose process forks, as Python does when vfork fails.
_PROBE = """
import os, sys, time, types

def probe():
    from concurrent.futures import ThreadPoolExecutor
    import grpc
    server = grpc.server(ThreadPoolExecutor(2))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    channel = grpc.insecure_channel(f"127.0.0.1:{port}")
    grpc.channel_ready_future(channel).result(60)
    before = set(os.listdir("/proc/self/task"))
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    time.sleep(0.2)
    started = set(os.listdir("/proc/self/task")) - before
    channel.close()
    server.stop(0).wait(60)
    print("threads started:", len(started))

sys.modules["serve.cli"] = types.SimpleNamespace(main=probe)
from MODULE import main
main()
"""


@pytest.mark.parametrize("module", ["gnnserve.__main__", "serve.__main__"])
def test_a_fork_leaves_the_threads_of_grpc_alone(module):
    done = subprocess.run(
        [sys.executable, "-c", _PROBE.replace("MODULE", module)],
        env=_ENVIRONMENT, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert done.stdout == "threads started: 0\n"
    assert "fork() handlers" not in done.stderr


def test_the_package_imports_grpc_when_the_client_is_used():
    program = (
        "import sys, gnnserve; print('grpc' in sys.modules);"
        "from gnnserve import Client; print('grpc' in sys.modules, gnnserve.Client is Client);"
        "from gnnserve import *; print(Client is gnnserve.Client, 'Client' in dir(gnnserve))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.splitlines() == ["False", "True True", "True True"]
