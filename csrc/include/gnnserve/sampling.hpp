// Neighbour sampling (GraphSAGE, Hamilton et al. 2017, algorithm 2): from the asked nodes outwards,
// hop by hop, a number of in-neighbours of every node met for the first time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "gnnserve/topology.hpp"

namespace gnnserve {

// As a fan-out: every neighbour.
inline constexpr std::int64_t kAllNeighbours = -1;

// A sampled subgraph. Local ids number its nodes in the order they were met, so the asked ones
// come first, and edges are sorted by destination.
struct Sample {
    // Local id to node.
    std::vector<std::int64_t> nodes;
    // Edge ends as local ids.
    std::vector<std::int32_t> sources;
    std::vector<std::int32_t> destinations;
    // For each asked id, repeated ones included, its local id.
    std::vector<std::int32_t> positions;
    // Different nodes among those asked: local ids below this.
    std::size_t num_seeds = 0;
};

// One entry of `fanouts` a hop: how many in-neighbours, drawn without replacement, or
// kAllNeighbours. What is drawn for a node depends on `seed`, the hop and the node alone, so the
// same seed gives the same sample on every machine. Throws std::invalid_argument for an id that is
// no node and a fan-out that is neither positive nor kAllNeighbours, std::length_error when the
// sample has more than 2^31 - 1 nodes.
Sample sample_neighbours(const Topology& topology, std::span<const std::int64_t> ids,
                         std::span<const std::int64_t> fanouts, std::uint64_t seed);

}  // namespace gnnserve
