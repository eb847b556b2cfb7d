"""Work in a thread beside the block of a `with` statement."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def beside(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run `work` in a thread inside the block; it ends when the event that it gets is set.

    Raises what it raised, at the end of the block.
    """
    over = threading.Event()
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work(over)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    if failed:
        raise failed[0]
