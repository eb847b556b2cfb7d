"""The last correction: a machine passes on a request that it cannot serve as another could, once.

A front or client that counts its own requests does not see what others send. The machine does.
"""

from collections.abc import Sequence

from serve.core.cluster.route import choose
from serve.core.cluster.views import MachineView, RoutedRequest

#: Machines that may pass on one request.
MOST_HOPS = 1


def stays(request: RoutedRequest, here: MachineView, now_ns: int) -> bool:
    """Return True when the machine can hold the request and is expected to answer in time."""
    return here.facts.can_hold(request) and here.is_in_time(request, now_ns)


def passed_on(
    request: RoutedRequest,
    here: MachineView,
    others: Sequence[MachineView],
    now_ns: int,
    *,
    hops: int,
    hop_ns: int = 0,
) -> MachineView | None:
    """Return the machine to pass the request on to; None to serve or refuse it here.

    Args:
        request: What is known of it.
        here: The machine that it is on.
        others: What is known of machines that it could go to.
        now_ns: The time now.
        hops: How many machines have passed it on before.
        hop_ns: What passing it on takes.

    It is passed on when it cannot be held here, or would be late here and in time there.
    """
    if hops >= MOST_HOPS or stays(request, here, now_ns):
        return None
    there = choose(request, others, now_ns + hop_ns)
    if there is None or not here.facts.can_hold(request):
        return there
    return there if there.is_in_time(request, now_ns + hop_ns) else None
