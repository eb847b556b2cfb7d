"""Request records as columns, with times and stages derived from them.

Columns make a report arithmetic on arrays instead of a walk over objects.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any

import msgspec
import numpy as np

from serve.obs.record import RequestRecord
from serve.obs.schema import value_type

Column = np.ndarray[Any, np.dtype[Any]]

#: Stages of a launched request, whose times sum to its latency. `handover` is the remainder:
#: messages to and from the lane, and a first attempt on a lane that died.
STAGES = ("queue", "prepare_exposed", "handover", "run", "suspended", "answer")


def _dtypes() -> dict[str, type]:
    """Return the column type of each field: None becomes NaN, so optional numbers are floats."""
    columns: dict[str, type] = {"run_id": np.int64}
    for field in msgspec.structs.fields(RequestRecord):
        plain, optional = value_type(field.type)
        numeric = np.float64 if optional or plain is float else np.int64
        columns[field.encode_name] = {str: object, bool: np.bool_}.get(plain, numeric)
    return columns


DTYPES = _dtypes()


class Frame:
    """Columns of equal length: some or all fields of `RequestRecord`, and `run_id`."""

    def __init__(self, columns: dict[str, Column]) -> None:
        self._columns = columns

    @classmethod
    def of_rows(cls, rows: Iterable[Sequence[Any]]) -> "Frame":
        """Make a frame from rows in the order of `DTYPES`."""
        values = list(zip(*rows, strict=True)) or [()] * len(DTYPES)
        return cls(
            {
                name: np.array(column, dtype=dtype)
                for (name, dtype), column in zip(DTYPES.items(), values, strict=True)
            }
        )

    @classmethod
    def joined(cls, frames: Sequence["Frame"]) -> "Frame":
        """Return the rows of one or more frames, one frame after the other."""
        return cls({name: np.concatenate([one[name] for one in frames]) for name in DTYPES})

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def __getitem__(self, name: str) -> Column:
        return self._columns[name]

    def where(self, mask: Column) -> "Frame":
        """Select rows by a boolean mask, or by an array of positions in its order."""
        return Frame({name: column[mask] for name, column in self._columns.items()})

    @property
    def answered(self) -> Column:
        """Mask of requests whose client got a result."""
        return np.asarray(self["status"] == "OK", dtype=np.bool_)

    @property
    def violated(self) -> Column:
        """Mask of requests whose client got a result after the QoS target."""
        return self.answered & self["violated"]

    @property
    def launched(self) -> Column:
        """Mask of requests that reached a lane."""
        return np.asarray(self["lane"] >= 0)

    @property
    def launched_unix_ns(self) -> Column:
        """Time of the first launch; meaningless for rows that are not `launched`."""
        return np.asarray(self["arrived_unix_ns"] + self["quet_ns"])

    @property
    def finished_unix_ns(self) -> Column:
        """Time at which the lane finished."""
        return np.asarray(self["arrived_unix_ns"] + self["latency_ns"] - self["answer_ns"])

    @property
    def over_target(self) -> Column:
        """Latency ÷ QoS target; 0 without a target."""
        return ratio(self["latency_ns"], self["qos_target_ns"])

    def stage_ns(self) -> dict[str, Column]:
        """Return the time spent in each of `STAGES`.

        Clocks of different processes may disagree, so each stage is capped at the rest of the
        latency.
        """
        left = self["latency_ns"]
        named: dict[str, Column] = {}
        for stage in STAGES:
            if stage != "handover":
                named[stage] = np.clip(self[f"{stage}_ns"], 0, left)
                left = left - named[stage]
        return {stage: named.get(stage, left) for stage in STAGES}


def ratio(numerator: Column, denominator: Column) -> Column:
    """Return the elementwise quotient, 0 where the denominator is not positive."""
    out = np.zeros(len(numerator))
    np.divide(numerator, denominator, out=out, where=np.asarray(denominator > 0))
    return out


def codes_of(names: Sequence[Any]) -> tuple[Column, list[Any]]:
    """Return a code for each name, and the names by code; None has the code -1."""
    codes: defaultdict[Any, int] = defaultdict(count(1).__next__, {None: 0})
    found = np.fromiter(map(codes.__getitem__, names), np.int64, len(names))
    return found - 1, list(codes)[1:]
