"""Plain requests: those that the front has checked and staged by itself.

The front knows from `models` what each served model takes. It stages what fits and has nothing
unusual in it; all else comes as a message, to be decoded and refused in words.
"""

from collections.abc import Callable, Iterator

from serve.inputs import INPUTS, Input, Size
from serve.ipc.shared_pool import SharedPool
from serve.native import EDGES, NODES, BlockPool, PlainModel, PlainRequest
from serve.server.api import InferCall
from serve.server.catalogue import ModelCatalogue, ModelEntry
from serve.server.driver import CallPort, Driver
from serve.server.intake import Intake
from serve.server.request_inputs import StagedInputs
from serve.server.ticket import Answer, PlainTicket

#: Name, version and description of a model, for the front.
PlainModels = list[tuple[str, str, PlainModel]]


class PlainRequests:
    """The engine for a front that stages requests."""

    def __init__(
        self,
        catalogue: ModelCatalogue,
        intake: Intake,
        driver: Driver,
        pool: SharedPool,
        admit: Callable[[InferCall], None],
        *,
        check_finite: bool,
    ) -> None:
        """`admit` raises NotReady for calls that are not taken now."""
        #: With it, features must be finite numbers.
        self.check_finite = check_finite
        self._catalogue = catalogue
        self._intake = intake
        self._driver = driver
        self._pool = pool
        self._admit = admit
        #: By token. An entry's token is its place in the order of descriptions.
        self._entries: dict[int, ModelEntry] = {}
        self._described = 0

    @property
    def blocks(self) -> BlockPool:
        """Where the front stages."""
        return self._pool.blocks

    def tell_models(self, tell: Callable[[PlainModels], None]) -> None:
        """Call `tell` with the models whose requests may be staged, now and at every change."""

        def changed() -> None:
            tell(list(self._models()))

        self._catalogue.changed = changed
        changed()

    def serve_through(self, port: CallPort) -> None:
        """Have the driver's thread serve `port`."""
        self._driver.serve_through(port)

    def leave_port(self, timeout_s: float) -> bool:
        """Tell no more models; return once the driver's thread serves no port.

        Returns False when it still serves one after `timeout_s`.
        """
        self._catalogue.changed = lambda: None
        return self._driver.leave_port(timeout_s)

    def entry(self, token: int) -> ModelEntry | None:
        """Return the model of a token; None when it is served no more."""
        return self._entries.get(token)

    def submit(
        self, call: InferCall, entry: ModelEntry, request: PlainRequest, answer: Answer
    ) -> PlainTicket | None:
        """Hand over a staged request, which the ticket owns from then on.

        Returns None when the model was retired; raises NotReady when no request is taken now.
        """
        self._admit(call)
        inputs = StagedInputs(call, entry, self._pool, request)
        return self._intake.submit_staged(call, inputs, answer)

    def _models(self) -> Iterator[tuple[str, str, PlainModel]]:
        entries = {}
        for entry in self._catalogue.entries:
            name, version = entry.spec.name, str(entry.spec.version)
            self._described += 1
            model = _describe(entry, self._described)
            if model is None:
                continue
            entries[self._described] = entry
            yield name, version, model
            if self._catalogue.is_default(entry):
                yield name, "", model
        self._entries = entries


def _describe(entry: ModelEntry, token: int) -> PlainModel | None:
    """Return what the front must know; None for a model that it cannot serve by itself."""
    if entry.spec.interface is not None:
        return None
    signature = entry.signature
    output = entry.estimator.calibration.memory.output
    nodes, edges = output.per
    model = PlainModel(
        token=token,
        narrow_edges=signature.narrow_edges,
        counts_loops=entry.estimator.counts_loops,
        output=(nodes, edges, output.constant),
    )
    sizes: dict[Size, int] = {"N": NODES, "E": EDGES, "F": signature.num_features}
    if signature.edge_dim is not None:
        sizes["D"] = signature.edge_dim
    for name in entry.spec.inputs:
        each: Input = INPUTS[name]
        if any(isinstance(size, str) and size not in sizes for size in each.shape):
            return None
        model.add_input(
            name,
            list(each.shape_of(sizes)),
            indices=each.ids_below is not None,
            also_int32=each.also == "INT32",
            required=not each.optional,
        )
    return model
