// The kernels of aggregate.hpp on the device. A team of lanes, a power of two up to a warp, handles
// a row (or a row's head) and a tile of its columns, which it keeps in registers. A node with a
// million neighbours must not be one team's work: heavy rows are reduced in pieces, which another
// kernel combines. There are no atomics: the graph gives the order of every sum, so the same
// request has the same answer bit by bit.
#pragma once

#include <cstdint>

#include "csr.cuh"
#include "gnnserve/aggregate.hpp"
#include "gnnserve/pieces.hpp"
#include "simt.cuh"

#ifdef __CUDACC__
#define GNNSERVE_UNROLL(times) _Pragma(GNNSERVE_TEXT(unroll times))
#define GNNSERVE_TEXT(words) #words
#else
#define GNNSERVE_UNROLL(times)
#endif

namespace gnnserve {

constexpr int kBlockThreads = 256;

template <int kValue>
struct Constant {
    static constexpr int value = kValue;
};

// Layout of columns: `team` lanes read `kUnits` units of kFloats floats each, so a tile has team ·
// kUnits · kFloats columns.
struct Tile {
    int team;
    std::int64_t units;  // of all columns
};

template <int kFloats>
struct alignas(kFloats * sizeof(float)) Unit {
    float at[kFloats];
};

// Number of units that a lane reads before it uses the first, to hide memory latency, where no
// variant says otherwise.
constexpr int kUnitsAhead = 8;

// The columns of one tile in a lane's registers; columns behind the last are never stored.
template <int kFloats, int kUnits>
struct Columns {
    Unit<kFloats> at[kUnits] = {};

    // Returns the k-th unit of this lane, which may be behind the last.
    __device__ static std::int64_t unit_of(const Tile& tile, int k) {
        return static_cast<std::int64_t>(blockIdx.y) * tile.team * kUnits +
               static_cast<std::int64_t>(k) * tile.team + static_cast<int>(threadIdx.x) % tile.team;
    }

    // A lane without a k-th unit reads the last one. Reads without a condition are all on their way
    // before the first is waited for.
    __device__ void load(const Tile& tile, const float* row) {
        GNNSERVE_UNROLL(kUnits)
        for (int k = 0; k < kUnits; ++k) {
            const std::int64_t unit = unit_of(tile, k);
            at[k] = reinterpret_cast<const Unit<kFloats>*>(
                row)[unit < tile.units ? unit : tile.units - 1];
        }
    }

    __device__ void store(const Tile& tile, float* row) const {
        GNNSERVE_UNROLL(kUnits)
        for (int k = 0; k < kUnits; ++k) {
            if (unit_of(tile, k) < tile.units) {
                reinterpret_cast<Unit<kFloats>*>(row)[unit_of(tile, k)] = at[k];
            }
        }
    }

    // Applies combine(mine, theirs) to each column.
    template <typename Combine>
    __device__ void with(const Columns& theirs, Combine combine) {
        GNNSERVE_UNROLL(kUnits)
        for (int k = 0; k < kUnits; ++k) {
            GNNSERVE_UNROLL(kFloats)
            for (int f = 0; f < kFloats; ++f) {
                at[k].at[f] = combine(at[k].at[f], theirs.at[k].at[f]);
            }
        }
    }

    // Applies it with a row in memory.
    template <typename Combine>
    __device__ void with(const Tile& tile, const float* row, Combine combine) {
        Columns theirs;
        theirs.load(tile, row);
        with(theirs, combine);
    }

