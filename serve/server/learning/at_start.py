"""The requests that the server times at start, before it takes anybody else's."""

import logging
from collections.abc import Callable

from serve.core.slowdown import NO_SLOWDOWN
from serve.obs.record import RequestRecord
from serve.server.api import InferCall, Ticket
from serve.server.catalogue import ModelCatalogue
from serve.server.learning.alone import Arrays, LoneRequests
from serve.server.learning.beside import DeviceRoom, learn_interference

_log = logging.getLogger(__name__)

#: Rounds of lone requests for each model and size, before and after those side by side. Expected
#: times beside others rest on times alone. Runs side by side then shift the corrections, so as many
#: lone runs must follow as corrections look at.
_LONE_FIRST, _LONE_LAST = 2, 3


def learn_at_start(
    catalogue: ModelCatalogue,
    ask: Callable[[str, Arrays], RequestRecord],
    submit: Callable[[InferCall], Ticket],
    room: DeviceRoom,
    *,
    largest_bytes: int,
    progress: Callable[[str, float], None],
) -> None:
    """Time requests alone and side by side, and calibrate the estimates of all models.

    Args:
        catalogue: The models; its overhead and interference learn.
        ask: Sends a request through the transport and returns its record.
        submit: Sends a request past the transport.
        room: What fits a device at once.
        largest_bytes: Upper bound of a request's size.
        progress: Is told what is timed now.
    """
    lone = LoneRequests(catalogue.entries, ask, largest_bytes)
    progress("timing lone requests", 1.0)
    lone.send(_LONE_FIRST)
    progress("timing requests side by side", 1.0)
    learn_interference(catalogue.entries, submit, room)
    if (table := catalogue.slowdown.by_runs.table) != NO_SLOWDOWN:
        _log.info("runs beside 0, 1, … others take %s times as long", table)
    progress("timing lone requests", 1.0)
    lone.send(_LONE_LAST)
    lone.teach(catalogue.overhead)
