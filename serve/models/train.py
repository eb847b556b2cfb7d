"""Train the four models of the zoo and write them as a model repository.

    python -m serve.models.train --out configs/models                   the community graph
    python -m serve.models.train --out models --data cora.npz           any graph with labels

Full-graph training, seeded; the same seed on the same machine gives the same weights.
"""

import argparse
import sys
import zipfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from rich.progress import BarColumn, Progress, TimeRemainingColumn
from rich.table import Table

from serve.errors import ConfigError, ServeError
from serve.models import zoo
from serve.models.community import LabelledGraph, community_graph, labelled
from serve.models.writer import write_model
from serve.terminal import Console, description_column

FACTORIES: dict[str, Callable[..., zoo.ConvStack]] = {
    "gcn": zoo.gcn,
    "sage": zoo.sage,
    "gin": zoo.gin,
    "gat": zoo.gat,
}


def train_model(
    module: torch.nn.Module,
    graph: LabelledGraph,
    epochs: int,
    on_epoch: Callable[[], object] = lambda: None,
) -> float:
    """Train `module` on the training nodes, leave it in eval mode and return its test accuracy."""
    x, edge_index, y = (torch.from_numpy(a) for a in (graph.x, graph.edge_index, graph.y))
    train, test = torch.from_numpy(graph.train_mask), torch.from_numpy(graph.test_mask)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.005, weight_decay=5e-4)
    module.train()
    for _ in range(epochs):
        optimizer.zero_grad()
        logits = module(x, edge_index)
        torch.autograd.backward(torch.nn.functional.cross_entropy(logits[train], y[train]))
        optimizer.step()
        on_epoch()
    module.eval()
    with torch.inference_mode():
        right = module(x, edge_index).argmax(dim=1) == y
    return float(right[test].float().mean())


def read_graph(path: Path, seed: int = 0) -> LabelledGraph:
    """Read a labelled graph from an npz file, split by `seed`; raises ConfigError naming the key.

    Keys: edge_index [2, E]; y [N]; x [N, F], or x_data, x_indices, x_indptr, x_shape (CSR).
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {key: archive[key] for key in archive.files}
        if "x" in arrays:
            x = arrays["x"].astype(np.float32)
        else:
            x = np.zeros(tuple(arrays["x_shape"]), dtype=np.float32)
            rows = np.repeat(np.arange(len(x)), np.diff(arrays["x_indptr"]))
            x[rows, arrays["x_indices"]] = arrays["x_data"]
        edge_index, y = (arrays[key].astype(np.int64) for key in ("edge_index", "y"))
    except KeyError as error:
        raise ConfigError(f"{path}: no array {error}; x (or x_* as CSR), edge_index, y") from error
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{path}: not a readable npz file: {error}") from error
    if edge_index.ndim != 2 or edge_index.shape[0] != 2 or len(x) != len(y):
        raise ConfigError(
            f"{path}: x {x.shape}, edge_index {edge_index.shape}, y {y.shape}: expected [N, F],"
            " [2, E] and [N]"
        )
    return labelled(x, edge_index, y, seed)


def train_all(
    out: Path,
    graph: LabelledGraph,
    suffix: str,
    told: str,
    epochs: int,
    seed: int,
    models: Sequence[str] = tuple(FACTORIES),
) -> dict[str, float]:
    """Train models of the zoo, write them as `<name><suffix>`, return test accuracies by name."""
    args = {
        "in_channels": graph.x.shape[1],
        "hidden_channels": 64,
        "out_channels": graph.num_classes,
        "num_layers": 3,
    }
    accuracy = {}
    columns = description_column(), BarColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        for name in models:
            bar = progress.add_task(f"{name}{suffix}", total=epochs)
            torch.manual_seed(seed)
            module = FACTORIES[name](**args)
            score = train_model(module, graph, epochs, partial(progress.advance, bar))
            accuracy[name + suffix] = score
            write_model(
                out,
                name + suffix,
                module,
                factory=f"serve.models.zoo:{name}",
                args=args,
                description=f"{told}; test accuracy {score:.3f}",
            )
    return accuracy


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return 0, or 2 after a message when the data cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m serve.models.train", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the model repository")
    parser.add_argument("--data", type=Path, help="npz file; default: the community graph")
    parser.add_argument("--models", nargs="+", choices=FACTORIES, default=list(FACTORIES))
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    # One thread adds in a fixed order, so that a seed gives one set of weights.
    torch.set_num_threads(1)
    try:
        if options.data is None:
            graph, suffix, told = community_graph(options.seed), "", "community graph"
        else:
            graph = read_graph(options.data, options.seed)
            suffix = f"_{options.data.stem}"
            told = options.data.stem
    except ServeError as error:
        Console(stderr=True).print_error(error)
        return 2
    told = f"trained on the {told}, seed {options.seed}, {options.epochs} epochs"
    accuracy = train_all(
        options.out, graph, suffix, told, options.epochs, options.seed, options.models
    )
    table = Table("model", "test accuracy", title=str(options.out))
    for name, score in accuracy.items():
        table.add_row(name, f"{score:.3f}")
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
