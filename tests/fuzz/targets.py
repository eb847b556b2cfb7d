"""What takes bytes from others, each with an oracle."""

import io
import re
import tempfile
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
from google.protobuf.message import DecodeError
from safetensors.numpy import save

from serve import _core, native
from serve.access.tokens import Token, TokensFile, hash_of, read_tokens, text_of
from serve.errors import ConfigError
from serve.graphs.load import OpenOptions, open_graph
from serve.ipc import messages
from serve.ipc.messages import TaskDone, TaskError
from serve.models.model_config import CONFIG_FILE, read_settings
from serve.models.weights_file import check_weights
from serve.pb import grpc_service_pb2 as pb
from serve.server.lane_run import LaneRun
from serve.wire import messages as wire
from serve.wire import protobuf as wire_library
from serve.wire.fields import WireError, split
from tests.fuzz.fuzzing import Target
from tests.native import oracle

KINDS = (pb.ModelInferResponse, pb.ModelInferRequest)


def words(error: BaseException) -> str:
    """The error without numbers and names, to tell kinds of errors apart."""
    return re.sub(r"[\d'\"].*", "", str(error))[:60]


# -- messages of inference ---------------------------------------------------------------------


def infer_seeds() -> list[bytes]:
    x, edges = np.ones((3, 4), np.float32), np.array([[0, 1], [1, 2]])
    several = {"timeout": 5, "tenant": "é", "share": 0.5, "sure": True, "none": None}
    plain = wire.encode_request("gcn", {"x": x, "edge_index": edges}, request_id="r")
    typed = pb.ModelInferRequest(model_name="m")
    typed.inputs.add(name="x", datatype="FP32", shape=[2]).contents.fp32_contents.extend([1, 2])
    typed.parameters["big"].uint64_param = 2**64 - 1
    answer = wire_library.encode_infer(
        False, "gcn", "1", "r", several, [("out", "FP32", (1, 2), {}, None)], [memoryview(bytes(8))]
    )
    region = wire.encode_request("gcn", {"x": x}, parameters=several)
    requests = [plain, region, typed.SerializeToString(), b"\x0a\x01a\x0b\x0c", b"\x3a\x00" * 40]
    return [b"\1" + one for one in requests] + [b"\0" + answer]


def infer(data: bytes) -> object:
    """The native codec, the one by parts, and protobuf's own take the same and read the same."""
    is_request, message = bool(data[:1] and data[0] & 1), data[1:]
    try:
        by_library = KINDS[is_request].FromString(message)
    except DecodeError:
        by_library = None
    try:
        by_parts = wire_library.decode_infer(is_request, message)
    except WireError as error:
        by_parts, told = None, words(error)
    try:
        found = native.decode_infer(is_request, message)
    except ValueError as error:
        if by_parts is not None:
            raise AssertionError(f"read by parts: {error}") from error
        return "refused", words(error)
    if found is not None:
        assert by_parts is not None
        assert same(found) == same(by_parts)
    if by_parts is None:
        # What protobuf takes is refused for a limit only.
        assert by_library is None or "at most" in told or "malformed" not in told, told
        return "refused", told
    assert by_library is not None
    assert (by_library.model_name, by_library.id) == (by_parts[0], by_parts[2])
    raws = by_library.raw_input_contents if is_request else by_library.raw_output_contents
    assert [bytes(raw) for raw in by_parts[-1]] == list(raws)
    return found is None, len(raws), len(by_parts[3]), len(by_parts[4])