    // Finishes row `row` of an output of `width` columns and stores it.
    __device__ void finish(const Tile& tile, const Finish& finish, float scale, std::int64_t row,
                           std::int64_t width, float* out) {
        with(*this, [=](float mine, float) { return mine * scale; });
        if (finish.skip != nullptr) {
            const float by = finish.skip_scale;
            with(tile, finish.skip + row * width,
                 [=](float mine, float skip) { return mine + by * skip; });
        }
        if (finish.bias != nullptr) {
            with(tile, finish.bias, [](float mine, float bias) { return mine + bias; });
        }
        if (finish.relu) {
            with(*this, [](float mine, float) { return mine < 0 ? 0 : mine; });
        }
        store(tile, out + row * width);
    }
};

// The slots of a team: those of a light row, or a piece of a heavy one.
struct Slots {
    std::int64_t row;
    std::int32_t begin;
    std::int32_t end;
};

__device__ inline bool is_heavy(const Slots& slots, std::int32_t chunk_slots) {
    return slots.end - slots.begin > 2 * chunk_slots;
}

__device__ inline Slots slots_of_row(const Csr& graph, std::int64_t row) {
    return {row, graph.begin[row], graph.begin[row + 1]};
}

// Returns the row of slot `s`.
__device__ inline Slots row_of_slot(const Csr& graph, std::int32_t s) {
    std::int64_t low = 0;
    std::int64_t high = graph.rows;
    while (high - low > 1) {
        const std::int64_t middle = (low + high) / 2;
        (graph.begin[middle] <= s ? low : high) = middle;
    }
    return slots_of_row(graph, low);
}

// Returns the slots of a chunk, regardless of rows. The last chunk may be short; chunks behind the
// last slot are empty. In 64 bits: a caller may ask for twice the chunks that the slots need, which
// int32 cannot number.
__device__ inline Slots slots_of_chunk(const Csr& graph, std::int64_t chunk,
                                       std::int32_t chunk_slots) {
    const std::int64_t begin = chunk * chunk_slots;
    const std::int64_t last = graph.begin[graph.rows];
    if (begin >= last) {
        return {0, 0, 0};
    }
    const std::int64_t end = begin + chunk_slots < last ? begin + chunk_slots : last;
    return {0, static_cast<std::int32_t>(begin), static_cast<std::int32_t>(end)};
}

// Returns piece `piece` = 2 · chunk + (0: of the chunk's first row, 1: of its last). It is empty
// when that row is not heavy, when the last row is also the first, or when the first row of a part
// of a graph begins later.
__device__ inline Slots slots_of_piece(const Csr& graph, std::int64_t piece,
                                       std::int32_t chunk_slots) {
    const Slots chunk = slots_of_chunk(graph, piece / kPieces, chunk_slots);
    if (chunk.begin == chunk.end) {
        return {0, 0, 0};
    }
    const bool first = piece % kPieces == 0;
    const Slots row = row_of_slot(graph, first ? chunk.begin : chunk.end - 1);
    const bool is_there = first ? row.begin <= chunk.begin : row.begin > chunk.begin;
    if (!is_heavy(row, chunk_slots) || !is_there) {
        return {0, 0, 0};
    }
    return {row.row, row.begin > chunk.begin ? row.begin : chunk.begin,
            row.end < chunk.end ? row.end : chunk.end};
}

// Returns the heavy row that begins in a chunk; empty when none does. The first row of a part of a
// graph may begin in a later chunk than the first.
__device__ inline Slots heavy_row_of(const Csr& graph, std::int64_t chunk,
                                     std::int32_t chunk_slots) {
    const Slots slots = slots_of_chunk(graph, chunk, chunk_slots);
    if (slots.begin == slots.end) {
        return {0, 0, 0};
    }
    const Slots row = row_of_slot(graph, slots.end - 1);
    const bool begins = row.begin >= slots.begin && row.begin < slots.end;
    return is_heavy(row, chunk_slots) && begins ? row : Slots{0, 0, 0};
}

// The pieces of a heavy row, in order.
struct RowPieces {
    std::int64_t first;
    std::int64_t second;
    std::int32_t count;

    __device__ RowPieces(const Slots& row, std::int32_t chunk_slots) {
        const std::int32_t chunk = row.begin / chunk_slots;
        first = std::int64_t{kPieces} * chunk + (row.begin % chunk_slots == 0 ? 0 : 1);
        second = std::int64_t{kPieces} * (chunk + 1);
        count = (row.end - 1) / chunk_slots - chunk + 1;
    }

