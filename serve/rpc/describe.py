"""Models and estimates as protobuf messages."""

from collections.abc import Sequence

from serve.obs.record import ServerRun
from serve.pb import gnnserve_pb2, model_config_pb2
from serve.pb import grpc_service_pb2 as pb
from serve.server.api import GraphInfo, ModelEstimate, ModelInfo

PLATFORM = "pytorch_safetensors"
BACKEND = "gnnserve"

#: The extensions that always work here, by the names their users look for.
EXTENSIONS = (
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "binary_tensor_data",
    "parameters",
    "statistics",
)
_SHARED_MEMORY = "system_shared_memory"


def extensions(*, shared_memory: bool) -> tuple[str, ...]:
    """Names of the extensions that this server offers."""
    return (*EXTENSIONS, _SHARED_MEMORY) if shared_memory else EXTENSIONS


def metadata(model: ModelInfo, versions: Sequence[str]) -> pb.ModelMetadataResponse:
    """Inputs, outputs and properties; `versions` are all that can be asked for."""
    answer = pb.ModelMetadataResponse(
        name=model.name,
        versions=versions,
        platform=PLATFORM,
        properties=properties(model),
    )
    for specs, tensors in ((model.inputs, answer.inputs), (model.outputs, answer.outputs)):
        for spec in specs:
            tensors.add(name=spec.name, datatype=spec.datatype, shape=spec.shape)
    return answer


def config(
    model: ModelInfo, versions: Sequence[str], facts: ServerRun
) -> model_config_pb2.ModelConfig:
    """The configuration that load generators read; there is no batch dimension."""
    answer = model_config_pb2.ModelConfig(
        name=model.name, platform=PLATFORM, backend=BACKEND, max_batch_size=0
    )
    answer.version_policy.specific.versions.extend(int(v) for v in versions if v.isdecimal())
    for spec in model.inputs:
        answer.input.add(
            name=spec.name,
            data_type=_data_type(spec.datatype),
            dims=spec.shape,
            optional=spec.optional,
        )
    for spec in model.outputs:
        answer.output.add(name=spec.name, data_type=_data_type(spec.datatype), dims=spec.shape)
    kinds = model_config_pb2.ModelInstanceGroup.Kind
    kind = kinds.KIND_GPU if on_cuda(facts) else kinds.KIND_CPU
    answer.instance_group.add(name=model.name, kind=kind, count=facts.lanes)
    for name, value in properties(model).items():
        answer.parameters[name].string_value = value
    return answer


def properties(model: ModelInfo) -> dict[str, str]:
    """What else is worth knowing of a model, as text."""
    return {
        "executor": model.executor,
        "weights_bytes": str(model.weights_bytes),
        "qos_factor": f"{model.qos_factor:g}",
        **model.properties,
        **({"note": model.reason} if model.reason else {}),
    }


def estimate(found: ModelEstimate) -> gnnserve_pb2.EstimateResponse:
    """Field by field; both have the same names."""
    answer = gnnserve_pb2.EstimateResponse()
    for field in answer.DESCRIPTOR.fields:
        setattr(answer, field.name, getattr(found, field.name))
    return answer


def graph(found: GraphInfo) -> gnnserve_pb2.GraphFacts:
    """Field by field; both have the same names."""
    answer = gnnserve_pb2.GraphFacts()
    for field in answer.DESCRIPTOR.fields:
        setattr(answer, field.name, getattr(found, field.name))
    return answer


def on_cuda(facts: ServerRun) -> bool:
    """The lanes run on a CUDA device."""
    return facts.device.startswith("cuda")


def _data_type(datatype: str) -> model_config_pb2.DataType:
    """The configuration's enumerator for one of the wire's datatype names."""
    name = "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"
    found: model_config_pb2.DataType = getattr(model_config_pb2, name)
    return found