def same(value: object) -> object:
    """The value with types, floats by their bits, and views as bytes."""
    if isinstance(value, dict):
        return {name: same(item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return [same(item) for item in value]
    if isinstance(value, float):
        return np.float64(value).tobytes()
    return bytes(value) if isinstance(value, memoryview) else (type(value), value)


def splitting(data: bytes) -> object:
    """Fields are cut out of exactly those messages that protobuf reads, and are the same."""
    try:
        rest, taken = split(data, 7)
    except WireError as error:
        try:
            pb.ModelInferRequest.FromString(data)
        except DecodeError:
            return words(error)
        raise AssertionError(f"protobuf reads it: {error}") from error
    try:
        whole = pb.ModelInferRequest.FromString(data)
    except DecodeError:
        return "text that is none"  # of a field; what remains is as bad
    assert list(whole.raw_input_contents) == [bytes(one) for one in taken]
    del whole.raw_input_contents[:]
    assert pb.ModelInferRequest.FromString(rest) == whole
    return min(len(taken), 8), len(rest) > 0


# -- packets of lanes --------------------------------------------------------------------------

CAPACITY_BYTES = 4096


def packet_seeds() -> list[bytes]:
    done = TaskDone(task_id=7, rows=(3,), columns=2, run_ns=5, peak_bytes=100, held_bytes=None)
    found = [messages.encode(done), messages.encode(msgspec.structs.replace(done, rows=(1, 2)))]
    found += [messages.encode(TaskError(7, "model_error", "words"))]
    return [*found, messages.encode(messages.LaneHolds(5)), b"\xc1", b"\x93"]


@cache
def members() -> tuple:
    inputs = SimpleNamespace(output_capacity_bytes=CAPACITY_BYTES, input_bytes=10)
    task = SimpleNamespace(task_id=7, estimate=None)
    return (SimpleNamespace(entry=None, inputs=inputs, task=task),)


def packets(data: bytes) -> object:
    """A packet is no message, or one that cannot be true, or what fits into the output's place."""
    try:
        message = messages.decode_from_lane(data)
    except Exception as error:  # of which any costs the lane
        return type(error)
    if not isinstance(message, TaskDone | TaskError):
        return type(message)
    run = LaneRun(members(), 0)
    if complaint := run.complaint(message):
        return words(Exception(complaint))
    if isinstance(message, TaskDone):
        run.ended(message)
        rows, columns = run.members[0].output_shape
        assert rows >= 0
        assert columns >= 0
        assert 4 * rows * columns <= CAPACITY_BYTES
    return type(message), "taken"


# -- files -------------------------------------------------------------------------------------

CONFIG = b'[model]\nfactory = "a.b:c"\ninputs = ["x"]\n[model.args]\nn = 3\n[qos]\nfactor = 2.0\n'
DECLARED = b"""[model]
factory = "a.b:c"
[[model.input]]
name = "x"
dtype = "FP32"
shape = ["N", 4]
[[model.output]]
name = "out"
dtype = "FP32"
shape = ["N", 2]
"""


def file_seeds() -> list[bytes]:
    arrays = {"x": np.ones((3, 2), np.float32), "edge_index": np.array([[0, 1], [1, 2]])}
    archive = io.BytesIO()
    np.savez(archive, num_nodes=3, **arrays)
    token = Token(principal="app", roles=("infer",), hash=hash_of("gnn_x"), tenant="a")
    weights = save({"w": np.ones((2, 2), np.float32)})
    tokens = text_of(TokensFile(token=(token,))).encode()
    rows = io.BytesIO()
    x = {"x_data": [1.0], "x_indices": [0], "x_indptr": [0, 1, 1, 1], "x_shape": [3, 2]}
    np.savez(rows, num_nodes=3, edge_index=arrays["edge_index"], **x)
    kinds = [weights, CONFIG, tokens, archive.getvalue(), save(arrays)]
    found = [bytes((n,)) + content for n, content in enumerate(kinds)]
    return [*found, b"\1" + DECLARED, b"\3" + rows.getvalue()]


@cache
def folder() -> Path:
    found = tempfile.TemporaryDirectory(prefix="fuzz-")
    folders.append(found)
    return Path(found.name)


folders: list[tempfile.TemporaryDirectory] = []


def write(name: str, content: bytes) -> Path:
    path = folder() / name
    path.write_bytes(content)
    path.chmod(0o600)
    return path


def files(data: bytes) -> object:
    """A file is read, or refused with its name."""
    kind, content = (data[0] if data else 0) % 5, data[1:]
    options = OpenOptions(cache=folder() / "cache")
    try:
        if kind == 0:
            check_weights(write("w.safetensors", content))
        elif kind == 1:
            read_settings(write(CONFIG_FILE, content).parent)
        elif kind == 2:
            read_tokens(write("tokens.toml", content))
        else:
            path = write("g.npz" if kind == 3 else "g.safetensors", content)
            open_graph("g", path, options, lambda *_: None)
    except ConfigError as error:
        if str(folder()) not in str(error) and "graph 'g'" not in str(error):
            raise AssertionError(f"names no file: {error}") from error
        return kind, words(error)
    return kind, "read"


# -- native code on arrays ---------------------------------------------------------------------


def kernels(data: bytes) -> object:
    """Compiled code and its plain twin give the same, also for what is out of bounds."""
    rng = np.random.default_rng(np.frombuffer(data[:32].ljust(32, b"\0"), np.uint32))
    dtype = rng.choice(["i4", "i8"])
    nodes, edges = int(rng.integers(1, 50)), int(rng.integers(0, 300))
    most = nodes if rng.random() < 0.7 else nodes + 2
    indices = rng.integers(0 if rng.random() < 0.8 else -1, most, (2, edges)).astype(dtype)
    values = rng.standard_normal(edges).astype(np.float32)
    if rng.random() < 0.3 and edges:
        values[rng.integers(edges)] = rng.choice([np.nan, np.inf, -np.inf])
    found = []
    for core in (_core, oracle):
        staged, rows = np.zeros((2, edges), np.int64), np.zeros(nodes + 1, np.int64)
        copied, columns = np.zeros_like(values), np.zeros(edges, np.int64)
        ends = [
            core.stage_indices(indices, dtype == "i4", nodes, staged),
            core.stage_features(values, copied, True),
            core.build_rows(indices, dtype == "i4", nodes, nodes, rows, columns, False),
        ]
        sample = []
        if ends[2] < 0:
            empty = np.zeros(0, np.int64)
            topology = core.Topology(
                nodes, rows, columns, False, empty, np.zeros(1, np.int64), empty
            )
            ids = np.array([0, nodes // 2])
            drawn = core.sample_neighbours(topology, ids, [3, -1], int(data[0]) if data else 0)
            taken = np.zeros(drawn.num_nodes, np.int64)
            pairs = np.zeros((2, drawn.num_edges), np.int64)
            drawn.write_nodes(taken)
            drawn.write_edges(pairs, False)
            sample = [taken.tolist(), pairs.tolist(), rows.tolist(), columns.tolist()]
        kept = [staged.tolist() if ends[0] < 0 else [], copied.tobytes() if ends[1] < 0 else b""]
        found.append((ends, kept, sample, allocated(core, data)))
    assert found[0] == found[1]
    return [end < 0 for end in found[0][0]].count(True), edges > 0


def allocated(core, data: bytes) -> list[int]:
    """Offsets and sums as each byte of the data takes or frees a range."""
    allocator, live, told = core.OffsetAllocator(4096, 64), [], []
    for byte in data[:200]:
        if byte < 128 or not live:
            offset = allocator.alloc(byte * 11)
            told.append(offset)
            if offset >= 0:
                live.append(offset)
        else:
            allocator.free(live.pop(byte % len(live)))
        told += [allocator.used_bytes, allocator.largest_free_bytes]
    return told


TARGETS = (
    Target("infer", infer_seeds, infer),
    # A view for each field of two bytes; who splits bounds their number first.
    Target("splitting", lambda: [one[1:] for one in infer_seeds()], splitting, per_byte=256),
    Target("packets", packet_seeds, packets),
    # Reading an archive may take what its arrays claim, as long as they are there.
    Target("files", file_seeds, files, base_s=1.0, base_bytes=16 << 20),
    Target("kernels", lambda: [bytes(range(n, n + 40)) for n in range(8)], kernels),
)
