// Vocabulary of the kernels, so that the same source runs on a device and, one thread after
// another, on the host: csrc/tests/simt.hpp stands in for CUDA where nvcc does not compile.
#pragma once

#include "export.hpp"

#ifdef __CUDACC__
#include <cuda_runtime.h>

namespace gnnserve {

constexpr int kSuccess = cudaSuccess;
constexpr int kInvalidValue = cudaErrorInvalidValue;
using Stream = cudaStream_t;

// Starts a kernel; returns the cudaError_t of this launch only, not of an earlier failure.
template <typename... Parameters, typename... Arguments>
int launch(void (*kernel)(Parameters...), dim3 grid, int threads, void* stream,
           Arguments... arguments) {
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.stream = static_cast<cudaStream_t>(stream);
    const cudaError_t error =
        cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
    if (error != cudaSuccess) {
        (void)cudaGetLastError();
    }
    return error;
}

}  // namespace gnnserve
#else
#include "simt.hpp"
#endif

namespace gnnserve {

constexpr int kWarp = 32;

// Mask of this lane's team: `team` lanes side by side, a power of two up to kWarp.
__device__ inline unsigned team_lanes(int team) {
    const unsigned lane = threadIdx.x % kWarp;
    const unsigned first = lane - lane % static_cast<unsigned>(team);
    return (team == kWarp ? 0xFFFFFFFFU : (1U << team) - 1U) << first;
}

// Returns the sum of the team's values to all of them, added in a fixed order; all must call it.
__device__ inline float team_sum(float value, int team) {
    const unsigned lanes = team_lanes(team);
    for (int distance = team / 2; distance > 0; distance /= 2) {
        value += __shfl_xor_sync(lanes, value, distance);
    }
    return value;
}

// Returns the value of the team's `from`-th lane to all of them; all must call it with the same
// `from`.
template <typename Value>
__device__ inline Value team_get(Value value, int from, int team) {
    return __shfl_sync(team_lanes(team), value, from, team);
}

}  // namespace gnnserve
