"""Files of a training job that the server and the job's processes share.

They are in a folder of the job's own, the only one that its processes write to:

    shared/graph.safetensors            graph and labels, by the server
    shared/checkpoint.safetensors       by the processes
    shared/weights.safetensors          the same, after the last step
"""

from pathlib import Path


class JobFiles:
    """Paths of one job's files."""

    def __init__(self, folder: Path) -> None:
        #: Where the model's code may leave anything: links, pipes, folders in folders.
        self.shared = folder / "shared"
        self.graph = self.shared / "graph.safetensors"
        self.checkpoint = self.shared / "checkpoint.safetensors"
        self.weights = self.shared / "weights.safetensors"
