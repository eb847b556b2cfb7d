// Calls that need the CUDA runtime: the slab, pinned host memory, captured runs. Every function
// returns a cudaError_t as a number, 0 for success; see gnnserve_cuda_error.

#include <cuda_runtime.h>

#include <cstdint>

#include "errors.cuh"
#include "export.hpp"

using gnnserve::told;

GNNSERVE_EXPORT const char* gnnserve_cuda_error(int code) {
    return cudaGetErrorString(static_cast<cudaError_t>(code));
}

// Allocates `bytes` of the device's memory until the process ends.
GNNSERVE_EXPORT int gnnserve_cuda_slab(int device, std::int64_t bytes, std::uint64_t* address) {
    void* slab = nullptr;
    cudaError_t error = cudaSetDevice(device);
    if (error == cudaSuccess) {
        error = cudaMalloc(&slab, static_cast<std::size_t>(bytes));
    }
    *address = reinterpret_cast<std::uint64_t>(slab);
    return told(error);
}

// Pins host memory in place; `address` is its address on the device. The device becomes the
// thread's current one: any other would get a context of hundreds of megabytes.
GNNSERVE_EXPORT int gnnserve_cuda_register(int device, void* memory, std::int64_t bytes,
                                           std::uint64_t* address) {
    void* seen = nullptr;
    cudaError_t error = cudaSetDevice(device);
    if (error == cudaSuccess) {
        error = cudaHostRegister(memory, static_cast<std::size_t>(bytes), cudaHostRegisterPortable);
    }
    if (error == cudaSuccess) {
        error = cudaHostGetDevicePointer(&seen, memory, 0);
        if (error != cudaSuccess) {
            (void)cudaHostUnregister(memory);
        }
    }
    *address = reinterpret_cast<std::uint64_t>(seen);
    return told(error);
}

GNNSERVE_EXPORT int gnnserve_cuda_unregister(void* memory) {
    return told(cudaHostUnregister(memory));
}

// Records what this thread launches on the stream, without running it, until
// gnnserve_cuda_capture_end.
GNNSERVE_EXPORT int gnnserve_cuda_capture(void* stream) {
    // Thread-local: other lanes may continue to make calls that a capture forbids.
    return told(cudaStreamBeginCapture(static_cast<cudaStream_t>(stream),
                                       cudaStreamCaptureModeThreadLocal));
}

// Ends the recording and makes it ready to replay; it keeps the addresses of its capture.
GNNSERVE_EXPORT int gnnserve_cuda_capture_end(void* stream, std::uint64_t* replay) {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t ready = nullptr;
    cudaError_t error = cudaStreamEndCapture(static_cast<cudaStream_t>(stream), &graph);
    if (error == cudaSuccess) {
        error = cudaGraphInstantiate(&ready, graph, 0);
        (void)cudaGraphDestroy(graph);
    }
    *replay = reinterpret_cast<std::uint64_t>(ready);
    return told(error);
}

GNNSERVE_EXPORT int gnnserve_cuda_replay(void* replay, void* stream) {
    return told(
        cudaGraphLaunch(static_cast<cudaGraphExec_t>(replay), static_cast<cudaStream_t>(stream)));
}

GNNSERVE_EXPORT int gnnserve_cuda_forget(void* replay) {
    return told(cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(replay)));
}
