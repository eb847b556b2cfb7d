// The kernels along edges as PyTorch operators, so that export, tracing and compiled packages can
// call them. serve/lane/executors/kernels.py documents them.

#include "operators.hpp"

#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "gnnserve/aggregate.hpp"
#include "gnnserve/csr.hpp"
#include "operator_arguments.hpp"
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

Index columns(const Tensor& x, Index rows, const char* name) {
    if (x.dim() != 2 || x.size(0) != rows) {
        throw std::invalid_argument(std::string(name) + " must be [" + std::to_string(rows) +
                                    ", columns]");
    }
    return x.size(1);
}

// The result of the operator `csr`: begin [rows + 1], source [room], and with edges slot_edge
// [room].
struct Sorted {
    Csr graph;
    Index room;
    const std::int32_t* slot_edge;

    Sorted(const Tensor& tensor, Index rows, bool edges) {
        require(tensor.dtype() == Dtype::kInt32 && tensor.is_contiguous(), "graph must be int32");
        const Index rest = tensor.numel() - rows - 1;
        require(rows >= 0 && rest >= 0, "graph is of fewer nodes");
        room = rest / (edges ? 2 : 1);
        const auto* begin = tensor.data<std::int32_t>();
        require(begin[rows] <= room, "graph is of another number of nodes");
        graph = {begin, begin + rows + 1, rows};
        slot_edge = edges ? begin + rows + 1 + room : nullptr;
    }
};

void boxed_csr(Value* stack, std::uint64_t, std::uint64_t) {
    Arguments take(stack);
    const Tensor edge_index = take.tensor();
    const Index rows = take.integer();
    const bool replace_loops = take.flag();
    const bool edges = take.flag();

    require(edge_index.dim() == 2 && edge_index.size(0) == 2, "edge_index must be [2, E]");
    const Index count = edge_index.size(1);
    require(count < 2 || edge_index.stride(1) == 1, "edge_index must have contiguous rows");
    const Index room = count + (replace_loops ? rows : 0);
    require(rows >= 0 && room <= std::numeric_limits<std::int32_t>::max(),
            "at most 2147483647 edges can be sorted");
    Tensor made = Tensor::empty({rows + 1 + room * (edges ? 2 : 1)}, Dtype::kInt32);
    auto* begin = made.data<std::int32_t>();
    std::int32_t* source = begin + rows + 1;
    const auto build = [&](const auto* from) {
        return build_csr(from, from + edge_index.stride(0), count, rows,
                         replace_loops ? Loops::kReplace : Loops::kKeep, begin, source,
                         edges ? source + room : nullptr);
    };
    Index slots = 0;
    if (edge_index.dtype() == Dtype::kInt64) {
        slots = build(edge_index.data<std::int64_t>());
    } else {
        require(edge_index.dtype() == Dtype::kInt32, "edge_index must be int64 or int32");
        slots = build(edge_index.data<std::int32_t>());
    }
    if (slots == kOutside) {
        throw std::out_of_range("edge_index holds a node outside [0, " + std::to_string(rows) +
                                ")");
    }
    give(stack, std::move(made));
}

void boxed_spread(Value* stack, std::uint64_t, std::uint64_t) {
    Arguments take(stack);
    const Tensor tensor = take.tensor();
    const Index rows = take.integer();
    const Tensor value = take.tensor();
    const float missing = take.real();

    const Sorted sorted(tensor, rows, true);
    const float* values = floats(value, value.numel(), "value");
    Tensor out = Tensor::empty({sorted.room}, Dtype::kFloat32);
    spread(sorted.slot_edge, sorted.graph.begin[rows], values, missing, out.data<float>());
    give(stack, std::move(out));
}

void boxed_normalise(Value* stack, std::uint64_t, std::uint64_t) {
    Arguments take(stack);
    const Tensor tensor = take.tensor();
    const Index rows = take.integer();
    const bool edges = take.flag();
    const std::optional<Tensor> weight = take.optional_tensor();

    const Sorted sorted(tensor, rows, edges);
    const float* weights = floats(weight, sorted.room, "weight");
    Tensor out = Tensor::empty({sorted.room}, Dtype::kFloat32);
    const Tensor scratch = Tensor::empty({rows}, Dtype::kFloat32);
    normalise(sorted.graph, weights, out.data<float>(), scratch.data<float>());
    give(stack, std::move(out));
}

