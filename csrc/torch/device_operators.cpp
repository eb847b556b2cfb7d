// The kernels along edges on a device: operators over the C functions of csrc/cuda/graph_api.cuh,
// in whose place their simulation on the processor may stand. All memory comes from PyTorch, all
// work goes to the current stream, and nothing waits for the device. Graphs must have been checked:
// an edge to a node that does not exist ends the process's use of the device, as in PyTorch's own
// kernels.

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>

#include "gnnserve/aggregate.hpp"
#include "gnnserve/pieces.hpp"
#include "operator_arguments.hpp"
#include "operators.hpp"
#include "stable_abi.hpp"

namespace gnnserve {
namespace {

using torch_abi::Arguments;
using torch_abi::Dtype;
using torch_abi::floats;
using torch_abi::give;
using torch_abi::require;
using torch_abi::Tensor;
using torch_abi::Value;
using Index = std::int64_t;
using Ints = std::int32_t*;
using Floats = const float*;

// The functions of the library.
struct Functions {
    Index (*csr_scratch)(Index);
    int (*csr)(const void*, const void*, int, Index, Index, int, Ints, Ints, Ints, void*, void*);
    int (*spread)(const std::int32_t*, Index, Floats, float, float*, void*);
    int (*normalise)(const std::int32_t*, const std::int32_t*, Index, Floats, float*, float*,
                     void*);
    int (*aggregate)(const std::int32_t*, const std::int32_t*, Index, Index, int, void*, Floats,
                     Floats, Index, int, Floats, float, Floats, int, float*, void*);
    int (*attend)(const std::int32_t*, const std::int32_t*, Index, Index, int, void*, int, Floats,
                  Floats, Floats, const std::int32_t*, int, Floats, float, Floats, Index, Index,
                  int, Floats, Floats, float*, void*);
    int (*head_dots)(Floats, Floats, Index, Index, Index, float*, void*);
    // The kernels run on a stream of CUDA.
    bool streams;
};

Functions functions;

Functions functions_of(const std::string& path, bool streams) {
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        throw std::runtime_error(dlerror());
    }
    Functions found{};
    const auto find = [&]<typename Function>(Function& into, const char* name) {
        const std::string whole = std::string("gnnserve_graph_") + name;
        void* address = dlsym(library, whole.c_str());
        if (address == nullptr) {
            throw std::runtime_error(path + " has no " + whole);
        }
        into = reinterpret_cast<Function>(address);
    };
    find(found.csr_scratch, "csr_scratch");
    find(found.csr, "csr");
    find(found.spread, "spread");
    find(found.normalise, "normalise");
    find(found.aggregate, "aggregate");
    find(found.attend, "attend");
    find(found.head_dots, "head_dots");
    found.streams = streams;
    return found;
}

void launched(const char* name, int code) {
    if (code != 0) {
        throw std::runtime_error(std::string("gnnserve::") + name +
                                 " could not be launched (cudaError " + std::to_string(code) + ")");
    }
}

void* stream_of(const Tensor& tensor) {
    return functions.streams ? torch_abi::current_cuda_stream(tensor.device().index) : nullptr;
}

// What the operator `csr` makes: begin [rows + 1], source [room], and with edges the edge of each
// slot [room]; slots after the last node's are unused.
struct Sorted {
    Index room;
    Ints begin, source, edge;

