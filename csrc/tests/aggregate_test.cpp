// Compares every instruction set of this processor with loops in double precision.

#include "gnnserve/aggregate.hpp"

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "../src/aggregate_isa.hpp"
#include "check.hpp"

using namespace gnnserve;

namespace {

using Floats = std::vector<float>;

std::mt19937 g_random(3);

Floats random_floats(std::size_t count) {
    std::normal_distribution<float> normal;
    Floats out(count);
    std::generate(out.begin(), out.end(), [&] { return normal(g_random); });
    return out;
}

struct Graph {
    // The last row has no edges, the first has many.
    Graph() {
        for (std::int32_t i = 0; i < kRows; ++i) {
            const std::int32_t count = i == 0 ? 90 : i + 1 == kRows ? 0 : i % 5;
            for (std::int32_t k = 0; k < count; ++k) {
                source.push_back(static_cast<std::int32_t>(g_random() % kRows));
            }
            begin.push_back(static_cast<std::int32_t>(source.size()));
        }
    }
    static constexpr std::int32_t kRows = 23;
    std::vector<std::int32_t> begin{0};
    std::vector<std::int32_t> source;
    Csr csr() const { return {begin.data(), source.data(), kRows}; }
    std::size_t slots() const { return source.size(); }
};

void check_near(float given, double expected) {
    CHECK(std::abs(given - expected) <= 2e-5 * (1 + std::abs(expected)));
}

double finished(double value, const Finish& finish, std::size_t place, std::size_t column) {
    value += finish.skip == nullptr ? 0 : finish.skip_scale * finish.skip[place];
    value += finish.bias == nullptr ? 0 : finish.bias[column];
    return finish.relu && value < 0 ? 0 : value;
}

void test_aggregate(const AggregateKernels& kernels, std::size_t width) {
    const Graph graph;
    const std::size_t rows = Graph::kRows;
    const Floats x = random_floats(rows * width);
    const Floats weight = random_floats(graph.slots());
    const Floats skip = random_floats(rows * width);
    const Floats bias = random_floats(width);
    Floats out(rows * width);
    for (const Reduce reduce : {Reduce::kSum, Reduce::kMean, Reduce::kMax, Reduce::kMin}) {
        for (const bool weighted : {false, true}) {
            const Finish finish =
                weighted ? Finish{skip.data(), 1.5F, bias.data(), true} : Finish{};
            kernels.aggregate({graph.csr(), x.data(), weighted ? weight.data() : nullptr,
                               static_cast<std::int64_t>(width), reduce, finish, out.data()});
            for (std::size_t i = 0; i < rows; ++i) {
                for (std::size_t c = 0; c < width; ++c) {
                    const auto first = static_cast<std::size_t>(graph.begin[i]);
                    const auto end = static_cast<std::size_t>(graph.begin[i + 1]);
                    double sum = 0;
                    double most = -INFINITY;
                    double least = INFINITY;
                    for (std::size_t s = first; s < end; ++s) {
                        const auto from = static_cast<std::size_t>(graph.source[s]);
                        const double term = static_cast<double>(x[from * width + c]) *
                                            (weighted ? static_cast<double>(weight[s]) : 1.0);
                        sum += term;
                        most = std::max(most, term);
                        least = std::min(least, term);
                    }
                    double expected = sum;
                    if (reduce == Reduce::kMean && end > first) {
                        expected = sum / static_cast<double>(end - first);
                    } else if (reduce == Reduce::kMax) {
                        expected = end > first ? most : 0;
                    } else if (reduce == Reduce::kMin) {
                        expected = end > first ? least : 0;
                    }
                    check_near(out[i * width + c], finished(expected, finish, i * width + c, c));
                }
            }
        }
    }
}

// Whatever the order of the slots, and also in vectors and behind them.
void test_extremes_of_no_numbers(const AggregateKernels& kernels, std::size_t width) {
    const std::vector<std::int32_t> begin{0, 3, 3, 3};
    const std::vector<std::int32_t> source{0, 1, 2};
    const Csr csr{begin.data(), source.data(), 3};
    const auto columns = static_cast<std::int64_t>(width);
    for (const Reduce reduce : {Reduce::kMax, Reduce::kMin}) {
        for (std::size_t place = 0; place < 3 * width; ++place) {
            Floats x = random_floats(3 * width);
            x[place] = NAN;
            Floats aggregated(3 * width);
            Floats combined(3 * width);
            kernels.aggregate({csr, x.data(), nullptr, columns, reduce, {}, aggregated.data()});
            kernels.combine({csr,
                             nullptr,
                             x.data(),
                             nullptr,
                             0,
                             nullptr,
                             0,
                             nullptr,
                             nullptr,
                             columns,
                             Gate::kNone,
                             reduce,
                             {},
                             combined.data()});
            for (std::size_t c = 0; c < width; ++c) {
                CHECK(std::isnan(aggregated[c]) == (c == place % width));
                CHECK(std::isnan(combined[c]) == (c == place % width));
            }
        }
    }
}

double leaky(double x, double slope) { return x > 0 ? x : x * slope; }

void test_attend(const AggregateKernels& kernels, std::size_t heads, std::size_t channels) {
    const Graph graph;
    const std::size_t rows = Graph::kRows;
    const std::size_t width = heads * channels;
    const Floats value = random_floats(rows * width);
    const Floats narrow_left = random_floats(rows * heads);
    const Floats narrow_right = random_floats(rows * heads);
    const Floats right = random_floats(rows * width);
    const Floats att = random_floats(width);
    const Floats edge = random_floats(graph.slots() * heads);
    std::vector<std::int32_t> slot_edge(graph.slots());
    for (std::size_t s = 0; s < slot_edge.size(); ++s) {
        slot_edge[s] = static_cast<std::int32_t>(slot_edge.size() - 1 - s);
    }
    Floats alpha(graph.slots() * heads);
    Floats out(rows * width);
    for (const Score score : {Score::kAdditive, Score::kDynamic, Score::kDot}) {
        for (const int way : {0, 1, 2}) {  // plain; averaged; with edges and added loops
            const bool average = way == 1;
            const bool edges = way == 2 && score == Score::kAdditive;
            const bool additive = score == Score::kAdditive;
            const Floats bias = random_floats(width);
            const Finish finish{nullptr, 1, way == 0 ? nullptr : bias.data(), way == 1};
            kernels.attend({graph.csr(), score, additive ? narrow_left.data() : value.data(),
                            additive ? narrow_right.data() : right.data(),
                            edges ? edge.data() : nullptr, slot_edge.data(), edges, att.data(),
                            0.2F, value.data(), static_cast<std::int64_t>(heads),
                            static_cast<std::int64_t>(channels), average, finish, alpha.data(),
                            out.data()});
            for (std::size_t i = 0; i < rows; ++i) {
                const auto first = static_cast<std::size_t>(graph.begin[i]);
                const auto end = static_cast<std::size_t>(graph.begin[i + 1]);
                std::vector<double> expected(width, 0.0);
                for (std::size_t h = 0; h < heads; ++h) {
                    std::vector<double> share;
                    double mean = 0;
                    for (std::size_t s = first + 1; s < end; ++s) {
                        mean += static_cast<double>(
                                    edge[static_cast<std::size_t>(slot_edge[s]) * heads + h]) /
                                static_cast<double>(end - first - 1);
                    }
                    for (std::size_t s = first; s < end; ++s) {
                        const auto j = static_cast<std::size_t>(graph.source[s]);
                        double raw = 0;
                        if (additive) {
                            raw = static_cast<double>(narrow_left[j * heads + h]) +
                                  static_cast<double>(narrow_right[i * heads + h]);
                            if (edges) {
                                raw +=
                                    s == first
                                        ? mean
                                        : static_cast<double>(
                                              edge[static_cast<std::size_t>(slot_edge[s]) * heads +
                                                   h]);
                            }
                            raw = leaky(raw, static_cast<double>(0.2F));
                        }
                        for (std::size_t c = 0; !additive && c < channels; ++c) {
                            const std::size_t at = h * channels + c;
                            const auto l = static_cast<double>(value[j * width + at]);
                            const auto r = static_cast<double>(right[i * width + at]);
                            raw += score == Score::kDot
                                       ? static_cast<double>(0.2F) * l * r
                                       : static_cast<double>(att[at]) *
                                             leaky(l + r, static_cast<double>(0.2F));
                        }
                        share.push_back(raw);
                    }
                    const double most =
                        share.empty() ? 0 : *std::max_element(share.begin(), share.end());
                    double sum = 0;
                    for (double& one : share) {
                        one = std::exp(one - most);
                        sum += one;
                    }
                    for (std::size_t s = first; s < end; ++s) {
                        const auto j = static_cast<std::size_t>(graph.source[s]);
                        for (std::size_t c = 0; c < channels; ++c) {
                            const std::size_t place = (average ? 0 : h * channels) + c;
                            expected[place] +=
                                share[s - first] / sum *
                                static_cast<double>(value[j * width + h * channels + c]) /
                                (average ? static_cast<double>(heads) : 1.0);
                        }
                    }
                }
                const std::size_t columns = average ? channels : width;
                for (std::size_t c = 0; c < columns; ++c) {
                    check_near(out[i * columns + c],
                               finished(expected[c], finish, i * columns + c, c));
                }
            }
        }
    }
}

// The slots of a graph by source, in order of their targets.
struct Reversed {
    explicit Reversed(const Graph& graph) {
        for (std::int32_t j = 0; j < Graph::kRows; ++j) {
            for (std::int32_t i = 0; i < Graph::kRows; ++i) {
                const auto row = static_cast<std::size_t>(i);
                for (std::int32_t s = graph.begin[row]; s < graph.begin[row + 1]; ++s) {
                    if (graph.source[static_cast<std::size_t>(s)] == j) {
                        target.push_back(i);
                        slot.push_back(s);
                    }
                }
            }
            begin.push_back(static_cast<std::int32_t>(target.size()));
        }
    }
    std::vector<std::int32_t> begin{0};
    std::vector<std::int32_t> target;
    std::vector<std::int32_t> slot;
    Csr csr() const { return {begin.data(), target.data(), Graph::kRows}; }
};

void check_all(const Floats& given, const std::vector<double>& expected, std::size_t count) {
    for (std::size_t k = 0; k < count; ++k) {
        const double error = std::abs(static_cast<double>(given[k]) - expected[k]);
        CHECK(error <= 1e-3 * (1 + std::abs(expected[k])));
    }
}

void test_attention_gradient(const AggregateKernels& kernels, std::size_t heads,
                             std::size_t channels, Score score, bool average) {
    const Graph graph;
    const Reversed reversed(graph);
    const std::size_t rows = Graph::kRows;
    const std::size_t width = heads * channels;
    const bool additive = score == Score::kAdditive;
    const std::size_t scored = additive ? heads : width;
    const float scale = 0.2F;
    const Floats left = random_floats(rows * scored);
    const Floats right = random_floats(rows * scored);
    const Floats att = random_floats(width);
    const Floats value = random_floats(rows * width);
    const Floats gradient = random_floats(rows * (average ? channels : width));
    Floats alpha(graph.slots() * heads);
    Floats out(rows * width);
    const auto many = static_cast<std::int64_t>(heads);
    const auto each = static_cast<std::int64_t>(channels);
    kernels.attend({graph.csr(),
                    score,
                    left.data(),
                    right.data(),
                    nullptr,
                    nullptr,
                    false,
                    att.data(),
                    scale,
                    value.data(),
                    many,
                    each,
                    average,
                    {},
                    alpha.data(),
                    out.data()});
    Floats of_score(graph.slots() * heads);
    Floats by_source(graph.slots() * heads);
    Floats of_left(rows * scored);
    Floats of_right(rows * scored);
    Floats of_value(rows * width);
    Floats of_att(width);
    kernels.attention_gradient(
        {graph.csr(),    reversed.csr(),  reversed.slot.data(), score,
         left.data(),    right.data(),    att.data(),           scale,
         value.data(),   alpha.data(),    gradient.data(),      many,
         each,           average,         of_score.data(),      by_source.data(),
         of_left.data(), of_right.data(), of_value.data(),      of_att.data()});

    std::vector<double> to_left(rows * scored);
    std::vector<double> to_right(rows * scored);
    std::vector<double> to_value(rows * width);
    std::vector<double> to_att(width);
    const auto at = [](const Floats& from, std::size_t k) { return static_cast<double>(from[k]); };
    const auto down = static_cast<double>(scale);
    for (std::size_t i = 0; i < rows; ++i) {
        const auto first = static_cast<std::size_t>(graph.begin[i]);
        const auto end = static_cast<std::size_t>(graph.begin[i + 1]);
        for (std::size_t h = 0; h < heads; ++h) {
            const std::size_t mine = average ? i * channels : i * width + h * channels;
            std::vector<double> of_alpha;
            double total = 0;
            for (std::size_t s = first; s < end; ++s) {
                const auto j = static_cast<std::size_t>(graph.source[s]);
                double sum = 0;
                for (std::size_t c = 0; c < channels; ++c) {
                    const std::size_t k = j * width + h * channels + c;
                    sum += at(gradient, mine + c) * at(value, k);
                    to_value[k] += at(alpha, s * heads + h) * at(gradient, mine + c);
                }
                of_alpha.push_back(sum);
                total += at(alpha, s * heads + h) * sum;
            }
            for (std::size_t s = first; s < end; ++s) {
                const auto j = static_cast<std::size_t>(graph.source[s]);
                const double step = at(alpha, s * heads + h) * (of_alpha[s - first] - total);
                for (std::size_t c = 0; c < (additive ? 1 : channels); ++c) {
                    const std::size_t from =
                        additive ? j * heads + h : j * width + h * channels + c;
                    const std::size_t to = additive ? i * heads + h : i * width + h * channels + c;
                    const double x = at(left, from) + at(right, to);
                    const double slope = x > 0 ? 1 : down;
                    if (score == Score::kDot) {
                        to_left[from] += step * down * at(right, to);
                        to_right[to] += step * down * at(left, from);
                        continue;
                    }
                    const double weight = additive ? 1 : at(att, h * channels + c);
                    to_left[from] += step * slope * weight;
                    to_right[to] += step * slope * weight;
                    to_att[h * channels + c] += step * slope * x;
                }
            }
        }
    }
    check_all(of_left, to_left, rows * scored);
    check_all(of_right, to_right, rows * scored);
    check_all(of_value, to_value, rows * width);
    check_all(of_att, to_att, score == Score::kDynamic ? width : 0);
}

void test_head_dots(const AggregateKernels& kernels) {
    const Floats x = random_floats(5 * 3 * 19);
    const Floats att = random_floats(3 * 19);
    Floats out(5 * 3);
    kernels.head_dots({x.data(), att.data(), 5, 3, 19, out.data()});
    for (std::size_t k = 0; k < out.size(); ++k) {
        double sum = 0;
        for (std::size_t c = 0; c < 19; ++c) {
            sum += static_cast<double>(x[k * 19 + c]) * static_cast<double>(att[k % 3 * 19 + c]);
        }
        check_near(out[k], sum);
    }
}

void test_all(const AggregateKernels& kernels) {
    // Widths around those of vectors and of blocks of vectors, and beyond all blocks.
    for (const std::size_t width : {1, 3, 4, 5, 12, 16, 17, 64, 100, 129, 256, 300, 9000}) {
        test_aggregate(kernels, width);
    }
    for (const std::size_t width : {1, 5, 16, 40}) {
        test_extremes_of_no_numbers(kernels, width);
    }
    for (const std::size_t channels : {1, 3, 4, 7, 12, 16, 64, 100}) {
        test_attend(kernels, 1, channels);
        test_attend(kernels, 3, channels);
        test_attend(kernels, 4, channels);
        test_attend(kernels, 8, channels);
        for (const Score score : {Score::kAdditive, Score::kDynamic, Score::kDot}) {
            test_attention_gradient(kernels, 1, channels, score, false);
            test_attention_gradient(kernels, 3, channels, score, true);
            test_attention_gradient(kernels, 4, channels, score, false);
        }
    }
    test_head_dots(kernels);
}

}  // namespace

int main() {
    test_all(kBaselineKernels);
#ifdef GNNSERVE_X86_LEVELS
    const std::string best = instruction_set();
    if (best != "baseline") {
        test_all(kV3Kernels);
    }
    if (best == "x86-64-v4") {
        test_all(kV4Kernels);
    }
#endif
}