    __device__ std::int64_t at(std::int32_t i) const {
        return i == 0 ? first : second + std::int64_t{kPieces} * (i - 1);
    }
};

// With `first` there are no slots yet, and the content of `so_far` is unspecified. An extreme of
// what is no number is none, as in PyTorch.
template <Reduce kReduce>
__device__ inline float reduced(float so_far, float value, bool first) {
    if constexpr (kReduce == Reduce::kMax) {
        return first || value > so_far || value != value ? value : so_far;
    } else if constexpr (kReduce == Reduce::kMin) {
        return first || value < so_far || value != value ? value : so_far;
    } else {
        return so_far + value;
    }
}

// Calls some(Constant<n>, s) for groups of at most n slots that begin at `s`, in order. A short
// rest has a group of its own, so that a row with few neighbours reads little twice.
template <int kAhead, typename Some>
__device__ inline void each_group(const Slots& slots, Some some) {
    std::int32_t s = slots.begin;
    for (; slots.end - s > kAhead / 2; s += kAhead) {
        some(Constant<kAhead>{}, s);
    }
    if (s < slots.end) {
        some(Constant<kAhead / 2>{}, s);
    }
}

// Returns the i-th slot of a group that begins at `s`; behind the last slot it is the last one
// again, which is read and not used.
__device__ inline std::int32_t slot_of_group(const Slots& slots, std::int32_t s, int i) {
    return s + i < slots.end ? s + i : slots.end - 1;
}

// What is known of a slot before its features are read. Sources and weights of slots as they are in
// memory:
struct SlotsInMemory {
    const Aggregation& call;

    __device__ std::int64_t source(std::int32_t slot) const { return call.graph.source[slot]; }
    __device__ float weight(std::int32_t slot) const {
        return call.weight == nullptr ? 1.0F : call.weight[slot];
    }
};

// Those of as many slots from `begin` on as a team has lanes, one in each; all lanes must ask for
// the same slot.
struct SlotsOfTeam {
    std::int32_t begin;
    int team;
    std::int32_t my_source;
    float my_weight;

    __device__ SlotsOfTeam(const Aggregation& call, int team_, const Slots& slots,
                           std::int32_t begin_)
        : begin(begin_), team(team_) {
        const std::int32_t mine = slot_of_group(slots, begin, static_cast<int>(threadIdx.x) % team);
        my_source = call.graph.source[mine];
        my_weight = call.weight == nullptr ? 1.0F : call.weight[mine];
    }

