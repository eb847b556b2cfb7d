"""CoGNN's queues of training tasks, and what its authors measured of them.

From the paper ("CoGNN: efficient scheduling for concurrent GNN training on GPUs") and the data that
its authors published: https://github.com/guessmewho233/CoGNN_info_for_SC22.
"""

from dataclasses import dataclass

from serve.estimate.closed_form import THRESHOLD, training_bytes

HIDDEN, EPOCHS = 64, 200
#: By data set: nodes, directed edges, features, classes (Table IV).
GRAPHS = {
    "CR": (2_708, 10_858, 1_433, 7),
    "CT": (3_327, 9_464, 3_703, 6),
    "PB": (19_717, 88_676, 500, 3),
    "PR": (43_471, 162_088, 29, 2),
    "AT": (50_515, 1_638_396, 100, 12),
    "SB": (88_784, 2_093_195, 128, 39),
    "DD": (334_925, 1_686_092, 98, 2),
    "AM": (410_236, 4_878_875, 96, 22),
    "TW": (580_768, 1_435_116, 1_323, 2),
    "YS": (1_714_644, 3_636_546, 74, 2),
    "OV": (1_890_931, 3_946_402, 66, 2),
}
#: Binary logarithm of the seconds of a task of eight layers, its process's start included
#: (Figure 15).
LOG_SECONDS = {
    "gcn": {"CT": 4.620, "CR": 4.670, "PB": 4.634, "PR": 4.663, "AT": 5.120, "SB": 5.262,
            "DD": 5.353, "AM": 6.109, "TW": 5.843, "YS": 6.416, "OV": 6.517},
    "sage": {"CT": 4.586, "CR": 4.609, "PB": 4.605, "PR": 4.594, "AT": 4.922, "SB": 5.045,
             "DD": 5.189, "AM": 5.795, "TW": 6.068, "YS": 6.244, "OV": 6.337},
    "gat": {"CT": 5.411, "CR": 5.421, "PB": 5.395, "PR": 5.411, "AT": 5.931, "SB": 6.094,
            "DD": 6.197, "AM": 7.000, "TW": 6.580, "YS": 7.312, "OV": 7.412},
    "gin": {"CT": 4.645, "CR": 4.673, "PB": 4.730, "PR": 4.903, "AT": 5.193, "SB": 5.463,
            "DD": 6.356, "AM": 6.769, "TW": 7.133, "YS": 8.503, "OV": 8.653},
}  # fmt: skip
_MEASURED_LAYERS = 8
#: Share of the GPU that a task keeps busy: mean achieved occupancy (Figure 4).
OCCUPANCY = {"gcn": 0.686, "sage": 0.619, "gat": 0.790, "gin": 0.633}


@dataclass(frozen=True)
class TrainingTask:
    """A task of a queue: a model of so many layers on a data set."""

    model: str
    dataset: str
    layers: int

    @property
    def widths(self) -> list[int]:
        """Widths of its layers, features first and classes last."""
        _, _, features, classes = GRAPHS[self.dataset]
        return [features, *[HIDDEN] * (self.layers - 1), classes]

    @property
    def peak_bytes(self) -> int:
        """Peak memory by the authors' closed form."""
        nodes, edges, _, _ = GRAPHS[self.dataset]
        return training_bytes(self.model, self.widths, nodes, edges)

    @property
    def reserve_bytes(self) -> int:
        """What CoGNN keeps for it."""
        return int(THRESHOLD * self.peak_bytes)

    @property
    def work_s(self) -> float:
        """Training beyond what the least data set takes, in proportion to the layers."""
        beyond_s = 2 ** LOG_SECONDS[self.model][self.dataset] - self.start_s
        return beyond_s * self.layers / _MEASURED_LAYERS

    @property
    def start_s(self) -> float:
        """What a process of its own takes before it trains: all that the least data set takes."""
        return min(2**seconds for seconds in LOG_SECONDS[self.model].values())


def _queue(model: str, words: str) -> tuple[TrainingTask, ...]:
    return tuple(TrainingTask(model, word[:2], int(word[2:])) for word in words.split())


