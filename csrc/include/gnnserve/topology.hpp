// A resident graph's edges as the sampler reads them: in-neighbours by destination, and a patch of
// rows that changed since they were built.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "gnnserve/staging.hpp"

namespace gnnserve {

// Stored node ids: 32 bits where they fit, because ids are most of what is read.
struct NodeIds {
    const std::byte* data = nullptr;
    IndexWidth width = IndexWidth::k64;

    std::int64_t operator[](std::size_t position) const {
        return width == IndexWidth::k32 ? reinterpret_cast<const std::int32_t*>(data)[position]
                                        : reinterpret_cast<const std::int64_t*>(data)[position];
    }
};

// In-neighbours of node v, which may be nodes of another type. When patched[p] is v, they are row p
// of the patch; otherwise they are indices[indptr[v] .. indptr[v + 1]). `patched` ascends. Nodes
// beyond both have none.
struct Topology {
    std::int64_t num_nodes = 0;
    std::span<const std::int64_t> indptr;
    NodeIds indices;
    std::span<const std::int64_t> patched;
    std::span<const std::int64_t> patched_indptr;
    std::span<const std::int64_t> patched_indices;
};

// Sorts the edges [2, E] (sources, then destinations) by destination; within a row they keep their
// order. Requires indptr of num_nodes + 1 entries and indices of E entries of `index_width` bytes.
// Returns kAllGood, or the flat position of the first source outside [0, num_sources) or
// destination outside [0, num_nodes); the output is then unspecified.
std::ptrdiff_t build_rows(NodeIds edges, std::size_t num_edges, std::int64_t num_sources,
                          std::int64_t num_nodes, std::span<std::int64_t> indptr,
                          std::span<std::byte> indices, IndexWidth index_width);

}  // namespace gnnserve
