#include "graphs.hpp"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "buffer.hpp"
#include "gnnserve/gather.hpp"
#include "gnnserve/sampling.hpp"
#include "gnnserve/topology.hpp"

namespace gnnserve::bindings {
namespace {

IndexWidth width_of(bool is_int32) { return is_int32 ? IndexWidth::k32 : IndexWidth::k64; }

void require(bool right, const std::string& rule) {
    if (!right) {
        throw nb::value_error(rule.c_str());
    }
}

// Returns true when so many elements are `count` rows of `width`.
bool are_rows(std::size_t elements, std::size_t count, std::size_t width) {
    std::size_t all = 0;
    return !__builtin_mul_overflow(count, width, &all) && all == elements;
}

// A topology over buffers that it holds; checked as far as possible without a pass over them.
class Rows {
public:
    Rows(std::int64_t num_nodes, nb::handle indptr, nb::handle indices, bool is_int32,
         nb::handle patched, nb::handle patched_indptr, nb::handle patched_indices)
        : indptr_(indptr, PyBUF_SIMPLE),
          indices_(indices, PyBUF_SIMPLE),
          patched_(patched, PyBUF_SIMPLE),
          patched_indptr_(patched_indptr, PyBUF_SIMPLE),
          patched_indices_(patched_indices, PyBUF_SIMPLE) {
        topology_.num_nodes = num_nodes;
        topology_.indptr = indptr_.as<const std::int64_t>("indptr");
        topology_.indices = {indices_.bytes().data(), width_of(is_int32)};
        topology_.patched = patched_.as<const std::int64_t>("patched");
        topology_.patched_indptr = patched_indptr_.as<const std::int64_t>("patched_indptr");
        topology_.patched_indices = patched_indices_.as<const std::int64_t>("patched_indices");
        const auto size = static_cast<std::int64_t>(indices_.size() / (is_int32 ? 4 : 8));
        require(num_nodes >= 0 && closes(topology_.indptr, size),
                "indptr does not end with the number of indices");
        require(topology_.indptr.size() <= static_cast<std::size_t>(num_nodes) + 1,
                "indptr has rows beyond num_nodes");
        require(topology_.patched_indptr.size() == topology_.patched.size() + 1 &&
                    closes(topology_.patched_indptr,
                           static_cast<std::int64_t>(topology_.patched_indices.size())),
                "patched_indptr does not fit patched and patched_indices");
    }

    const Topology& topology() const { return topology_; }

private:
    static bool closes(std::span<const std::int64_t> indptr, std::int64_t size) {
        return !indptr.empty() && indptr.front() == 0 && indptr.back() == size;
    }

