// Compiled once per instruction set, with the two headers that are parts of it; GNNSERVE_KERNELS
// names the table that it fills. Everything is in an unnamed namespace and nothing of the standard
// library is called: the linker could pick this version of a shared function, whose instructions
// another processor may lack.

#include "aggregate_isa.hpp"

#include "attention_isa.hpp"
#include "rows_isa.hpp"

namespace gnnserve {
namespace {

template <Terms T>
void aggregate_with(const Aggregation& call) {
    const Csr& graph = call.graph;
    Block blocks[kMostBlocks];
    // Only thousands of columns take more than one round.
    for (Index start = 0; start < call.width;) {
        const int count = cut<T>(call.width, call.reduce, start, blocks);
        const bool finished =
            start >= call.width && (call.reduce == Reduce::kMean || finishes(call.finish));
        in_pieces(graph, [&](Index first, const Csr& rows) {
            float* out = call.out + first * call.width;
            for (int b = 0; b < count; ++b) {
                const Block& block = blocks[b];
                block.run({rows, call.x + block.start, call.width, call.weight, 1, 1, 0, block.last,
                           out + block.start, call.width});
            }
            if (finished) {
                for (Index i = 0; i < rows.rows; ++i) {
                    const std::int32_t slots = rows.begin[i + 1] - rows.begin[i];
                    const bool mean = call.reduce == Reduce::kMean && slots > 1;
                    const float scale = mean ? 1.0F / static_cast<float>(slots) : 1.0F;
                    finish_row(call.finish, first + i, call.width, scale, out + i * call.width);
                }
            }
        });
    }
}

void run_aggregate(const Aggregation& call) {
    if (call.weight != nullptr) {
        aggregate_with<Terms::kWeighted>(call);
    } else {
        aggregate_with<Terms::kPlain>(call);
    }
}

inline float sigmoid(float x) {
    const float e = exp_negative(x < 0 ? x : -x);
    return (x < 0 ? e : 1.0F) / (1.0F + e);
}

// Prefetch distance in slots, as the rows of edges follow no order of slots.
constexpr std::int32_t kEdgesAhead = 6;
constexpr Index kLineFloats = 16;

// Reduces the messages of one row in B vectors of columns from `start`, all in registers.
template <int L, int B, Gate G>
void combine_row(const Combination& call, Index row, Index start) {
    using V = Lanes<L>;
    using Vector = typename V::Vector;
    const std::int32_t begin = call.graph.begin[row];
    const std::int32_t end = call.graph.begin[row + 1];
    const std::int32_t slots = call.graph.begin[call.graph.rows];
    Vector reduced[B] = {};
    Vector fixed[B] = {};
    if (call.target != nullptr) {
        for (int b = 0; b < B; ++b) {
            fixed[b] = V::load(call.target + row * call.target_stride + start + b * L);
        }
    }
    for (std::int32_t s = begin; s < end; ++s) {
        Vector message[B];
        const Index j = call.graph.source[s];
        for (int b = 0; b < B; ++b) {
            message[b] = fixed[b];
            if (call.x != nullptr) {
                message[b] += V::load(call.x + j * call.width + start + b * L);
            }
        }
        if (call.edge != nullptr) {
            if (s + kEdgesAhead < slots) {
                const float* next = call.edge + call.slot_edge[s + kEdgesAhead] * call.edge_width;
                const Index from = call.map != nullptr ? 0 : start;
                const Index to = call.map != nullptr ? call.edge_width : start + B * L;
                for (Index c = from; c < to; c += kLineFloats) {
                    __builtin_prefetch(next + c);
                }
            }
            const float* edge = call.edge + call.slot_edge[s] * call.edge_width;
            if (call.map != nullptr) {
                for (Index d = 0; d < call.edge_width; ++d) {
                    const float* map = call.map + d * call.width + start;
                    for (int b = 0; b < B; ++b) {
                        message[b] += edge[d] * V::load(map + b * L);
                    }
                }
            } else {
                for (int b = 0; b < B; ++b) {
                    message[b] += V::load(edge + start + b * L);
                }
            }
        }
        if constexpr (G == Gate::kRelu) {
            const Vector zero = {};
            for (int b = 0; b < B; ++b) {
                message[b] = message[b] < zero ? zero : message[b];
            }
        } else if constexpr (G == Gate::kSigmoid) {
            float gated[B * L];
            __builtin_memcpy(gated, message, sizeof gated);
            for (int c = 0; c < B * L; ++c) {
                gated[c] = sigmoid(gated[c]);
            }
            __builtin_memcpy(message, gated, sizeof gated);
        }
        for (int b = 0; b < B; ++b) {
            if (call.value != nullptr) {
                message[b] *= V::load(call.value + j * call.width + start + b * L);
            }
            if (call.reduce == Reduce::kMax) {
                reduced[b] =
                    s == begin ? message[b] : extreme<Reduce::kMax>(reduced[b], message[b]);
            } else if (call.reduce == Reduce::kMin) {
                reduced[b] =
                    s == begin ? message[b] : extreme<Reduce::kMin>(reduced[b], message[b]);
            } else {
                reduced[b] += message[b];
            }
        }
    }
    for (int b = 0; b < B; ++b) {
        V::store(call.out + row * call.width + start + b * L, reduced[b]);
    }
}

// Cuts a row's columns into blocks; the last vector ends with the last column.
template <int L, Gate G>
void combine_columns(const Combination& call, Index row) {
    Index start = 0;
    for (; start + 4 * L <= call.width; start += 4 * L) {
        combine_row<L, 4, G>(call, row, start);
    }
    for (; start < call.width; start += L) {
        const Index last = call.width - L;
        combine_row<L, 1, G>(call, row, start < last ? start : last);
    }
}

template <Gate G>
void combine_with(const Combination& call) {
    for (Index row = 0; row < call.graph.rows; ++row) {
        if (call.width >= kWide) {
            combine_columns<kWide, G>(call, row);
        } else if (call.width >= kNarrow) {
            combine_columns<kNarrow, G>(call, row);
        } else {
            combine_columns<1, G>(call, row);
        }
        const std::int32_t slots = call.graph.begin[row + 1] - call.graph.begin[row];
        const bool mean = call.reduce == Reduce::kMean && slots > 1;
        finish_row(call.finish, row, call.width, mean ? 1.0F / static_cast<float>(slots) : 1.0F,
                   call.out + row * call.width);
    }
}

void run_combine(const Combination& call) {
    switch (call.gate) {
        case Gate::kRelu:
            return combine_with<Gate::kRelu>(call);
        case Gate::kSigmoid:
            return combine_with<Gate::kSigmoid>(call);
        default:
            return combine_with<Gate::kNone>(call);
    }
}

void run_head_dots(const HeadDots& call) {
    for (Index i = 0; i < call.rows; ++i) {
        for (Index h = 0; h < call.heads; ++h) {
            const float* x = call.x + (i * call.heads + h) * call.channels;
            call.out[i * call.heads + h] = dot(x, call.att + h * call.channels, x, call.channels,
                                               [](auto a, auto b, auto) { return a * b; });
        }
    }
}

}  // namespace

extern const AggregateKernels GNNSERVE_KERNELS;
const AggregateKernels GNNSERVE_KERNELS = {run_aggregate, run_combine, run_attend,
                                           run_attention_gradient, run_head_dots};

}  // namespace gnnserve
