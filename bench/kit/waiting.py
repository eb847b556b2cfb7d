"""Waiting for conditions, long enough for a machine that is busy with other work."""

import inspect
import time
from collections.abc import Callable
from typing import Any

#: Limit of one wait. A machine with ten times the work it can do must fail no test.
PATIENCE_S = 300.0


def wait_for(true: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> Any:
    """Return the first truthy result of `true`."""
    give_up = time.monotonic() + patience_s
    while not (found := true()):
        assert time.monotonic() < give_up, f"never came: {what}"
        time.sleep(0.01)
    return found


def eventually(condition: Callable[[], Any]) -> None:
    """Wait for a condition; its source names it in the error."""
    wait_for(condition, inspect.getsource(condition).strip())


def with_growing_limits(ask: Callable[[float], Any]) -> Any:
    """Return the first truthy result of `ask` with a limit of 0.2 s, 0.4 s, 0.8 s and so on."""
    limit_s = 0.2
    while limit_s < PATIENCE_S:
        if found := ask(limit_s):
            return found
        limit_s *= 2
    raise AssertionError(f"not with a limit of {limit_s / 2:g} s either")