    __device__ std::int64_t source(std::int32_t slot) const {
        return team_get(my_source, slot - begin, team);
    }
    __device__ float weight(std::int32_t slot) const {
        return team_get(my_weight, slot - begin, team);
    }
};

// Adds at most kCount slots from `s` on; all are read before the first is added. `begin` is the
// first slot of what is summed.
template <int kCount, int kFloats, int kUnits, Reduce kReduce, typename Known>
__device__ inline void reduce_some(const Aggregation& call, const Tile& tile, std::int32_t s,
                                   std::int32_t begin, const Slots& slots, const Known& known,
                                   Columns<kFloats, kUnits>& sum) {
    Columns<kFloats, kUnits> read[kCount];
    float weight[kCount];
    GNNSERVE_UNROLL(kCount)
    for (int i = 0; i < kCount; ++i) {
        const std::int32_t slot = slot_of_group(slots, s, i);
        const std::int64_t source = known.source(slot);
        weight[i] = known.weight(slot);
        read[i].load(tile, call.x + source * call.width);
    }
    GNNSERVE_UNROLL(kCount)
    for (int i = 0; i < kCount; ++i) {
        const bool first = s + i == begin;
        const float by = weight[i];
        if (s + i < slots.end) {
            sum.with(read[i], [=](float so_far, float value) {
                return reduced<kReduce>(so_far, by * value, first);
            });
        }
    }
}

// Adds the slots of a row or of a piece, of each kAhead units a lane at once. With kShuffled, teams
// have at least kAhead lanes.
template <int kFloats, int kUnits, Reduce kReduce, int kAhead, bool kShuffled>
__device__ inline Columns<kFloats, kUnits> reduce_slots(const Aggregation& call, const Tile& tile,
                                                        const Slots& slots) {
    Columns<kFloats, kUnits> sum;
    const auto reduce = [&](const Slots& some, const auto& known) {
        each_group<kAhead / kUnits>(some, [&](auto count, std::int32_t s) {
            reduce_some<decltype(count)::value, kFloats, kUnits, kReduce>(
                call, tile, s, slots.begin, some, known, sum);
        });
    };
    if constexpr (kShuffled) {
        if (slots.begin == slots.end) {
            return sum;
        }
        SlotsOfTeam now(call, tile.team, slots, slots.begin);
        for (std::int32_t s = slots.begin;; s += tile.team) {
            const bool last = slots.end - s <= tile.team;
            // On their way while those before are used.
            const SlotsOfTeam next(call, tile.team, slots, last ? s : s + tile.team);
            reduce({slots.row, s, last ? slots.end : s + tile.team}, now);
            if (last) {
                break;
            }
            now = next;
        }
    } else {
        reduce(slots, SlotsInMemory{call});
    }
    return sum;
}

__device__ inline float mean_scale(Reduce reduce, const Slots& slots) {
    const std::int32_t count = slots.end - slots.begin;
    return reduce == Reduce::kMean && count > 1 ? 1.0F / static_cast<float>(count) : 1.0F;
}

// One team per row. Rows of more than `most_slots` are left to the next two kernels.
template <int kFloats, int kUnits, Reduce kReduce, int kAhead, bool kShuffled>
__global__ void aggregate_rows(Aggregation call, Tile tile, std::int32_t most_slots) {
    const std::int64_t row = thread_of_grid() / tile.team;
    if (row >= call.graph.rows) {
        return;
    }
    const Slots slots = slots_of_row(call.graph, row);
    if (slots.end - slots.begin <= most_slots) {
        auto sum = reduce_slots<kFloats, kUnits, kReduce, kAhead, kShuffled>(call, tile, slots);
        sum.finish(tile, call.finish, mean_scale(call.reduce, slots), row, call.width, call.out);
    }
}

// One team per piece; partial [pieces, width].
template <int kFloats, int kUnits, Reduce kReduce, int kAhead, bool kShuffled>
__global__ void aggregate_pieces(Aggregation call, Tile tile, std::int32_t chunk_slots,
                                 std::int64_t pieces, float* partial) {
    const std::int64_t piece = thread_of_grid() / tile.team;
    if (piece >= pieces) {
        return;
    }
    const Slots slots = slots_of_piece(call.graph, piece, chunk_slots);
    if (slots.begin < slots.end) {
        reduce_slots<kFloats, kUnits, kReduce, kAhead, kShuffled>(call, tile, slots)
            .store(tile, partial + piece * call.width);
    }
}

// One team per chunk: it combines the pieces of the heavy row that begins in the chunk.
template <int kFloats, int kUnits, Reduce kReduce>
__global__ void aggregate_heavy(Aggregation call, Tile tile, std::int32_t chunk_slots,
                                std::int64_t chunks, const float* partial) {
    const std::int64_t chunk = thread_of_grid() / tile.team;
    if (chunk >= chunks) {
        return;
    }
    const Slots slots = heavy_row_of(call.graph, chunk, chunk_slots);
    if (slots.begin == slots.end) {
        return;
    }
    const RowPieces pieces(slots, chunk_slots);
    const Slots all{slots.row, 0, pieces.count};
    Columns<kFloats, kUnits> sum;
    each_group<kUnitsAhead / kUnits>(all, [&](auto count, std::int32_t s) {
        constexpr int kCount = decltype(count)::value;
        Columns<kFloats, kUnits> read[kCount];
        GNNSERVE_UNROLL(kCount)
        for (int i = 0; i < kCount; ++i) {
            read[i].load(tile, partial + pieces.at(slot_of_group(all, s, i)) * call.width);
        }
        GNNSERVE_UNROLL(kCount)
        for (int i = 0; i < kCount; ++i) {
            if (s + i < all.end) {
                sum.with(read[i], [=](float so_far, float value) {
                    return reduced<kReduce>(so_far, value, s + i == 0);
                });
            }
        }
    });
    sum.finish(tile, call.finish, mean_scale(call.reduce, slots), slots.row, call.width, call.out);
}

// One team per row and head: out[i, h] = Σ_c x[i, h, c] · att[h, c].
__global__ void head_dots_rows(HeadDots call, int team) {
    const std::int64_t pair = thread_of_grid() / team;
    if (pair >= call.rows * call.heads) {
        return;
    }
    const int lane = static_cast<int>(threadIdx.x) % team;
    const float* x = call.x + pair * call.channels;
    const float* att = call.att + pair % call.heads * call.channels;
    float sum = 0;
    for (std::int64_t c = lane; c < call.channels; c += team) {
        sum += x[c] * att[c];
    }
    sum = team_sum(sum, team);
    if (lane == 0) {
        call.out[pair] = sum;
    }
}

}  // namespace gnnserve
