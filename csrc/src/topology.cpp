#include "gnnserve/topology.hpp"

#include <algorithm>
#include <vector>

namespace gnnserve {
namespace {

template <typename Source, typename Target>
std::ptrdiff_t build(const Source* edges, std::size_t num_edges, std::int64_t num_sources,
                     std::int64_t num_nodes, std::span<std::int64_t> indptr, Target* indices) {
    for (std::size_t i = 0; i < 2 * num_edges; ++i) {
        if (edges[i] < 0 || edges[i] >= (i < num_edges ? num_sources : num_nodes)) {
            return static_cast<std::ptrdiff_t>(i);
        }
    }
    const Source* destinations = edges + num_edges;
    std::fill(indptr.begin(), indptr.end(), 0);
    for (std::size_t i = 0; i < num_edges; ++i) {
        ++indptr[static_cast<std::size_t>(destinations[i]) + 1];
    }
    for (std::size_t v = 1; v < indptr.size(); ++v) {
        indptr[v] += indptr[v - 1];
    }
    std::vector<std::int64_t> next(indptr.begin(), indptr.end());
    for (std::size_t i = 0; i < num_edges; ++i) {
        const auto row = static_cast<std::size_t>(destinations[i]);
        indices[next[row]++] = static_cast<Target>(edges[i]);
    }
    return kAllGood;
}

}  // namespace

std::ptrdiff_t build_rows(NodeIds edges, std::size_t num_edges, std::int64_t num_sources,
                          std::int64_t num_nodes, std::span<std::int64_t> indptr,
                          std::span<std::byte> indices, IndexWidth index_width) {
    const auto from = [&](auto* source) {
        return index_width == IndexWidth::k32
                   ? build(source, num_edges, num_sources, num_nodes, indptr,
                           reinterpret_cast<std::int32_t*>(indices.data()))
                   : build(source, num_edges, num_sources, num_nodes, indptr,
                           reinterpret_cast<std::int64_t*>(indices.data()));
    };
    return edges.width == IndexWidth::k32 ? from(reinterpret_cast<const std::int32_t*>(edges.data))
                                          : from(reinterpret_cast<const std::int64_t*>(edges.data));
}

}  // namespace gnnserve
