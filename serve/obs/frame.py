"""Records as columns, and the moments and stages derived from them.

A report over 50,000 rows is then arithmetic on arrays instead of a walk over objects.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from serve.obs.record import RequestRecord
from serve.obs.schema import value_type

Column = np.ndarray[Any, np.dtype[Any]]

#: Where a launched request's latency goes; the stages of one sum to its latency. `handover` is what
#: the others leave: messages to and from the lane, and a first attempt on a lane that died.
STAGES = ("queue", "prepare_exposed", "handover", "run", "suspended", "answer")


def _dtypes() -> dict[str, type]:
    """Column type by field: None becomes NaN, so optional numbers are floats."""
    columns: dict[str, type] = {"run_id": np.int64}
    for field in msgspec.structs.fields(RequestRecord):
        plain, optional = value_type(field.type)
        numeric = np.float64 if optional or plain is float else np.int64
        columns[field.encode_name] = {str: object, bool: np.bool_}.get(plain, numeric)
    return columns


DTYPES = _dtypes()


class Frame:
    """Named columns of equal length, one per field of `RequestRecord`, and `run_id`."""

    def __init__(self, columns: dict[str, Column]) -> None:
        self._columns = columns

    @classmethod
    def of_rows(cls, rows: Iterable[Sequence[Any]]) -> "Frame":
        """From rows in the order of `DTYPES`."""
        values = list(zip(*rows, strict=True)) or [()] * len(DTYPES)
        return cls(
            {
                name: np.array(column, dtype=dtype)
                for (name, dtype), column in zip(DTYPES.items(), values, strict=True)
            }
        )

    @classmethod
    def of_records(cls, records: Iterable[RequestRecord]) -> "Frame":
        """From the structs, all of one run of the server."""
        return cls.of_rows((0, *msgspec.structs.astuple(record)) for record in records)

    def __len__(self) -> int:
        return len(self._columns["run_id"])

    def __getitem__(self, name: str) -> Column:
        return self._columns[name]

    def where(self, mask: Column) -> "Frame":
        """The rows picked by a boolean mask or by an array of positions, in its order."""
        return Frame({name: column[mask] for name, column in self._columns.items()})

    @property
    def requests(self) -> int:
        """How many there were, those included that have no row of their own."""
        return len(self) + int(self["left_out"].sum())

    @property
    def answered(self) -> Column:
        """Mask: the client got a result."""
        return np.asarray(self["status"] == "OK", dtype=np.bool_)

    @property
    def violated(self) -> Column:
        """Mask: the client got its result later than promised."""
        return self.answered & self["violated"]

    @property
    def launched(self) -> Column:
        """Mask: it reached a lane, whatever came of it."""
        return np.asarray(self["lane"] >= 0)

    @property
    def launched_unix_ns(self) -> Column:
        """When it first ran; meaningless where not `launched`."""
        return np.asarray(self["arrived_unix_ns"] + self["quet_ns"])

    @property
    def finished_unix_ns(self) -> Column:
        """When its lane was done with it."""
        return np.asarray(self["arrived_unix_ns"] + self["latency_ns"] - self["answer_ns"])

    @property
    def over_target(self) -> Column:
        """Latency ÷ QoS target; 0 where there was no target."""
        return ratio(self["latency_ns"], self["qos_target_ns"])

    def stage_ns(self) -> dict[str, Column]:
        """Time of every stage of `STAGES`.

        Clocks of different processes may disagree: no stage gets more than is left of the latency.
        """
        left = self["latency_ns"]
        named: dict[str, Column] = {}
        for stage in STAGES:
            if stage != "handover":
                named[stage] = np.clip(self[f"{stage}_ns"], 0, left)
                left = left - named[stage]
        return {stage: named.get(stage, left) for stage in STAGES}


def ratio(numerator: Column, denominator: Column) -> Column:
    """Elementwise quotient, 0 where the denominator is not positive."""
    out = np.zeros(len(numerator))
    np.divide(numerator, denominator, out=out, where=np.asarray(denominator > 0))
    return out
