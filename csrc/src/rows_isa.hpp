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
                if constexpr (R == Reduce::kMax || R == Reduce::kMin) {
                    sum[b] = s == row.begin ? value : extreme<R>(sum[b], value);
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
