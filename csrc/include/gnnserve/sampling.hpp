// Neighbour sampling (GraphSAGE, Hamilton et al. 2017, algorithm 2). It starts at the requested
// nodes and goes outwards hop by hop; every node draws in-neighbours when it is first reached.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "gnnserve/topology.hpp"

namespace gnnserve {

// The fan-out that takes every neighbour.
inline constexpr std::int64_t kAllNeighbours = -1;

// A sampled subgraph. Local ids number its nodes in the order in which they were reached, so the
// requested nodes come first. Edges are sorted by destination.
struct Sample {
    // The node of each local id.
    std::vector<std::int64_t> nodes;
    // Both ends of each edge, as local ids.
    std::vector<std::int32_t> sources;
    std::vector<std::int32_t> destinations;
    // The local id of each requested id, repeated ones included.
    std::vector<std::int32_t> positions;
    // Number of distinct requested nodes; their local ids are below it.
    std::size_t num_seeds = 0;
};

// `fanouts` has one entry per hop: a number of in-neighbours, drawn without replacement, or
// kAllNeighbours. The draw of a node depends only on `seed`, the hop and the node, so the same seed
// gives the same sample on every machine. Throws std::invalid_argument for an id that is no node
// and for a fan-out that is neither positive nor kAllNeighbours, and std::length_error when the
// sample has more than 2^31 - 1 nodes.
Sample sample_neighbours(const Topology& topology, std::span<const std::int64_t> ids,
                         std::span<const std::int64_t> fanouts, std::uint64_t seed);

}  // namespace gnnserve
