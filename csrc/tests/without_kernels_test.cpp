// What works without nvcc, over a CUDA runtime that the process brings: this file's functions, of
// which one may be missing.

#include <dlfcn.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "check.hpp"
#include "copy.hpp"
#include "export.hpp"

namespace {

constexpr int kNotReady = 600, kFails = 2;

// Calls, in order, and the name of the one that fails.
std::vector<std::string> said;
std::string fails;

int told(const char* call) {
    said.emplace_back(call);
    return fails == call ? kFails : 0;
}

}  // namespace

GNNSERVE_EXPORT const char* cudaGetErrorString(int code) {
    return code == kFails ? "out of memory" : "no error";
}
GNNSERVE_EXPORT int cudaGetLastError() { return told("cudaGetLastError"); }
GNNSERVE_EXPORT int cudaSetDevice(int device) { return device == 1 ? told("cudaSetDevice") : 1; }
GNNSERVE_EXPORT int cudaMalloc(void** memory, std::size_t bytes) {
    *memory = reinterpret_cast<void*>(bytes);
    return told("cudaMalloc");
}
GNNSERVE_EXPORT int cudaHostRegister(void*, std::size_t, unsigned flags) {
    CHECK(flags == 1);
    return told("cudaHostRegister");
}
GNNSERVE_EXPORT int cudaHostUnregister(void*) { return told("cudaHostUnregister"); }
GNNSERVE_EXPORT int cudaHostGetDevicePointer(void** seen, void* memory, unsigned) {
    *seen = memory;
    return told("cudaHostGetDevicePointer");
}
GNNSERVE_EXPORT int cudaStreamBeginCapture(void*, int mode) {
    CHECK(mode == 1);
    return told("cudaStreamBeginCapture");
}
GNNSERVE_EXPORT int cudaStreamEndCapture(void*, void**) { return told("cudaStreamEndCapture"); }
GNNSERVE_EXPORT int cudaStreamWaitEvent(void*, void*, unsigned) {
    return told("cudaStreamWaitEvent");
}
GNNSERVE_EXPORT int cudaGraphInstantiate(void** ready, void*, unsigned long long) {
    *ready = &said;
    return told("cudaGraphInstantiate");
}
GNNSERVE_EXPORT int cudaGraphDestroy(void*) { return told("cudaGraphDestroy"); }
GNNSERVE_EXPORT int cudaGraphLaunch(void* graph, void*) {
    CHECK(graph == &said);
    return told("cudaGraphLaunch");
}
GNNSERVE_EXPORT int cudaGraphExecDestroy(void*) { return told("cudaGraphExecDestroy"); }
GNNSERVE_EXPORT int cudaEventCreateWithFlags(void**, unsigned flags) {
    CHECK((flags & 2) != 0);
    return told("cudaEventCreateWithFlags");
}
GNNSERVE_EXPORT int cudaEventRecord(void*, void*) { return told("cudaEventRecord"); }
GNNSERVE_EXPORT int cudaEventQuery(void*) {
    const bool asked_before = said.back() == "cudaGetLastError";
    told("cudaEventQuery");
    return asked_before ? 0 : kNotReady;
}
GNNSERVE_EXPORT int cudaEventSynchronize(void*) { return told("cudaEventSynchronize"); }
GNNSERVE_EXPORT int cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, int, void*) {
    std::memcpy(to, from, bytes);
    return told("cudaMemcpyAsync");
}
#if !GNNSERVE_LACKS_ONE
GNNSERVE_EXPORT int cudaMemsetAsync(void* to, int value, std::size_t bytes, void*) {
    std::memset(to, value, bytes);
    return told("cudaMemsetAsync");
}
#endif

