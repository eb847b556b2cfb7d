"""The pool of graphs that a workload draws from: made by ``PoolSpec``, found by ``GraphRef``."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from serve.errors import ConfigError
from serve.graphs.datasets import Dataset, load_dataset
from serve.graphs.generate import exact_edges, generate_edges
from serve.graphs.subgraphs import Subgraph, subgraphs
from serve.workload import RANDOM, RECORDED, GraphRef, PoolSpec


class GraphPool:
    """All subgraphs of a spec's datasets. Deterministic in spec and folder."""

    def __init__(
        self, spec: PoolSpec, folder: Path | None = None, *, given: Dataset | None = None
    ) -> None:
        """Read or generate the datasets and cut the subgraphs; seconds for a large scale.

        `given` is the only one, where it is there already. Raises what `load_dataset` raises.
        """
        self.spec = spec
        self.sources: dict[str, str] = {}
        self._pools: dict[str, tuple[Subgraph, ...]] = {}
        for name in spec.datasets:
            dataset = given or load_dataset(name, folder=folder, scale=spec.scale, seed=spec.seed)
            self.sources[name] = dataset.source
            self._pools[name] = subgraphs(
                dataset,
                spec.count,
                seed=spec.seed,
                min_nodes=min(spec.min_nodes, spec.max_nodes),
                max_nodes=spec.max_nodes,
                max_edges=spec.max_edges,
            )

    @property
    def refs(self) -> tuple[GraphRef, ...]:
        """All graphs, datasets in the spec's order, small graphs first."""
        return tuple(
            GraphRef(name, graph.index, graph.num_nodes, graph.num_edges)
            for name, pool in self._pools.items()
            for graph in pool
        )

    def edges(self, ref: GraphRef) -> NDArray[np.int64]:
        """Return the graph's edges [2, E]; raises ConfigError when its sizes differ from `ref`.

        A `random` or `recorded` graph needs no pool: its index seeds the generator.
        """
        if ref.dataset == RECORDED:
            return exact_edges(ref.num_nodes, ref.num_edges, np.random.default_rng(ref.index))
        if ref.dataset == RANDOM:
            rng = np.random.default_rng(ref.index)
            edges = generate_edges(ref.num_nodes, ref.num_edges, rng).astype(np.int64)
            found = GraphRef(RANDOM, ref.index, ref.num_nodes, edges.shape[1])
        else:
            pool = self._pools.get(ref.dataset, ())
            if not 0 <= ref.index < len(pool):
                raise ConfigError(f"graph {ref.dataset}/{ref.index} is not in the pool")
            graph = pool[ref.index]
            edges = graph.edge_index
            found = GraphRef(ref.dataset, ref.index, graph.num_nodes, graph.num_edges)
        if found != ref:
            raise ConfigError(
                f"graph {ref.dataset}/{ref.index} has {found.num_nodes} nodes and "
                f"{found.num_edges} edges here, {ref.num_nodes} and {ref.num_edges} are meant: "
                "another scale, seed or folder of graphs?"
            )
        return edges
