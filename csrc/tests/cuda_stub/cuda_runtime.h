// Stands in for CUDA's own header, so that tests can compile code that calls the runtime and make
// any call fail. As in CUDA, a failure is also kept until the last error is read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorNotReady = 600,
    cudaErrorUnknown = 999
};
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost = 2 };
enum { cudaHostRegisterPortable = 1, cudaStreamCaptureModeThreadLocal = 1 };
enum { cudaEventDisableTiming = 2, cudaEventBlockingSync = 1 };
struct cudaFuncAttributes {};
using cudaStream_t = struct StubStream*;
using cudaEvent_t = struct StubEvent*;
using cudaGraph_t = struct StubGraph*;
using cudaGraphExec_t = struct StubGraphExec*;

namespace cuda_stub {

// The call that fails, the error not yet read, and the device that was set last.
inline std::string fails;
inline cudaError_t last_error = cudaSuccess;
inline int device = 0;
// Calls on streams and events, in order, and how often an event is not ready when asked.
inline std::vector<std::string> said;
inline int not_ready = 0;
// "s3" or "e1": the addresses of streams and events are small numbers.
inline std::string named(char kind, const void* address) {
    // Not `+`: GCC 12 warns of overlapping copies in it where there are none.
    std::string name(1, kind);
    name += std::to_string(reinterpret_cast<std::uintptr_t>(address));
    return name;
}
inline std::uintptr_t events = 0;
// What launching a graph does.
inline std::function<void()> graph;

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
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, const void*) {
    return cuda_stub::end_of("cudaFuncGetAttributes");
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
    if (cuda_stub::graph) {
        cuda_stub::graph();
    }
    return cuda_stub::end_of("cudaGraphLaunch");
}
inline cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) {
    return cuda_stub::end_of("cudaGraphExecDestroy");
}
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
    *event = reinterpret_cast<cudaEvent_t>(++cuda_stub::events);
    return cuda_stub::end_of("cudaEventCreateWithFlags");
}
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    cuda_stub::said.push_back(cuda_stub::named('s', stream) + " records " +
                              cuda_stub::named('e', event));
    return cuda_stub::end_of("cudaEventRecord");
}
inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    cuda_stub::said.push_back(cuda_stub::named('s', stream) + " waits for " +
                              cuda_stub::named('e', event));
    return cuda_stub::end_of("cudaStreamWaitEvent");
}
inline cudaError_t cudaEventQuery(cudaEvent_t) {
    if (cuda_stub::not_ready > 0) {
        --cuda_stub::not_ready;
        return cuda_stub::last_error = cudaErrorNotReady;
    }
    return cuda_stub::end_of("cudaEventQuery");
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    cuda_stub::said.push_back("host waits for " + cuda_stub::named('e', event));
    return cuda_stub::end_of("cudaEventSynchronize");
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind,
                                   cudaStream_t stream) {
    cuda_stub::said.push_back(cuda_stub::named('s', stream) + " copies " + std::to_string(bytes));
    std::memcpy(to, from, bytes);
    return cuda_stub::end_of("cudaMemcpyAsync");
}
inline cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t stream) {
    cuda_stub::said.push_back(cuda_stub::named('s', stream) + " fills " + std::to_string(bytes));
    std::memset(to, value, bytes);
    return cuda_stub::end_of("cudaMemsetAsync");
}
