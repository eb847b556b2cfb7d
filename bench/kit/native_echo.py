"""A server that runs nothing: the native front, which answers every ``ModelInfer`` at once.

    python -m bench.kit.native_echo PORT

What a client sees of it is transport alone: a lower bound for any server on this front.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from bench.kit.result import ROOT
from bench.kit.servers import free_ports
from bench.kit.waiting import PATIENCE_S
from serve.native import Front
from serve.wire.messages import INFER_METHOD, encode_response

#: As large as a mean answer of the mix.
ANSWER_BYTES = 28_000


@contextmanager
def native_echo() -> Iterator[tuple[int, str]]:
    """Yield the process id of a running echo, and its address."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "bench.kit.native_echo", str(port)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n", f"the echo ended: {process.wait()}"
            yield process.pid, f"127.0.0.1:{port}"
        finally:
            process.kill()


def main(port: int) -> None:
    """Serve until the process is killed."""
    front = Front(
        host="127.0.0.1",
        port=port,
        backend="gnnserve-nobody-is-behind",
        method=INFER_METHOD,
        max_message_bytes=1 << 30,
        max_receiving_bytes=4 << 30,
        max_connections=1024,
        max_connections_of_peer=1024,
        max_streams=1024,
        receive_timeout_s=PATIENCE_S,
        receive_bytes_per_s=1,
        send_timeout_s=PATIENCE_S,
    )
    answer = encode_response("", {"output": np.zeros((ANSWER_BYTES // 4, 1), np.float32)})
    print("ready", flush=True)
    while True:
        _, events = front.poll(-1)
        for handle, message, *_ in events:
            if message is not None:
                front.answer(handle, answer)


if __name__ == "__main__":
    main(int(sys.argv[1]))
