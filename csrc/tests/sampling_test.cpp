#include "gnnserve/sampling.hpp"

#include <algorithm>
#include <random>
#include <set>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "check.hpp"

using gnnserve::IndexWidth;
using gnnserve::kAllGood;
using gnnserve::kAllNeighbours;
using gnnserve::Relation;
using gnnserve::Sample;
using gnnserve::sample_neighbours;
using gnnserve::sample_typed;
using gnnserve::Topology;
using gnnserve::TypedSample;

namespace {

constexpr std::int64_t kNodes = 300;

// A random graph with a hub of every node, and isolated nodes at the end.
struct Graph {
    Graph() {
        std::mt19937_64 random(1);
        const std::size_t num_edges = 3000;
        std::vector<std::int32_t> edges(2 * num_edges);
        for (std::size_t i = 0; i < num_edges; ++i) {
            edges[i] = static_cast<std::int32_t>(random() % 280);
            edges[num_edges + i] = i < 280 ? 0 : static_cast<std::int32_t>(random() % 280);
        }
        indptr.resize(kNodes + 1);
        indices.resize(num_edges);
        const auto bad = gnnserve::build_rows(
            {reinterpret_cast<const std::byte*>(edges.data()), IndexWidth::k32}, num_edges, kNodes,
            kNodes, indptr, std::as_writable_bytes(std::span(indices)), IndexWidth::k32);
        CHECK(bad == kAllGood);
    }

    Topology topology() const {
        Topology found;
        found.num_nodes = kNodes;
        found.indptr = indptr;
        found.indices = {reinterpret_cast<const std::byte*>(indices.data()), IndexWidth::k32};
        return found;
    }

