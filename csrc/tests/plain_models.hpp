// Inputs and models for tests of what the front stages.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "plain_model.hpp"

namespace gnnserve::front {

inline PlainInput elements_of(std::string name, const char* datatype,
                              std::vector<std::int64_t> shape, std::int64_t low = 0,
                              std::int64_t high = 1) {
    PlainInput found;
    found.name = std::move(name);
    found.element = find_element(datatype);
    found.shape = std::move(shape);
    found.low = low;
    found.high = high;
    return found;
}

// Indices that are below the counts.
inline PlainInput indices_of(std::string name, std::vector<std::int64_t> shape,
                             std::vector<std::size_t> below, bool also_int32 = true) {
    PlainInput found = elements_of(std::move(name), "INT64", std::move(shape));
    found.below = std::move(below);
    found.also_int32 = also_int32;
    return found;
}

inline PlainInput optional(PlainInput input) {
    input.required = false;
    return input;
}

// One output of that many bytes for each node, and besides.
inline PlainModel short_form(std::int64_t features, double output_nodes = 0,
                             double output_constant = 0) {
    PlainModel found;
    found.inputs = {elements_of("x", "FP32", {kNodes, features}),
                    indices_of("edge_index", {2, kEdges}, {0})};
    found.outputs = {{"output", output_constant, {output_nodes, 0}}};
    return found;
}

// Authors (A), papers (P) and what authors write (W), with a tensor of every kind.
inline PlainModel declared() {
    constexpr std::int64_t kAuthors = size_of_count(0), kPapers = size_of_count(1),
                           kWrites = size_of_count(2);
    PlainModel found;
    found.counts = 3;
    found.node_counts = 2;
    found.inputs = {elements_of("x.author", "FP16", {kAuthors, 3}),
                    elements_of("kind", "INT8", {kAuthors}, -5, 90),
                    indices_of("writes", {2, kWrites}, {0, 1}),
                    elements_of("known", "BOOL", {kPapers}),
                    indices_of("graph", {kPapers}, {1}),
                    optional(elements_of("year", "INT16", {kPapers}, 1900, 2100)),
                    optional(elements_of("score", "FP64", {kWrites})),
                    optional(elements_of("level", "UINT8", {kPapers}, 3, 200)),
                    optional(elements_of("number", "INT32", {kPapers}, -100, 1 << 30)),
                    optional(elements_of("serial", "INT64", {kPapers}, INT64_MIN, 1 << 30))};
    found.inputs[4].numbers_graphs = found.inputs[4].counts_graphs = true;
    found.outputs = {{"y", 0, {4, 0, 0}}, {"z", 0, {0, 8, 0}}};
    return found;
}

// Short form as "gcn", declared as "typed"; the default versions.
inline std::shared_ptr<const PlainModels> served(PlainModel gcn) {
    auto found = std::make_shared<PlainModels>();
    found->add("gcn", "", std::make_shared<PlainModel>(std::move(gcn)));
    found->add("typed", "", std::make_shared<PlainModel>(declared()));
    return found;
}

}  // namespace gnnserve::front