    Sorted(const Tensor& graph, Index rows, bool edges)
        : room((graph.numel() - rows - 1) / (edges ? 2 : 1)) {
        require(graph.dtype() == Dtype::kInt32 && graph.is_contiguous(), "graph must be int32");
        require(rows >= 0 && room >= 0, "graph is of fewer nodes");
        begin = graph.data<std::int32_t>();
        source = begin + rows + 1;
        edge = edges ? source + room : nullptr;
    }
};

// Returns room for `width` floats of every piece that heavy nodes are put together of; also where
// no node is heavy, and in whole bytes a slot, as memory estimates are linear.
Tensor pieces(const Tensor& graph, Index slots, Index width, Index variant) {
    require(variant >= 0 && variant < static_cast<Index>(std::size(kVariants)), "no such variant");
    const Index chunk_slots = kVariants[variant].chunk_slots;
    const Index piece_bytes = 4 * kPieces * width;
    const Index bytes = slots * ((piece_bytes + chunk_slots - 1) / chunk_slots) + piece_bytes;
    return Tensor::empty_on(graph.device(), {bytes}, Dtype::kUint8);
}

void boxed_csr(Value* stack, std::uint64_t, std::uint64_t) {
    Arguments take(stack);
    const Tensor edge_index = take.tensor();
    const Index rows = take.integer();
    const bool replace_loops = take.flag();
    const bool edges = take.flag();

    const Dtype dtype = edge_index.dtype();
    require(dtype == Dtype::kInt64 || dtype == Dtype::kInt32, "edge_index must be int64 or int32");
    require(edge_index.dim() == 2 && edge_index.size(0) == 2, "edge_index must be [2, E]");
    const Index count = edge_index.size(1);
    require(count < 2 || edge_index.stride(1) == 1, "edge_index must have contiguous rows");
    const Index room = count + (replace_loops ? rows : 0);
    require(rows >= 0 && room <= std::numeric_limits<std::int32_t>::max(),
            "at most 2147483647 edges can be sorted");
    const torch_abi::Device device = edge_index.device();
    Tensor made = Tensor::empty_on(device, {rows + 1 + room * (edges ? 2 : 1)}, Dtype::kInt32);
    const Tensor scratch = Tensor::empty_on(device, {functions.csr_scratch(count)}, Dtype::kUint8);
    const Sorted sorted(made, rows, edges);
    const Index item = dtype == Dtype::kInt32 ? 4 : 8;
    const auto* first = edge_index.data<std::byte>();
    launched("csr",
             functions.csr(first, first + edge_index.stride(0) * item, dtype == Dtype::kInt32,
                           count, rows, replace_loops, sorted.begin, sorted.source, sorted.edge,
                           scratch.data<void>(), stream_of(edge_index)));
    give(stack, std::move(made));
}

void boxed_spread(Value* stack, std::uint64_t, std::uint64_t) {
    Arguments take(stack);
    const Tensor graph = take.tensor();
    const Index rows = take.integer();
    const Tensor value = take.tensor();
    const float missing = take.real();

    const Sorted sorted(graph, rows, true);
    const float* values = floats(value, value.numel(), "value");
    Tensor out = Tensor::empty_on(graph.device(), {sorted.room}, Dtype::kFloat32);
    launched("spread", functions.spread(sorted.edge, sorted.room, values, missing,
                                        out.data<float>(), stream_of(graph)));
    give(stack, std::move(out));
}

void boxed_normalise(Value* stack, std::uint64_t, std::uint64_t) {
    Arguments take(stack);
    const Tensor graph = take.tensor();
    const Index rows = take.integer();
    const bool edges = take.flag();
    const std::optional<Tensor> weight = take.optional_tensor();

    const Sorted sorted(graph, rows, edges);
    const float* weights = floats(weight, sorted.room, "weight");
    Tensor out = Tensor::empty_on(graph.device(), {sorted.room}, Dtype::kFloat32);
    const Tensor scratch = Tensor::empty_on(graph.device(), {rows}, Dtype::kFloat32);
    launched("normalise",
             functions.normalise(sorted.begin, sorted.source, rows, weights, out.data<float>(),
                                 scratch.data<float>(), stream_of(graph)));
    give(stack, std::move(out));
}

void boxed_aggregate(Value* stack, std::uint64_t, std::uint64_t) {
    Arguments take(stack);
    const Tensor graph = take.tensor();
    const Tensor x = take.tensor();
    const std::optional<Tensor> weight = take.optional_tensor();
    const Index reduce = take.integer();
    const std::optional<Tensor> skip = take.optional_tensor();
    const float skip_scale = take.real();
    const std::optional<Tensor> bias = take.optional_tensor();
    const bool relu = take.flag();
    const Index variant = take.integer();

    require(x.dim() == 2, "x must be [N, F]");
    require(reduce >= 0 && reduce <= static_cast<Index>(Reduce::kMin), "no such reduction");
    const Index rows = x.size(0), width = x.size(1);
    // With the edges of slots it may be half of this: they are not told apart here.
    const Sorted sorted(graph, rows, false);
    const float* features = floats(x, rows * width, "x");
    Tensor out = Tensor::empty_on(x.device(), {rows, width}, Dtype::kFloat32);
    const Tensor partial = pieces(graph, sorted.room, width, variant);
    launched("aggregate",
             functions.aggregate(
                 sorted.begin, sorted.source, rows, sorted.room, static_cast<int>(variant),
                 partial.data<void>(), features, floats(weight, "weight"), width,
                 static_cast<int>(reduce), floats(skip, rows * width, "skip"), skip_scale,
                 floats(bias, width, "bias"), relu, out.data<float>(), stream_of(x)));
    give(stack, std::move(out));
}

void boxed_attend(Value* stack, std::uint64_t, std::uint64_t) {
    Arguments take(stack);
    const Tensor graph = take.tensor();
    const bool edges = take.flag();
    const bool added_loops = take.flag();
    const Index score = take.integer();
    const Tensor left = take.tensor();
    const Tensor right = take.tensor();
    const Tensor value = take.tensor();
    const Index heads = take.integer();
    const float scale = take.real();
    const bool average = take.flag();
    const std::optional<Tensor> att = take.optional_tensor();
    const std::optional<Tensor> edge = take.optional_tensor();
    const std::optional<Tensor> skip = take.optional_tensor();
    const std::optional<Tensor> bias = take.optional_tensor();
    const Index variant = take.integer();

    require(value.dim() == 2, "value must be [N, heads * C]");
    const Index rows = value.size(0), width = value.size(1);
    require(heads >= 1 && width % heads == 0, "heads do not fit value");
    require(score >= 0 && score <= static_cast<Index>(Score::kDot), "no such score");
    const auto kind = static_cast<Score>(score);
    require(kind != Score::kDynamic || att.has_value(), "a dynamic score needs att");
    require(!edge || edges, "edge needs a graph that remembers its edges");
    const Sorted sorted(graph, rows, edges);
    const Index channels = width / heads, out_width = average ? channels : width;
    const Index scored = rows * (kind == Score::kAdditive ? heads : width);
    const float* lefts = floats(left, scored, "left");
    const float* rights = floats(right, scored, "right");
    const float* values = floats(value, rows * width, "value");
    Tensor out = Tensor::empty_on(value.device(), {rows, out_width}, Dtype::kFloat32);
    const Tensor partial = pieces(graph, sorted.room, heads * (channels + 2), variant);
    launched("attend",
             functions.attend(
                 sorted.begin, sorted.source, rows, sorted.room, static_cast<int>(variant),
                 partial.data<void>(), static_cast<int>(score), lefts, rights, floats(edge, "edge"),
                 sorted.edge, added_loops, floats(att, width, "att"), scale, values, heads,
                 channels, average, floats(skip, rows * out_width, "skip"),
                 floats(bias, out_width, "bias"), out.data<float>(), stream_of(value)));
    give(stack, std::move(out));
}

void boxed_head_dots(Value* stack, std::uint64_t, std::uint64_t) {
    Arguments take(stack);
    const Tensor x = take.tensor();
    const Tensor att = take.tensor();
    const Index heads = take.integer();

    require(x.dim() == 2 && heads >= 1 && x.size(1) % heads == 0, "x must be [N, heads * C]");
    const Index rows = x.size(0), width = x.size(1);
    const float* features = floats(x, rows * width, "x");
    const float* weights = floats(att, width, "att");
    Tensor out = Tensor::empty_on(x.device(), {rows, heads}, Dtype::kFloat32);
    launched("head_dots", functions.head_dots(features, weights, rows, heads, width / heads,
                                              out.data<float>(), stream_of(x)));
    give(stack, std::move(out));
}

constexpr torch_abi::Kernel kKernels[] = {
    {"csr", &boxed_csr},
    {"spread", &boxed_spread},
    {"normalise", &boxed_normalise},
    {"aggregate", &boxed_aggregate},
    {"attend", &boxed_attend},
    {"head_dots", &boxed_head_dots},
};

// What PyTorch was told of; it takes everything once.
std::set<std::string> told;

}  // namespace

void use_device_operators(const std::string& path) {
    functions = functions_of(path, true);
    if (!told.contains("gnnserve")) {
        torch_abi::implement("gnnserve", "CUDA", kKernels);
        told.insert("gnnserve");
    }
}

void define_simulated_operators(const std::string& path, const std::string& library) {
    functions = functions_of(path, false);
    if (!told.contains(library)) {
        torch_abi::define(library.c_str(), kSchemas);
        torch_abi::implement(library.c_str(), "CPU", kKernels);
        told.insert(library);
    }
}

}  // namespace gnnserve
