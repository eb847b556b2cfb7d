"""All benches: the question each answers, its script, its result, the page that quotes it."""

from dataclasses import dataclass

CHAOS = "takes an hour: make chaos FULL=1"
GPU = "needs a GPU: make gpu-check"


@dataclass(frozen=True)
class Entry:
    """One question."""

    question: str
    #: Module below `bench`, with its question where it answers several.
    script: str
    #: Page below docs/measurements, or below the root from `/` on.
    quoted_in: str
    #: Files in bench/results; None: the one named as the last word of `script`.
    stored: tuple[str, ...] | None = None
    #: Why it is not run with the others; empty for nothing.
    apart: str = ""

    @property
    def results(self) -> tuple[str, ...]:
        """Return the names of files in bench/results."""
        return (self.script.replace(".", " ").split()[-1],) if self.stored is None else self.stored

    @property
    def page(self) -> str:
        """Return the page below the root."""
        root = self.quoted_in.startswith("/")
        return self.quoted_in[1:] if root else f"docs/measurements/{self.quoted_in}"

    @property
    def quick(self) -> bool:
        """Return True when its quick profile runs on any machine."""
        return not self.apart


SECTIONS: dict[str, tuple[Entry, ...]] = {
    "Scheduling: what to run next": (
        Entry("How many requests meet their target under each policy and discipline?",
              "scheduling.policies", "policies.md"),
        Entry("What keeps the scheduler from the lower bound?",
              "scheduling.limits", "policies.md"),
        Entry("What does one decision cost, and a simulation of a million requests?",
              "scheduling.decisions", "policies.md"),
    ),
    "Papers: their experiments again": (
        Entry("Which devices would give the GNNSched paper's figures 5 to 8?",
              "papers.gnnsched", "papers.md"),
        Entry("How exact are GNNSched's estimates, and what do its decisions cost?",
              "papers.gnnsched_costs", "papers.md"),
        Entry("How many operators does TurboMGNN's matching fuse, and who ends sooner by it?",
              "papers.turbomgnn", "papers.md"),
        Entry("What does one pass over a graph for several tasks gain here?",
              "papers.fused_pass", "papers.md"),
        Entry("How exact is the traced memory of a training step, beside CoGNN's closed form?",
              "papers.training_pmc", "papers.md"),
        Entry("What do CoGNN's policies make of its queues, and what memory do their groups take?",
              "papers.cognn", "papers.md"),
        Entry("What do CoGNN's estimates and decisions cost, in epochs of a queue?",
              "papers.cognn_costs", "papers.md"),
        Entry("What do the DGTP paper's placement and sharing of the network save?",
              "papers.dgtp", "papers.md"),
        Entry("What does placing stores, samplers and lanes gain beside servers that are alike?",
              "papers.dgtp_serving", "papers.md"),
        Entry("Does a placed job take as long live as it does simulated?",
              "papers.dgtp_live", "papers.md"),
    ),
    "Cluster: many machines": (
        Entry("How many requests meet their target by each way to spread them over machines?",
              "cluster.routing", "cluster.md"),
        Entry("What does simulating 10,000 machines take?",
              "cluster.size", "cluster.md", ("cluster_size",)),
        Entry("What does a front before servers cost a request, and a client of several?",
              "cluster.front", "cluster.md", ("cluster_front",)),
        Entry("Has every request one right answer while servers are killed, frozen and stopped?",
              "cluster.soak", "cluster.md", ("cluster_soak",)),
        Entry("Does a request fail while servers are restarted in turn and a version rolled out?",
              "cluster.rollout", "cluster.md", ("cluster_rollout",)),
    ),
    "Live: whole servers under load": (
        Entry("How late are live requests, and who takes the cores?",
              "live.live", "live.md", ("live", "live_eager")),
        Entry("How many requests a second are answered, and in time, by this version and another?",
              "live.rates", "peers.md", ("versions", "rates")),
        Entry("What does training beside requests cost them, and get of the time they leave?",
              "live.training", "/docs/training.md"),
        Entry("What do the memory checks prevent?",
              "live.memory_safety", "live.md"),
        Entry("How late are other servers on the same requests?",
              "peers", "peers.md", apart="needs gnnserve[peers]"),
        Entry("What holds when a million requests meet every fault?",
              "chaos", "chaos.md", apart=CHAOS),
    ),
    "Host: what the server costs beside the model": (
        Entry("What does the server add to calling the model directly?",
              "host.requests overhead", "/README.md"),
        Entry("What does each way of sending a graph take, in time and processor time?",
              "host.requests ways", "host.md"),
        Entry("Do JSON bodies of 50 MB delay gRPC requests?",
              "host.json_beside", "host.md"),
        Entry("How late are others while a client attacks?",
              "host.attacked", "host.md"),
        Entry("What does a run wait for between server and lane?",
              "host.handover", "live.md"),
        Entry("What does a request cost the server behind each front of its port?",
              "host.fronts", "/docs/adr/0005-native-front.md"),
        Entry("What do TLS and a token cost a small request?",
              "host.access", "/docs/access.md"),
        Entry("What do access log, live page and metrics cost a request?",
              "host.operating", "host.md"),
        Entry("What does a report of a million requests take, in time and memory?",
              "host.report_size", "host.md"),
        Entry("What does a view of the live page take before a million requests?",
              "host.live_page", "host.md"),
        Entry("What does a start with calibrated models take?",
              "host.warm_start", "host.md"),
        Entry("How soon do models answer while another takes a minute to load?",
              "host.warm_start slow", "host.md", ("slow_start",)),
        Entry("Do files and memory stay flat for an hour at 500 requests a second?",
              "host.retention soak", "host.md", ("retention_soak",)),
        Entry("Do they while a server serves so many?",
              "host.long_run", "host.md"),
        Entry("Do answers wait while rows of the report are deleted?",
              "host.retention answers", "host.md", ("retention_answers",)),
    ),
    "Models: forward passes and estimates": (
        Entry("How fast are the executors beside stock PyG?",
              "models.executors", "executors.md"),
        Entry("What does merging requests of one model gain?",
              "models.merging", "executors.md"),
        Entry("How fast is a training step beside stock PyG?",
              "models.training_step", "executors.md"),
        Entry("How much slower is a forward pass right after a training step on its core?",
              "models.after_step", "/docs/training.md"),
        Entry("How exact are memory estimates?",
              "models.pmc_accuracy", "estimates.md"),
        Entry("How exact are estimates of models that declare their inputs?",
              "models.gallery_accuracy", "estimates.md"),
        Entry("How exact are memory estimates of models that pad graphs to the largest?",
              "models.padded_accuracy", "estimates.md"),
        Entry("Which classes of PyG serve as models of their own?",
              "models.coverage", "/docs/serve-your-own-model.md"),
        Entry("How exact are run-time estimates?",
              "models.time_accuracy", "estimates.md"),
    ),
    "Graphs: sampling and features": (
        Entry("How fast are sampling and gathering?",
              "graphs.sampling", "sampling.md"),
        Entry("What share of gathered rows does the hot set serve?",
              "graphs.hot_rows", "gpu.md"),
        Entry("What do requests fetch from other machines when features are shared out?",
              "graphs.partitions", "cluster.md", apart="needs gnnserve[cluster]"),
        Entry("Would servers fetch less if they kept copies of what they are asked for?",
              "graphs.shared_hot_rows", "cluster.md", apart="needs gnnserve[cluster]"),
        Entry("What does a graph that is shared out over four servers cost a request?",
              "graphs.shared_rows", "cluster.md", apart="needs gnnserve[cluster]"),
        Entry("How often do requests wait for others where edges are shared out?",
              "graphs.shared_topology", "cluster.md", apart="needs gnnserve[cluster]"),
        Entry("What do requests see of lost servers and of changes where a graph is shared out?",
              "graphs.shared_faults", "cluster.md", apart="needs gnnserve[cluster]"),
    ),
    "GPU": (
        Entry("Everything that needs a GPU",
              "gpu.check", "gpu.md", ("gpu",), apart=GPU),
    ),
}  # fmt: skip


def entries() -> list[Entry]:
    """Return all entries in the order of the sections."""
    return [entry for section in SECTIONS.values() for entry in section]
