"""The process of a GPU's lanes, which are threads of it.

To the server these are lanes like any other, each with its channel. They differ in two ways: all
are lost together when the process ends, and none can be suspended. After a fault of the device (an
illegal access, a failed assert) nothing can go on: the process ends and a new one is started.
"""

import faulthandler
import logging
import mmap
import socket
import threading
from pathlib import Path

from serve.ipc.setup import LaneSetup, PassedFile
from serve.ipc.shared_pool import LANE_WORDS_BYTES
from serve.ipc.stop_word import StopWord
from serve.lane.channel import LaneChannel
from serve.lane.cuda.device import CudaDevice
from serve.lane.cuda.place import EXIT_FAULT, CudaPlace
from serve.lane.loop import Lane
from serve.lane.process import enter, leave

_log = logging.getLogger(__name__)


def main(setup: LaneSetup, channels: list[socket.socket], pool_file: PassedFile) -> None:
    """Serve as all lanes of one device; the entry point of the process."""
    # Tasks that share inputs get copies of their own on the device.
    pool = enter(setup, pool_file).pool
    # When a driver crashes, only this shows the Python stack.
    faulthandler.enable()
    started_before = _driver_is_loaded()
    try:
        device = CudaDevice.open(setup, pool)
        threads = [
            threading.Thread(
                target=_serve,
                args=(channel, pool, device, setup.words_offset_bytes + LANE_WORDS_BYTES * index),
                name=f"lane {index}",
                daemon=True,
            )
            for index, channel in enumerate(channels)
        ]
    except Exception:
        _log.exception("%s: the device cannot be used: %s", setup.name, setup.place)
        if started_before:
            _log.error(
                "an import of the fork server has started CUDA: no process forked from it can"
            )
        leave(EXIT_FAULT)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    leave()


def _driver_is_loaded() -> bool:
    """Return True when something has loaded CUDA's driver into this process."""
    return "/libcuda.so" in Path("/proc/self/maps").read_text()


def _serve(
    channel: socket.socket, pool: mmap.mmap, device: CudaDevice, word_offset_bytes: int
) -> None:
    lane_channel = LaneChannel(channel)
    try:
        place = CudaPlace(lane_channel, pool, device, StopWord(pool, word_offset_bytes))
        Lane(lane_channel, place).serve()
    except BaseException:
        # A thread that ended alone would leave its lane silent for ever.
        _log.exception("a lane's loop failed; its process ends")
        leave(EXIT_FAULT)
