"""A run on the terminal: a progress line while it lasts, tables at its end."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from loadgen.measure import Distribution, LoadSummary, Sample, distribution
from serve.terminal import Console
from serve.workload import Trace

#: Number of latest samples that the progress line covers.
_RECENT = 500


def progress_line(at_s: float, trace: Trace, sent: int, samples: Sequence[Sample]) -> str:
    """Return the progress line, which covers only the latest samples to stay cheap."""
    recent = samples[-_RECENT:]
    answered = sum(sample.answered for sample in recent)
    late = sum(sample.late for sample in recent)
    lag = distribution(sample.lag_ns / 1e6 for sample in recent)
    return (
        f"{at_s:5.1f} of {trace.duration_s:.0f} s · sent {sent} of {len(trace.items)}"
        f" · in flight {sent - len(samples)} · recent: late {_percent(late, answered)},"
        f" failed {len(recent) - answered}, lag p99 {lag.p99:.1f} ms"
    )


def show_summary(summary: LoadSummary, console: Console) -> None:
    """Print a run: its load, latencies, late answers and failures."""
    header = summary.trace
    load = f", ρ {header.rho:g} on {header.lanes} slots" if header.rho is not None else ""
    if header.in_flight is None:
        profile = f" × {header.profile}" if header.profile else ""
        times = f"{header.arrivals} arrivals at {header.rate_hz:.4g}/s{profile}{load}"
    else:
        times = f"{header.in_flight} in flight"
    told = (
        f" to {summary.target}: "
        f"{summary.requests} of {summary.scheduled} requests in {summary.elapsed_s:.1f} s, "
        f"{times}, seed {header.seed}"
    )
    console.print(Text.assemble("\n", (header.workload, "bold"), told), soft_wrap=True)
    for name, source in header.sources.items():
        console.print(f"  graph {name}: {source}", style="dim")
    console.print(_times(summary))
    console.print(_models(summary))
    if summary.messages:
        console.print(_failures(summary))
    console.print(
        f"late answers: {_percent(summary.violations, summary.answered)} at the client "
        f"(95 % interval {summary.violation_interval[0]:.1%} to "
        f"{summary.violation_interval[1]:.1%}), "
        f"{_percent(summary.violations_by_server, summary.answered)} by the server's clock; "
        f"{summary.missed_rate:.1%} of requests had no answer in time; "
        f"{summary.answered_hz:.4g} answers/s; {_generator(summary)} "
        f"{summary.generator_cpu:.0%} of a core",
        soft_wrap=True,
    )
    for warning in summary.warnings:
        console.print(f"warning: {warning}", style="yellow", soft_wrap=True)


def _times(summary: LoadSummary) -> Table:
    table = Table("", "mean", "p50", "p90", "p99", "p99.9", "max")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, values in (
        ("latency, ms", summary.latency_ms),
        ("latency ÷ target", summary.latency_over_qt),
        ("send lag, ms", summary.send_lag_ms),
    ):
        table.add_row(name, *_cells(values))
    return table


def _models(summary: LoadSummary) -> Table:
    table = Table("model", "requests", "answered", "late", "p50 ms", "p99 ms", "p99 ÷ target")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, model in summary.by_model.items():
        table.add_row(
            name,
            str(model.requests),
            str(model.answered),
            _percent(model.violations, model.answered),
            f"{model.latency_ms.p50:.2f}",
            f"{model.latency_ms.p99:.2f}",
            f"{model.latency_over_qt.p99:.2f}",
        )
    return table


def _failures(summary: LoadSummary) -> Table:
    table = Table("status", "requests", "for example")
    for status, message in summary.messages.items():
        table.add_row(status, str(summary.by_status[status]), message)
    return table


def _generator(summary: LoadSummary) -> str:
    many = summary.processes > 1
    return f"busiest of {summary.processes} generators" if many else "generator"


def _cells(values: Distribution) -> list[str]:
    return [
        f"{v:.2f}"
        for v in (values.mean, values.p50, values.p90, values.p99, values.p999, values.max)
    ]


def _percent(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "–"
