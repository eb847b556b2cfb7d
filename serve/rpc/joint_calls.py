"""Joint requests: several models asked about one graph by one message.

The parameter `models` lists them, as in `gcn,sage:2`. Each model takes those of the tensors that it
has as inputs. The answer holds the outputs of all, as `gcn/output`, and for each model a parameter
`gcn/facts`: its QoS facts in JSON, or, when it failed, `status` and `message` of its error.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from serve.access.principal import Principal
from serve.errors import InvalidInput, ServeError, UnknownName, Unsupported, VersionReplaced
from serve.obs.record import RequestRecord
from serve.rpc.cancellation import Cancellation
from serve.rpc.convert import decode_call, qos_facts
from serve.rpc.parameters import text
from serve.rpc.status import status_of
from serve.rpc.tensors import raw_contents
from serve.server.api import NODE_IDS, InferCall, Inference, InferResult, ModelInfo
from serve.server.regions import Regions
from serve.wire.messages import (
    MOST_TENSORS,
    REGION,
    Array,
    ParameterValue,
    WireOutput,
    WireRequest,
    encode_response,
)

#: The parameter with the models' names, and the most that it may list.
MODELS = "models"
MOST_MODELS = 8
#: Longest list, in characters.
_MOST_TEXT = 2048
#: Between a model and one of its outputs or its facts; no name of a model has it.
_OF = "/"
_FACTS = f"{_OF}facts"
#: Between a model and its version.
_VERSION = ":"


class _Asked(NamedTuple):
    """One model of a joint request."""

    #: As the request names it, which the answer repeats.
    name: str
    model: ModelInfo


class JointCalls:
    """Answers joint requests."""

    def __init__(
        self,
        engine: Inference,
        regions: Regions,
        succeeded: Callable[[RequestRecord], None],
        failed: Callable[[str, str, int], None],
    ) -> None:
        """`succeeded` and `failed` count each model's part; see ``InferenceService``."""
        self._engine = engine
        self._regions = regions
        self._succeeded = succeeded
        self._failed = failed

    def infer(
        self,
        request: WireRequest,
        arrived_ns: int,
        cancellation: Cancellation,
        remaining_s: float,
        caller: Principal,
        trace_parent: str = "",
    ) -> bytes:
        """Run a joint request to the end of all its models; return the serialized response.

        Raises the first model's ServeError when no model has a result.
        """
        asked: list[_Asked] = []
        try:
            while True:
                asked = []
                asked += self._asked(request)
                calls = self._decode(request, asked, arrived_ns, remaining_s, caller)
                if trace_parent:
                    calls = [replace(call, trace_parent=trace_parent) for call in calls]
                try:
                    ticket = self._engine.submit_jointly(calls)
                    break
                except VersionReplaced:
                    continue  # ends: each time another version was unloaded
        except ServeError as error:
            # What the request calls a model may be any text, and names are labels of metrics.
            name, version = "unknown", ""
            if asked:
                name, version = asked[0].model.name, asked[0].model.version
            self._engine.refused(name, version, request.request_id, arrived_ns, error, trace_parent)
            for one in asked:
                self._failed(one.model.name, one.model.version, arrived_ns)
            raise
        cancellation.submitted(ticket)
        try:
            results = ticket.results()
        finally:
            cancellation.finished()
        for one, result in zip(asked, results, strict=True):
            if isinstance(result, InferResult):
                self._succeeded(result.record)
            else:
                self._failed(one.model.name, one.model.version, arrived_ns)
        errors = [result for result in results if isinstance(result, Exception)]
        if len(errors) == len(results):
            raise errors[0]
        return _encode(request.request_id or ticket.joint_uid, ticket.joint_uid, asked, results)

    def _asked(self, request: WireRequest) -> Iterator[_Asked]:
        """Yield the models that the request lists; raises InvalidInput, UnknownName, NotReady."""
        listed = text(request.parameters, MODELS, _MOST_TEXT) or ""
        names = [name.strip() for name in listed.split(",")]
        if not all(names):
            raise InvalidInput(f"parameter '{MODELS}': {listed!r} is no list of names: gcn,sage:2")
        if len(names) > MOST_MODELS:
            raise InvalidInput(
                f"parameter '{MODELS}': {len(names)} models are listed, at most {MOST_MODELS} are "
                "taken"
            )
        if len(set(names)) < len(names):
            raise InvalidInput(f"parameter '{MODELS}': {listed!r} lists a model twice")
        if request.version:
            raise InvalidInput(
                f"model_version: '{request.version}' is given beside parameter '{MODELS}'; write "
                f"versions there, as in {names[0].partition(':')[0]}:{request.version}"
            )
        if request.model and request.model not in [name.partition(":")[0] for name in names]:
            raise InvalidInput(
                f"model_name: '{request.model}' is not in parameter '{MODELS}', {listed!r}"
            )
        for name in names:
            model, _, version = name.partition(_VERSION)
            yield _Asked(name, self._engine.model(model, version, request.request_id))

    def _decode(
        self,
        request: WireRequest,
        asked: Sequence[_Asked],
        arrived_ns: int,
        remaining_s: float,
        caller: Principal,
    ) -> list[InferCall]:
        """Return a call for each model. Raises the errors of ``decode_call``, with its name."""
        raws = raw_contents(request)
        taken = {spec.name for one in asked for spec in one.model.inputs} | {NODE_IDS.name}
        for position, tensor in enumerate(request.inputs):
            if tensor.name not in taken:
                names = ", ".join(one.name for one in asked)
                raise InvalidInput(
                    f"inputs[{position}]: none of the models {names} has an input '{tensor.name}'"
                )
        wanted = _wanted(request.outputs, asked)
        calls = []
        for one in asked:
            own = {spec.name for spec in one.model.inputs} | {NODE_IDS.name}
            kept = [at for at, tensor in enumerate(request.inputs) if tensor.name in own]
            part = request._replace(
                model=one.model.name,
                # One that is not named may be replaced meanwhile, and another answers then.
                version=one.model.version if _VERSION in one.name else "",
                inputs=[request.inputs[at] for at in kept],
                outputs=wanted[one.name],
                raws=[raw for at in kept if (raw := raws[at]) is not None],
            )
            try:
                calls.append(
                    decode_call(part, one.model, self._regions, arrived_ns, remaining_s, caller)
                )
            except (InvalidInput, UnknownName, Unsupported) as error:
                raise type(error)(f"model '{one.name}': {error}") from error
        return calls


