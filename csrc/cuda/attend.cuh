// Attention along edges on the device: scores, softmax and weighted sum in one pass over a row's
// slots (online softmax: Milakov and Gimelshein, 2018), so that nothing is stored per edge. The
// contract is that of Attention in aggregate.hpp, except that alpha is not written.
#pragma once

#include "aggregate.cuh"

namespace gnnserve {

// Added to the softmax's sum, as PyG does.
constexpr float kSoftmaxEpsilon = 1e-16F;

// State of one head's online softmax: maximum, sum, and weighted values of the slots so far.
template <int kFloats, int kUnits>
struct Softmax {
    float most = -INFINITY;
    float sum = 0;
    Columns<kFloats, kUnits> values;

    // Merges other softmaxes: each one's maximum, sum and values. `count` of them exist; for a slot
    // these are its score, 1 and its values.
    template <int kCount>
    __device__ void add(int count, const float (&their_most)[kCount],
                        const float (&their_sum)[kCount],
                        const Columns<kFloats, kUnits> (&theirs)[kCount]) {
        const float before = most;
        GNNSERVE_UNROLL(kCount)
        for (int i = 0; i < kCount; ++i) {
            most = i < count && their_most[i] > most ? their_most[i] : most;
        }
        const float mine = most == before ? 1.0F : expf(before - most);
        sum *= mine;
        values.with(values, [=](float so_far, float) { return so_far * mine; });
        GNNSERVE_UNROLL(kCount)
        for (int i = 0; i < kCount; ++i) {
            if (i < count) {
                const float by = expf(their_most[i] - most);
                sum += their_sum[i] * by;
                values.with(theirs[i],
                            [=](float so_far, float value) { return so_far + value * by; });
            }
        }
    }

    __device__ float scale() const { return 1.0F / (sum + kSoftmaxEpsilon); }
};

__device__ inline float leaky(float x, float slope) { return x > 0 ? x : x * slope; }

// Mean over a row's edges except its added loop, which is the row's first slot.
__device__ inline float mean_edge(const Attention& call, int team, std::int64_t row,
                                  std::int64_t head) {
    const std::int32_t begin = call.graph.begin[row] + 1;
    const std::int32_t end = call.graph.begin[row + 1];
    float sum = 0;
    GNNSERVE_UNROLL(4)
    for (std::int32_t s = begin + static_cast<int>(threadIdx.x) % team; s < end; s += team) {
        sum += call.edge[call.slot_edge[s] * call.heads + head];
    }
    sum = team_sum(sum, team);
    return end > begin ? sum / static_cast<float>(end - begin) : 0.0F;
}

// A row's head, whose slots are scored.
struct Head {
    std::int64_t row;
    std::int64_t head;
    std::int32_t loop;  // the slot of the row's added loop; -1 without one
    float loop_edge;    // the mean that stands for its edge

