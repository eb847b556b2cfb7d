// Sorting a graph's edges by destination on the device; what csr.hpp says holds here too. Edges are
// sorted by a stable radix sort, so a row's slots are in the order of the edge list and sums over
// them the same at every run.
//
// The host never learns how many slots there are, which would cost a wait. Slots behind the last
// row's, as many as loops were dropped, have source 0 and edge -1 and belong to nobody.
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

    __device__ std::int64_t at(const void* from, std::int64_t e) const {
        return is_int32 ? static_cast<const std::int32_t*>(from)[e]
                        : static_cast<const std::int64_t*>(from)[e];
    }
};

__device__ inline std::int64_t thread_of_grid() {
    return static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}

// Thread e: what edge e is sorted by. A dropped loop comes behind all rows. An edge to a node that
// does not exist ends the process's use of the device, as torch's own kernels do: requests are
// checked before they come here, so it is a model's own.
__global__ void csr_keys(CsrBuild build, std::uint32_t* key, std::uint32_t* value) {
    const std::int64_t e = thread_of_grid();
    if (e >= build.edges) {
        return;
    }
    const auto from = static_cast<std::uint64_t>(build.source_of(e));
    const auto to = static_cast<std::uint64_t>(build.target_of(e));
    const auto rows = static_cast<std::uint64_t>(build.rows);
    if (from >= rows || to >= rows) {
        __trap();
    }
    key[e] = static_cast<std::uint32_t>(build.replace_loops && from == to ? rows : to);
    value[e] = static_cast<std::uint32_t>(e);
}

// The first position whose key is not below `wanted`.
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

// Thread i of rows + 1: where row i starts, and its added loop.
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

// Thread p: the slot of the p-th edge in order; for a dropped loop it is one that belongs to
// nobody, and the added loop remembers the last it replaces.
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
    if (dropped) {
        atomicMax(build.slot_edge + build.begin[build.target_of(e)], static_cast<std::int32_t>(e));
    }
}

// Thread s: out[s] = value[slot_edge[s]], or `missing`.
__global__ void csr_spread(const std::int32_t* slot_edge, std::int64_t slots, const float* value,
                           float missing, float* out) {
    const std::int64_t s = thread_of_grid();
    if (s < slots) {
        out[s] = slot_edge[s] < 0 ? missing : value[slot_edge[s]];
    }
}

// A warp a row: 1 / sqrt of what its slots weigh together.
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

// A warp a row: out[s] = w[s] · scale of both ends.
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
