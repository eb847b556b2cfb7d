"""How the allocator treats the runs that measure a model."""

from collections.abc import Callable
from dataclasses import dataclass

from serve.native import Meter

Run = Callable[[], object]


class TooLarge(Exception):
    """A run needed more memory than measuring a model may take."""


@dataclass(frozen=True, slots=True)
class Allocator:
    """Treatment of the allocator around each run, which must be that of a lane."""

    #: Runs a forward pass and returns its peak of held bytes, tensors and kernels' scratch space.
    #: None without a meter; the scratch space then counts as nothing.
    held_by: Callable[[Run], int] | None = None
    #: Called before a run with the bytes that it will need.
    expect: Callable[[int], None] = lambda need_bytes: None
    #: Returns a run that raises TooLarge where this one takes too much.
    limited: Callable[[Run], Run] = lambda run: run


UNMETERED = Allocator()


def limited_by(meter: Meter, limit_bytes: int) -> Callable[[Run], Run]:
    """Return an `Allocator.limited` of runs whose tensors may take `limit_bytes` together.

    Sizes are chosen by what is known of a model so far, so a model whose memory grows otherwise may
    ask for more than the machine has.
    """

    def limited(run: Run) -> Run:
        def within_limit() -> object:
            meter.insert(limit_bytes)
            try:
                return run()
            except Exception:
                if not meter.refused_bytes():
                    raise
            finally:
                meter.clear()
            # Raised here, it keeps none of the tensors in the frames of the model's own error.
            raise TooLarge(f"it takes more than the {limit_bytes >> 20} MiB that measuring may")

        return within_limit

    return limited