#: In order of arrival.
QUEUES = {
    "GCN": _queue("gcn", "OV10 YS10 CR10 PB6 PB8 CR8 CT10 PR4 CT6 SB10 PB4 PB10 CR4 CR6 PR8 CT8 "
                         "DD10 PR6 PR10 CT4"),
    "SAGE": _queue("sage", "OV10 YS10 CR7 PR10 CR10 CT10 PR9 CT8 SB10 CT9 PB8 CR8 PR8 PB7 CT7 PR7 "
                           "DD10 CR9 PB9 PB10"),
    "GAT": _queue("gat", "AM8 TW10 PB4 PB10 PR8 PB6 CR4 CR8 SB10 CT6 PR10 CT8 PR9 CT4 PB8 CT10 PR7 "
                         "CR6 DD10 CR10"),
    "GIN": _queue("gin", "OV8 TW10 CR8 PB10 PR8 CR6 CT8 SB10 CT4 PR10 PR6 CT10 CR7 AT10 CT6 CT9 "
                         "PR7 PB8 CR9 CT7"),
    "Mix": (
        *_queue("gat", "AM8"), *_queue("gcn", "OV10 CT4"), *_queue("gat", "PB6"),
        *_queue("gcn", "CR6"), *_queue("sage", "CT8"), *_queue("gat", "CR4 CR8"),
        *_queue("gcn", "SB10 CT6 PB6"), *_queue("gat", "PR8"), *_queue("gin", "CT10"),
        *_queue("sage", "PB10"), *_queue("gat", "PR6"), *_queue("gcn", "CR8 PR8"),
        *_queue("gin", "CR10"), *_queue("gat", "DD10 PB4"),
    ),
}  # fmt: skip
#: Table V, in minutes: makespan, mean JCT and mean QT of each queue, in the order of ``QUEUES``.
TABLE_V: dict[str, tuple[tuple[float, ...], ...]] = {
    "default": ((12.14, 11.57, 18.40, 19.10, 15.02), (7.47, 7.04, 10.47, 14.20, 8.86),
                (6.86, 6.46, 9.55, 13.25, 8.11)),
    "mps": ((4.26, 10.55, 44.00, 23.12, 44.69), (3.27, 8.05, 39.47, 20.24, 40.96),
            (2.89, 7.02, 35.21, 18.21, 36.74)),
    "pipeswitch": ((3.54, 3.53, 7.02, 11.67, 6.07), (2.89, 2.87, 4.93, 10.56, 4.34),
                   (2.71, 2.69, 4.58, 9.97, 4.04)),
    "base": ((3.41, 3.40, 6.54, 11.85, 6.04), (2.81, 2.78, 4.52, 10.56, 4.17),
             (2.62, 2.59, 4.13, 9.92, 3.83)),
    "lmcf": ((3.43, 3.45, 6.88, 11.55, 5.65), (0.56, 0.57, 1.86, 1.33, 1.15),
             (0.34, 0.35, 1.38, 0.67, 0.80)),
    "bmc": ((3.47, 3.29, 6.40, 13.76, 5.46), (2.86, 2.73, 4.62, 11.38, 4.33),
            (2.67, 2.54, 4.24, 10.67, 4.01)),
}  # fmt: skip
#: Figure 14: binary logarithm of the MiB of each group, in order, by policy and queue.
LOG_GROUP_MIB: dict[str, dict[str, tuple[float, ...]]] = {
    "lmcf": {
        "GCN": (5.880, 6.170, 7.013, 7.176, 8.212, 8.529, 8.795, 9.279, 12.251, 13.504, 13.635),
        "SAGE": (7.515, 7.519, 8.862, 8.863, 9.011, 9.078, 9.100, 9.351, 12.016, 13.698, 13.829),
        "GAT": (6.725, 7.249, 7.486, 7.815, 9.498, 10.211, 10.682, 11.006, 14.279, 13.789, 14.421),
        "GIN": (7.492, 7.496, 8.838, 8.840, 8.841, 9.183, 9.399, 9.878, 11.294, 13.682, 14.183),
        "Mix": (6.032, 6.767, 7.122, 7.970, 8.852, 9.118, 9.498, 10.591, 13.567, 13.635, 14.421),
    },
    "bmc": {
        "GCN": (13.639, 13.508, 11.545, 10.936, 8.639, 8.459, 8.254, 8.147, 8.323, 8.433),
        "SAGE": (13.838, 13.708, 11.546, 10.382, 9.167, 9.085, 8.997, 8.975, 9.012, 9.077),
        "GAT": (14.424, 13.795, 13.328, 13.250, 10.188, 10.063, 9.935, 9.796, 9.898, 9.899),
        "GIN": (14.190, 13.692, 10.666, 10.058, 9.555, 9.336, 9.212, 9.077, 9.081, 8.962),
        "Mix": (14.423, 13.639, 13.324, 10.954, 9.877, 9.533, 8.994, 8.858, 9.008, 8.974),
    },
}
#: Figure 13: epochs that estimating and scheduling take, by queue and policy.
FIGURE_13 = {
    ("GCN", "base"): (2.75, 3.53), ("GCN", "lmcf"): (2.74, 5.18), ("GCN", "bmc"): (2.70, 5.26),
    ("SAGE", "base"): (3.02, 6.59), ("SAGE", "lmcf"): (2.93, 4.29), ("SAGE", "bmc"): (2.94, 6.05),
    ("GAT", "base"): (2.13, 3.77), ("GAT", "lmcf"): (2.02, 3.77), ("GAT", "bmc"): (2.25, 4.52),
    ("GIN", "base"): (1.24, 2.39), ("GIN", "lmcf"): (1.26, 1.91), ("GIN", "bmc"): (1.08, 1.78),
    ("Mix", "base"): (1.56, 3.56), ("Mix", "lmcf"): (1.61, 2.68), ("Mix", "bmc"): (1.68, 2.86),
}  # fmt: skip