void boxed_aggregate(Value* stack, std::uint64_t, std::uint64_t) {
    Arguments take(stack);
    const Tensor tensor = take.tensor();
    const Tensor x = take.tensor();
    const std::optional<Tensor> weight = take.optional_tensor();
    const Index reduce = take.integer();
    const std::optional<Tensor> skip = take.optional_tensor();
    const float skip_scale = take.real();
    const std::optional<Tensor> bias = take.optional_tensor();
    const bool relu = take.flag();

    require(x.dim() == 2, "x must be [N, F]");
    const Index rows = x.size(0);
    const Index width = x.size(1);
    const Sorted sorted(tensor, rows, false);
    require(reduce >= 0 && reduce <= static_cast<Index>(Reduce::kMin), "no such reduction");
    require(!weight || weight->numel() >= sorted.graph.begin[rows], "weight is too short");
    const Aggregation call{
        sorted.graph,
        floats(x, rows * width, "x"),
        floats(weight, "weight"),
        width,
        static_cast<Reduce>(reduce),
        {floats(skip, rows * width, "skip"), skip_scale, floats(bias, width, "bias"), relu},
        nullptr};
    Tensor out = Tensor::empty({rows, width}, Dtype::kFloat32);
    Aggregation with_out = call;
    with_out.out = out.data<float>();
    aggregate(with_out);
    give(stack, std::move(out));
}

void boxed_combine(Value* stack, std::uint64_t, std::uint64_t) {
    Arguments take(stack);
    const Tensor tensor = take.tensor();
    const Index rows = take.integer();
    const Index width = take.integer();
    const bool edges = take.flag();
    const std::optional<Tensor> x = take.optional_tensor();
    const std::optional<Tensor> target = take.optional_tensor();
    const std::optional<Tensor> edge = take.optional_tensor();
    const std::optional<Tensor> map = take.optional_tensor();
    const std::optional<Tensor> value = take.optional_tensor();
    const Index gate = take.integer();
    const Index reduce = take.integer();
    const std::optional<Tensor> skip = take.optional_tensor();
    const float skip_scale = take.real();
    const std::optional<Tensor> bias = take.optional_tensor();

    require(x || edge, "a message needs x or edge");
    require(gate >= 0 && gate <= static_cast<Index>(Gate::kSigmoid), "no such gate");
    require(reduce >= 0 && reduce <= static_cast<Index>(Reduce::kMin), "no such reduction");
    require(!edge || edges, "edge needs a graph that remembers its edges");
    require(!map || edge, "map needs edge");
    const Sorted sorted(tensor, rows, edges);
    Index edge_width = 0;
    if (edge) {
        edge_width = columns(*edge, sorted.room, "edge");
        require(map || edge_width == width, "edge must have as many columns as the result");
    }
    const bool same_target = target && target->dim() == 1;
    const Combination call{
        sorted.graph,
        sorted.slot_edge,
        floats(x, rows * width, "x"),
        floats(target, same_target ? width : rows * width, "target"),
        same_target ? 0 : width,
        floats(edge, sorted.room * edge_width, "edge"),
        edge_width,
        floats(map, edge_width * width, "map"),
        floats(value, rows * width, "value"),
        width,
        static_cast<Gate>(gate),
        static_cast<Reduce>(reduce),
        {floats(skip, rows * width, "skip"), skip_scale, floats(bias, width, "bias")},
        nullptr};
    Tensor out = Tensor::empty({rows, width}, Dtype::kFloat32);
    Combination with_out = call;
    with_out.out = out.data<float>();
    combine(with_out);
    give(stack, std::move(out));
}

// Gives the result and, for a second output, the weights of the slots [room, heads].
void boxed_attend(Value* stack, std::uint64_t, std::uint64_t outputs) {
    Arguments take(stack);
    const Tensor tensor = take.tensor();
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

    require(value.dim() == 2, "value must be [N, heads * C]");
    const Index rows = value.size(0);
    const Index width = value.size(1);
    require(heads >= 1 && heads <= kMostHeads && width % heads == 0, "heads do not fit value");
    require(score >= 0 && score <= static_cast<Index>(Score::kDot), "no such score");
    const auto kind = static_cast<Score>(score);
    const Index scored = rows * (kind == Score::kAdditive ? heads : width);
    require(kind != Score::kDynamic || att.has_value(), "a dynamic score needs att");
    require(!edge || edges, "edge needs a graph that remembers its edges");
    const Sorted sorted(tensor, rows, edges);
    const Index channels = width / heads;
    const Index out_width = average ? channels : width;
    if (edge) {
        require(columns(*edge, edge->size(0), "edge") == heads, "edge must be [E, heads]");
        require(edge->size(0) + (added_loops ? rows : 0) == sorted.room, "edge is of other edges");
    }
    Attention call{sorted.graph,
                   kind,
                   floats(left, scored, "left"),
                   floats(right, scored, "right"),
                   floats(edge, "edge"),
                   sorted.slot_edge,
                   added_loops,
                   floats(att, width, "att"),
                   scale,
                   floats(value, rows * width, "value"),
                   heads,
                   channels,
                   average,
                   {floats(skip, rows * out_width, "skip"), 1, floats(bias, out_width, "bias")},
                   nullptr,
                   nullptr};
    Tensor alpha = Tensor::empty({sorted.room, heads}, Dtype::kFloat32);
    Tensor out = Tensor::empty({rows, out_width}, Dtype::kFloat32);
    call.alpha = alpha.data<float>();
    call.out = out.data<float>();
    attend(call);
    give(stack, std::move(out));
    if (outputs > 1) {
        give(stack + 1, std::move(alpha));
    }
}

