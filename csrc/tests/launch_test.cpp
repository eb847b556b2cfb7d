// Launches kernels as compiled by nvcc, over a runtime that fails on request: the returned error
// must be that of this launch.

#define __CUDACC__
#define __device__

#include <cuda_runtime.h>

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
    dim3(unsigned x_ = 1) : x(x_) {}  // NOLINT: CUDA's own is not explicit either.
};
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    std::size_t dynamicSmemBytes = 0;
    cudaStream_t stream = nullptr;
};
static dim3 threadIdx;
static float __shfl_xor_sync(unsigned, float value, int) { return value; }
template <typename... Parameters>
static cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t*, void (*kernel)(Parameters...),
                                      Parameters... arguments) {
    kernel(arguments...);
    return cuda_stub::end_of("cudaLaunchKernelEx");
}

#include "../cuda/simt.cuh"
#include "check.hpp"

namespace {

std::int64_t found = 0;
void kernel(std::int64_t value) { found += value; }

int start(std::int64_t value) { return gnnserve::launch(&kernel, dim3(1), 32, nullptr, value); }

}  // namespace

int main() {
    cuda_stub::last_error = cudaErrorUnknown;  // somebody else's
    CHECK(start(1) == cudaSuccess);
    CHECK(cudaGetLastError() == cudaErrorUnknown);
    cuda_stub::fails = "cudaLaunchKernelEx";
    CHECK(start(2) == cudaErrorUnknown);
    CHECK(cudaGetLastError() == cudaSuccess);
    CHECK(found == 3);
    CHECK(gnnserve::team_sum(1, 1) == 1);
}
