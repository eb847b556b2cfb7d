"""All benches: the question each answers, its script, its result, the page that quotes it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """One question."""

    question: str
    #: Module below `bench`, with its question where it answers several.
    script: str
    #: Names of files in bench/results.
    results: tuple[str, ...] = ()
    #: Page below the root; empty for none.
    page: str = ""
    #: Why it is not run with the others; empty for nothing.
    apart: str = ""

    @property
    def quick(self) -> bool:
        """Return True when its quick profile runs on any machine."""
        return bool(self.results) and not self.apart


_MEASURED = "docs/measurements"
GPU = "needs a GPU: make gpu-check"
SECTIONS: dict[str, tuple[Entry, ...]] = {
    "Scheduling: what to run next": (
        Entry(
            "How many requests meet their target under each policy and discipline?",
            "scheduling.policies", ("policies",), f"{_MEASURED}/policies.md",
        ),
        Entry(
            "What keeps the scheduler from the lower bound?",
            "scheduling.limits", ("limits",), f"{_MEASURED}/policies.md",
        ),
        Entry(
            "What does one decision cost, and a simulation of a million requests?",
            "scheduling.decisions", ("decisions",), f"{_MEASURED}/policies.md",
        ),
        Entry(
            "How do the GNNSched paper's figures 5 to 8 look here?",
            "scheduling.figures", ("figures",), f"{_MEASURED}/policies.md",
        ),
    ),
    "Live: whole servers under load": (
        Entry(
            "How late are live requests, and who takes the cores?",
            "live.live", ("live", "live_eager"), f"{_MEASURED}/live.md",
        ),
        Entry(
            "Is this version faster than another one?",
            "live.versions", ("versions",), f"{_MEASURED}/peers.md", "needs another checkout",
        ),
        Entry(
            "What do the memory checks prevent?",
            "live.memory_safety", ("memory_safety",), f"{_MEASURED}/live.md",
        ),
        Entry(
            "Is anything left over after 10,000 requests?",
            "live.soak", ("soak",), f"{_MEASURED}/live.md",
        ),
        Entry(
            "How late are other servers on the same requests?",
            "peers", ("peers",), f"{_MEASURED}/peers.md", "needs gnnserve[peers]",
        ),
    ),
    "Host: what the server costs beside the model": (
        Entry(
            "What does the server add to calling the model directly?",
            "host.requests overhead", ("overhead",), "README.md",
        ),
        Entry(
            "What does each way of sending a graph add?",
            "host.requests transport", ("transport",), f"{_MEASURED}/host.md",
        ),
        Entry(
            "What processor time does one request take in server and client?",
            "host.requests cost", ("request_cost",), f"{_MEASURED}/host.md",
        ),
        Entry(
            "What does a run wait for between server and lane?",
            "host.handover", (), f"{_MEASURED}/live.md",
        ),
        Entry(
            "What does a bare gRPC echo take, on threads and on asyncio?",
            "host.echo", ("echo",), "docs/adr/0001-threads-not-asyncio.md",
        ),
    ),
    "Models: forward passes and estimates": (
        Entry(
            "How fast are the executors beside stock PyG?",
            "models.executors", ("executors",), f"{_MEASURED}/executors.md",
        ),
        Entry(
            "What does merging requests of one model gain?",
            "models.merging", ("merging",), f"{_MEASURED}/executors.md",
        ),
        Entry(
            "How exact are memory estimates?",
            "models.pmc_accuracy", ("pmc_accuracy",), f"{_MEASURED}/estimates.md",
        ),
        Entry(
            "How exact are run-time estimates?",
            "models.time_accuracy", ("time_accuracy",), f"{_MEASURED}/estimates.md",
        ),
    ),
    "Graphs: sampling and features": (
        Entry(
            "How fast are sampling and gathering?",
            "graphs.sampling", ("sampling",), f"{_MEASURED}/sampling.md",
        ),
        Entry(
            "What share of gathered rows does the hot set serve?",
            "graphs.hot_rows", ("hot_rows",), f"{_MEASURED}/gpu.md",
        ),
    ),
    "Drawings": (
        Entry(
            "How does each policy order nine tasks? How is memory estimated?",
            "drawings", (), "docs/scheduling.md",
        ),
    ),
    "GPU": (
        Entry("Everything that needs a GPU", "gpu.check", (), f"{_MEASURED}/gpu.md", GPU),
    ),
}  # fmt: skip


def entries() -> list[Entry]:
    """Return all entries in the order of the sections."""
    return [entry for section in SECTIONS.values() for entry in section]
