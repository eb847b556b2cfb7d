// A graph's edges by destination (CSR): for every node the slots of its incoming edges, for every
// slot the edge's source. Made from an edge list by one counting sort.
#pragma once

#include <cstdint>

namespace gnnserve {

// Edges of `rows` nodes; slots [begin[i], begin[i + 1]) end in node i.
struct Csr {
    const std::int32_t* begin;   // [rows + 1]
    const std::int32_t* source;  // [begin[rows]]
    std::int64_t rows;
};

enum class Loops : std::uint8_t {
    kKeep,     // edges as they are
    kReplace,  // edges from a node to itself are dropped, and one added for every node
};

// Result of build_csr when an edge names a node that does not exist.
inline constexpr std::int64_t kOutside = -1;

// Both ends of a pair that is no edge and is left out: runs of a fixed size fill up with these.
inline constexpr std::int32_t kNoEdge = -1;

// Sorts `edges` pairs (source[e], target[e]) by target; edges of one target keep their order, and
// an added loop precedes them. Writes begin [rows + 1], the source of every slot and, unless null,
// slot_edge: the position of the slot's edge in the list. For an added loop that is the last loop
// it replaces, or -1. Both arrays must hold `edges` slots, and `rows` more with kReplace. Returns
// the number of slots, or kOutside. The caller ensures that this number fits 31 bits. Index is
// int32 or int64.
template <typename Index>
std::int64_t build_csr(const Index* source, const Index* target, std::int64_t edges,
                       std::int64_t rows, Loops loops, std::int32_t* begin,
                       std::int32_t* slot_source, std::int32_t* slot_edge);

// out[s] = value[slot_edge[s]], or `missing` for a slot without an edge.
void spread(const std::int32_t* slot_edge, std::int64_t slots, const float* value, float missing,
            float* out);

// Edge weights of a graph convolution (Kipf and Welling, 2017): out[s] = w[s] / sqrt(d[i] d[j]) for
// the slot s of an edge from j to i, where d sums w over the slots of a node. A d of 0 divides
// nothing. A null `weight` means ones; `weight` may be `out`. `scratch` holds one float per row.
void normalise(const Csr& graph, const float* weight, float* out, float* scratch);

}  // namespace gnnserve