    std::vector<std::int64_t> indptr;
    std::vector<std::int32_t> indices;
};

void test_every_edge_is_there_and_no_more_than_asked() {
    const Graph graph;
    const std::vector<std::int64_t> ids{0, 17, 17, 299, 5};
    const std::vector<std::int64_t> fanouts{40, 3, kAllNeighbours};
    const Sample sample = sample_neighbours(graph.topology(), ids, fanouts, 7);
    CHECK(sample.num_seeds == 4);
    CHECK((sample.positions == std::vector<std::int32_t>{0, 1, 1, 2, 3}));
    CHECK(std::set(sample.nodes.begin(), sample.nodes.end()).size() == sample.nodes.size());
    CHECK(std::is_sorted(sample.destinations.begin(), sample.destinations.end()));
    for (std::size_t i = 0; i < sample.sources.size(); ++i) {
        const auto source = sample.nodes[static_cast<std::size_t>(sample.sources[i])];
        const auto row = static_cast<std::size_t>(
            sample.nodes[static_cast<std::size_t>(sample.destinations[i])]);
        const auto begin = graph.indices.begin() + graph.indptr[row];
        const auto end = graph.indices.begin() + graph.indptr[row + 1];
        CHECK(std::find(begin, end, source) != end);
    }
    const auto into = [&](std::int32_t local) {
        return std::count(sample.destinations.begin(), sample.destinations.end(), local);
    };
    CHECK(into(0) == 40);
    CHECK(into(2) == 0);
    CHECK(into(4) <= 3);
}

void test_seeds_decide() {
    const Graph graph;
    const std::vector<std::int64_t> ids{0, 1, 2, 3};
    const std::vector<std::int64_t> fanouts{5, 5};
    const Sample one = sample_neighbours(graph.topology(), ids, fanouts, 1);
    const Sample again = sample_neighbours(graph.topology(), ids, fanouts, 1);
    const Sample other = sample_neighbours(graph.topology(), ids, fanouts, 2);
    CHECK(one.nodes == again.nodes && one.sources == again.sources);
    CHECK(one.sources != other.sources || one.nodes != other.nodes);
}

void test_nothing_and_nonsense() {
    const Graph graph;
    CHECK(sample_neighbours(graph.topology(), {}, std::vector<std::int64_t>{2}, 0).nodes.empty());
    const auto refused = [&](std::vector<std::int64_t> ids, std::vector<std::int64_t> fanouts) {
        try {
            sample_neighbours(graph.topology(), ids, fanouts, 0);
        } catch (const std::invalid_argument&) {
            return true;
        }
        return false;
    };
    CHECK(refused({-1}, {2}) && refused({kNodes}, {2}) && refused({0}, {0}) && refused({0}, {-2}));
    const std::vector<std::int64_t> edges{0, kNodes, 1, 1};
    std::vector<std::int64_t> indptr(kNodes + 1);
    std::vector<std::int64_t> indices(2);
    CHECK(gnnserve::build_rows({reinterpret_cast<const std::byte*>(edges.data()), IndexWidth::k64},
                               2, kNodes, kNodes, indptr,
                               std::as_writable_bytes(std::span(indices)), IndexWidth::k64) == 1);
    CHECK(gnnserve::build_rows({reinterpret_cast<const std::byte*>(edges.data()), IndexWidth::k64},
                               2, kNodes + 1, 2, indptr = std::vector<std::int64_t>(3),
                               std::as_writable_bytes(std::span(indices)),
                               IndexWidth::k64) == kAllGood);
}

void test_relations_draw_for_their_targets() {
    const Graph graph;
    const Topology topology = graph.topology();
    const std::vector<std::int64_t> ids{0, 5};
    // Type 0 draws from type 1, and type 1 from itself.
    const std::vector<Relation> relations{{&topology, 1, 0, 0}, {&topology, 1, 1, 1}};
    const std::vector<std::int64_t> fanouts{3, 2, 3, 2};
    const TypedSample found = sample_typed(2, relations, {0, kNodes, ids}, fanouts, 9);
    CHECK(found.num_seeds == 2 && found.nodes[0].size() == 2);
    CHECK(found.edges[0].sources.size() <= 6 && !found.edges[1].sources.empty());
    for (std::size_t r = 0; r < 2; ++r) {
        const auto& edges = found.edges[r];
        CHECK(std::is_sorted(edges.destinations.begin(), edges.destinations.end()));
        for (std::size_t i = 0; i < edges.sources.size(); ++i) {
            const auto source = found.nodes[1][static_cast<std::size_t>(edges.sources[i])];
            const auto row = static_cast<std::size_t>(
                found.nodes[r][static_cast<std::size_t>(edges.destinations[i])]);
            const auto begin = graph.indices.begin() + graph.indptr[row];
            const auto end = graph.indices.begin() + graph.indptr[row + 1];
            CHECK(std::find(begin, end, source) != end);
        }
    }
    // The nodes of type 1 that only the second hop reached draw nothing.
    const TypedSample first =
        sample_typed(2, relations, {0, kNodes, ids}, std::vector<std::int64_t>{3, 2}, 9);
    CHECK(first.edges[1].sources.empty() && first.edges[0].sources == found.edges[0].sources);
}

void test_types_that_are_none_are_refused() {
    const Graph graph;
    const Topology topology = graph.topology();
    const std::vector<std::int64_t> ids{0};
    const auto refused = [&](std::size_t source, std::size_t type, std::size_t count) {
        const std::vector<Relation> relations{{&topology, source, 0, 0}, {&topology, 0, 0, 1}};
        try {
            const std::vector<std::int64_t> fanouts(count, 1);
            sample_typed(2, relations, {type, kNodes, ids}, fanouts, 0);
        } catch (const std::invalid_argument&) {
            return true;
        }
        return false;
    };
    CHECK(!refused(1, 1, 4) && refused(2, 0, 4) && refused(1, 2, 4) && refused(1, 0, 3));
}

void test_threads_share_a_topology() {
    const Graph graph;
    const std::vector<std::int64_t> fanouts{4, 4};
    std::vector<Sample> samples(4);
    {
        std::vector<std::jthread> threads;
        for (auto& sample : samples) {
            threads.emplace_back([&] {
                const std::vector<std::int64_t> ids{0, 9};
                sample = sample_neighbours(graph.topology(), ids, fanouts, 3);
            });
        }
    }
    for (const auto& sample : samples) {
        CHECK(sample.nodes == samples[0].nodes && sample.sources == samples[0].sources);
    }
}

}  // namespace

int main() {
    test_every_edge_is_there_and_no_more_than_asked();
    test_seeds_decide();
    test_nothing_and_nonsense();
    test_relations_draw_for_their_targets();
    test_types_that_are_none_are_refused();
    test_threads_share_a_topology();
}
