// Vectors, and sums over the slots of a row in blocks of them: a part of aggregate_isa.cpp.
#pragma once

#include "gnnserve/aggregate.hpp"

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

// Rows that are reduced by one call, as a call costs about as much as a row of few slots. Their
// results stay in the nearest cache until they are finished.
constexpr Index kRowsAtOnce = 16;

// What is reduced over the slots of a row: x, weight · x, or that of several heads.
enum class Terms : std::uint8_t { kPlain, kWeighted, kByHead };

// Consecutive rows, and one block of their columns.
struct Rows {
    Csr graph;            // `begin` is that of the first row
    const float* x;       // first column of the block, in row 0
    Index stride;         // from row to row of x
    const float* weight;  // of slot 0
    Index weight_stride;  // from slot to slot
    Index parts;          // kByHead: heads summed into the same columns,
    Index part_stride;    // so many columns apart
    Index last;           // offset of the block's last vector, which may overlap the one before
    float* out;           // in the first row
    Index out_stride;     // from row to row of out
};

using RowsFunction = void (*)(const Rows&);

// Calls run(first, rows) with the rows of `graph` from `first` on, kRowsAtOnce at a time.
template <typename Run>
void in_pieces(const Csr& graph, Run run) {
    for (Index first = 0; first < graph.rows; first += kRowsAtOnce) {
        const Index left = graph.rows - first;
        run(first, Csr{graph.begin + first, graph.source, left < kRowsAtOnce ? left : kRowsAtOnce});
    }
}

// The larger or the smaller of two. What is no number counts as that, as in PyTorch: it does not
// vanish among numbers.
template <Reduce R, typename Vector>
inline Vector extreme(Vector so_far, Vector value) {
    if constexpr (R == Reduce::kMax) {
        return value > so_far || value != value ? value : so_far;
    } else {
        return value < so_far || value != value ? value : so_far;
    }
}

// Reduces B vectors of columns over the slots of each row, all in registers.
template <int L, int B, Reduce R, Terms T>
void reduce_rows(const Rows& rows) {
    using V = Lanes<L>;
    const std::int32_t* source = rows.graph.source;
    const float* weight = rows.weight;
    const Index stride = rows.stride;
    const Index weight_stride = rows.weight_stride;
    const Index last = rows.last;
    // A constant, so that without heads there is no loop, for which GCC would spill the sums.
    const Index parts = T == Terms::kByHead ? rows.parts : 1;
    for (Index i = 0; i < rows.graph.rows; ++i) {
        const std::int32_t begin = rows.graph.begin[i];
        const std::int32_t end = rows.graph.begin[i + 1];
        typename V::Vector sum[B] = {};
        for (Index part = 0; part < parts; ++part) {
            const float* x = rows.x + part * rows.part_stride;
            for (std::int32_t s = begin; s < end; ++s) {
                const float* from = x + source[s] * stride;
                for (int b = 0; b < B; ++b) {
                    auto value = V::load(from + (b == B - 1 ? last : b * L));
                    if constexpr (T != Terms::kPlain) {
                        value *= weight[s * weight_stride + part];
                    }
                    if constexpr (R == Reduce::kMax || R == Reduce::kMin) {
                        sum[b] = s == begin ? value : extreme<R>(sum[b], value);
                    } else {
                        sum[b] += value;
                    }
                }
            }
        }
        float* out = rows.out + i * rows.out_stride;
        for (int b = 0; b < B; ++b) {
            V::store(out + (b == B - 1 ? last : b * L), sum[b]);
        }
    }
}

template <int L, Reduce R, Terms T>
RowsFunction with_vectors(int count) {
    switch (count) {
        case 1:
            return reduce_rows<L, 1, R, T>;
        case 2:
            return reduce_rows<L, 2, R, T>;
        case 3:
            return reduce_rows<L, 3, R, T>;
        case 4:
            return reduce_rows<L, 4, R, T>;
        case 5:
            return reduce_rows<L, 5, R, T>;
        case 6:
            return reduce_rows<L, 6, R, T>;
        case 7:
            return reduce_rows<L, 7, R, T>;
        case 8:
            return reduce_rows<L, 8, R, T>;
        default:
            return reduce_rows<L, kMostVectors, R, T>;
    }
}

template <Reduce R, Terms T>
RowsFunction with_lanes(int lanes, int count) {
    switch (lanes) {
        case 1:
            return with_vectors<1, R, T>(count);
        case kNarrow:
            return with_vectors<kNarrow, R, T>(count);
        default:
            return with_vectors<kWide, R, T>(count);
    }
}

template <Terms T>
RowsFunction rows_function(Reduce reduce, int lanes, int count) {
    switch (reduce) {
        case Reduce::kMax:
            return with_lanes<Reduce::kMax, T>(lanes, count);
        case Reduce::kMin:
            return with_lanes<Reduce::kMin, T>(lanes, count);
        default:
            return with_lanes<Reduce::kSum, T>(lanes, count);
    }
}

// The columns that one RowsFunction handles.
struct Block {
    Index start;
    Index last;
    RowsFunction run;
};

constexpr int kMostBlocks = 64;

// Cuts `width` columns into blocks of vectors, as wide as fit. The last vector ends with the last
// column, so no column is left over. Returns the number of entries of `blocks` that were filled,
// and moves `start` behind them.
template <Terms T>
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
        blocks[count++] = {start, last, rows_function<T>(reduce, lanes, static_cast<int>(vectors))};
        start = end;
    }
    return count;
}

bool finishes(const Finish& finish) {
    return finish.skip != nullptr || finish.bias != nullptr || finish.relu;
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

}  // namespace
}  // namespace gnnserve