def _wanted(outputs: Sequence[WireOutput], asked: Sequence[_Asked]) -> dict[str, list[WireOutput]]:
    """Return the outputs asked of each model; all of its own when none is asked of any.

    Raises InvalidInput and Unsupported.
    """
    found: dict[str, list[WireOutput]] = {one.name: [] for one in asked}
    for position, output in enumerate(outputs):
        name, _, own = output.name.rpartition(_OF)
        if name not in found:
            raise InvalidInput(
                f"outputs[{position}]: '{output.name}' is no output of one of the models; they are "
                f"named as in {asked[0].name}{_OF}{asked[0].model.outputs[0].name}"
            )
        if output.parameters and REGION in output.parameters:
            raise Unsupported(
                f"output '{output.name}': outputs of several models do not go to shared memory"
            )
        found[name].append(WireOutput(own, output.parameters))
    if outputs and (left := [name for name, own in found.items() if not own]):
        raise InvalidInput(f"outputs: none is asked of model '{left[0]}'")
    count = len(outputs) or sum(len(one.model.outputs) for one in asked)
    if count > MOST_TENSORS:
        raise InvalidInput(
            f"outputs: the models have {count}, and a message holds at most {MOST_TENSORS}; name "
            "those that you want"
        )
    return found


def _encode(
    request_id: str,
    joint_uid: str,
    asked: Sequence[_Asked],
    results: Sequence[InferResult | Exception],
) -> bytes:
    """Serialize the response."""
    outputs: dict[str, Array] = {}
    parameters: dict[str, ParameterValue | None] = {
        MODELS: ",".join(one.name for one in asked),
        "joint_uid": joint_uid,
    }
    for one, result in zip(asked, results, strict=True):
        facts: dict[str, ParameterValue | None]
        if isinstance(result, InferResult):
            facts = qos_facts(result.record)
            outputs |= {f"{one.name}{_OF}{name}": out for name, out in result.outputs.items()}
        else:
            status = status_of(result)
            facts = {"status": status.code.name, "message": status.text}
            if status.retry_after_ms is not None:
                facts["retry_after_ms"] = status.retry_after_ms
        facts["model_version"] = one.model.version
        parameters[one.name + _FACTS] = msgspec.json.encode(facts).decode()
    return encode_response(
        asked[0].model.name, outputs, request_id=request_id, parameters=parameters
    )
