// Stands in for CUDA's own header, so that tests can compile code that calls the runtime and make
// any call fail. As in CUDA, a failure is also kept until the last error is read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorUnknown = 999 };
enum { cudaHostRegisterPortable = 1, cudaStreamCaptureModeThreadLocal = 1 };
using cudaStream_t = struct StubStream*;
using cudaGraph_t = struct StubGraph*;
using cudaGraphExec_t = struct StubGraphExec*;

namespace cuda_stub {

// The call that fails, the error not yet read, and the device that was set last.
inline std::string fails;
inline cudaError_t last_error = cudaSuccess;
inline int device = 0;

inline cudaError_t end_of(const char* call) {
    if (fails != call) {
        return cudaSuccess;
    }
    last_error = cudaErrorUnknown;
    return cudaErrorUnknown;
}

}  // namespace cuda_stub

inline const char* cudaGetErrorString(cudaError_t) { return "stub"; }
inline cudaError_t cudaGetLastError() { return std::exchange(cuda_stub::last_error, cudaSuccess); }
inline cudaError_t cudaSetDevice(int device) {
    cuda_stub::device = device;
    return cuda_stub::end_of("cudaSetDevice");
}
inline cudaError_t cudaMalloc(void** memory, std::size_t) {
    *memory = nullptr;
    return cuda_stub::end_of("cudaMalloc");
}
inline cudaError_t cudaHostRegister(void*, std::size_t, unsigned) {
    return cuda_stub::end_of("cudaHostRegister");
}
inline cudaError_t cudaHostGetDevicePointer(void** seen, void* memory, unsigned) {
    *seen = memory;
    return cuda_stub::end_of("cudaHostGetDevicePointer");
}
inline cudaError_t cudaHostUnregister(void*) { return cuda_stub::end_of("cudaHostUnregister"); }
inline cudaError_t cudaStreamBeginCapture(cudaStream_t, int) {
    return cuda_stub::end_of("cudaStreamBeginCapture");
}
inline cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t*) {
    return cuda_stub::end_of("cudaStreamEndCapture");
}
inline cudaError_t cudaGraphInstantiate(cudaGraphExec_t*, cudaGraph_t, std::uint64_t) {
    return cuda_stub::end_of("cudaGraphInstantiate");
}
inline cudaError_t cudaGraphDestroy(cudaGraph_t) { return cuda_stub::end_of("cudaGraphDestroy"); }
inline cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) {
    return cuda_stub::end_of("cudaGraphLaunch");
}
inline cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) {
    return cuda_stub::end_of("cudaGraphExecDestroy");
}
