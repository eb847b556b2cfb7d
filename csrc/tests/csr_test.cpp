#include "gnnserve/csr.hpp"

#include <cmath>
#include <random>
#include <vector>

#include "check.hpp"

using gnnserve::build_csr;
using gnnserve::Csr;
using gnnserve::kOutside;
using gnnserve::Loops;

namespace {

// Sized exactly, so that AddressSanitizer sees every extra slot.
template <typename Index>
struct Sorted {
    Sorted(const std::vector<Index>& from, const std::vector<Index>& to, std::int64_t rows,
           Loops loops)
        : begin(static_cast<std::size_t>(rows + 1)),
          source(from.size() + (loops == Loops::kReplace ? static_cast<std::size_t>(rows) : 0)),
          edge(source.size()) {
        slots = build_csr(from.data(), to.data(), static_cast<std::int64_t>(from.size()), rows,
                          loops, begin.data(), source.data(), edge.data());
    }
    std::vector<std::int32_t> begin;
    std::vector<std::int32_t> source;
    std::vector<std::int32_t> edge;
    std::int64_t slots;
};

template <typename Index>
void test_sorts() {
    std::mt19937 random(1);
    for (const std::size_t rows : {1UL, 2UL, 7UL, 100UL}) {
        for (const std::size_t edges : {0UL, 1UL, 5UL, 1000UL}) {
            std::vector<Index> from(edges);
            std::vector<Index> to(edges);
            for (std::size_t e = 0; e < edges; ++e) {
                from[e] = static_cast<Index>(random() % rows);
                to[e] = static_cast<Index>(random() % rows);
            }
            for (const Loops loops : {Loops::kKeep, Loops::kReplace}) {
                const Sorted<Index> found(from, to, static_cast<std::int64_t>(rows), loops);
                const bool replace = loops == Loops::kReplace;
                std::size_t slot = 0;
                for (std::size_t i = 0; i < rows; ++i) {
                    CHECK(found.begin[i] == static_cast<std::int32_t>(slot));
                    std::int32_t loop = -1;
                    const std::size_t loop_slot = slot;
                    if (replace) {
                        CHECK(found.source[slot++] == static_cast<std::int32_t>(i));
                    }
                    for (std::size_t e = 0; e < edges; ++e) {
                        if (to[e] != static_cast<Index>(i)) {
                            continue;
                        }
                        if (replace && from[e] == to[e]) {
                            loop = static_cast<std::int32_t>(e);
                            continue;
                        }
                        CHECK(found.edge[slot] == static_cast<std::int32_t>(e));
                        CHECK(found.source[slot++] == static_cast<std::int32_t>(from[e]));
                    }
                    CHECK(!replace || found.edge[loop_slot] == loop);
                }
                CHECK(found.begin[rows] == static_cast<std::int32_t>(slot));
                CHECK(found.slots == static_cast<std::int64_t>(slot));
            }
        }
    }
}

template <typename Index>
void test_refuses() {
    for (const Index bad : {Index{-1}, Index{3}}) {
        CHECK((Sorted<Index>({0, bad}, {1, 2}, 3, Loops::kKeep).slots == kOutside));
        CHECK((Sorted<Index>({0, 1}, {bad, 2}, 3, Loops::kReplace).slots == kOutside));
    }
    CHECK((Sorted<Index>({0}, {0}, 0, Loops::kKeep).slots == kOutside));
    CHECK((Sorted<Index>({}, {}, 0, Loops::kReplace).slots == 0));
}

void test_weights() {
    const Sorted<std::int32_t> found({0, 1, 1, 2}, {1, 1, 0, 0}, 3, Loops::kReplace);
    const std::vector<float> weight{2, 3, 4, 5};
    std::vector<float> out(static_cast<std::size_t>(found.slots));
    std::vector<float> scratch(3);
    gnnserve::spread(found.edge.data(), found.slots, weight.data(), 7, out.data());
    // Row 0: its loop, 1, 2; row 1: its loop, which replaces edge 1, and 0; row 2: its loop.
    CHECK((out == std::vector<float>{7, 4, 5, 3, 2, 7}));
    const Csr graph{found.begin.data(), found.source.data(), 3};
    gnnserve::normalise(graph, out.data(), out.data(), scratch.data());
    CHECK(std::abs(out[1] - 4 / std::sqrt(16.0F * 5.0F)) < 1e-6F);
    gnnserve::normalise(graph, nullptr, out.data(), scratch.data());
    CHECK(std::abs(out[2] - 1 / std::sqrt(3.0F)) < 1e-6F);
    const Sorted<std::int32_t> alone({0}, {1}, 2, Loops::kKeep);
    gnnserve::normalise({alone.begin.data(), alone.source.data(), 2}, nullptr, out.data(),
                        scratch.data());
    CHECK(out[0] == 0);  // node 0 has a degree of 0
}

}  // namespace

int main() {
    test_sorts<std::int32_t>();
    test_sorts<std::int64_t>();
    test_refuses<std::int32_t>();
    test_refuses<std::int64_t>();
    test_weights();
}
