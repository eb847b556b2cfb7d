"""Histograms of our own against prometheus_client's, scrape for scrape."""

import numpy as np
import prometheus_client
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from serve.obs.histograms import Histograms

BOUNDS = (0.0, 0.25, 1.0, 10.0)
#: With bounds below 0 a histogram has no sum.
ALL_BOUNDS = st.sampled_from([BOUNDS, (-1.0, *BOUNDS)])
#: Bounds themselves too; sums of these are exact.
VALUES = st.sampled_from([*BOUNDS, -2.0, -1.0, 0.125, 0.5, 3.0, 64.0])


def scraped(*collectors):
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    return generate_latest(registry).decode().splitlines()


def observe(histograms, rows, known):
    """Count (labels' values, value) of which `known` are the first."""
    of = [*known, *dict.fromkeys(labels for labels, _ in rows)]
    kinds = np.array([of.index(labels) for labels, _ in rows], np.int64)
    histograms.observe(np.array([value for _, value in rows], np.float64), kinds, of)


@given(
    rows=st.lists(st.tuples(st.sampled_from(["gcn", 'a "b"\n']), VALUES), max_size=30),
    cut=st.integers(0, 30),
    bounds=ALL_BOUNDS,
)
def test_labelled_ones_read_as_prometheus_clients_own(rows, cut, bounds):
    prometheus_client.disable_created_metrics()
    theirs = Histogram("h", "Some help", ["model"], buckets=bounds, registry=None)
    ours = Histograms("h", "Some help", bounds, "model")
    for model, value in rows:
        theirs.labels(model).observe(value)
    for part in (rows[:cut], rows[cut:]):
        # A kind without values makes no series, and two kinds may have the same labels.
        observe(ours, [((model,), value) for model, value in part], [("none",), ("gcn",), ("gcn",)])
    assert sorted(scraped(ours)) == sorted(scraped(theirs))


@given(values=st.lists(VALUES, max_size=30))
def test_one_without_labels_is_there_before_its_first_observation(values):
    prometheus_client.disable_created_metrics()
    theirs = Histogram("h", "Some help", buckets=BOUNDS, registry=None)
    ours = Histograms("h", "Some help", BOUNDS)
    for value in values:
        theirs.observe(value)
    observe(ours, [((), value) for value in values], [()])
    assert scraped(ours) == scraped(theirs)
    assert any(line.startswith("h_count") for line in scraped(ours))
