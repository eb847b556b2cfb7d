"""Names and numbers of the public standard, and other users of it in the same process."""

import subprocess
import sys

import pytest

from serve.pb import POOL, gnnserve_pb2
from serve.pb import grpc_service_pb2 as pb

RPCS = [
    *("ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata"),
    *("ModelInfer", "ModelStreamInfer", "ModelConfig", "ModelStatistics"),
    *("RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload"),
    *("SystemSharedMemoryStatus", "SystemSharedMemoryRegister", "SystemSharedMemoryUnregister"),
    *("CudaSharedMemoryStatus", "CudaSharedMemoryRegister", "CudaSharedMemoryUnregister"),
    *("TraceSetting", "LogSettings"),
]

# As published: message, then `number name` of every field.
FIELDS = {
    "ServerLiveResponse": "1 live",
    "ServerReadyResponse": "1 ready",
    "ModelReadyRequest": "1 name 2 version",
    "ModelReadyResponse": "1 ready",
    "ServerMetadataResponse": "1 name 2 version 3 extensions",
    "ModelMetadataRequest": "1 name 2 version",
    "ModelMetadataResponse": "1 name 2 versions 3 platform 4 inputs 5 outputs 6 properties",
    "ModelMetadataResponse.TensorMetadata": "1 name 2 datatype 3 shape",
    "ModelInferRequest": "1 model_name 2 model_version 3 id 4 parameters 5 inputs 6 outputs "
    "7 raw_input_contents",
    "ModelInferRequest.InferInputTensor": "1 name 2 datatype 3 shape 4 parameters 5 contents",
    "ModelInferRequest.InferRequestedOutputTensor": "1 name 2 parameters",
    "ModelInferResponse": "1 model_name 2 model_version 3 id 4 parameters 5 outputs "
    "6 raw_output_contents",
    "ModelInferResponse.InferOutputTensor": "1 name 2 datatype 3 shape 4 parameters 5 contents",
    "InferParameter": "1 bool_param 2 int64_param 3 string_param 4 double_param 5 uint64_param",
    "InferTensorContents": "1 bool_contents 2 int_contents 3 int64_contents 4 uint_contents "
    "5 uint64_contents 6 fp32_contents 7 fp64_contents 8 bytes_contents",
    "ModelStreamInferResponse": "1 error_message 2 infer_response",
    "ModelConfigResponse": "1 config",
    "ModelStatistics": "1 name 2 version 3 last_inference 4 inference_count 5 execution_count "
    "6 inference_stats 7 batch_stats 8 memory_usage 9 response_stats",
    "InferStatistics": "1 success 2 fail 3 queue 4 compute_input 5 compute_infer "
    "6 compute_output 7 cache_hit 8 cache_miss",
    "StatisticDuration": "1 count 2 ns",
    "MemoryUsage": "1 type 2 id 3 byte_size",
    "RepositoryIndexResponse.ModelIndex": "1 name 2 version 3 state 4 reason",
    "RepositoryModelUnloadRequest": "1 repository_name 2 model_name 3 parameters",
    "ModelConfig": "1 name 2 platform 3 version_policy 4 max_batch_size 5 input 6 output "
    "7 instance_group 8 default_model_filename 9 cc_model_filenames 10 metric_tags "
    "11 dynamic_batching 12 optimization 13 sequence_batching 14 parameters "
    "15 ensemble_scheduling 16 model_warmup 17 backend 18 model_operations "
    "19 model_transaction_policy 20 batch_input 21 batch_output 23 model_repository_agents "
    "24 response_cache 25 runtime 26 model_metrics",
}


@pytest.mark.parametrize("name", FIELDS)
def test_fields_have_the_published_numbers(name):
    fields = POOL.FindMessageTypeByName(f"inference.{name}").fields
    found = " ".join(f"{f.number} {f.name}" for f in sorted(fields, key=lambda f: f.number))
    assert found == FIELDS[name]


def test_the_service_has_the_published_methods():
    service = POOL.FindServiceByName("inference.GRPCInferenceService")
    assert [method.name for method in service.methods] == RPCS
    stream = service.methods_by_name["ModelStreamInfer"]
    assert (stream.client_streaming, stream.server_streaming) == (True, True)


def every_field(descriptor):
    """Yield (message, number, name, type, repeated) for all messages of a file."""
    for message in descriptor.message_types_by_name.values():
        yield from _fields_of(message)


def _fields_of(message):
    for f in message.fields:
        of = f.message_type or f.enum_type
        yield (message.full_name, f.number, f.name, f.type, f.is_repeated, of and of.full_name)
    for nested in message.nested_types:
        yield from _fields_of(nested)


def test_all_messages_equal_those_of_another_implementation():
    theirs = pytest.importorskip("tritonclient.grpc")
    from serve.pb import model_config_pb2

    ours = set(every_field(pb.DESCRIPTOR)) | set(every_field(model_config_pb2.DESCRIPTOR))
    other = set(every_field(theirs.service_pb2.DESCRIPTOR))
    other |= set(every_field(theirs.model_config_pb2.DESCRIPTOR))
    # That copy lacks KServe's `properties`, and newer copies may have more fields than ours.
    extra = {field for field in ours - other if "properties" not in f"{field}".lower()}
    assert not extra
    assert len(ours & other) > 200


def test_report_fields_follow_the_report():
    from serve.obs.report import report_dict
    from tests.obs.builders import build_report

    report = report_dict(build_report([], []))
    fields = {f.name: f for f in gnnserve_pb2.ReportResponse.DESCRIPTOR.fields}
    assert set(report) == set(fields)
    for name in ("memory", "latency_over_qt"):
        assert set(report[name]) == {f.name for f in fields[name].message_type.fields}


@pytest.mark.parametrize("order", ["serve.pb first", "tritonclient first"])
def test_another_users_messages_live_in_the_same_process(order):
    pytest.importorskip("tritonclient.grpc")
    imports = ["from serve.pb import grpc_service_pb2 as ours", "import tritonclient.grpc"]
    if order == "tritonclient first":
        imports.reverse()
    use = """
from tritonclient.grpc import service_pb2 as theirs
sent = theirs.ModelInferRequest(model_name="gcn", id="7")
sent.inputs.add(name="x", datatype="FP32", shape=[2, 3])
got = ours.ModelInferRequest.FromString(sent.SerializeToString())
assert (got.model_name, got.id, list(got.inputs[0].shape)) == ("gcn", "7", [2, 3])
assert type(got) is not type(sent)
"""
    script = "\n".join([*imports, use])
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True)
