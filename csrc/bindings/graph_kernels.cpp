// The kernels along edges, for serve.native. Arrays are given by address: what calls them a dozen
// times in a forward pass of a hundred microseconds cannot afford to describe each one.

#include "graph_kernels.hpp"

#include <cstdint>

#include "gnnserve/aggregate.hpp"
#include "gnnserve/csr.hpp"

namespace nb = nanobind;

namespace {

using Address = std::uintptr_t;

template <typename T>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

gnnserve::Csr csr(Address begin, Address source, std::int64_t rows) {
    return {at<const std::int32_t>(begin), at<const std::int32_t>(source), rows};
}

gnnserve::Finish finish(Address skip, float skip_scale, Address bias, bool relu) {
    return {at<const float>(skip), skip_scale, at<const float>(bias), relu};
}

std::int64_t build_csr(Address source, Address target, bool is_int32, std::int64_t edges,
                       std::int64_t rows, bool replace_loops, Address begin, Address slot_source,
                       Address slot_edge) {
    const auto loops = replace_loops ? gnnserve::Loops::kReplace : gnnserve::Loops::kKeep;
    const auto build = [&]<typename Index>(const Index* from) {
        return gnnserve::build_csr(from, at<const Index>(target), edges, rows, loops,
                                   at<std::int32_t>(begin), at<std::int32_t>(slot_source),
                                   at<std::int32_t>(slot_edge));
    };
    return is_int32 ? build(at<const std::int32_t>(source)) : build(at<const std::int64_t>(source));
}

void spread(Address slot_edge, std::int64_t slots, Address value, float missing, Address out) {
    gnnserve::spread(at<const std::int32_t>(slot_edge), slots, at<const float>(value), missing,
                     at<float>(out));
}

void normalise(Address begin, Address source, std::int64_t rows, Address weight, Address out,
               Address scratch) {
    gnnserve::normalise(csr(begin, source, rows), at<const float>(weight), at<float>(out),
                        at<float>(scratch));
}

void aggregate(Address begin, Address source, std::int64_t rows, Address x, Address weight,
               std::int64_t width, int reduce, Address skip, float skip_scale, Address bias,
               bool relu, Address out) {
    gnnserve::aggregate({csr(begin, source, rows), at<const float>(x), at<const float>(weight),
                         width, static_cast<gnnserve::Reduce>(reduce),
                         finish(skip, skip_scale, bias, relu), at<float>(out)});
}

void attend(Address begin, Address source, std::int64_t rows, int score, Address left,
            Address right, Address edge, Address slot_edge, bool added_loops, Address att,
            float scale, Address value, std::int64_t heads, std::int64_t channels, bool average,
            Address skip, Address bias, bool relu, Address alpha, Address out) {
    gnnserve::attend({csr(begin, source, rows), static_cast<gnnserve::Score>(score),
                      at<const float>(left), at<const float>(right), at<const float>(edge),
                      at<const std::int32_t>(slot_edge), added_loops, at<const float>(att), scale,
                      at<const float>(value), heads, channels, average, finish(skip, 1, bias, relu),
                      at<float>(alpha), at<float>(out)});
}

void head_dots(Address x, Address att, std::int64_t rows, std::int64_t heads, std::int64_t channels,
               Address out) {
    gnnserve::head_dots(
        {at<const float>(x), at<const float>(att), rows, heads, channels, at<float>(out)});
}

}  // namespace

void bind_graph_kernels(nb::module_& module) {
    using namespace nb::literals;
    module.def("build_csr", &build_csr, "source"_a, "target"_a, "is_int32"_a, "edges"_a, "rows"_a,
               "replace_loops"_a, "begin"_a, "slot_source"_a, "slot_edge"_a);
    module.def("spread", &spread, "slot_edge"_a, "slots"_a, "value"_a, "missing"_a, "out"_a);
    module.def("normalise", &normalise, "begin"_a, "source"_a, "rows"_a, "weight"_a, "out"_a,
               "scratch"_a);
    module.def("aggregate", &aggregate, "begin"_a, "source"_a, "rows"_a, "x"_a, "weight"_a,
               "width"_a, "reduce"_a, "skip"_a, "skip_scale"_a, "bias"_a, "relu"_a, "out"_a);
    module.def("attend", &attend, "begin"_a, "source"_a, "rows"_a, "score"_a, "left"_a, "right"_a,
               "edge"_a, "slot_edge"_a, "added_loops"_a, "att"_a, "scale"_a, "value"_a, "heads"_a,
               "channels"_a, "average"_a, "skip"_a, "bias"_a, "relu"_a, "alpha"_a, "out"_a);
    module.def("head_dots", &head_dots, "x"_a, "att"_a, "rows"_a, "heads"_a, "channels"_a, "out"_a);
    module.def("instruction_set", &gnnserve::instruction_set);
    module.attr("MOST_HEADS") = gnnserve::kMostHeads;
}
