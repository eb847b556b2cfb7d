"""What an operator does to a server under chaos: changes credentials, certificates and models."""

import random
import shutil
import signal
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress

import grpc
import numpy as np

from bench.chaos.machine_faults import Violated
from bench.chaos.outside import Outside
from bench.chaos.world import CASES, World, case, issue_certificate, write_credentials
from gnnserve import Client, ClientError
from serve.pb import grpc_service_pb2 as pb

#: A model that comes and goes.
_FLEETING = "fleeting"
#: Longest time until a change counts, on a machine that does much else.
_TAKEN_S = 60.0


def _wait_for(true: Callable[[], bool], what: str) -> float:
    """Return the time in s until it was true; raises Violated."""
    began = time.monotonic()
    while not true():
        if time.monotonic() - began > _TAKEN_S:
            raise Violated(f"not within {_TAKEN_S:g} s: {what}")
        time.sleep(0.05)
    return time.monotonic() - began


def renew_certificate(world: World, outside: Outside) -> str:
    """Put another certificate in the place of the server's; both ports must show it."""
    wanted = ssl.PEM_cert_to_DER_cert(issue_certificate(world))
    context = ssl.create_default_context(cafile=str(world.authority))
    context.set_alpn_protocols(["h2"])

    def shown(port: int) -> bool:
        with (
            suppress(OSError),
            socket.create_connection(("127.0.0.1", port), timeout=5) as raw,
            context.wrap_socket(raw, server_hostname="127.0.0.1") as one,
        ):
            return one.getpeercert(binary_form=True) == wanted
        return False

    ports = outside.server.grpc_port, outside.server.http_port
    times = [_wait_for(lambda port=port: shown(port), "the new certificate") for port in ports]  # type: ignore[misc]
    return f"after {times[0]:.1f} s, then {times[1]:.1f} s"


def change_credentials(world: World, outside: Outside, dice: random.Random) -> str:
    """Take a token away and give it back, with a file between that is none."""
    stub = outside.stub
    metadata = (("authorization", f"Bearer {world.visitor}"),)
    path = world.folder / "tokens.toml"

    def is_known(wanted: bool) -> Callable[[], bool]:
        def ask() -> bool:
            try:
                stub.ServerMetadata(pb.ServerMetadataRequest(), timeout=5, metadata=metadata)
            except grpc.RpcError as error:
                return not wanted and error.code() is grpc.StatusCode.UNAUTHENTICATED
            return wanted

        return ask

    try:
        path.write_text("[[token")
        time.sleep(0.7)
        write_credentials(world, visitor=False)
        if dice.random() < 0.5:
            assert outside.server.process is not None
            outside.server.process.send_signal(signal.SIGHUP)
        gone_s = _wait_for(is_known(False), "a token that was taken away is refused")
    finally:
        write_credentials(world, visitor=True)
    back_s = _wait_for(is_known(True), "a token that was given back is taken")
    return f"refused after {gone_s:.1f} s, taken after {back_s:.1f} s"


def load_for_a_while(world: World, admin: Client, dice: random.Random) -> str:
    """Load a new model, ask it, and unload it; its answer must be right, and it must be gone."""
    folder = world.repository / _FLEETING
    number = dice.randrange(CASES)
    x, edges = case(number)
    expected = np.load(world.folder / "expected.npz")[f"gin/1/{number}"]
    shutil.copytree(world.repository / "gin", folder)
    try:
        admin.load(_FLEETING)
        found = admin.infer(_FLEETING, x=x, edge_index=edges).output
        if not np.allclose(found, expected, rtol=0, atol=1e-4 * np.abs(expected).max()):
            raise Violated(f"{_FLEETING} answers case {number} wrongly")
        admin.unload(_FLEETING)
        try:
            admin.infer(_FLEETING, x=x, edge_index=edges)
        except ClientError as error:
            if error.code not in ("NOT_FOUND", "UNAVAILABLE"):
                raise
        else:
            raise Violated(f"{_FLEETING} answers though it is unloaded")
    finally:
        shutil.rmtree(folder)
    return f"case {number}"
