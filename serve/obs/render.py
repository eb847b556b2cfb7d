"""The report on a terminal, on one screen."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from serve.obs import explanations
from serve.obs.frame import STAGES
from serve.obs.lost_calls import STATUS_BY_REASON
from serve.obs.record import ServerRun
from serve.obs.report import ModelReport, Report
from serve.units import format_bytes, format_ms, format_seconds

_COLOURS = {"queue": "yellow", "prepare_exposed": "cyan", "handover": "white", "run": "blue",
            "suspended": "magenta", "answer": "green"}  # fmt: skip


def render_report(report: Report, runs: Sequence[ServerRun]) -> RenderableType:
    """Return the whole report, for `Console.print`."""
    parts: list[RenderableType] = [_headline(report, runs)]
    if report.by_machine:
        parts.append(_totals("By machine", "machine", report.by_machine))
    if report.by_model:
        parts.append(_totals("By model", "model", report.by_model))
    if report.violations:
        parts.append(_causes(report))
    if report.answered:
        parts += [_stages(report), _memory(report)]
    if report.rejected:
        parts.append(_rejected(report))
    if report.worst:
        parts.append(_worst(report))
    return Group(*(line for part in parts for line in (part, "")))


def verdict(report: Report) -> str:
    """Summarize the report in a few sentences, with emphasis between asterisks."""
    lost = {reason: report.rejected.get(reason, 0) for reason in STATUS_BY_REASON}
    told = ", ".join(f"{reason} {count:,}" for reason, count in lost.items() if count)
    if not told:
        return _verdict(report)
    unread = f"{sum(lost.values()):,} calls ended before they were read ({told})."
    return f"{_verdict(report)} {unread}"


def missing_rows(report: Report) -> str:
    """Return a sentence on rows that the database could not take; empty when it took all."""
    if not report.rows_lost:
        return ""
    return f"*{report.rows_lost:,} rows are missing here*: the database could not take them."


def _verdict(report: Report) -> str:
    if not report.requests:
        return "No requests yet, or none that passes the filters."
    if not report.answered:
        return f"*None of {report.requests:,} requests got a result.*"
    if not report.violations:
        return f"*Every promise was kept:* none of {report.answered:,} answers was late."
    cause, count = max(report.by_cause.items(), key=lambda item: item[1])
    sentences = [
        f"*{report.violations:,} of {report.answered:,} answers were late* "
        f"({report.violation_rate:.2%}), most often because of *{cause}* "
        f"({count / report.violations:.0%} of them)."
    ]
    if len(report.by_model) > 1:
        name, model = max(report.by_model.items(), key=lambda item: item[1].violation_rate)
        sentences.append(f"The worst model is {name}: {model.violation_rate:.2%} late.")
    if report.by_machine:
        name, machine = max(report.by_machine.items(), key=lambda item: item[1].violation_rate)
        sentences.append(f"The worst machine is {name}: {machine.violation_rate:.2%} late.")
    if report.expired_late:
        sentences.append(f"{report.expired_late:,} more requests expired after their target.")
    return " ".join(sentences)


def _headline(report: Report, runs: Sequence[ServerRun]) -> RenderableType:
    lines = Text()
    if told := missing_rows(report):
        lines.append(told.replace("*", "") + "\n", "bold red")
    if report.answered:
        low, high = report.attainment_interval
        good = report.attainment >= 0.99
        lines.append(f"{report.attainment:.2%}", "bold green" if good else "bold red")
        lines.append(" answered in time", "bold")
        lines.append(f"   95 % interval {low:.2%} to {high:.2%}\n", "dim")
    for i, part in enumerate(verdict(report).split("*")):
        lines.append(part, "bold" if i % 2 else "")
    facts = [f"{report.requests:,} requests"]
    if report.requests:
        first = datetime.fromtimestamp(report.first_unix_ns / 1e9, UTC)
        span = (report.last_unix_ns - report.first_unix_ns) / 1e9
        facts.append(f"from {first:%Y-%m-%d %H:%M:%S} UTC over {format_seconds(span)}")
    if report.answered:
        over = report.latency_over_qt
        facts.append(f"latency ÷ target p50 {over.p50:.2f}, p90 {over.p90:.2f}, p99 {over.p99:.2f}")
    newest = max(runs, key=lambda run: run.started_unix_ns, default=None)
    if report.by_machine:
        facts.append(f"{len(report.by_machine)} machines")
    if newest:
        facts.append(
            f"{newest.policy}/{newest.discipline}, {newest.lanes_told} on {newest.device}, "
            f"target {newest.qos_factor:g} × solo"
        )
    lines.append("\n" + " · ".join(facts), "dim")
    return lines


def _totals(title: str, what: str, rows: Mapping[str, ModelReport]) -> Table:
    table = _table(title, what, "requests#", "late#", "share#", "÷ target p50#",
                   "÷ target p99#", "p50#", "p99#")  # fmt: skip
    for name, model in rows.items():
        table.add_row(
            name,
            f"{model.requests:,}",
            f"{model.violations:,}",
            f"{model.violation_rate:.2%}",
            f"{model.latency_over_qt.p50:.2f}",
            f"{model.latency_over_qt.p99:.2f}",
            format_ms(model.latency_ms.p50),
            format_ms(model.latency_ms.p99),
        )
    return table


def _causes(report: Report) -> Table:
    table = _table("Why answers were late", "cause", "late#", "share#", "what happened")
    for cause, count in sorted(report.by_cause.items(), key=lambda item: -item[1]):
        if count:
            meaning = explanations.CAUSES.get(cause, ("", ""))[0]
            table.add_row(cause, f"{count:,}", f"{count / report.violations:.0%}", meaning)
    return table


def _stages(report: Report) -> Table:
    table = _table("Where the time went", "stage", "share#", "of the mean answer")
    for stage in STAGES:
        share = report.overhead[stage]
        bar = Text("█" * round(40 * share), _COLOURS[stage])
        table.add_row(explanations.STAGES[stage], f"{share:.1%}", bar)
    hidden = report.overhead["prepare_hidden_share"]
    table.add_row(
        "prepare, hidden", f"{hidden:.0%}", "of all preparation, behind other work", style="dim"
    )
    return table


def _memory(report: Report) -> Text:
    memory = report.memory
    text = Text("Memory  ", "bold")
    where = " on a machine" if report.by_machine else ""
    text.append(f"at most {format_bytes(memory.peak_bytes)} reserved at once{where}", "")
    if memory.budget_bytes:
        share = memory.peak_bytes / memory.budget_bytes
        text.append(f" ({share:.0%} of {format_bytes(memory.budget_bytes)})")
    text.append(
        f", {format_bytes(memory.peak_measured_bytes)} measured; "
        f"median reservation {memory.overestimate_p50:+.1%}; "
    )
    style = "bold red" if memory.underestimates else ""
    text.append(f"{memory.underestimates:,} of {memory.measured:,} runs exceeded theirs", style)
    return text


def _rejected(report: Report) -> Table:
    table = _table("Without a result", "reason", "requests#", "meaning")
    for reason, count in report.rejected.items():
        table.add_row(reason, f"{count:,}", explanations.REASONS.get(reason, ""))
    return table


def _worst(report: Report) -> Table:
    machine = ["machine"] if report.by_machine else []
    table = _table("The worst late answers", "request", *machine, "model", "nodes#", "latency#",
                   "÷ target#", "cause", "group mates")  # fmt: skip
    for late in report.worst:
        table.add_row(
            late.request_uid,
            *([late.machine] if machine else []),
            late.model,
            f"{late.num_nodes:,}",
            format_ms(late.latency_ms),
            f"{late.latency_over_qt:.2f}",
            late.cause,
            _mates(late.group_mates),
        )
    return table


def _mates(uids: Sequence[str]) -> str:
    others = f" and {len(uids) - 1} more" if len(uids) > 1 else ""
    return f"{uids[0]}{others}" if uids else ""


def _table(title: str, *columns: str) -> Table:
    """Return an empty table; a column whose name ends in # holds numbers."""
    table = Table(
        title=title, title_justify="left", title_style="bold", box=None, pad_edge=False,
        header_style="dim", padding=(0, 2, 0, 0),
    )  # fmt: skip
    for column in columns:
        number = column.endswith("#")
        table.add_column(column.rstrip("#"), justify="right" if number else "left", no_wrap=number)
    return table
