"""The report as one HTML file (see ``page_parts``)."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape

from serve.core.rules.cause import CAUSES
from serve.obs import explanations, plots
from serve.obs.frame import STAGES
from serve.obs.memory_plot import memory_plot
from serve.obs.record import ServerRun
from serve.obs.render import missing_rows, verdict
from serve.obs.report import ModelReport, Report
from serve.obs.summary import Summary
from serve.obs.timeline import timeline
from serve.page_parts import document, figure, table
from serve.units import format_bytes, format_ms, format_seconds


def render_html(summary: Summary, runs: Sequence[ServerRun], report: Report) -> str:
    """Return the page for the `report` made of `summary`."""
    now = datetime.now(UTC)
    body = "\n".join(
        [
            _header(runs, report),
            f'<p class="verdict">{_verdict(report)}</p>',
            _tiles(report),
            f'<div class="grid">{"".join(_figures(summary, runs, report))}</div>',
            f"<footer>Made on {_day(now)} at {now:%H:%M:%S}. "
            "Latency is the time from arrival until the answer was handed to the transport. "
            'All times are UTC<span id="zone"></span>.</footer>',
        ]
    )
    return document(f"{report.attainment:.2%} in time · gnnserve QoS report", body)


def _verdict(report: Report) -> str:
    parts = escape(f"{missing_rows(report)} {verdict(report)}".strip()).split("*")
    return "".join(f"<b>{part}</b>" if i % 2 else part for i, part in enumerate(parts))


def _header(runs: Sequence[ServerRun], report: Report) -> str:
    facts: list[tuple[str, str]] = []
    if report.requests:
        facts.append(_period(report.first_unix_ns / 1e9, report.last_unix_ns / 1e9))
    newest = max(runs, key=lambda run: run.started_unix_ns, default=None)
    if report.by_machine:
        facts.append((f"{len(report.by_machine)} machines", ""))
    if newest:
        facts += [
            (f"{newest.policy}, {newest.discipline}", f"window {newest.window}"),
            (newest.lanes_told, f"on {newest.device}"),
            (f"{newest.qos_factor:g} × solo", "target"),
            (f"gnnserve {newest.version}", ""),
        ]
    shown = "".join(f"<span><b>{escape(a)}</b> {escape(b)}</span>" for a, b in facts)
    return f'<header><h1>QoS report</h1><div class="facts">{shown}</div></header>'


def _tiles(report: Report) -> str:
    low, high = report.attainment_interval
    span = (report.last_unix_ns - report.first_unix_ns) / 1e9
    rate = f"{report.requests / span:,.3g} a second" if span > 0 else ""
    over, latency, memory = report.latency_over_qt, report.latency_ms, report.memory
    unanswered = sum(report.rejected.values())
    top = next(iter(report.rejected.items()), None)
    used = (
        f"{memory.peak_bytes / memory.budget_bytes:.0%} of the budget"
        if memory.budget_bytes
        else ""
    )
    some = report.answered > 0
    tiles = [
        ("head", "answered in time", f"{report.attainment:.2%}" if some else "–",
         f"{report.violations:,} late; 95 % interval {low:.2%} to {high:.2%}" if some else "",
         "" if not some else "ok" if report.attainment >= 0.99 else "bad"),
        ("", "requests", f"{report.requests:,}", rate, ""),
        ("", "latency ÷ target, p99", f"{over.p99:.2f}" if some else "–",
         f"p50 {over.p50:.2f}, p90 {over.p90:.2f}" if some else "",
         "bad" if over.p99 > 1 else ""),
        ("", "latency, p50", format_ms(latency.p50) if some else "–",
         f"p99 {format_ms(latency.p99)}" if some else "", ""),
        ("", "peak memory reserved", format_bytes(memory.peak_bytes),
         f"{used}; {memory.underestimates:,} runs exceeded theirs", ""),
        ("", "without a result", f"{unanswered:,}",
         f"most: {top[0]} ({top[1]:,})" if top else "none", ""),
    ]  # fmt: skip
    return (
        '<div class="tiles">'
        + "".join(
            f'<div class="tile {kind}"><div class="name">{name}</div>'
            f'<div class="big {tone}">{escape(value)}</div>'
            f'<div class="note">{escape(note)}</div></div>'
            for kind, name, value, note, tone in tiles
        )
        + "</div>"
    )


def _figures(summary: Summary, runs: Sequence[ServerRun], report: Report) -> list[str]:
    models = [(name, f"m{i % 8}") for i, name in enumerate(sorted(report.by_model))]
    stages = [(explanations.STAGES[stage], f"s-{stage}") for stage in STAGES]
    ends = [("in time", "kept"), ("late", "late"), ("without a result", "none")]
    hidden = report.overhead["prepare_hidden_share"]
    several = bool(report.by_machine)
    where = f", on {escape(summary.window_machine)}" if several else ""
    alone = [] if several else runs  # whose budget the timeline shows
    excess = report.memory.overestimate_p50
    return [
        figure(
            "Latency in multiples of the QoS target",
            "Histogram of all answers. Those right of the line are late.",
            plots.distribution(summary) if report.answered else "",
        ),
        figure(
            "Memory: reserved and measured",
            "One point per run. The median reservation is "
            f"{abs(excess):.1%} {'above' if excess >= 0 else 'below'} the measured peak; "
            f"{report.memory.underestimates:,} runs used more than was reserved.",
            memory_plot(summary.points, summary.memory.excess_counts)
            if len(summary.points)
            else "",
            models,
            "No run was measured.",
        ),
        figure(
            "Over time",
            "Outcomes of requests by arrival time, and the causes of late answers.",
            plots.over_time(summary.outcomes.over_time) if report.requests else "",
            [*ends, *((cause, f"c-{cause}") for cause in CAUSES)],
            wide=True,
        ),
        figure(
            "Where the time went",
            "Mean shares of the latency. Preparation counts only while an idle lane waited for "
            f"it; {hidden:.0%} of it was hidden behind other work.",
            plots.stage_shares(summary.answers.stages) if report.answered else "",
            stages,
        ),
        figure(
            "The worst late answers",
            "The answers furthest beyond their target, in multiples of the target.",
            plots.worst_stages(report.worst) if report.worst else "",
            stages,
            "No answer was late.",
        ),
        figure(
            "Lanes and groups",
            f"The seconds with the most late answers{where}. Colours distinguish groups; a red "
            "edge marks a late answer. Point at a run to see its group.",
            timeline(summary.shown, summary.window, alone) if summary.window else "",
            wide=True,
        ),
        *_tables(report),
    ]


def _tables(report: Report) -> list[str]:
    total = max(report.violations, 1)
    causes = [
        (f'<span class="key c-{escape(cause)}">{escape(cause)}</span>', f"{count:,}",
         f"{count / total:.0%}", *explanations.CAUSES.get(cause, ("", "")))
        for cause, count in report.by_cause.items()
    ]  # fmt: skip
    reasons = [
        (escape(reason), f"{count:,}", escape(explanations.REASONS.get(reason, "")))
        for reason, count in report.rejected.items()
    ]
    worst = [
        (f"{escape(v.request_uid)}<br><small>{escape(v.client_id)}</small>",
         f"{escape(v.model)}<br><small>{escape(v.machine)}</small>",
         f"{v.num_nodes:,}<br><small>{v.num_edges:,}</small>",
         f"{format_ms(v.latency_ms)}<br><small>{format_ms(v.qos_target_ms)}</small>",
         f"{v.latency_over_qt:.2f}", escape(v.cause), format_ms(v.backlog_ms),
         f"{v.group_id}, {v.group_size} tasks<br><small>{_lines(v.group_mates[:4])}</small>")
        for v in report.worst
    ]  # fmt: skip
    machines = [_totals("By machine", "machine", report.by_machine)] if report.by_machine else []
    where = "<br>machine" if machines else ""
    return [
        *machines,
        _totals("By model", "model", report.by_model),
        table("Without a result", "Requests that were refused, failed, cancelled or expired; they "
               "are no violations.", reasons, "reason/requests/meaning", "_n_",
               "Every request got a result."),
        table("Why answers were late", "", causes,
               "cause/late/share/what happened/what to try first", "_nn__", wide=True),
        table("The worst late answers", "With their sizes, times and group.",
               worst, f"request<br>client's id/model{where}/nodes<br>edges/latency<br>target"
               "/÷ target/cause/backlog/group and mates", "i_nnn_ni", "No answer was late.",
              wide=True),
    ]  # fmt: skip


def _totals(title: str, what: str, totals: Mapping[str, ModelReport]) -> str:
    rows = [
        (escape(name), f"{m.requests:,}", f"{m.violations:,}", f"{m.violation_rate:.2%}",
         f"{m.latency_over_qt.p99:.2f}",
         format_ms(m.latency_ms.p50), format_ms(m.latency_ms.p99))
        for name, m in totals.items()
    ]  # fmt: skip
    return table(title, "", rows, f"{what}/requests/late/share/p99 ÷ target/p50/p99", "_nnnnnn")


def _lines(items: Sequence[str]) -> str:
    return "<br>".join(escape(item) for item in items)


def _period(first_s: float, last_s: float) -> tuple[str, str]:
    """Return the day, to be emphasized, and the times from and to."""
    first, last = (datetime.fromtimestamp(second, UTC) for second in (first_s, last_s))
    long = f" ({format_seconds(last_s - first_s)})" if last_s > first_s else ""
    if first.date() == last.date():
        return _day(first), f"{first:%H:%M:%S} to {last:%H:%M:%S} UTC{long}"
    return f"{_day(first)} {first:%H:%M}", f"to {_day(last)} {last:%H:%M} UTC{long}"


def _day(moment: datetime) -> str:
    return f"{moment.day} {moment:%B %Y}"
