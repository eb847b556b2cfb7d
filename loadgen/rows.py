"""A run's requests as a CSV file, one row each."""

import csv
from collections.abc import Callable, Iterable
from pathlib import Path

from loadgen.measure import Sample
from serve.csv_cells import cells
from serve.errors import ConfigError

_COLUMNS: dict[str, Callable[[Sample], object]] = {
    "request": lambda one: one.index,
    "model": lambda one: one.model,
    "due_s": lambda one: f"{one.due_ns / 1e9:.6f}",
    "lag_ms": lambda one: f"{one.lag_ns / 1e6:.3f}",
    "latency_ms": lambda one: f"{one.latency_ns / 1e6:.3f}",
    "target_ms": lambda one: "" if one.target_us is None else f"{one.target_us / 1e3:.3f}",
    "status": lambda one: one.status,
    "late": lambda one: int(one.late),
    "late_by_server": lambda one: int(one.late_by_server),
    "answer_bytes": lambda one: one.size_bytes,
    "request_uid": lambda one: one.request_uid,
    "message": lambda one: one.message,
}


def write_rows(path: Path, samples: Iterable[Sample]) -> None:
    """Write a heading and a row for each request, in their order.

    Times count from the start of the run; latencies from the intended send time. Raises ConfigError
    when the file cannot be written.
    """
    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(_COLUMNS)
            for sample in sorted(samples, key=lambda one: one.index):
                writer.writerow(cells(value(sample) for value in _COLUMNS.values()))
    except OSError as error:
        raise ConfigError(f"--csv: {path}: {error.strerror}") from None
