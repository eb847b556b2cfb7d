"""A fork that waits for a while where the system has no room for one more process.

multiprocessing's fork server ends at the first fork that fails, and all lanes with it.
"""

import os
import time

#: Longest wait, and time between two tries. Whoever asked for the process waits as long.
_MOST_S, _EVERY_S = 10.0, 0.1


def fork_patiently() -> None:
    """Replace `os.fork` of this process by one that waits; children have the usual one again."""
    usual = os.fork

    def patient() -> int:
        gives_up_at = time.monotonic() + _MOST_S
        while True:
            try:
                return usual()
            except OSError:
                if time.monotonic() >= gives_up_at:
                    raise
            time.sleep(_EVERY_S)

    def restore() -> None:
        os.fork = usual

    os.fork = patient
    os.register_at_fork(after_in_child=restore)
