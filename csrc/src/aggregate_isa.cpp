// Compiled once per instruction set; GNNSERVE_KERNELS names the table that it fills. Everything is
// in an unnamed namespace and nothing of the standard library is called: the linker could pick this
// version of a shared function, whose instructions another processor may lack.

#include "aggregate_isa.hpp"

namespace gnnserve {
namespace {

using Index = std::int64_t;

// Floats of the widest vector, and the number of vectors that are summed into at once.
#if defined(__AVX512F__)
constexpr int kWide = 16;
constexpr int kMostVectors = 16;
#elif defined(__AVX__)
constexpr int kWide = 8;
constexpr int kMostVectors = 8;
#else
constexpr int kWide = 4;
constexpr int kMostVectors = 8;
#endif
constexpr int kNarrow = 4;

template <int L>
struct Lanes {
    typedef float Vector __attribute__((vector_size(L * sizeof(float))));
    static Vector load(const float* from) {
        Vector v;
        __builtin_memcpy(&v, from, sizeof v);
        return v;
    }
    static void store(float* to, Vector v) { __builtin_memcpy(to, &v, sizeof v); }
};

template <>
struct Lanes<1> {
    typedef float Vector;
    static Vector load(const float* from) { return *from; }
    static void store(float* to, Vector v) { *to = v; }
};

// The slots [begin, end) of one row, and one block of its columns.
struct Row {
    const std::int32_t* source;
    std::int32_t begin;
    std::int32_t end;
    const float* x;       // first column of the block, in row 0
    Index stride;         // from row to row of x
    const float* weight;  // of slot 0
    Index weight_stride;  // from slot to slot
    Index parts;          // heads summed into the same columns,
    Index part_stride;    // so many columns apart
    Index last;           // offset of the block's last vector, which may overlap the one before
    float* out;
};

using RowFunction = void (*)(const Row&);

// Reduces B vectors of columns over the slots of a row, all in registers.
template <int L, int B, Reduce R, bool kWeighted>
void reduce_row(const Row& row) {
    using V = Lanes<L>;
    typename V::Vector sum[B] = {};
    for (Index part = 0; part < row.parts; ++part) {
        const float* columns = row.x + part * row.part_stride;
        for (std::int32_t s = row.begin; s < row.end; ++s) {
            const float* from = columns + row.source[s] * row.stride;
            for (int b = 0; b < B; ++b) {
                auto value = V::load(from + (b == B - 1 ? row.last : b * L));
                if constexpr (kWeighted) {
                    value *= row.weight[s * row.weight_stride + part];
                }
                if constexpr (R == Reduce::kMax) {
                    sum[b] = s == row.begin || value > sum[b] ? value : sum[b];
                } else if constexpr (R == Reduce::kMin) {
                    sum[b] = s == row.begin || value < sum[b] ? value : sum[b];
                } else {
                    sum[b] += value;
                }
            }
        }
    }
    for (int b = 0; b < B; ++b) {
        V::store(row.out + (b == B - 1 ? row.last : b * L), sum[b]);
    }
}

template <int L, Reduce R, bool kWeighted>
RowFunction with_vectors(int count) {
    switch (count) {
        case 1:
            return reduce_row<L, 1, R, kWeighted>;
        case 2:
            return reduce_row<L, 2, R, kWeighted>;
        case 3:
            return reduce_row<L, 3, R, kWeighted>;
        case 4:
            return reduce_row<L, 4, R, kWeighted>;
        case 5:
            return reduce_row<L, 5, R, kWeighted>;
        case 6:
            return reduce_row<L, 6, R, kWeighted>;
        case 7:
            return reduce_row<L, 7, R, kWeighted>;
        case 8:
            return reduce_row<L, 8, R, kWeighted>;
        default:
            return reduce_row<L, kMostVectors, R, kWeighted>;
    }
}

template <Reduce R, bool kWeighted>
RowFunction with_lanes(int lanes, int count) {
    switch (lanes) {
        case 1:
            return with_vectors<1, R, kWeighted>(count);
        case kNarrow:
            return with_vectors<kNarrow, R, kWeighted>(count);
        default:
            return with_vectors<kWide, R, kWeighted>(count);
    }
}

template <bool kWeighted>
RowFunction row_function(Reduce reduce, int lanes, int count) {
    switch (reduce) {
        case Reduce::kMax:
            return with_lanes<Reduce::kMax, kWeighted>(lanes, count);
        case Reduce::kMin:
            return with_lanes<Reduce::kMin, kWeighted>(lanes, count);
        default:
            return with_lanes<Reduce::kSum, kWeighted>(lanes, count);
    }
}

// The columns that one RowFunction handles.
struct Block {
    Index start;
    Index last;
    RowFunction run;
};

constexpr int kMostBlocks = 64;

// Cuts `width` columns into blocks of vectors, as wide as fit. The last vector ends with the last
// column, so no column is left over. Returns the number of entries of `blocks` that were filled,
// and moves `start` behind them.
template <bool kWeighted>
int cut(Index width, Reduce reduce, Index& start, Block* blocks) {
    const int lanes = width >= kWide ? kWide : width >= kNarrow ? kNarrow : 1;
    int count = 0;
    while (start < width && count < kMostBlocks) {
        Index vectors = (width - start + lanes - 1) / lanes;
        if (vectors > 8) {
            vectors = vectors >= kMostVectors ? kMostVectors : 8;
        }
        const Index end = start + vectors * lanes;
        const Index last = (end < width ? end : width) - lanes - start;
        blocks[count++] = {start, last,
                           row_function<kWeighted>(reduce, lanes, static_cast<int>(vectors))};
        start = end;
    }
    return count;
}

void finish_row(const Finish& finish, Index row, Index width, float scale, float* out) {
    if (scale != 1) {
        for (Index c = 0; c < width; ++c) {
            out[c] *= scale;
        }
    }
    if (finish.skip != nullptr) {
        const float* skip = finish.skip + row * width;
        for (Index c = 0; c < width; ++c) {
            out[c] += finish.skip_scale * skip[c];
        }
    }
    if (finish.bias != nullptr) {
        for (Index c = 0; c < width; ++c) {
            out[c] += finish.bias[c];
        }
    }
    if (finish.relu) {
        for (Index c = 0; c < width; ++c) {
            out[c] = out[c] < 0 ? 0 : out[c];
        }
    }
}

template <bool kWeighted>
void aggregate_with(const Aggregation& call) {
    const Csr& graph = call.graph;
    Block blocks[kMostBlocks];
    // Only thousands of columns take more than one round.
    for (Index start = 0; start < call.width;) {
        const int count = cut<kWeighted>(call.width, call.reduce, start, blocks);
        const bool done = start >= call.width;
        for (Index i = 0; i < graph.rows; ++i) {
            const std::int32_t begin = graph.begin[i];
            const std::int32_t end = graph.begin[i + 1];
            float* out = call.out + i * call.width;
            for (int b = 0; b < count; ++b) {
                const Block& block = blocks[b];
                block.run({graph.source, begin, end, call.x + block.start, call.width, call.weight,
                           1, 1, 0, block.last, out + block.start});
            }
            if (done) {
                const bool mean = call.reduce == Reduce::kMean && end - begin > 1;
                const float scale = mean ? 1.0F / static_cast<float>(end - begin) : 1.0F;
                finish_row(call.finish, i, call.width, scale, out);
            }
        }
    }
}

void run_aggregate(const Aggregation& call) {
    if (call.weight != nullptr) {
        aggregate_with<true>(call);
    } else {
        aggregate_with<false>(call);
    }
}

// e^x for x <= 0 within 2 units in the last place: x = n ln 2 + r, with a polynomial for e^r
// (Cephes) and n in the exponent. Plain arithmetic, so that loops over it are vectorised.
inline float exp_negative(float x) {
    constexpr float kLog2E = 1.44269504088896341F;
    constexpr float kLn2High = 0.693359375F;
    constexpr float kLn2Low = -2.12194440e-4F;
    constexpr float kRound = 12582912.0F;  // 1.5 · 2^23: adding it rounds to an integer
    x = x < -87.0F ? -87.0F : x;
    const float n = (x * kLog2E + kRound) - kRound;
    const float r = (x - n * kLn2High) - n * kLn2Low;
    float p = 1.9875691500e-4F;
    p = p * r + 1.3981999507e-3F;
    p = p * r + 8.3334519073e-3F;
    p = p * r + 4.1665795894e-2F;
    p = p * r + 1.6666665459e-1F;
    p = p * r + 5.0000001201e-1F;
    p = p * r * r + r + 1.0F;
    const std::int32_t bits = (static_cast<std::int32_t>(n) + 127) << 23;
    float power;
    __builtin_memcpy(&power, &bits, sizeof power);
    return p * power;
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
                reduced[b] = s == begin || message[b] > reduced[b] ? message[b] : reduced[b];
            } else if (call.reduce == Reduce::kMin) {
                reduced[b] = s == begin || message[b] < reduced[b] ? message[b] : reduced[b];
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

inline float leaky(float x, float slope) { return x > 0 ? x : x * slope; }

// Σ_c combine(a[c], b[c]) in vectors, then the remaining columns one by one.
template <typename Combine>
inline float dot(const float* a, const float* b, const float* c, Index count, Combine combine) {
    using V = Lanes<kWide>;
    V::Vector sum = {};
    Index at = 0;
    for (; at + kWide <= count; at += kWide) {
        sum += combine(V::load(a + at), V::load(b + at), V::load(c + at));
    }
    float total = 0;
    for (int lane = 0; lane < kWide; ++lane) {
        total += sum[lane];
    }
    for (; at < count; ++at) {
        total += combine(a[at], b[at], c[at]);
    }
    return total;
}

// Loops over heads are short: a kHeads other than 0 lets compilers make each a single vector.
template <int kHeads>
void score_additive(const Attention& call, Index row, std::int32_t begin, std::int32_t end) {
    const Index heads = kHeads == 0 ? call.heads : kHeads;
    const float* right = call.right + row * heads;
    float mean[kMostHeads] = {};
    for (std::int32_t s = begin; s < end; ++s) {
        const float* left = call.left + call.graph.source[s] * heads;
        float* alpha = call.alpha + s * heads;
        for (Index h = 0; h < heads; ++h) {
            alpha[h] = left[h] + right[h];
        }
        if (call.edge == nullptr) {
            continue;
        }
        if (call.added_loops && s == begin) {
            continue;
        }
        const float* edge = call.edge + call.slot_edge[s] * heads;
        for (Index h = 0; h < heads; ++h) {
            alpha[h] += edge[h];
            mean[h] += edge[h];
        }
    }
    if (call.edge != nullptr && call.added_loops && end - begin > 1) {
        for (Index h = 0; h < heads; ++h) {
            call.alpha[begin * heads + h] += mean[h] / static_cast<float>(end - begin - 1);
        }
    }
    float* alpha = call.alpha + begin * heads;
    const Index count = (end - begin) * heads;
    const float slope = call.scale;
    for (Index k = 0; k < count; ++k) {
        alpha[k] = leaky(alpha[k], slope);
    }
}

void score_wide(const Attention& call, Index row, std::int32_t begin, std::int32_t end) {
    const Index heads = call.heads;
    const Index channels = call.channels;
    const Index width = heads * channels;
    const float scale = call.scale;
    const bool dynamic = call.score == Score::kDynamic;
    for (std::int32_t s = begin; s < end; ++s) {
        for (Index h = 0; h < heads; ++h) {
            const float* left = call.left + call.graph.source[s] * width + h * channels;
            const float* right = call.right + row * width + h * channels;
            float& alpha = call.alpha[s * heads + h];
            if (dynamic) {
                alpha = dot(left, right, call.att + h * channels, channels,
                            [scale](auto a, auto b, auto w) {
                                const auto x = a + b;
                                return w * (x > 0 ? x : x * scale);
                            });
            } else {
                alpha = scale * dot(left, right, left, channels,
                                    [](auto a, auto b, auto) { return a * b; });
            }
        }
    }
}

// Turns a row's scores [slots, heads] into weights that sum to 1 for each head.
template <int kHeads>
void softmax(float* alpha, Index slots, Index any_heads) {
    const Index heads = kHeads == 0 ? any_heads : kHeads;
    float most[kMostHeads];
    float sum[kMostHeads];
    for (Index h = 0; h < heads; ++h) {
        most[h] = alpha[h];
        sum[h] = 1e-16F;
    }
    for (Index s = 1; s < slots; ++s) {
        for (Index h = 0; h < heads; ++h) {
            const float score = alpha[s * heads + h];
            most[h] = score > most[h] ? score : most[h];
        }
    }
    for (Index s = 0; s < slots; ++s) {
        for (Index h = 0; h < heads; ++h) {
            alpha[s * heads + h] -= most[h];
        }
    }
    for (Index k = 0; k < slots * heads; ++k) {
        alpha[k] = exp_negative(alpha[k]);
    }
    for (Index s = 0; s < slots; ++s) {
        for (Index h = 0; h < heads; ++h) {
            sum[h] += alpha[s * heads + h];
        }
    }
    for (Index h = 0; h < heads; ++h) {
        sum[h] = 1.0F / sum[h];
    }
    for (Index s = 0; s < slots; ++s) {
        for (Index h = 0; h < heads; ++h) {
            alpha[s * heads + h] *= sum[h];
        }
    }
}

template <int kHeads>
void attend_with(const Attention& call) {
    const Csr& graph = call.graph;
    const Index heads = call.heads;
    const Index channels = call.channels;
    const Index width = heads * channels;
    const Index out_width = call.average ? channels : width;
    Block blocks[kMostBlocks];
    for (Index start = 0; start < channels;) {
        const bool first = start == 0;
        const int count = cut<true>(channels, Reduce::kSum, start, blocks);
        const bool done = start >= channels;
        for (Index i = 0; i < graph.rows; ++i) {
            const std::int32_t begin = graph.begin[i];
            const std::int32_t end = graph.begin[i + 1];
            if (first && begin < end) {
                if (call.score == Score::kAdditive) {
                    score_additive<kHeads>(call, i, begin, end);
                } else {
                    score_wide(call, i, begin, end);
                }
                softmax<kHeads>(call.alpha + begin * heads, end - begin, heads);
            }
            float* out = call.out + i * out_width;
            for (Index h = 0; h < (call.average ? 1 : heads); ++h) {
                for (int b = 0; b < count; ++b) {
                    const Block& block = blocks[b];
                    block.run({graph.source, begin, end, call.value + h * channels + block.start,
                               width, call.alpha + h, heads, call.average ? heads : 1, channels,
                               block.last, out + h * channels + block.start});
                }
            }
            if (done) {
                const float scale = call.average ? 1.0F / static_cast<float>(heads) : 1.0F;
                finish_row(call.finish, i, out_width, scale, out);
            }
        }
    }
}

void run_attend(const Attention& call) {
    switch (call.heads) {
        case 1:
            return attend_with<1>(call);
        case 4:
            return attend_with<4>(call);
        case 8:
            return attend_with<8>(call);
        default:
            return attend_with<0>(call);
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
const AggregateKernels GNNSERVE_KERNELS = {run_aggregate, run_combine, run_attend, run_head_dots};

}  // namespace gnnserve
