"""CPU and memory use of the machine, read from ``/proc`` at every scrape.

A machine without ``/proc`` shows neither.
"""

from collections.abc import Iterator
from pathlib import Path

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector


class HostUsage(Collector):
    """Collects `nv_cpu_utilization` (0 to 1, since the last scrape) and `nv_cpu_memory_…_bytes`."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._last = self._cpu_ticks()

    def describe(self) -> list[GaugeMetricFamily]:
        """Return nothing, so that registering does not count as a scrape."""
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the gauges that this machine can fill."""
        ticks = self._cpu_ticks()
        if ticks is not None and self._last is not None:
            busy, total = (now - before for now, before in zip(ticks, self._last, strict=True))
            yield GaugeMetricFamily(
                "nv_cpu_utilization",
                "Share of CPU time in use since the last scrape",
                value=busy / total if total > 0 else 0.0,
            )
        self._last = ticks
        memory = self._memory()
        if memory is not None:
            total, available = memory
            yield GaugeMetricFamily(
                "nv_cpu_memory_total_bytes", "Memory of the machine", value=total
            )
            yield GaugeMetricFamily(
                "nv_cpu_memory_used_bytes", "Memory of the machine in use", value=total - available
            )

    def _cpu_ticks(self) -> tuple[int, int] | None:
        """Return the clock ticks (busy, total) of all cores since boot; None without ``/proc``."""
        try:
            first = (self._proc / "stat").read_text().split("\n", 1)[0]
        except OSError:
            return None
        # user nice system idle iowait irq softirq steal
        ticks = [int(word) for word in first.split()[1:9]]
        return sum(ticks) - ticks[3] - ticks[4], sum(ticks)

    def _memory(self) -> tuple[int, int] | None:
        """Return bytes (total, available); None without ``/proc``."""
        try:
            lines = (self._proc / "meminfo").read_text().splitlines()
        except OSError:
            return None
        kib = {name: int(rest.split()[0]) for name, rest in (line.split(":") for line in lines)}
        return kib["MemTotal"] * 1024, kib["MemAvailable"] * 1024
