// Compares the device's kernels along edges, run on the host (simt.hpp), with the processor's:
// every reduction and score, widths that do and do not fit vectors, rows with no slots and with
// thousands.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <random>
#include <vector>

#include "check.hpp"
#include "gnnserve/aggregate.hpp"
#include "graph_api.cuh"

namespace {

using gnnserve::Csr;
using gnnserve::Reduce;
using gnnserve::Score;
using Floats = std::vector<float>;
using Ints = std::vector<std::int32_t>;

std::mt19937 random_bits(7);

Floats random_floats(std::int64_t count) {
    std::normal_distribution<float> normal;
    Floats found(static_cast<std::size_t>(count));
    std::generate(found.begin(), found.end(), [&] { return normal(random_bits); });
    return found;
}

struct Edges {
    std::int64_t rows;
    std::vector<std::int64_t> source;
    std::vector<std::int64_t> target;

    std::int64_t count() const { return static_cast<std::int64_t>(source.size()); }
};

// Puts what is no edge before, between and behind the edges.
Edges with_none(const Edges& edges) {
    Edges found{edges.rows, {-1, -1}, {-1, -1}};
    for (std::size_t e = 0; e < edges.source.size(); ++e) {
        found.source.insert(found.source.end(), {edges.source[e], -1});
        found.target.insert(found.target.end(), {edges.target[e], -1});
    }
    return found;
}

// Returns uniform edges, a fifth of them loops, and `into_first` more that end in node 0.
Edges random_edges(std::int64_t rows, std::int64_t count, std::int64_t into_first = 0) {
    Edges edges{rows, {}, {}};
    for (std::int64_t e = 0; e < count + into_first; ++e) {
        const auto node = [&] {
            return static_cast<std::int64_t>(random_bits() % static_cast<std::uint64_t>(rows));
        };
        const std::int64_t from = node();
        const bool loop = e % 5 == 0 && e < count;
        edges.source.push_back(from);
        edges.target.push_back(e >= count ? 0 : loop ? from : node());
    }
    return edges;
}

// A graph in the device's form, and the number of its slots that belong to rows.
struct Graph {
    Ints begin, source, edge;
    std::int64_t rows;
    std::int64_t room;
    std::int64_t slots = 0;

    Graph(const Edges& edges, bool loops)
        : begin(static_cast<std::size_t>(edges.rows) + 1),
          rows(edges.rows),
          room(edges.count() + (loops ? edges.rows : 0)) {
        source.assign(static_cast<std::size_t>(room), -7);
        edge.assign(static_cast<std::size_t>(room), -7);
        std::vector<unsigned char> scratch(
            static_cast<std::size_t>(gnnserve_graph_csr_scratch(edges.count())));
        CHECK(gnnserve_graph_csr(edges.source.data(), edges.target.data(), 0, edges.count(), rows,
                                 loops, begin.data(), source.data(), edge.data(), scratch.data(),
                                 nullptr) == 0);
        slots = begin.back();
    }

