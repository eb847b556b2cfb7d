// Sorts a graph's edges by destination on the device, with the contract of csr.hpp. The radix sort
// is stable, so a row's slots are in the order of the edge list, and sums over them are the same in
// every run.
//
// The host never learns the number of slots, which would cost a wait. Slots behind the last row's,
// one for each dropped pair, have source 0 and edge -1 and belong to no row.
#pragma once

#include <cstdint>

#include "gnnserve/csr.hpp"
#include "simt.cuh"

namespace gnnserve {

struct CsrBuild {
    const void* source;  // [edges], int32 or int64
    const void* target;
    bool is_int32;
    std::int64_t edges;
    std::int64_t rows;
    bool replace_loops;
    std::int32_t* begin;        // [rows + 1]
    std::int32_t* slot_source;  // [edges (+ rows)]
    std::int32_t* slot_edge;    // the same, or null

    __device__ std::int64_t source_of(std::int64_t e) const { return at(source, e); }
    __device__ std::int64_t target_of(std::int64_t e) const { return at(target, e); }

    __device__ bool is_none(std::int64_t e) const {
        return source_of(e) == kNoEdge && target_of(e) == kNoEdge;
    }

    __device__ std::int64_t at(const void* from, std::int64_t e) const {
        return is_int32 ? static_cast<const std::int32_t*>(from)[e]
                        : static_cast<const std::int64_t*>(from)[e];
    }
};

__device__ inline std::int64_t thread_of_grid() {
    return static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}

// Thread e writes the sort key of edge e. Dropped loops and what is no edge sort behind all rows.
// An edge to a node that does not exist makes the device unusable for the process, as in torch's
// own kernels. Requests are checked before, so only a model itself can make such an edge.
__global__ void csr_keys(CsrBuild build, std::uint32_t* key, std::uint32_t* value) {
    const std::int64_t e = thread_of_grid();
    if (e >= build.edges) {
        return;
    }
    const auto from = static_cast<std::uint64_t>(build.source_of(e));
    const auto to = static_cast<std::uint64_t>(build.target_of(e));
    const auto rows = static_cast<std::uint64_t>(build.rows);
    const bool none = build.is_none(e);
    if (!none && (from >= rows || to >= rows)) {
        __trap();
    }
    const bool dropped = none || (build.replace_loops && from == to);
    key[e] = static_cast<std::uint32_t>(dropped ? rows : to);
    value[e] = static_cast<std::uint32_t>(e);
}

// Returns the first position whose key is not below `wanted`.
__device__ inline std::int64_t lower_bound(const std::uint32_t* key, std::int64_t count,
                                           std::uint32_t wanted) {
    std::int64_t low = 0;
    while (count > 0) {
        const std::int64_t half = count / 2;
        if (key[low + half] < wanted) {
            low += half + 1;
            count -= half + 1;
        } else {
            count = half;
        }
    }
    return low;
}

// Thread i of rows + 1 writes the start of row i and its added loop.
__global__ void csr_rows(CsrBuild build, const std::uint32_t* key) {
    const std::int64_t i = thread_of_grid();
    if (i > build.rows) {
        return;
    }
    const std::int64_t each = build.replace_loops ? 1 : 0;
    const auto begin = static_cast<std::int32_t>(
        lower_bound(key, build.edges, static_cast<std::uint32_t>(i)) + each * i);
    build.begin[i] = begin;
    if (build.replace_loops && i < build.rows) {
        build.slot_source[begin] = static_cast<std::int32_t>(i);
        if (build.slot_edge != nullptr) {
            build.slot_edge[begin] = -1;
        }
    }
}

// Thread p writes the slot of the p-th edge in sorted order. What was dropped gets a slot of no
// row, and the added loop records the last loop that it replaces.
__global__ void csr_slots(CsrBuild build, const std::uint32_t* key, const std::uint32_t* value) {
    const std::int64_t p = thread_of_grid();
    if (p >= build.edges) {
        return;
    }
    const std::int64_t row = key[p];
    const std::int64_t e = value[p];
    const bool dropped = row == build.rows;
    const std::int64_t slot = p + (!build.replace_loops ? 0 : dropped ? build.rows : row + 1);
    build.slot_source[slot] = dropped ? 0 : static_cast<std::int32_t>(build.source_of(e));
    if (build.slot_edge == nullptr) {
        return;
    }
    build.slot_edge[slot] = dropped ? -1 : static_cast<std::int32_t>(e);
    if (dropped && !build.is_none(e)) {
        atomicMax(build.slot_edge + build.begin[build.target_of(e)], static_cast<std::int32_t>(e));
    }
}

// Thread s writes out[s] = value[slot_edge[s]], or `missing`.
__global__ void csr_spread(const std::int32_t* slot_edge, std::int64_t slots, const float* value,
                           float missing, float* out) {
    const std::int64_t s = thread_of_grid();
    if (s < slots) {
        out[s] = slot_edge[s] < 0 ? missing : value[slot_edge[s]];
    }
}

// One warp per row: 1 / sqrt of the sum of its slots' weights.
__global__ void csr_degrees(Csr graph, const float* weight, float* scale) {
    const std::int64_t row = thread_of_grid() / kWarp;
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    if (row >= graph.rows) {
        return;
    }
    const std::int32_t begin = graph.begin[row];
    const std::int32_t end = graph.begin[row + 1];
    float degree = static_cast<float>(end - begin);
    if (weight != nullptr) {
        float part = 0;
        for (std::int32_t s = begin + lane; s < end; s += kWarp) {
            part += weight[s];
        }
        degree = team_sum(part, kWarp);
    }
    if (lane == 0) {
        scale[row] = degree == 0 ? 0.0F : 1.0F / sqrtf(degree);
    }
}

// One warp per row: out[s] = w[s] · the scales of both ends.
__global__ void csr_normalise(Csr graph, const float* weight, const float* scale, float* out) {
    const std::int64_t row = thread_of_grid() / kWarp;
    if (row >= graph.rows) {
        return;
    }
    const std::int32_t end = graph.begin[row + 1];
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    for (std::int32_t s = graph.begin[row] + lane; s < end; s += kWarp) {
        const float both = scale[graph.source[s]] * scale[row];
        out[s] = weight == nullptr ? both : both * weight[s];
    }
}

}  // namespace gnnserve
