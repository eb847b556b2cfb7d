#include "gnnserve/csr.hpp"

#include <algorithm>
#include <cmath>

namespace gnnserve {

template <typename Index>
std::int64_t build_csr(const Index* source, const Index* target, std::int64_t edges,
                       std::int64_t rows, Loops loops, std::int32_t* begin,
                       std::int32_t* slot_source, std::int32_t* slot_edge) {
    const bool replace = loops == Loops::kReplace;
    // Counts are stored two places to the right: after summing, begin[i + 1] is the start of row i,
    // and placing the row's edges moves it to the end. This needs no second array.
    std::fill_n(begin, rows + 1, 0);
    const auto last = static_cast<std::uint64_t>(rows);
    std::int64_t dropped = 0;
    std::int64_t none = 0;
    for (std::int64_t e = 0; e < edges; ++e) {
        const auto from = static_cast<std::uint64_t>(source[e]);
        const auto to = static_cast<std::uint64_t>(target[e]);
        if (from >= last || to >= last) {
            if (source[e] != kNoEdge || target[e] != kNoEdge) {
                return kOutside;
            }
            ++none;
            continue;
        }
        const bool drop = replace && from == to;
        dropped += drop;
        if (to + 2 <= last && !drop) {
            ++begin[to + 2];
        }
    }
    const std::int32_t each = replace ? 1 : 0;
    std::int32_t sum = 0;
    for (std::int64_t i = 1; i <= rows; ++i) {
        sum += begin[i] + (i > 1 ? each : 0);
        begin[i] = sum;
    }
    if (replace) {
        for (std::int64_t i = 0; i < rows; ++i) {
            const std::int32_t slot = begin[i + 1]++;
            slot_source[slot] = static_cast<std::int32_t>(i);
            if (slot_edge != nullptr) {
                slot_edge[slot] = -1;
            }
        }
    }
    for (std::int64_t e = 0; e < edges; ++e) {
        if (target[e] == kNoEdge || (replace && source[e] == target[e])) {
            continue;
        }
        const std::int32_t slot = begin[static_cast<std::int64_t>(target[e]) + 1]++;
        slot_source[slot] = static_cast<std::int32_t>(source[e]);
        if (slot_edge != nullptr) {
            slot_edge[slot] = static_cast<std::int32_t>(e);
        }
    }
    for (std::int64_t e = 0; dropped > 0 && slot_edge != nullptr && e < edges; ++e) {
        if (source[e] == target[e] && target[e] != kNoEdge) {
            slot_edge[begin[target[e]]] = static_cast<std::int32_t>(e);
        }
    }
    return edges - none - dropped + (replace ? rows : 0);
}

template std::int64_t build_csr(const std::int32_t*, const std::int32_t*, std::int64_t,
                                std::int64_t, Loops, std::int32_t*, std::int32_t*, std::int32_t*);
template std::int64_t build_csr(const std::int64_t*, const std::int64_t*, std::int64_t,
                                std::int64_t, Loops, std::int32_t*, std::int32_t*, std::int32_t*);

void spread(const std::int32_t* slot_edge, std::int64_t slots, const float* value, float missing,
            float* out) {
    for (std::int64_t s = 0; s < slots; ++s) {
        out[s] = slot_edge[s] < 0 ? missing : value[slot_edge[s]];
    }
}

void normalise(const Csr& graph, const float* weight, float* out, float* scratch) {
    for (std::int64_t i = 0; i < graph.rows; ++i) {
        float degree = static_cast<float>(graph.begin[i + 1] - graph.begin[i]);
        if (weight != nullptr) {
            degree = 0;
            for (std::int32_t s = graph.begin[i]; s < graph.begin[i + 1]; ++s) {
                degree += weight[s];
            }
        }
        scratch[i] = degree == 0 ? 0.0F : 1.0F / std::sqrt(degree);
    }
    for (std::int64_t i = 0; i < graph.rows; ++i) {
        for (std::int32_t s = graph.begin[i]; s < graph.begin[i + 1]; ++s) {
            const float both = scratch[graph.source[s]] * scratch[i];
            out[s] = weight == nullptr ? both : both * weight[s];
        }
    }
}

}  // namespace gnnserve
