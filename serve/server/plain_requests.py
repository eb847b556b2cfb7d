"""Plain requests: those that the front has checked and staged by itself.

The front knows from `models` what each served model takes. It stages what fits and has nothing
unusual in it; all else comes as a message, to be decoded and refused in words.
"""

from collections.abc import Callable, Iterator, Mapping

from serve.inputs import INPUTS, Size
from serve.interface import InputSlot, Interface, is_float
from serve.ipc.shared_pool import SharedPool
from serve.native import BlockPool, PlainModel, PlainRequest
from serve.obs.payload_recorder import PayloadRecorder
from serve.server.api import OUTPUT, InferCall
from serve.server.catalogue import ModelCatalogue, ModelEntry
from serve.server.declared_inputs import StagedDeclaredInputs
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
        self._stages = True
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

    def record_payloads(self, recorder: PayloadRecorder) -> None:
        """Have the tensors of all requests recorded from now on, as they are sent.

        The front stages nothing any more: all requests come as messages.
        """
        self._stages = False
        self._intake.payloads = recorder
        self._catalogue.changed()

    def serve_through(self, port: CallPort) -> None:
        """Have the driver's thread serve `port`."""
        self._driver.serve_through(port)

    def leave_port(self, timeout_s: float) -> bool:
        """Stop telling of models, and return once the driver's thread serves no port.

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

        `entry` is what the request was staged for; the version that is to answer it may be another.
        Returns None when the model was retired, when that version takes other inputs, and for a
        request that a shadow is to run too; raises NotReady when no request is taken now.
        """
        self._admit(call)
        rules = self._catalogue.router.rules(call.model)
        if not call.version and (
            rules.shadows(call.model, call.client_id) if call.client_id else rules.shadow
        ):
            # Requests that are run again come as messages, from which their inputs are copied.
            return None
        if not call.version and rules.shares:
            chosen = self._catalogue.get(call.model, "", call.client_id)
            if chosen is not entry and not _alike(chosen, entry):
                return None
            entry = chosen
        kind = StagedInputs if entry.spec.interface is None else StagedDeclaredInputs
        inputs = kind(call, entry, self._pool, request)
        return self._intake.submit_staged(call, inputs, answer)

    def _models(self) -> Iterator[tuple[str, str, PlainModel]]:
        entries = {}
        for entry in self._catalogue.entries if self._stages else ():
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


def _alike(one: ModelEntry, other: ModelEntry) -> bool:
    """Return True when the front describes both entries alike, see ``_describe``."""
    memory, others = (each.estimator.calibration.memory for each in (one, other))
    return (
        (one.spec.inputs, one.spec.interface, one.signature)
        == (other.spec.inputs, other.spec.interface, other.signature)
        and one.estimator.counts_loops == other.estimator.counts_loops
        and one.estimator.counts_graphs == other.estimator.counts_graphs
        and memory.output == others.output
    )


def _describe(entry: ModelEntry, token: int) -> PlainModel | None:
    """Return what the front must know; None for a model that it cannot serve by itself."""
    if (interface := entry.spec.interface) is not None:
        if any(slot.columns for slot in interface.inputs):
            return None
        return _declared(interface, token, entry)
    signature = entry.signature
    inputs = [INPUTS[name] for name in entry.spec.inputs]
    has_edges = any(each.per[0] == "E" for each in inputs)
    if not (has_edges or signature.accepts_edgeless):
        return None
    sizes: dict[Size, int] = {"N": _size_of_count(0), "F": signature.num_features}
    if has_edges:
        sizes["E"] = _size_of_count(1)
    if signature.edge_dim is not None:
        sizes["D"] = signature.edge_dim
    model = PlainModel(
        token=token,
        counts=1 + has_edges,
        node_counts=1,
        narrow_edges=signature.narrow_edges,
        counts_loops=has_edges and entry.estimator.counts_loops,
    )
    for each in inputs:
        if any(isinstance(size, str) and size not in sizes for size in each.shape):
            return None
        model.add_input(
            each.name,
            each.datatype,
            list(each.shape_of(sizes)),
            required=not each.optional,
            also_int32=each.also == "INT32",
            # No more graphs than nodes.
            below=[] if each.ids_below is None else [0],
            counts_graphs=each.ids_below == "G" and entry.estimator.counts_graphs,
            ascends=each.ids_below == "G" and signature.needs_sorted_batch,
        )
    output = entry.estimator.calibration.memory.output
    model.add_output(OUTPUT, output.constant, list(output.per[: 1 + has_edges]))
    return model


def _declared(interface: Interface, token: int, entry: ModelEntry) -> PlainModel:
    """Return what the front must know of a model that declares its inputs."""
    place = {symbol: number for number, symbol in enumerate(interface.counts)}
    model = PlainModel(token=token, counts=len(place), node_counts=len(interface.nodes))
    for slot in interface.inputs:
        low, high = _range(slot)
        model.add_input(
            slot.name,
            slot.datatype,
            [_size_of_count(place[dim]) if isinstance(dim, str) else dim for dim in slot.shape],
            required=not slot.optional,
            also_int32=bool(slot.index) and slot.datatype == "INT64",
            below=_below(slot, place),
            low=low,
            high=high,
            numbers_graphs=interface.numbers_graphs(slot),
            counts_graphs=entry.estimator.counts_graphs and slot in interface.batches,
            ascends=entry.signature.needs_sorted_batch and slot in interface.orders,
        )
    for output in interface.outputs:
        per, constant = interface.bytes_per((output,))
        model.add_output(output.name, constant, list(per))
    return model


def _below(slot: InputSlot, place: Mapping[str, int]) -> list[int]:
    """Return the counts that the values of each row are below, or of all rows."""
    # No more graphs than things in them.
    found = [
        place[symbol] if symbol in place else place[slot.symbols[0]] for symbol in slot.row_bounds
    ]
    return found[:1] if len(set(found)) == 1 else found


def _range(slot: InputSlot) -> tuple[int, int]:
    """Return the least and the greatest value of integers that are no index."""
    if slot.index or is_float(slot.datatype) or slot.datatype == "BOOL":
        return 0, 1
    low, end = (int(bound) for bound in slot.bounds)
    low, high = max(low, -(2**63)), min(end - 1, 2**63 - 1)
    return (low, high) if low <= high else (1, 0)


def _size_of_count(number: int) -> int:
    """Return what stands in a shape for a count; see ``PlainModel.add_input``."""
    return -1 - number
