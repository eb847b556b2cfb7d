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

// Where the requested nodes are in a sampled subgraph. Local ids number the nodes of a type in the
// order in which they were reached, so the requested nodes come first.
struct SeedPlaces {
    // The local id of each requested id, repeated ones included.
    std::vector<std::int32_t> positions;
    // Number of distinct requested nodes; their local ids are below it.
    std::size_t num_seeds = 0;
};

// A sampled subgraph. Edges are sorted by destination.
struct Sample : SeedPlaces {
    // The node of each local id.
    std::vector<std::int64_t> nodes;
    // Both ends of each edge, as local ids.
    std::vector<std::int32_t> sources;
    std::vector<std::int32_t> destinations;
};

// `fanouts` has one entry per hop: a number of in-neighbours, drawn without replacement, or
// kAllNeighbours. The draw of a node depends only on `seed`, the hop and the node, so the same seed
// gives the same sample on every machine. Throws std::invalid_argument for an id that is no node
// and for a fan-out that is neither positive nor kAllNeighbours, and std::length_error when the
// sample has more than 2^31 - 1 nodes.
Sample sample_neighbours(const Topology& topology, std::span<const std::int64_t> ids,
                         std::span<const std::int64_t> fanouts, std::uint64_t seed);

// Edges of one type. `topology` has a row for each node of the type `target`, with nodes of the
// type `source`.
struct Relation {
    const Topology* topology = nullptr;
    std::size_t source = 0;
    std::size_t target = 0;
    // Sets its draws apart from those of other relations into the same nodes.
    std::uint64_t key = 0;
};

// A sampled subgraph with nodes and edges of several types. Each type has local ids of its own.
struct TypedSample : SeedPlaces {
    struct Edges {
        std::vector<std::int32_t> sources;
        std::vector<std::int32_t> destinations;
    };
    // The node of each local id, by type.
    std::vector<std::vector<std::int64_t>> nodes;
    // By relation, as in Sample.
    std::vector<Edges> edges;
};

// Nodes to begin a sample with: `ids` of one type, which has `num_nodes` nodes.
struct Seeds {
    std::size_t type = 0;
    std::int64_t num_nodes = 0;
    std::span<const std::int64_t> ids;
};

// As sample_neighbours, for `num_types` types of nodes and several relations. At each hop, every
// node that was first reached at the hop before draws from each relation into its type, in their
// order. `fanouts` has one entry for each relation, hop after hop; 0 draws none. With one relation
// of key 0 the sample is that of sample_neighbours. Throws the same, and std::invalid_argument for
// a type that is none and for fan-outs that are not the same number for each hop.
TypedSample sample_typed(std::size_t num_types, std::span<const Relation> relations,
                         const Seeds& seeds, std::span<const std::int64_t> fanouts,
                         std::uint64_t seed);

}  // namespace gnnserve
