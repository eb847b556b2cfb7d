// What the front must know of models to stage their plain requests: one table that Python fills,
// for models of the short form of inputs and for those that declare their own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace gnnserve::front {

// A request's shapes tell counts: of nodes, edges, or whatever else a model takes any number of. A
// size of a shape that is the n-th count is -1 - n; all others are fixed, and positive.
constexpr std::int64_t size_of_count(std::size_t count) {
    return -1 - static_cast<std::int64_t>(count);
}
constexpr std::size_t count_of_size(std::int64_t size) {
    return static_cast<std::size_t>(-1 - size);
}
// The first two counts of graphs with one type of nodes and one of edges.
inline constexpr std::int64_t kNodes = size_of_count(0), kEdges = size_of_count(1);

// A type of elements that tensors in the pool may have.
struct Element {
    enum class Kind : std::uint8_t { kFloat, kSigned, kUnsigned };
    // Open Inference Protocol's name, and numpy's.
    std::string_view datatype, dtype;
    std::int64_t bytes;
    Kind kind;
};

// Returns null for a datatype that no tensor in the pool has.
const Element* find_element(std::string_view datatype);

// What a model takes under one name.
struct PlainInput {
    std::string name;
    const Element* element = nullptr;
    // It may come as INT32 instead of INT64.
    bool also_int32 = false;
    bool required = true;
    std::vector<std::int64_t> shape;
    // Of indices: the count that the values of each row are below, or one for all rows.
    std::vector<std::size_t> below;
    // Of other integers: the least and the greatest value; a BOOL is 0 or 1.
    std::int64_t low = 0, high = 1;
    // Its values number graphs: how many there are is one more than the largest.
    bool numbers_graphs = false;
    // It tells the graph of each of some things, and the sizes of graphs are counted.
    bool counts_graphs = false;
    // No value may be less than the one before it.
    bool ascends = false;

    bool is_index() const { return !below.empty(); }
    bool is_edges() const { return is_index() && shape.size() == 2 && shape[1] == kEdges; }
};

// What a model returns under one name; an upper bound of its bytes is constant + Σ per · count.
struct PlainOutput {
    std::string name;
    double constant = 0;
    std::vector<double> per;
};

// A model.
struct PlainModel {
    // Names it in what comes out of the front.
    std::uint64_t token = 0;
    // Numbers of counts, and how many of them, the first ones, are of nodes.
    std::size_t counts = 2, node_counts = 1;
    // In the order in which they are staged.
    std::vector<PlainInput> inputs;
    std::vector<PlainOutput> outputs;
    // INT32 edges stay INT32.
    bool narrow_edges = false;
    bool counts_loops = false;
};

// Models by name and version; the default version also under the empty one.
class PlainModels {
public:
    void add(const std::string& name, const std::string& version,
             std::shared_ptr<const PlainModel> model);
    // Returns null for an unknown one.
    std::shared_ptr<const PlainModel> find(std::string_view name, std::string_view version) const;

private:
    std::unordered_map<std::string, std::shared_ptr<const PlainModel>> models_;
};

}  // namespace gnnserve::front
