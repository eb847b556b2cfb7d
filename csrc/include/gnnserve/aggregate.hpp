// Kernels of graph layers along edges: sums, means, extremes and attention over a node's
// neighbours. Each is one pass without a tensor of E messages, on one thread. They are compiled for
// several instruction sets; the first call selects the best that this processor has.
#pragma once

#include <cstdint>

#include "gnnserve/csr.hpp"

namespace gnnserve {

enum class Reduce : std::uint8_t { kSum, kMean, kMax, kMin };

// Last step of a row: `skip` and `bias` are added unless null; with `relu`, negatives become 0.
struct Finish {
    const float* skip = nullptr;  // [rows, out_width], times skip_scale
    float skip_scale = 1;
    const float* bias = nullptr;  // [out_width]
    bool relu = false;
};

// out[i] = reduce over the slots s of i of weight[s] · x[source[s]], then the finish. A node
// without slots gets 0, also for extremes.
struct Aggregation {
    Csr graph;
    const float* x;       // [rows, width]
    const float* weight;  // [slots] or null: ones
    std::int64_t width;
    Reduce reduce;
    Finish finish;
    float* out;  // [rows, width]
};

void aggregate(const Aggregation& call);

enum class Gate : std::uint8_t { kNone, kRelu, kSigmoid };

// out[i] = reduce over the slots s of i, which is edge e from j, of gate(x[j] + target[i] + edge[e]
// · map) · value[j], then the finish. Null terms are left out; x and edge must not both be null.
// Covers GINEConv, ResGatedGraphConv and EdgeConv.
struct Combination {
    Csr graph;
    const std::int32_t* slot_edge;  // [slots], the edge of each slot; needed with `edge`
    const float* x;                 // [rows, width]
    const float* target;            // [rows, width], or [width] when target_stride is 0
    std::int64_t target_stride;
    const float* edge;        // [E, edge_width]
    std::int64_t edge_width;  // equal to width without `map`
    const float* map;         // [edge_width, width]
    const float* value;       // [rows, width]
    std::int64_t width;
    Gate gate;
    Reduce reduce;
    Finish finish;
    float* out;  // [rows, width]
};

void combine(const Combination& call);

// Attention score of the edge from j to i, per head h, before the softmax over i's slots.
enum class Score : std::uint8_t {
    kAdditive,  // leaky(left[j, h] + right[i, h] + edge[e, h])          GAT; left, right [rows, H]
    kDynamic,   // Σ_c att[h, c] · leaky(left[j] + right[i])[h, c]       GATv2; [rows, H·C]
    kDot,       // scale · Σ_c left[j, h, c] · right[i, h, c]            Transformer; [rows, H·C]
};

inline constexpr std::int64_t kMostHeads = 64;

// out[i] = Σ over the slots s of i of softmax(score)[s, h] · value[source[s], h], heads side by
// side or averaged, then the finish. The softmax adds 1e-16 to its sum, as PyG does.
struct Attention {
    Csr graph;
    Score score;
    const float* left;
    const float* right;
    const float* edge;              // kAdditive: [E, H] or null; an added loop has its row's mean
    const std::int32_t* slot_edge;  // [slots], the edge of each slot; needed with `edge`
    bool added_loops;               // a row's first slot is an added loop: its edge is their mean
    const float* att;               // [H, C], for kDynamic
    float scale;                    // kDot: the factor; else the slope of leaky below 0
    const float* value;             // [rows, H·C]
    std::int64_t heads;
    std::int64_t channels;
    bool average;
    Finish finish;
    float* alpha;  // [slots, H], the softmax, written; heads at most kMostHeads
    float* out;    // [rows, H·C], or [rows, C] when averaged
};

void attend(const Attention& call);

// Gradients of an attention without `edge`, from that of its result before the finish. They are
// sums over the slots of each node, and over the slots by source: nothing is added to from two
// places.
struct AttentionGradient {
    Csr graph;
    Csr reversed;                       // the same slots by source, which lead to their targets
    const std::int32_t* reversed_slot;  // [slots], the slot in `graph` of each of them
    Score score;
    const float* left;  // these as in Attention
    const float* right;
    const float* att;
    float scale;
    const float* value;
    const float* alpha;     // [slots, H], as attend has written it
    const float* gradient;  // [rows, H·C], or [rows, C] for each head alike when averaged
    std::int64_t heads;
    std::int64_t channels;
    bool average;
    float* of_score;   // [slots, H], scratch
    float* by_source;  // [slots, H], scratch
    float* of_left;    // like left, right, value and att; the last for kDynamic alone
    float* of_right;
    float* of_value;
    float* of_att;
};

void attention_gradient(const AttentionGradient& call);

// out[i, h] = Σ_c x[i, h, c] · att[h, c] for x [rows, heads · channels].
struct HeadDots {
    const float* x;
    const float* att;
    std::int64_t rows;
    std::int64_t heads;
    std::int64_t channels;
    float* out;
};

void head_dots(const HeadDots& call);

// Name of the instruction set in use: "x86-64-v4", "x86-64-v3" or "baseline".
const char* instruction_set();

}  // namespace gnnserve
