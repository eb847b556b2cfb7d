"""`gnnserve front`: one address before several servers, until a signal."""

import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from serve.access.front_stamps import read_key
from serve.cluster.front import Front
from serve.cluster.servers_file import read_servers
from serve.errors import ConfigError

_LOOK_S = 0.05


def run_front(
    host: str,
    port: int,
    servers: Sequence[str],
    file: Path | None,
    key_file: Path | None,
    on_ready: Callable[[], None],
) -> None:
    """Stand before the servers until SIGINT or SIGTERM; calls `on_ready` when one is ready.

    They are `servers`, or those that `file` names now: it is read again and again. With the key in
    `key_file` it tells them when it got each request. Raises ConfigError when it cannot read these,
    or ends by itself.
    """
    if bool(servers) == (file is not None):
        raise ConfigError("give --server for each server, or --servers-file")
    key = "" if key_file is None else read_key(key_file)
    drained: Sequence[str] = ()
    if file is not None:
        servers, drained = read_servers(file)
    over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda _number, _frame: over.set())
    with tempfile.TemporaryDirectory(prefix="gnnserve-front-") as folder:
        front = Front(host, port, servers, Path(folder), key)
        said, wrong = False, ""
        try:
            front.start()
            front.change(servers, drained)
            while not over.wait(_LOOK_S):
                if file is not None:
                    try:
                        front.change(*read_servers(file))
                    except ConfigError as error:  # it goes on with those that it knows
                        if wrong != (wrong := str(error)):
                            sys.stderr.write(f"error: {wrong}\n")
                if front.failure is not None:
                    raise ConfigError(front.failure)
                if not said and front.ready_count:
                    said = True
                    on_ready()
        finally:
            front.stop()
