"""Other users of the host are heard by none of the sockets between the server's processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.kit.http2_frames import PREFACE, SETTINGS, frame
from tests.access.certs import needs_openssl
from tests.processes import PATIENCE_S, descendants
from tests.rpc.test_tls import FRONTS, Encrypted

#: As a user who owns nothing, connect and say how that ends.
CONNECT = """
import os, socket, sys
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
name = os.fsencode(sys.argv[1])
with socket.socket(socket.AF_UNIX) as one:
    one.settimeout(30)
    try:
        one.connect(b"\\0" + name[1:] if name.startswith(b"@") else name)
        one.sendall(bytes.fromhex(sys.argv[2]))
        print("heard" if one.recv(1) else "closed")
    except TimeoutError:
        print("nothing")
    except OSError:
        print("closed")
"""
_LISTENS = 0x10000


def unix_listeners(pid: int) -> list[str]:
    """Names of the Unix sockets on which the process listens; abstract ones begin with `@`."""
    own = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            own.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
        except OSError:
            continue
    lines = Path("/proc/net/unix").read_text().splitlines()[1:]
    rows = [line.split(maxsplit=7) for line in lines]
    return [
        row[7]
        for row in rows
        if len(row) == 8 and int(row[3], 16) & _LISTENS and f"socket:[{row[6]}]" in own
    ]


def connected(name: str) -> str:
    """Return how it ends for another user to connect to a Unix socket and greet: `closed`."""
    hello = (PREFACE + frame(SETTINGS, 0, 0)).hex()
    done = subprocess.run(
        [sys.executable, "-c", CONNECT, name, hello],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    return done.stdout.strip()


becomes_another = pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")


@becomes_another
def test_other_users_are_not_heard(server):
    names = [name for pid in (server.pid, *descendants(server.pid)) for name in unix_listeners(pid)]
    assert len(names) >= 3, "of the gRPC server behind the front, for the gateway, for lanes"
    for name in names:
        assert connected(name) == "closed", name


@becomes_another
@needs_openssl
@FRONTS
def test_other_users_are_not_heard_where_the_port_is_encrypted(tmp_path, front):
    before = set(unix_listeners(os.getpid()))
    server = Encrypted(tmp_path, front)
    try:
        names = set(unix_listeners(os.getpid())) - before
        assert server.server.own_address.partition(":")[2] in {one.lstrip("@") for one in names}
        for name in names:
            assert connected(name) == "closed", name
    finally:
        server.close()
