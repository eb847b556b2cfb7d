// The gather, and whether the kernels can run at all. The gather itself is in gather.cuh, so that
// tests can run it on the host.

#include <cuda_runtime.h>

#include "errors.cuh"
#include "export.hpp"
#include "gather.cuh"

// Fails where this library has no code for the device, or the driver is too old for it.
GNNSERVE_EXPORT int gnnserve_cuda_usable(int device) {
    cudaError_t error = cudaSetDevice(device);
    if (error == cudaSuccess) {
        cudaFuncAttributes attributes{};
        error = cudaFuncGetAttributes(
            &attributes, reinterpret_cast<const void*>(&gnnserve::gather_kernel<uint4>));
    }
    return gnnserve::told(error);
}
