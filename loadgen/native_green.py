"""The compiled sender in a process of gevent's, for Locust."""

from collections.abc import Callable

from loadgen import patched  # noqa: F401  isort: skip

import gevent
from gevent.event import AsyncResult

from loadgen.measure import Sample
from loadgen.native import NativeLoop
from loadgen.plan import LoadPlan

#: Interval at which answers are added to the statistics.
_COLLECT_S = 0.2


class NativeGreenLoop(NativeLoop):
    """A run whose thread is one of gevent's pool, so that greenlets run meanwhile."""

    def __init__(self, plan: LoadPlan, address: str, timeout_s: float) -> None:
        super().__init__(plan, address, timeout_s)
        #: Set when the run has ended, with its error if it failed.
        self.ended = AsyncResult()

    def drive(self, on_sample: Callable[[Sample], None]) -> None:
        """Send all requests and wait until each has ended.

        Args:
            on_sample: Called with every request that ended.
        """
        self.begin()
        sending = gevent.get_hub().threadpool.spawn(self.send)
        try:
            while True:
                gevent.wait([sending], timeout=_COLLECT_S)
                over = sending.ready()
                for sample in self.collect():
                    on_sample(sample)
                if over:
                    break
            self.end()
            sending.get()
        except Exception as error:
            self.ended.set_exception(error)
            raise
        else:
            self.ended.set(None)
        finally:
            self.stop()
