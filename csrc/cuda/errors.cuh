// Errors of the CUDA runtime as this library tells them.
#pragma once

#include <cuda_runtime.h>

namespace gnnserve {

// Clears the error, so that the next call that reads the last error does not find it.
inline int told(cudaError_t error) {
    if (error != cudaSuccess) {
        (void)cudaGetLastError();
    }
    return error;
}

}  // namespace gnnserve
