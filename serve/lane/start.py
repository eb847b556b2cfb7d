"""Entry of a lane's process; light, because the main process imports it to start lanes."""

import socket

from serve.ipc.setup import LaneSetup, PassedFile


def run_lanes(
    setup: LaneSetup,
    channels: list[socket.socket],
    pool_file: PassedFile,
    outputs: tuple[PassedFile, PassedFile] | None,
) -> None:
    """Serve as the lanes of this process. Only here, in the forked process, is torch imported.

    `outputs` are pipes for what it prints; None to print where the server does.
    """
    if outputs is not None:
        from serve.lane import output

        output.redirect(outputs, setup.log_level)
    if setup.place is not None:
        from serve.lane.cuda import process

        process.main(setup, channels, pool_file)
    else:
        from serve.lane import processor

        processor.main(setup, channels[0], pool_file)
