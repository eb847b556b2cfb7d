"""A training job on disk: what it is, its graph, and what its process keeps there.

    job.json                    the job and how far it is known to be
    graph.safetensors           graph and labels, as they were when the job was prepared
    checkpoint.safetensors      written by its process, renamed into place
    weights.safetensors         the same, after the last step

A server that starts goes on with the jobs that it finds without an end.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from serve.errors import ConfigError
from serve.graphs.resident import ResidentGraph

_JOB, _GRAPH, _CHECKPOINT = "job.json", "graph.safetensors", "checkpoint.safetensors"
WEIGHTS = "weights.safetensors"
#: Share of the labelled nodes that are learned from; the others tell how well.
_TRAIN_SHARE = 0.5


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
    loss: float = 0.0
    accuracy: float = 0.0


class JobFolder:
    """Folder of one job."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def keep(self, file: KeptJob) -> None:
        """Write what the job is, in one step; raises OSError."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = self.path / f"{_JOB}.part"
        part.write_bytes(msgspec.json.encode(file))
        part.replace(self.path / _JOB)

    def keep_graph(self, graph: ResidentGraph, seed: int) -> None:
        """Write the graph as it is now, unless it was written before; raises OSError.

        Raises ConfigError for a graph without labels.
        """
        if (self.path / _GRAPH).exists():
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
        part = self.path / f"{_GRAPH}.part"
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
        part.replace(self.path / _GRAPH)

    def steps_kept(self) -> int:
        """Return how many steps the checkpoint holds; 0 without one."""
        try:
            with safe_open(self.path / _CHECKPOINT, "np") as file:
                return int(file.metadata()["steps"])
        except (OSError, SafetensorError, KeyError, TypeError, ValueError):
            return 0

    def publish(self, model_folder: Path, version: int) -> None:
        """Copy the weights into a model's folder as that version, whole or not at all.

        Does nothing when the version is there. Raises OSError.
        """
        target = model_folder / str(version)
        if target.exists():
            return
        part = model_folder / f".{version}.part"
        part.mkdir(exist_ok=True)
        shutil.copyfile(self.path / WEIGHTS, part / WEIGHTS)
        os.replace(part, target)

    def tidy(self) -> None:
        """Delete all but what the job was."""
        for file in self.path.iterdir():
            if file.name != _JOB:
                file.unlink(missing_ok=True)

    def remove(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self.path, ignore_errors=True)


def kept_jobs(root: Path) -> Iterator[tuple[JobFolder, KeptJob]]:
    """Yield the jobs under `root`, in order of their ids; what is no job is left alone."""
    with suppress(FileNotFoundError):
        for path in sorted(root.iterdir(), key=lambda one: (len(one.name), one.name)):
            with suppress(OSError, msgspec.DecodeError):
                data = (path / _JOB).read_bytes()
                yield JobFolder(path), msgspec.json.decode(data, type=KeptJob)