    __device__ static Head of(const Attention& call, const Tile& tile, const Slots& slots,
                              std::int64_t head) {
        const bool added =
            call.edge != nullptr && call.added_loops && slots.begin == call.graph.begin[slots.row];
        return {slots.row, head, added ? slots.begin : -1,
                added ? mean_edge(call, tile.team, slots.row, head) : 0.0F};
    }
};

// Returns the score of slot `s` from node `source`, the same for all lanes of the team.
template <Score kScore, int kFloats>
__device__ inline float score_of(const Attention& call, const Tile& tile, const Head& of,
                                 std::int32_t s, std::int64_t source) {
    const std::int64_t row = of.row;
    const std::int64_t head = of.head;
    if constexpr (kScore == Score::kAdditive) {
        float score = call.left[source * call.heads + head] + call.right[row * call.heads + head];
        if (call.edge != nullptr) {
            const std::int32_t edge = call.slot_edge[s];
            score += s == of.loop ? of.loop_edge : call.edge[edge * call.heads + head];
        }
        return leaky(score, call.scale);
    } else {
        const std::int64_t width = call.heads * call.channels;
        const std::int64_t first = head * call.channels;
        const auto* left =
            reinterpret_cast<const Unit<kFloats>*>(call.left + source * width + first);
        const auto* right =
            reinterpret_cast<const Unit<kFloats>*>(call.right + row * width + first);
        const auto* att = reinterpret_cast<const Unit<kFloats>*>(call.att + first);
        float sum = 0;
        for (std::int64_t unit = static_cast<int>(threadIdx.x) % tile.team; unit < tile.units;
             unit += tile.team) {
            const Unit<kFloats> a = left[unit];
            const Unit<kFloats> b = right[unit];
            if constexpr (kScore == Score::kDynamic) {
                const Unit<kFloats> by = att[unit];
                GNNSERVE_UNROLL(kFloats)
                for (int f = 0; f < kFloats; ++f) {
                    sum += by.at[f] * leaky(a.at[f] + b.at[f], call.scale);
                }
            } else {
                GNNSERVE_UNROLL(kFloats)
                for (int f = 0; f < kFloats; ++f) {
                    sum += a.at[f] * b.at[f];
                }
            }
        }
        sum = team_sum(sum, tile.team);
        return kScore == Score::kDot ? call.scale * sum : sum;
    }
}

// Adds at most kCount slots from `s` on; all are read before the first is added.
template <int kCount, Score kScore, int kFloats, int kUnits>
__device__ inline void attend_some(const Attention& call, const Tile& tile, const Slots& slots,
                                   std::int32_t s, const Head& of,
                                   Softmax<kFloats, kUnits>& softmax) {
    Columns<kFloats, kUnits> read[kCount];
    std::int64_t source[kCount];
    float score[kCount];
    float one[kCount];
    GNNSERVE_UNROLL(kCount)
    for (int i = 0; i < kCount; ++i) {
        source[i] = call.graph.source[slot_of_group(slots, s, i)];
        read[i].load(tile, call.value + (source[i] * call.heads + of.head) * call.channels);
    }
    GNNSERVE_UNROLL(kCount)
    for (int i = 0; i < kCount; ++i) {
        const std::int32_t slot = slot_of_group(slots, s, i);
        score[i] = score_of<kScore, kFloats>(call, tile, of, slot, source[i]);
        one[i] = 1;
    }
    softmax.add(slots.end - s, score, one, read);
}

template <Score kScore, int kFloats, int kUnits>
__device__ inline Softmax<kFloats, kUnits> attend_slots(const Attention& call, const Tile& tile,
                                                        const Slots& slots, std::int64_t head) {
    Softmax<kFloats, kUnits> softmax;
    const Head of = Head::of(call, tile, slots, head);
    // Half of a sum's: the state of a softmax and scores that read units too need registers.
    each_group<kUnitsAhead / 2 / kUnits>(slots, [&](auto count, std::int32_t s) {
        attend_some<decltype(count)::value, kScore>(call, tile, slots, s, of, softmax);
    });
    return softmax;
}

// Selects the columns of `head` in everything that has heads side by side.
__device__ inline Finish finish_of_head(const Attention& call, std::int64_t head) {
    Finish finish = call.finish;
    const std::int64_t first = head * call.channels;
    finish.skip = finish.skip == nullptr ? nullptr : finish.skip + first;
    finish.bias = finish.bias == nullptr ? nullptr : finish.bias + first;
    return finish;
}

// Stores a row: of one head, or averaged over all heads; softmax_of(head) returns each.
template <int kFloats, int kUnits, typename SoftmaxOf>
__device__ inline void store_row(const Attention& call, const Tile& tile, std::int64_t row,
                                 std::int64_t head, SoftmaxOf softmax_of) {
    if (!call.average) {
        Softmax<kFloats, kUnits> softmax = softmax_of(head);
        softmax.values.finish(tile, finish_of_head(call, head), softmax.scale(), row,
                              call.heads * call.channels, call.out + head * call.channels);
        return;
    }
    Columns<kFloats, kUnits> sum;
    for (std::int64_t each = 0; each < call.heads; ++each) {
        const Softmax<kFloats, kUnits> softmax = softmax_of(each);
        const float scale = softmax.scale();
        sum.with(softmax.values, [=](float so_far, float value) { return so_far + value * scale; });
    }
    sum.finish(tile, call.finish, 1.0F / static_cast<float>(call.heads), row, call.channels,
               call.out);
}

// Number of teams per row.
__device__ inline std::int64_t row_teams(const Attention& call) {
    return call.average ? 1 : call.heads;
}

// One team per row and head, or per row when heads are averaged. Rows of more than `most_slots` are
// left to the next two kernels.
template <Score kScore, int kFloats, int kUnits>
__global__ void attend_rows(Attention call, Tile tile, std::int32_t most_slots) {
    const std::int64_t pair = thread_of_grid() / tile.team;
    const std::int64_t row = pair / row_teams(call);
    if (row >= call.graph.rows) {
        return;
    }
    const Slots slots = slots_of_row(call.graph, row);
    if (slots.end - slots.begin <= most_slots) {
        store_row<kFloats, kUnits>(call, tile, row, pair % row_teams(call), [&](std::int64_t head) {
            return attend_slots<kScore, kFloats, kUnits>(call, tile, slots, head);
        });
    }
}

// Partial result of each piece and head.
struct PieceSoftmax {
    float* values;  // [pieces, heads, channels]
    float* sums;    // [pieces, heads, 2]: the maximum and the sum
};

// One team per piece and head.
template <Score kScore, int kFloats, int kUnits>
__global__ void attend_pieces(Attention call, Tile tile, std::int32_t chunk_slots,
                              std::int64_t pieces, PieceSoftmax kept) {
    const std::int64_t pair = thread_of_grid() / tile.team;
    if (pair >= pieces * call.heads) {
        return;
    }
    const Slots slots = slots_of_piece(call.graph, pair / call.heads, chunk_slots);
    if (slots.begin == slots.end) {
        return;
    }
    const auto softmax =
        attend_slots<kScore, kFloats, kUnits>(call, tile, slots, pair % call.heads);
    softmax.values.store(tile, kept.values + pair * call.channels);
    if (static_cast<int>(threadIdx.x) % tile.team == 0) {
        kept.sums[2 * pair] = softmax.most;
        kept.sums[2 * pair + 1] = softmax.sum;
    }
}

// One team per chunk and head, or per chunk when heads are averaged. It combines the pieces of the
// heavy row that begins in the chunk.
template <int kFloats, int kUnits>
__global__ void attend_heavy(Attention call, Tile tile, std::int32_t chunk_slots,
                             std::int64_t chunks, PieceSoftmax kept) {
    const std::int64_t pair = thread_of_grid() / tile.team;
    if (pair >= chunks * row_teams(call)) {
        return;
    }
    const Slots slots = heavy_row_of(call.graph, pair / row_teams(call), chunk_slots);
    if (slots.begin == slots.end) {
        return;
    }
    const RowPieces pieces(slots, chunk_slots);
    const Slots all{slots.row, 0, pieces.count};
    store_row<kFloats, kUnits>(
        call, tile, slots.row, pair % row_teams(call), [&](std::int64_t head) {
            Softmax<kFloats, kUnits> softmax;
            each_group<kUnitsAhead / 2 / kUnits>(all, [&](auto count, std::int32_t s) {
                constexpr int kCount = decltype(count)::value;
                Columns<kFloats, kUnits> values[kCount];
                float most[kCount];
                float sum[kCount];
                GNNSERVE_UNROLL(kCount)
                for (int i = 0; i < kCount; ++i) {
                    const std::int64_t at = pieces.at(slot_of_group(all, s, i)) * call.heads + head;
                    values[i].load(tile, kept.values + at * call.channels);
                    most[i] = kept.sums[2 * at];
                    sum[i] = kept.sums[2 * at + 1];
                }
                softmax.add(all.end - s, most, sum, values);
            });
            return softmax;
        });
}

}  // namespace gnnserve