    Buffer indptr_;
    Buffer indices_;
    Buffer patched_;
    Buffer patched_indptr_;
    Buffer patched_indices_;
    Topology topology_;
};

TypedSample typed_sample(const std::vector<Rows*>& rows,
                         const std::vector<std::pair<std::size_t, std::size_t>>& ends,
                         const std::vector<std::uint64_t>& keys,
                         const std::vector<std::int64_t>& num_nodes, std::size_t type,
                         nb::handle ids, const std::vector<std::int64_t>& fanouts,
                         std::uint64_t seed) {
    require(rows.size() == ends.size() && rows.size() == keys.size() && type < num_nodes.size(),
            "rows, ends and keys are not of one length, or the type is none");
    std::vector<Relation> relations;
    for (std::size_t r = 0; r < rows.size(); ++r) {
        require(rows[r] != nullptr, "rows are topologies, not None");
        relations.push_back({&rows[r]->topology(), ends[r].first, ends[r].second, keys[r]});
    }
    const Buffer asked(ids, PyBUF_SIMPLE);
    const Seeds seeds{type, num_nodes[type], asked.as<const std::int64_t>("ids")};
    const nb::gil_scoped_release release;
    return sample_typed(num_nodes.size(), relations, seeds, fanouts, seed);
}

// The element at a position; throws IndexError.
template <typename Element>
const Element& at(const std::vector<Element>& elements, std::size_t position) {
    if (position >= elements.size()) {
        throw nb::index_error("no such type of nodes or edges");
    }
    return elements[position];
}

Sample sample(const Rows& rows, nb::handle ids, const std::vector<std::int64_t>& fanouts,
              std::uint64_t seed) {
    const Buffer asked(ids, PyBUF_SIMPLE);
    const auto span = asked.as<const std::int64_t>("ids");
    const nb::gil_scoped_release release;
    return sample_neighbours(rows.topology(), span, fanouts, seed);
}

template <typename Target, typename Source>
void write(nb::handle target, const std::vector<Source>& first, const std::vector<Source>& second) {
    const Buffer buffer(target, PyBUF_WRITABLE);
    const auto span = buffer.as<Target>("target");
    require(span.size() == first.size() + second.size(),
            "target has " + std::to_string(span.size()) + " elements, " +
                std::to_string(first.size() + second.size()) + " are written");
    const auto convert = [](Source value) { return static_cast<Target>(value); };
    unlocked(buffer.size(), [&] {
        const auto next = std::transform(first.begin(), first.end(), span.begin(), convert);
        std::transform(second.begin(), second.end(), next, convert);
    });
}

template <typename Source>
void write_ends(nb::handle target, const std::vector<Source>& sources,
                const std::vector<Source>& destinations, bool is_int32) {
    if (is_int32) {
        write<std::int32_t, Source>(target, sources, destinations);
    } else {
        write<std::int64_t, Source>(target, sources, destinations);
    }
}

std::ptrdiff_t rows_of_edges(nb::handle edges, bool is_int32, std::int64_t num_sources,
                             std::int64_t num_nodes, nb::handle indptr, nb::handle indices,
                             bool narrow) {
    const Buffer source(edges, PyBUF_SIMPLE);
    const Buffer starts(indptr, PyBUF_WRITABLE);
    const Buffer target(indices, PyBUF_WRITABLE);
    const auto width = width_of(is_int32);
    const std::size_t pair = 2 * static_cast<std::size_t>(width);
    require(num_nodes >= 0 && source.size() % pair == 0, "edges are not [2, E]");
    const std::size_t num_edges = source.size() / pair;
    const auto offsets = starts.as<std::int64_t>("indptr");
    require(offsets.size() == static_cast<std::size_t>(num_nodes) + 1,
            "indptr does not have num_nodes + 1 entries");
    require(target.size() == num_edges * static_cast<std::size_t>(width_of(narrow)),
            "indices does not have one entry for each edge");
    const nb::gil_scoped_release release;
    return build_rows({source.bytes().data(), width}, num_edges, num_sources, num_nodes, offsets,
                      target.bytes(), width_of(narrow));
}

FeatureType type_of(const std::string& dtype) {
    if (dtype == "float32") {
        return FeatureType::kFloat32;
    }
    if (dtype == "float16") {
        return FeatureType::kFloat16;
    }
    require(dtype == "uint8", "features are float32, float16 or uint8, not " + dtype);
    return FeatureType::kUint8;
}

void gather(nb::handle rows, const std::string& dtype, std::size_t width, nb::handle patched,
            nb::handle patched_rows, nb::handle ids, nb::handle target) {
    const Buffer base(rows, PyBUF_SIMPLE);
    const Buffer changed(patched, PyBUF_SIMPLE);
    const Buffer changed_rows(patched_rows, PyBUF_SIMPLE);
    const Buffer asked(ids, PyBUF_SIMPLE);
    const Buffer place(target, PyBUF_WRITABLE);
    const Features features{base.bytes(), type_of(dtype), width,
                            changed.as<const std::int64_t>("patched"),
                            changed_rows.as<const float>("patched_rows")};
    const auto nodes = asked.as<const std::int64_t>("ids");
    const auto written = place.as<float>("target");
    require(are_rows(features.patched_rows.size(), features.patched.size(), width),
            "patched_rows does not have one row for each patched node");
    require(are_rows(written.size(), nodes.size(), width),
            "target does not have one row of " + std::to_string(width) + " for each id");
    unlocked(place.size(), [&] { gather_rows(features, nodes, written); });
}

}  // namespace

void bind_graphs(nb::module_& module) {
    using namespace nb::literals;

    nb::class_<Rows>(
        module, "Topology",
        "In-neighbours by destination, and rows that changed since; holds its buffers.")
        .def(nb::init<std::int64_t, nb::handle, nb::handle, bool, nb::handle, nb::handle,
                      nb::handle>(),
             "num_nodes"_a, "indptr"_a, "indices"_a, "is_int32"_a, "patched"_a, "patched_indptr"_a,
             "patched_indices"_a,
             nb::sig("def __init__(self, num_nodes: int, indptr: serve.native.BytesLike, "
                     "indices: serve.native.BytesLike, is_int32: bool, "
                     "patched: serve.native.BytesLike, patched_indptr: serve.native.BytesLike, "
                     "patched_indices: serve.native.BytesLike) -> None"));
    nb::class_<SeedPlaces>(module, "SeedPlaces",
                           "Where the requested nodes are in a sampled subgraph.")
        .def_prop_ro(
            "num_seeds", [](const SeedPlaces& self) { return self.num_seeds; },
            "Number of distinct requested nodes.")
        .def(
            "write_positions",
            [](const SeedPlaces& self, nb::handle target) {
                write<std::int64_t, std::int32_t>(target, self.positions, {});
            },
            "target"_a,
            nb::sig("def write_positions(self, target: serve.native.BytesLike) -> None"),
            "Write the local id of each requested id, int64.");
    nb::class_<Sample, SeedPlaces>(module, "Sample", "A sampled subgraph.")
        .def_prop_ro(
            "num_nodes", [](const Sample& self) { return self.nodes.size(); },
            "Number of nodes; the requested ones come first.")
        .def_prop_ro(
            "num_edges", [](const Sample& self) { return self.sources.size(); },
            "Number of edges; they are sorted by destination.")
        .def(
            "write_nodes",
            [](const Sample& self, nb::handle target) {
                write<std::int64_t, std::int64_t>(target, self.nodes, {});
            },
            "target"_a, nb::sig("def write_nodes(self, target: serve.native.BytesLike) -> None"),
            "Write the node of each local id, int64.")
        .def(
            "write_edges",
            [](const Sample& self, nb::handle target, bool is_int32) {
                write_ends(target, self.sources, self.destinations, is_int32);
            },
            "target"_a, "is_int32"_a,
            nb::sig(
                "def write_edges(self, target: serve.native.BytesLike, is_int32: bool) -> None"),
            "Write the edges [2, E] in local ids, int32 or int64.");
    nb::class_<TypedSample, SeedPlaces>(module, "TypedSample",
                                        "A sampled subgraph with nodes and edges of several types.")
        .def(
            "num_nodes",
            [](const TypedSample& self, std::size_t type) { return at(self.nodes, type).size(); },
            "type"_a, "Return the number of nodes of a type; the requested ones come first.")
        .def(
            "num_edges",
            [](const TypedSample& self, std::size_t relation) {
                return at(self.edges, relation).sources.size();
            },
            "relation"_a, "Return the number of edges of a relation, sorted by destination.")
        .def(
            "write_nodes",
            [](const TypedSample& self, std::size_t type, nb::handle target) {
                write<std::int64_t, std::int64_t>(target, at(self.nodes, type), {});
            },
            "type"_a, "target"_a,
            nb::sig("def write_nodes(self, type: int, target: serve.native.BytesLike) -> None"),
            "Write the node of each local id of a type, int64.")
        .def(
            "write_edges",
            [](const TypedSample& self, std::size_t relation, nb::handle target, bool is_int32) {
                const TypedSample::Edges& edges = at(self.edges, relation);
                write_ends(target, edges.sources, edges.destinations, is_int32);
            },
            "relation"_a, "target"_a, "is_int32"_a,
            nb::sig("def write_edges(self, relation: int, target: serve.native.BytesLike, "
                    "is_int32: bool) -> None"),
            "Write the edges [2, E] of a relation in local ids, int32 or int64.");
    module.def("sample_typed", &typed_sample, "rows"_a, "ends"_a, "keys"_a, "num_nodes"_a, "type"_a,
               "ids"_a, "fanouts"_a, "seed"_a,
               nb::sig("def sample_typed(rows: collections.abc.Sequence[Topology], "
                       "ends: collections.abc.Sequence[tuple[int, int]], "
                       "keys: collections.abc.Sequence[int], "
                       "num_nodes: collections.abc.Sequence[int], type: int, "
                       "ids: serve.native.BytesLike, fanouts: collections.abc.Sequence[int], "
                       "seed: int) -> TypedSample"));
    module.def("sample_neighbours", &sample, "topology"_a, "ids"_a, "fanouts"_a, "seed"_a,
               nb::sig("def sample_neighbours(topology: Topology, ids: serve.native.BytesLike, "
                       "fanouts: collections.abc.Sequence[int], seed: int) -> Sample"));
    module.def("build_rows", &rows_of_edges, "edges"_a, "is_int32"_a, "num_sources"_a,
               "num_nodes"_a, "indptr"_a, "indices"_a, "narrow"_a,
               nb::sig("def build_rows(edges: serve.native.BytesLike, is_int32: bool, "
                       "num_sources: int, num_nodes: int, indptr: serve.native.BytesLike, "
                       "indices: serve.native.BytesLike, narrow: bool) -> int"));
    module.def("gather_rows", &gather, "rows"_a, "dtype"_a, "width"_a, "patched"_a,
               "patched_rows"_a, "ids"_a, "target"_a,
               nb::sig("def gather_rows(rows: serve.native.BytesLike, dtype: str, width: int, "
                       "patched: serve.native.BytesLike, patched_rows: serve.native.BytesLike, "
                       "ids: serve.native.BytesLike, target: serve.native.BytesLike) -> None"));
}

}  // namespace gnnserve::bindings
