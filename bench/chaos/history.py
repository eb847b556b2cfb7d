"""What a chaos run records: lines of JSON, one file for each process that writes.

    requests-N.jsonl   {"id", "at", …} when a request is sent, {"id", "end", …} for each outcome
    answers-N.jsonl    the content of each answer that process N has not seen before, by its hash
    faults.jsonl       what was done to the server, from when to when
    turns.jsonl        when one tenant flooded while the others sent little, and when it did not
    samples.jsonl      the server seen from outside, about once a second
    stills.jsonl       when the machine stood still, or ran none of the run's processes
    end.json           how the run and the server's last life ended

Times are ns of the machine's monotonic clock. ``checker`` reads this and shares no code with it.
"""

import base64
import hashlib
import json
import threading
from pathlib import Path
from typing import Any

from serve.wire.messages import Array


class History:
    """Appends lines to files in a folder. Thread-safe."""

    def __init__(self, folder: Path, number: int) -> None:
        self._requests = (folder / f"requests-{number}.jsonl").open("a")
        self._answers = (folder / f"answers-{number}.jsonl").open("a")
        self._seen: set[str] = set()
        self._lock = threading.Lock()

    def write(self, **line: Any) -> None:
        """Append a line about a request."""
        text = json.dumps(line, separators=(",", ":"))
        with self._lock:
            self._requests.write(text + "\n")

    def keep(self, answer: Array) -> str:
        """Return the hash of a float32 matrix, and keep its content once."""
        content = answer.tobytes()
        key = f"{answer.shape} {hashlib.sha256(content).hexdigest()[:24]}"
        with self._lock:
            if key not in self._seen:
                self._seen.add(key)
                line = {
                    "hash": key,
                    "shape": list(answer.shape),
                    "content": base64.b64encode(content).decode(),
                }
                self._answers.write(json.dumps(line) + "\n")
        return key

    def close(self) -> None:
        """Write what is left; later lines are an error."""
        with self._lock:
            self._requests.close()
            self._answers.close()


def append(path: Path, **line: Any) -> None:
    """Append one line to a file that one thread writes."""
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")
