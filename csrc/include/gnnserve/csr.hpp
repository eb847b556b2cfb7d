// A graph's edges by destination: for every node the slots of the edges that end in it, and for
// every slot where its edge begins. Made from an edge list in one counting sort.
#pragma once

#include <cstdint>

namespace gnnserve {

// Edges of `rows` nodes; slots begin[i] up to begin[i + 1] are those that end in node i.
struct Csr {
    const std::int32_t* begin;   // [rows + 1]
    const std::int32_t* source;  // [begin[rows]]
    std::int64_t rows;
};

enum class Loops : std::uint8_t {
    kKeep,     // edges as they are
    kReplace,  // edges from a node to itself are dropped, and one added for every node
};

// What build_csr returns when an edge names a node that does not exist.
inline constexpr std::int64_t kOutside = -1;

// Sorts `edges` pairs (source[e], target[e]) by target; within a target they stay in order, with an
// added loop in front. Writes begin [rows + 1], and for every slot its source and, unless null, in
// slot_edge the position of its edge in the list; for an added loop that of the last one it
// replaces, or -1. Both must hold `edges` slots, and with kReplace `rows` more. Returns the number
// of slots, or kOutside. The caller sees to it that it fits 31 bits. Index is int32 or int64.
template <typename Index>
std::int64_t build_csr(const Index* source, const Index* target, std::int64_t edges,
                       std::int64_t rows, Loops loops, std::int32_t* begin,
                       std::int32_t* slot_source, std::int32_t* slot_edge);

// out[s] = value[slot_edge[s]], or `missing` for a slot without an edge.
void spread(const std::int32_t* slot_edge, std::int64_t slots, const float* value, float missing,
            float* out);

// The weights of a graph convolution (Kipf and Welling, 2017): out[s] = w[s] / sqrt(d[i] d[j]) for
// the slot s of an edge from j to i, where d sums w over the slots of a node; nothing is divided by
// a d of 0. `weight` null: ones; it may be `out`. `scratch` holds a float per row.
void normalise(const Csr& graph, const float* weight, float* out, float* scratch);

}  // namespace gnnserve