GNNSERVE_EXPORT const char* gnnserve_cuda_open();
GNNSERVE_EXPORT const char* gnnserve_cuda_error(int);
GNNSERVE_EXPORT int gnnserve_cuda_slab(int, std::int64_t, std::uint64_t*);
GNNSERVE_EXPORT int gnnserve_cuda_register(int, void*, std::int64_t, std::uint64_t*);
GNNSERVE_EXPORT int gnnserve_cuda_unregister(void*);
GNNSERVE_EXPORT int gnnserve_cuda_capture(void*);
GNNSERVE_EXPORT int gnnserve_cuda_capture_end(void*, std::uint64_t*);
GNNSERVE_EXPORT int gnnserve_cuda_replay(void*, void*);
GNNSERVE_EXPORT int gnnserve_cuda_forget(void*);
GNNSERVE_EXPORT int gnnserve_cuda_route(int, void*, void*, std::uint64_t*);
GNNSERVE_EXPORT int gnnserve_cuda_replay_task(const void*, const gnnserve::Replay*);

namespace {

void test_memory_comes_from_the_runtime_of_the_process() {
    std::uint64_t address = 0;
    CHECK(gnnserve_cuda_slab(1, 4096, &address) == 0 && address == 4096);
    int memory = 0;
    CHECK(gnnserve_cuda_register(1, &memory, 4, &address) == 0);
    CHECK(address == reinterpret_cast<std::uint64_t>(&memory));
    CHECK(gnnserve_cuda_unregister(&memory) == 0);
    CHECK((said == std::vector<std::string>{"cudaSetDevice", "cudaMalloc", "cudaSetDevice",
                                            "cudaHostRegister", "cudaHostGetDevicePointer",
                                            "cudaHostUnregister"}));
}

void test_a_refusal_is_told_once() {
    std::uint64_t address = 0;
    fails = "cudaMalloc";
    said.clear();
    CHECK(gnnserve_cuda_slab(1, 4096, &address) == kFails);
    CHECK(said.back() == "cudaGetLastError");
    CHECK(std::string(gnnserve_cuda_error(kFails)) == "out of memory");
    fails.clear();
}

// A run is captured, its place filled, launched and its answer copied, without kernels of ours.
void test_a_captured_run_is_replayed() {
    static std::uint64_t route = 0;  // it is kept for good
    std::uint64_t graph = 0;
    CHECK(gnnserve_cuda_route(1, nullptr, nullptr, &route) == 0);
    CHECK(gnnserve_cuda_capture(nullptr) == 0);
    CHECK(gnnserve_cuda_capture_end(nullptr, &graph) == 0);
    const int input = 7;
    int places[2] = {0, 0}, answer = 0;
    const auto at = [](const int* place) { return reinterpret_cast<std::uint64_t>(place); };
    const gnnserve::Copy up{at(&places[0]), at(&input), 4};
    const gnnserve::Fill spare{at(&places[1]), 4, 0xFF};
    const gnnserve::Copy down{at(&answer), at(&places[0]), 4};
    const gnnserve::Replay replay{
        nullptr, reinterpret_cast<void*>(graph), &up, 1, nullptr, 0, nullptr, 0, &spare, 1, &down,
        1};
    said.clear();
    CHECK(gnnserve_cuda_replay_task(reinterpret_cast<const void*>(route), &replay) == 0);
    CHECK(answer == 7 && places[1] == -1);
    CHECK((said == std::vector<std::string>{"cudaMemcpyAsync", "cudaMemsetAsync", "cudaGraphLaunch",
                                            "cudaMemcpyAsync", "cudaEventRecord", "cudaEventQuery",
                                            "cudaGetLastError", "cudaEventQuery"}));
    CHECK(gnnserve_cuda_replay(reinterpret_cast<void*>(graph), nullptr) == 0);
    CHECK(gnnserve_cuda_forget(reinterpret_cast<void*>(graph)) == 0);
}

}  // namespace

int main() {
    const char* missing = gnnserve_cuda_open();
    if (GNNSERVE_LACKS_ONE) {
        CHECK(missing != nullptr && std::string(missing) == "cudaMemsetAsync");
        return 0;
    }
    CHECK(missing == nullptr);
    test_memory_comes_from_the_runtime_of_the_process();
    test_a_refusal_is_told_once();
    test_a_captured_run_is_replayed();
}