    std::int64_t pieces(int variant) const { return gnnserve_graph_pieces(room, variant); }
    Csr csr() const { return {begin.data(), source.data(), rows}; }
};

constexpr int kVariantCount = std::size(gnnserve::kVariants);

bool close(const Floats& found, const Floats& expected) {
    float scale = 1e-6F;
    for (const float value : expected) {
        scale = std::max(scale, std::abs(value));
    }
    for (std::size_t i = 0; i < expected.size(); ++i) {
        if (!(std::abs(found[i] - expected[i]) <= 1e-4F * scale)) {
            std::fprintf(stderr, "[%zu] is %g, not %g\n", i, static_cast<double>(found[i]),
                         static_cast<double>(expected[i]));
            return false;
        }
    }
    return found.size() == expected.size();
}

void test_csr() {
    for (const bool loops : {false, true}) {
        for (const auto& edges :
             {random_edges(1, 0), random_edges(1, 6), random_edges(40, 0), random_edges(70, 300),
              random_edges(30, 40, 5000), with_none(random_edges(1, 6)),
              with_none(random_edges(70, 300)), with_none(random_edges(9, 0))}) {
            const Graph graph(edges, loops);
            Ints begin(graph.begin.size());
            Ints source(graph.source.size());
            Ints edge(graph.edge.size());
            const std::int64_t slots = gnnserve::build_csr(
                edges.source.data(), edges.target.data(), edges.count(), edges.rows,
                loops ? gnnserve::Loops::kReplace : gnnserve::Loops::kKeep, begin.data(),
                source.data(), edge.data());
            CHECK(graph.slots == slots && graph.begin == begin);
            for (std::int64_t s = 0; s < graph.room; ++s) {
                const auto i = static_cast<std::size_t>(s);
                CHECK(graph.source[i] == (s < slots ? source[i] : 0));
                CHECK(graph.edge[i] == (s < slots ? edge[i] : -1));
            }
            const Floats value = random_floats(edges.count());
            Floats spread(graph.source.size());
            Floats expected(graph.source.size(), 2.5F);
            CHECK(gnnserve_graph_spread(graph.edge.data(), graph.room, value.data(), 2.5F,
                                        spread.data(), nullptr) == 0);
            gnnserve::spread(edge.data(), slots, value.data(), 2.5F, expected.data());
            CHECK(spread == expected);
            Floats positive(spread.size());
            std::transform(spread.begin(), spread.end(), positive.begin(),
                           [](float value) { return std::abs(value); });
            for (const bool weighted : {false, true}) {
                const float* weight = weighted ? positive.data() : nullptr;
                Floats found(spread.size());
                Floats wanted(spread.size());
                Floats scratch(static_cast<std::size_t>(edges.rows));
                CHECK(gnnserve_graph_normalise(graph.begin.data(), graph.source.data(), edges.rows,
                                               weight, found.data(), scratch.data(), nullptr) == 0);
                gnnserve::normalise(graph.csr(), weight, wanted.data(), scratch.data());
                CHECK(close(found, wanted));
            }
        }
    }
}

// What is no edge changes nothing but the numbers of the edges.
void test_no_edges() {
    for (const bool loops : {false, true}) {
        const Edges edges = random_edges(40, 200);
        const Graph with(with_none(edges), loops);
        const Graph without(edges, loops);
        CHECK(with.begin == without.begin && with.slots == without.slots);
        for (std::int64_t s = 0; s < with.slots; ++s) {
            const auto i = static_cast<std::size_t>(s);
            CHECK(with.source[i] == without.source[i]);
            CHECK(with.edge[i] == (without.edge[i] < 0 ? -1 : 2 * without.edge[i] + 2));
        }
    }
}

// Every slot of a heavy row is in exactly one of its pieces, slots of other rows are in none, and
// the row is combined from just these pieces.
void check_pieces(const Csr& csr, std::int64_t room, std::int64_t pieces,
                  std::int32_t chunk_slots) {
    std::vector<int> covered(static_cast<std::size_t>(room), 0);
    std::vector<std::int64_t> row_of(static_cast<std::size_t>(pieces), -1);
    for (std::int64_t piece = 0; piece < pieces; ++piece) {
        const auto part = gnnserve::slots_of_piece(csr, piece, chunk_slots);
        CHECK(part.end - part.begin <= chunk_slots);
        for (std::int32_t s = part.begin; s < part.end; ++s) {
            ++covered[static_cast<std::size_t>(s)];
            row_of[static_cast<std::size_t>(piece)] = part.row;
        }
    }
    std::vector<int> begun(static_cast<std::size_t>(csr.rows), 0);
    for (std::int64_t chunk = 0; chunk < pieces / gnnserve::kPieces; ++chunk) {
        const auto row = gnnserve::heavy_row_of(csr, chunk, chunk_slots);
        if (row.begin == row.end) {
            continue;
        }
        ++begun[static_cast<std::size_t>(row.row)];
        const gnnserve::RowPieces of_row(row, chunk_slots);
        std::int32_t next = row.begin;
        for (std::int32_t i = 0; i < of_row.count; ++i) {
            const std::int64_t piece = of_row.at(i);
            CHECK(row_of[static_cast<std::size_t>(piece)] == row.row);
            row_of[static_cast<std::size_t>(piece)] = -1;
            const auto part = gnnserve::slots_of_piece(csr, piece, chunk_slots);
            CHECK(part.begin == next);
            next = part.end;
        }
        CHECK(next == row.end);
    }
    for (const std::int64_t row : row_of) {
        CHECK(row == -1);
    }
    for (std::int64_t i = 0; i < csr.rows; ++i) {
        const auto row = gnnserve::slots_of_row(csr, i);
        const int times = gnnserve::is_heavy(row, chunk_slots) ? 1 : 0;
        CHECK(begun[static_cast<std::size_t>(i)] == times);
        for (std::int32_t s = row.begin; s < row.end; ++s) {
            CHECK(covered[static_cast<std::size_t>(s)] == times);
        }
    }
}

// Also of a part of a graph, whose first row does not begin at slot 0.
void test_pieces() {
    for (const std::int64_t slots : {255, 256, 512, 513, 1000, 1280, 9000}) {
        Edges edges = random_edges(50, 100, slots);
        for (std::int64_t e = 0; e < 2 * slots; ++e) {
            edges.source.push_back(3);
            edges.target.push_back(e % 2 == 0 ? 17 : 18);
        }
        const Graph graph(edges, true);
        const Csr csr = graph.csr();
        for (int variant = 0; variant < kVariantCount; ++variant) {
            const std::int32_t chunk_slots = gnnserve::kVariants[variant].chunk_slots;
            const std::int64_t pieces = graph.pieces(variant);
            check_pieces(csr, graph.room, pieces, chunk_slots);
            for (const std::int64_t first : {1, 17, 18, 19}) {
                check_pieces({csr.begin + first, csr.source, csr.rows - first}, graph.room, pieces,
                             chunk_slots);
            }
        }
    }
}

// A caller that does not know whether a graph has edge ids asks for twice the chunks; with more
// than 2^30 edges their slots exceed int32.
void test_chunks_behind_the_last_slot() {
    for (const gnnserve::Variant& variant : gnnserve::kVariants) {
        const std::int32_t chunk_slots = variant.chunk_slots;
        const Graph graph(random_edges(1, 5, 3 * variant.heavy_slots()), false);
        const Csr csr = graph.csr();
        const std::int64_t last = variant.chunks_of(csr.begin[csr.rows]) - 1;
        CHECK(gnnserve::slots_of_piece(csr, gnnserve::kPieces * last, chunk_slots).end ==
              csr.begin[csr.rows]);
        for (const std::int64_t chunk : {last + 1, (std::int64_t{1} << 21) - 1,
                                         std::int64_t{1} << 21, std::int64_t{3} << 20}) {
            for (std::int64_t piece = 0; piece < gnnserve::kPieces; ++piece) {
                const auto slots =
                    gnnserve::slots_of_piece(csr, gnnserve::kPieces * chunk + piece, chunk_slots);
                CHECK(slots.begin == slots.end);
            }
            const auto row = gnnserve::heavy_row_of(csr, chunk, chunk_slots);
            CHECK(row.begin == row.end);
        }
    }
}

// Of every variant; those that cut rows alike give the same bits.
void test_aggregate(const Edges& edges, std::int64_t width) {
    Graph graph(edges, false);
    const auto size = edges.rows * width;
    const Floats x = random_floats(size);
    const Floats skip = random_floats(size);
    const Floats bias = random_floats(width);
    const Floats weight = random_floats(graph.room);
    for (const Reduce reduce : {Reduce::kSum, Reduce::kMean, Reduce::kMax, Reduce::kMin}) {
        for (const bool all : {false, true}) {
            const float* weights = all ? weight.data() : nullptr;
            const gnnserve::Finish finish =
                all ? gnnserve::Finish{skip.data(), 0.5F, bias.data(), true} : gnnserve::Finish{};
            Floats expected(x.size());
            gnnserve::aggregate(
                {graph.csr(), x.data(), weights, width, reduce, finish, expected.data()});
            std::vector<Floats> found(kVariantCount, Floats(x.size(), NAN));
            for (int variant = 0; variant < kVariantCount; ++variant) {
                Floats partial(static_cast<std::size_t>(graph.pieces(variant) * width), NAN);
                CHECK(gnnserve_graph_aggregate(graph.begin.data(), graph.source.data(), edges.rows,
                                               graph.room, variant, partial.data(), x.data(),
                                               weights, width, static_cast<int>(reduce),
                                               finish.skip, finish.skip_scale, finish.bias,
                                               finish.relu, found[variant].data(), nullptr) == 0);
                CHECK(close(found[variant], expected));
            }
            CHECK(found[0] == found[2] && found[0] == found[3]);
        }
    }
}

void test_extremes_of_no_numbers(const Edges& edges, std::int64_t width) {
    const Graph graph(edges, false);
    Floats x = random_floats(edges.rows * width);
    for (std::size_t i = 0; i < x.size(); i += 37) {
        x[i] = NAN;
    }
    for (const Reduce reduce : {Reduce::kMax, Reduce::kMin}) {
        Floats expected(x.size());
        gnnserve::aggregate({graph.csr(), x.data(), nullptr, width, reduce, {}, expected.data()});
        for (int variant = 0; variant < kVariantCount; ++variant) {
            Floats partial(static_cast<std::size_t>(graph.pieces(variant) * width));
            Floats found(x.size());
            CHECK(gnnserve_graph_aggregate(graph.begin.data(), graph.source.data(), edges.rows,
                                           graph.room, variant, partial.data(), x.data(), nullptr,
                                           width, static_cast<int>(reduce), nullptr, 1, nullptr, 0,
                                           found.data(), nullptr) == 0);
            for (std::size_t i = 0; i < x.size(); ++i) {
                CHECK(std::isnan(found[i]) == std::isnan(expected[i]));
            }
        }
    }
}

void test_attend(const Edges& edges, Score score, std::int64_t heads, std::int64_t channels,
                 bool average) {
    const bool additive = score == Score::kAdditive;
    for (const bool loops : {false, true}) {
        Graph graph(edges, loops);
        const std::int64_t width = heads * channels;
        const Floats left = random_floats(edges.rows * (additive ? heads : width));
        const Floats right = random_floats(edges.rows * (additive ? heads : width));
        const Floats value = random_floats(edges.rows * width);
        const Floats att = random_floats(width);
        const Floats edge = random_floats(edges.count() * heads + 1);
        const std::int64_t out_width = average ? channels : width;
        const Floats skip = random_floats(edges.rows * out_width);
        const Floats bias = random_floats(out_width);
        Floats alpha(static_cast<std::size_t>(graph.room * heads));
        Floats expected(static_cast<std::size_t>(edges.rows * out_width));
        for (const bool all : {false, true}) {
            const float* edges_too = all && additive ? edge.data() : nullptr;
            const gnnserve::Finish finish =
                all ? gnnserve::Finish{skip.data(), 1, bias.data()} : gnnserve::Finish{};
            gnnserve::attend({graph.csr(), score, left.data(), right.data(), edges_too,
                              graph.edge.data(), loops, att.data(), 0.2F, value.data(), heads,
                              channels, average, finish, alpha.data(), expected.data()});
            // They differ in the chunks only, which heavy rows are cut at.
            for (int variant = 0; variant < (edges.count() > 1000 ? 2 : 1); ++variant) {
                Floats partial(
                    static_cast<std::size_t>(graph.pieces(variant) * heads * (channels + 2)), NAN);
                Floats found(expected.size(), NAN);
                CHECK(gnnserve_graph_attend(graph.begin.data(), graph.source.data(), edges.rows,
                                            graph.room, variant, partial.data(),
                                            static_cast<int>(score), left.data(), right.data(),
                                            edges_too, graph.edge.data(), loops, att.data(), 0.2F,
                                            value.data(), heads, channels, average, finish.skip,
                                            finish.bias, found.data(), nullptr) == 0);
                CHECK(close(found, expected));
            }
        }
    }
}

void test_head_dots() {
    for (const std::int64_t channels : {1, 3, 8, 50}) {
        const std::int64_t rows = 37;
        const std::int64_t heads = 3;
        const Floats x = random_floats(rows * heads * channels);
        const Floats att = random_floats(heads * channels);
        Floats found(static_cast<std::size_t>(rows * heads), NAN);
        Floats expected(found.size());
        gnnserve::head_dots({x.data(), att.data(), rows, heads, channels, expected.data()});
        CHECK(gnnserve_graph_head_dots(x.data(), att.data(), rows, heads, channels, found.data(),
                                       nullptr) == 0);
        CHECK(close(found, expected));
    }
}

}  // namespace

int main() {
    test_csr();
    test_no_edges();
    test_pieces();
    test_chunks_behind_the_last_slot();
    const Edges light = random_edges(60, 400);
    const Edges heavy = random_edges(20, 30, 2700);
    for (const std::int64_t width : {1, 2, 4, 7, 16, 50, 64, 100, 128, 200, 260, 300}) {
        test_aggregate(light, width);
    }
    // Long rows of a small graph are not cut into pieces.
    const Edges small = random_edges(20, 30, 900);
    for (const std::int64_t width : {1, 7, 16, 100, 300}) {
        test_aggregate(heavy, width);
        test_aggregate(small, width);
        test_extremes_of_no_numbers(heavy, width);
    }
    for (const Score score : {Score::kAdditive, Score::kDynamic, Score::kDot}) {
        for (const bool average : {false, true}) {
            for (const auto& [heads, channels] : std::vector<std::pair<std::int64_t, std::int64_t>>{
                     {1, 1}, {1, 130}, {2, 8}, {3, 5}, {4, 16}, {8, 32}, {1, 300}}) {
                test_attend(light, score, heads, channels, average);
            }
            test_attend(heavy, score, 2, 12, average);
            test_attend(small, score, 2, 12, average);
        }
    }
    test_head_dots();
}
