"""A training job on disk: what it is, its graph, and what its process keeps there.

    job.json        the job and how far it is known to be
    …               see ``serve.ipc.job_files``; the graph is as it was when the job was prepared

A server that starts goes on with the jobs that it finds without an end. The model's code runs in
the job's processes and may leave anything in their part of the folder: it is read without following
links, and without waiting.
"""

import filecmp
import logging
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from serve.errors import ConfigError
from serve.files import open_regular, read_text, remove_tree, replace_file
from serve.graphs.resident import ResidentGraph
from serve.ipc.job_files import JobFiles
from serve.models.repository import WEIGHTS_FILE

_log = logging.getLogger(__name__)

_JOB, _MOST_JOB_BYTES = "job.json", 1 << 16
MOST_EPOCHS = 10**6
#: Of a number that no job has.
_DIGITS = 16
#: Share of the labelled nodes that are learned from; the others tell how well.
_TRAIN_SHARE = 0.5
_PIECE_BYTES = 1 << 20


class KeptJob(msgspec.Struct, frozen=True, kw_only=True):
    """Content of a job's file."""

    job_id: int
    model: str
    #: Version whose weights it starts from.
    base_version: int
    graph: str
    epochs: int
    learning_rate: float
    seed: int
    fresh: bool
    priority: int
    #: Version as which its weights are published; 0 before.
    version: int = 0
    #: How it ended, empty before; and why.
    end: str = ""
    message: str = ""
    epochs_done: int = 0
    #: None where it was no number.
    loss: float | None = 0.0
    accuracy: float = 0.0


class JobFolder:
    """Folder of one job."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = JobFiles(path)

    @property
    def shared(self) -> Path:
        """Folder that its processes may write to."""
        return self._files.shared

    def keep(self, file: KeptJob) -> None:
        """Write what the job is, in one step; raises OSError."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.shared.mkdir(mode=0o700, exist_ok=True)
        replace_file(self.path / _JOB, msgspec.json.encode(file))

    def keep_graph(self, graph: ResidentGraph, seed: int) -> None:
        """Write the graph as it is now, unless it was written before; raises OSError.

        Raises ConfigError for a graph without labels.
        """
        self.shared.mkdir(mode=0o700, exist_ok=True)
        if self._files.graph.exists():
            return
        snapshot, known = graph.snapshot, graph.labels
        if known is None:
            raise ConfigError(f"graph '{graph.name}' has no labels 'y' to train on")
        # Nodes that came later have none.
        labelled = np.random.default_rng(seed).permutation(np.flatnonzero(known >= 0))
        count = int(np.ceil(_TRAIN_SHARE * len(labelled)))
        rows, held_out = np.sort(labelled[:count]), np.sort(labelled[count:])
        if not count:
            raise ConfigError(f"graph '{graph.name}' has no node with a label")
        # Where no process can have left a link.
        part = self.path / "graph.part"
        save_file(
            {
                "x": snapshot.features(np.arange(snapshot.num_nodes)),
                "edge_index": snapshot.edges(),
                "rows": rows,
                "labels": known[rows],
                "held_out": held_out,
                "held_out_labels": known[held_out],
            },
            part,
        )
        part.replace(self._files.graph)

    def graph_bytes(self) -> int:
        """Return the size of the graph's file; 0 where there is none."""
        try:
            return self._files.graph.lstat().st_size
        except FileNotFoundError:
            return 0

    def steps_kept(self) -> int:
        """Return how many steps the checkpoint holds; 0 without one that can be read."""
        try:
            _require_file(self._files.checkpoint)
            with safe_open(self._files.checkpoint, "np") as file:
                steps = int(file.metadata()["steps"])
                return steps if 0 <= steps <= MOST_EPOCHS else 0
        except (OSError, SafetensorError, KeyError, TypeError, ValueError):
            return 0

    def published_as(self, model_folder: Path, version: int) -> bool:
        """Return whether a model's version has the weights of the job's process."""
        try:
            _require_file(self._files.weights)
            theirs = model_folder / str(version) / WEIGHTS_FILE
            return filecmp.cmp(self._files.weights, theirs, shallow=False)
        except OSError:
            return False

    def publish(self, model_folder: Path, version: int, begin: Callable[[], bool]) -> bool:
        """Copy the weights into a model's folder as that version, whole or not at all.

        `begin` is asked once, just before the version appears: False leaves nothing behind. Returns
        whether the version is there. Raises OSError, also for weights that are no file and for a
        version that is there already.
        """
        target = model_folder / str(version)
        part = model_folder / f".{version}.part"
        try:
            part.mkdir(exist_ok=True)
            _require_file(self._files.weights)
            copied = part / WEIGHTS_FILE
            with open_regular(self._files.weights) as source, copied.open("wb") as copy:
                shutil.copyfileobj(source, copy, _PIECE_BYTES)
            if not begin():
                return False
            os.replace(part, target)
            return True
        finally:
            remove_tree(part)

    def tidy(self) -> None:
        """Delete all but what the job was."""
        remove_tree(self.shared)
        for file in self.path.iterdir():
            if file.name != _JOB:
                file.unlink(missing_ok=True)

    def remove(self) -> None:
        """Delete the folder."""
        remove_tree(self.path)


def highest_number(root: Path) -> int:
    """Return the highest number that a folder under `root` has, of a job or not; 0 without one."""
    with suppress(FileNotFoundError):
        names = (path.name for path in root.iterdir())
        numbers = (int(name) for name in names if name.isdecimal() and len(name) < _DIGITS)
        return max(numbers, default=0)
    return 0


def kept_jobs(root: Path) -> Iterator[tuple[JobFolder, KeptJob]]:
    """Yield the jobs under `root`, in order of their ids; what is no job is left alone and told."""
    with suppress(FileNotFoundError):
        for path in sorted(root.iterdir(), key=lambda one: (len(one.name), one.name)):
            try:
                file = msgspec.json.decode(read_text(path / _JOB, _MOST_JOB_BYTES), type=KeptJob)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except (OSError, UnicodeDecodeError, msgspec.DecodeError, RecursionError) as error:
                _log.warning("%s: no training job: %s", path, error)
                continue
            # A copy of a folder has another's number.
            if path.name != str(file.job_id):
                _log.warning("%s: it holds job %d, and is left alone", path, file.job_id)
                continue
            yield JobFolder(path), file


def _require_file(path: Path) -> None:
    """Raise OSError unless it is a file, and no link to one: the model's code could name others'.

    None of its processes runs by then.
    """
    if not stat.S_ISREG(path.lstat().st_mode):
        raise OSError(f"{path} is no regular file")