void boxed_attention_gradient(Value* stack, std::uint64_t, std::uint64_t) {
    Arguments take(stack);
    const Tensor tensor = take.tensor();
    const bool edges = take.flag();
    const Tensor reversed_tensor = take.tensor();
    const Index score = take.integer();
    const Tensor left = take.tensor();
    const Tensor right = take.tensor();
    const Tensor value = take.tensor();
    const Tensor alpha = take.tensor();
    const Index heads = take.integer();
    const float scale = take.real();
    const bool average = take.flag();
    const std::optional<Tensor> att = take.optional_tensor();
    const Tensor gradient = take.tensor();

    require(value.dim() == 2, "value must be [N, heads * C]");
    const Index rows = value.size(0);
    const Index width = value.size(1);
    require(heads >= 1 && heads <= kMostHeads && width % heads == 0, "heads do not fit value");
    require(score >= 0 && score <= static_cast<Index>(Score::kDot), "no such score");
    const auto kind = static_cast<Score>(score);
    const bool dynamic = kind == Score::kDynamic;
    const Index scored = kind == Score::kAdditive ? heads : width;
    require(!dynamic || att.has_value(), "a dynamic score needs att");
    const Sorted sorted(tensor, rows, edges);
    const Sorted reversed(reversed_tensor, rows, true);
    const Index slots = sorted.graph.begin[rows];
    require(reversed.graph.begin[rows] == slots, "reversed is of another graph");
    const Index channels = width / heads;
    const Tensor of_score = Tensor::empty({slots, heads}, Dtype::kFloat32);
    const Tensor by_source = Tensor::empty({slots, heads}, Dtype::kFloat32);
    Tensor of_left = Tensor::empty({rows, scored}, Dtype::kFloat32);
    Tensor of_right = Tensor::empty({rows, scored}, Dtype::kFloat32);
    Tensor of_value = Tensor::empty({rows, width}, Dtype::kFloat32);
    Tensor of_att = Tensor::empty({dynamic ? width : 0}, Dtype::kFloat32);
    attention_gradient({sorted.graph,
                        reversed.graph,
                        reversed.slot_edge,
                        kind,
                        floats(left, rows * scored, "left"),
                        floats(right, rows * scored, "right"),
                        floats(att, width, "att"),
                        scale,
                        floats(value, rows * width, "value"),
                        floats(alpha, sorted.room * heads, "alpha"),
                        floats(gradient, rows * (average ? channels : width), "gradient"),
                        heads,
                        channels,
                        average,
                        of_score.data<float>(),
                        by_source.data<float>(),
                        of_left.data<float>(),
                        of_right.data<float>(),
                        of_value.data<float>(),
                        of_att.data<float>()});
    give(stack, std::move(of_left));
    give(stack + 1, std::move(of_right));
    give(stack + 2, std::move(of_value));
    give(stack + 3, std::move(of_att));
}

void boxed_head_dots(Value* stack, std::uint64_t, std::uint64_t) {
    Arguments take(stack);
    const Tensor x = take.tensor();
    const Tensor att = take.tensor();
    const Index heads = take.integer();

    require(x.dim() == 2 && heads >= 1 && x.size(1) % heads == 0, "x must be [N, heads * C]");
    const Index rows = x.size(0);
    const Index width = x.size(1);
    const float* features = floats(x, rows * width, "x");
    const float* weights = floats(att, width, "att");
    Tensor out = Tensor::empty({rows, heads}, Dtype::kFloat32);
    head_dots({features, weights, rows, heads, width / heads, out.data<float>()});
    give(stack, std::move(out));
}

constexpr torch_abi::Kernel kKernels[] = {
    {"csr", &boxed_csr},
    {"spread", &boxed_spread},
    {"normalise", &boxed_normalise},
    {"aggregate", &boxed_aggregate},
    {"combine", &boxed_combine},
    {"attend", &boxed_attend},
    {"attend_kept", &boxed_attend},
    {"attention_gradient", &boxed_attention_gradient},
    {"head_dots", &boxed_head_dots},
};

}  // namespace

void define_operators() {
    torch_abi::define("gnnserve", kSchemas);
    torch_abi::implement("gnnserve", "CPU", kKernels);
}

}  // namespace gnnserve
