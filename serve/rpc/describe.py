"""Models, graphs and estimates as protobuf messages."""

import dataclasses
from collections.abc import Sequence

from serve.core.versions.rules import VersionRules
from serve.obs.record import ServerRun
from serve.pb import gnnserve_pb2, model_config_pb2
from serve.pb import grpc_service_pb2 as pb
from serve.server.api import GraphInfo, ModelEstimate, ModelInfo
from serve.server.training.job_facts import JobStatus
from serve.server.version_facts import VersionFacts

_MOST_INT64 = 2**63 - 1
PLATFORM = "pytorch_safetensors"
BACKEND = "gnnserve"

#: Names of the protocol's extensions that are always offered.
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
    """Return the names of the extensions that this server offers."""
    return (*EXTENSIONS, _SHARED_MEMORY) if shared_memory else EXTENSIONS


def metadata(model: ModelInfo, versions: Sequence[str]) -> pb.ModelMetadataResponse:
    """Describe inputs, outputs and properties; `versions` are all that can be requested."""
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
    """Return the configuration that load generators read; it has no batch dimension."""
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
    """Return further facts about a model, as text."""
    return {
        "executor": model.executor,
        "weights_bytes": str(model.weights_bytes),
        "qos_factor": f"{model.qos_factor:g}",
        **model.properties,
        **({"note": model.reason} if model.reason else {}),
    }


def estimate(found: ModelEstimate) -> gnnserve_pb2.EstimateResponse:
    """Copy an estimate field by field; both types use the same names.

    A number that the field cannot hold, as of a model that compares all pairs of 10^12 nodes, is
    the largest that it can.
    """
    answer = gnnserve_pb2.EstimateResponse()
    for field in answer.DESCRIPTOR.fields:
        value = getattr(found, field.name)
        setattr(answer, field.name, min(value, _MOST_INT64) if isinstance(value, int) else value)
    return answer


def graph(found: GraphInfo) -> gnnserve_pb2.GraphFacts:
    """Copy a graph's facts field by field; both types use the same names."""
    return gnnserve_pb2.GraphFacts(**dataclasses.asdict(found))


def job(found: JobStatus) -> gnnserve_pb2.JobFacts:
    """Copy a job's facts field by field; both types use the same names."""
    return gnnserve_pb2.JobFacts(**dataclasses.asdict(found))


def seen_job(message: gnnserve_pb2.JobFacts) -> JobStatus:
    """Return a job as a client knows it."""
    return JobStatus(
        **{one.name: getattr(message, one.name) for one in dataclasses.fields(JobStatus)}
    )


def versions(found: VersionFacts) -> gnnserve_pb2.ModelVersions:
    """Return which versions of a model answer requests that name none."""
    counts = found.shadow
    return gnnserve_pb2.ModelVersions(
        model=found.model,
        rules=_rules(found.rules),
        previous=None if found.previous is None else _rules(found.previous),
        main=found.main or 0,
        served=found.served,
        taken_back=found.taken_back,
        not_kept=found.not_kept,
        shadow=None if counts is None else gnnserve_pb2.ShadowCounts(**counts._asdict()),
    )


def _rules(rules: VersionRules) -> gnnserve_pb2.VersionRules:
    return gnnserve_pb2.VersionRules(
        split=dict(rules.shares),
        canary=rules.canary or 0,
        shadow=rules.shadow or 0,
        shadow_percent=rules.shadow_percent if rules.shadow else 0.0,
    )


def on_cuda(facts: ServerRun) -> bool:
    """Return True when the lanes run on a CUDA device."""
    return facts.device.startswith("cuda")


def _data_type(datatype: str) -> model_config_pb2.DataType:
    """Return the configuration's enumerator for a wire datatype name."""
    name = "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"
    found: model_config_pb2.DataType = getattr(model_config_pb2, name)
    return found
