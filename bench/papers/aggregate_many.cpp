// One pass over a graph's edges for several tasks' features (TurboMGNN's fused kernel), which
// fused_pass.py races with a pass of the server's for each task. It takes the server's vectors, and
// rows in the same pieces: only the order of the loops differs.

#include <cstdint>

#include "rows_isa.hpp"

namespace gnnserve {
namespace {

constexpr int kMostTasks = 16;
constexpr Index kMostColumns = 4096;

// Tasks t with features x[t], each [rows, width], and with weights of slots unless that is null.
struct Many {
    Csr graph;
    Index tasks;
    const float* const* x;
    const float* const* weight;
    Index width;
    bool mean;
    float* const* out;
};

// Vectors of columns of several tasks.
struct Columns {
    Index task;   // the first of them
    Index start;  // the first column
    Index last;   // offset of the last vector, which may overlap the one before
};

// Sums the columns over the slots of each row, of all T tasks in registers: the tasks are the
// innermost loop, so the edges are read once for all.
template <int L, int B, int T, bool kWeighted>
void sum_together(const Many& call, Index first, const Csr& rows, const Columns& columns) {
    using V = Lanes<L>;
    const float* x[T];
    const float* weight[T];
    float* out[T];
    for (int t = 0; t < T; ++t) {
        x[t] = call.x[columns.task + t] + columns.start;
        weight[t] = kWeighted ? call.weight[columns.task + t] : nullptr;
        out[t] = call.out[columns.task + t] + columns.start + first * call.width;
    }
    const Index width = call.width;
    const Index last = columns.last;
    for (Index i = 0; i < rows.rows; ++i) {
        typename V::Vector sum[T][B];
        for (int t = 0; t < T; ++t) {
            for (int b = 0; b < B; ++b) {
                sum[t][b] = typename V::Vector{};
            }
        }
        for (std::int32_t s = rows.begin[i]; s < rows.begin[i + 1]; ++s) {
            const Index from = rows.source[s] * width;
            for (int t = 0; t < T; ++t) {
                for (int b = 0; b < B; ++b) {
                    auto value = V::load(x[t] + from + (b == B - 1 ? last : b * L));
                    if constexpr (kWeighted) {
                        value *= weight[t][s];
                    }
                    sum[t][b] += value;
                }
            }
        }
        for (int t = 0; t < T; ++t) {
            for (int b = 0; b < B; ++b) {
                V::store(out[t] + i * width + (b == B - 1 ? last : b * L), sum[t][b]);
            }
        }
    }
}

using Together = void (*)(const Many&, Index, const Csr&, const Columns&);

template <int L, int T, bool kWeighted>
Together with_vectors_of(Index vectors) {
    constexpr Together kBy[] = {
        sum_together<L, 1, T, kWeighted>,
        sum_together<L, 2, T, kWeighted>,
        sum_together<L, 3, T, kWeighted>,
        sum_together<L, 4, T, kWeighted>,
        sum_together<L, kMostVectors / T, T, kWeighted>,
    };
    return kBy[vectors <= 4 ? vectors - 1 : 4];
}

template <int L, bool kWeighted>
Together together(Index tasks, Index vectors) {
    return tasks == 4   ? with_vectors_of<L, 4, kWeighted>(vectors)
           : tasks == 2 ? with_vectors_of<L, 2, kWeighted>(vectors)
                        : with_vectors_of<L, 1, kWeighted>(vectors);
}

void finish(const Many& call, Index first, const Csr& rows) {
    for (Index t = 0; call.mean && t < call.tasks; ++t) {
        for (Index i = 0; i < rows.rows; ++i) {
            const std::int32_t slots = rows.begin[i + 1] - rows.begin[i];
            const float scale = slots > 1 ? 1.0F / static_cast<float>(slots) : 1.0F;
            finish_row({}, first + i, call.width, scale, call.out[t] + (first + i) * call.width);
        }
    }
}

// Reads the edges of a piece of rows from the nearest cache for all tasks but the first.
template <bool kWeighted>
void by_rows(const Many& call) {
    Block blocks[kMostBlocks];
    Index start = 0;
    const int count =
        cut<kWeighted ? Terms::kWeighted : Terms::kPlain>(call.width, Reduce::kSum, start, blocks);
    in_pieces(call.graph, [&](Index first, const Csr& rows) {
        for (Index t = 0; t < call.tasks; ++t) {
            for (int b = 0; b < count; ++b) {
                const Block& block = blocks[b];
                block.run({rows, call.x[t] + block.start, call.width,
                           kWeighted ? call.weight[t] : nullptr, 1, 1, 0, block.last,
                           call.out[t] + first * call.width + block.start, call.width});
            }
        }
        finish(call, first, rows);
    });
}

// Reads the edges once for `at_once` tasks, and for each piece of columns that fits in registers.
template <int L, bool kWeighted>
void side_by_side(const Many& call, Index at_once) {
    struct Piece {
        Columns columns;
        Together run;
    };
    Piece pieces[kMostTasks * kMostColumns / kNarrow / 4];
    int count = 0;
    Index tasks = at_once;
    for (Index task = 0; task < call.tasks; task += tasks) {
        while (tasks > call.tasks - task) {
            tasks /= 2;
        }
        const Index most = kMostVectors / tasks;
        for (Index start = 0; start < call.width;) {
            Index vectors = (call.width - start + L - 1) / L;
            vectors = vectors >= most ? most : vectors > 4 ? 4 : vectors;
            const Index end = start + vectors * L;
            const Index last = (end < call.width ? end : call.width) - L - start;
            pieces[count++] = {{task, start, last}, together<L, kWeighted>(tasks, vectors)};
            start = end;
        }
    }
    in_pieces(call.graph, [&](Index first, const Csr& rows) {
        for (int p = 0; p < count; ++p) {
            pieces[p].run(call, first, rows, pieces[p].columns);
        }
        finish(call, first, rows);
    });
}

template <bool kWeighted>
void run(const Many& call, Index at_once) {
    if (at_once == 0) {
        by_rows<kWeighted>(call);
    } else if (call.width >= kWide) {
        side_by_side<kWide, kWeighted>(call, at_once);
    } else {
        side_by_side<kNarrow, kWeighted>(call, at_once);
    }
}

}  // namespace
}  // namespace gnnserve

// Writes the sums, or means, of `tasks` features [rows, width]. `at_once` tasks, 1, 2 or 4, share
// each edge that is read; with 0 they share a piece of rows. Returns whether it could: of 4 to 4096
// columns and at most 16 tasks.
extern "C" bool aggregate_many(const std::int32_t* begin, const std::int32_t* source,
                               std::int64_t rows, std::int64_t tasks, const float* const* x,
                               const float* const* weight, std::int64_t width, bool mean,
                               std::int64_t at_once, float* const* out) {
    using namespace gnnserve;
    if (width < kNarrow || width > kMostColumns || tasks > kMostTasks ||
        (at_once != 0 && at_once != 1 && at_once != 2 && at_once != 4)) {
        return false;
    }
    const Many call{{begin, source, rows}, tasks, x, weight, width, mean, out};
    weight != nullptr ? run<true>(call, at_once) : run<false>(call, at_once);
    return true;
}
