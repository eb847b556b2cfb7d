// What kernels are written in, so that the same source runs on a device and, thread after thread,
// on the host: csrc/tests/simt.hpp stands in for CUDA where nvcc does not compile.
#pragma once

#define GNNSERVE_EXPORT extern "C" __attribute__((visibility("default")))

#ifdef __CUDACC__
#include <cuda_runtime.h>

namespace gnnserve {

constexpr int kSuccess = cudaSuccess;
constexpr int kInvalidValue = cudaErrorInvalidValue;
using Stream = cudaStream_t;

// Starts a kernel; a cudaError_t as a number, of this launch and not of what failed before it.
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

// The lanes of this one's team: `team` of them, a power of two up to kWarp, side by side.
__device__ inline unsigned team_lanes(int team) {
    const unsigned lane = threadIdx.x % kWarp;
    const unsigned first = lane - lane % static_cast<unsigned>(team);
    return (team == kWarp ? 0xFFFFFFFFU : (1U << team) - 1U) << first;
}

// Σ of the team's values, in the same order at every call, for all of them; all must come here.
__device__ inline float team_sum(float value, int team) {
    const unsigned lanes = team_lanes(team);
    for (int distance = team / 2; distance > 0; distance /= 2) {
        value += __shfl_xor_sync(lanes, value, distance);
    }
    return value;
}

}  // namespace gnnserve
