// A failed call of the CUDA runtime must leave no error behind, or the thread's next launch would
// be reported as failed. Compiles device.cu and gather.cu over a runtime that fails on request.

#include <functional>
#include <utility>
#include <vector>

#include "../cuda/device.cu"
#include "../cuda/gather.cu"
#include "check.hpp"

namespace {

void test_a_failure_is_told_once() {
    int memory = 0;
    std::uint64_t made = 0;
    const std::vector<std::pair<const char*, std::function<int()>>> calls{
        {"cudaSetDevice", [&] { return gnnserve_cuda_slab(0, 512, &made); }},
        {"cudaSetDevice", [] { return gnnserve_cuda_usable(0); }},
        {"cudaFuncGetAttributes", [] { return gnnserve_cuda_usable(0); }},
        {"cudaMalloc", [&] { return gnnserve_cuda_slab(0, 512, &made); }},
        {"cudaHostRegister", [&] { return gnnserve_cuda_register(0, &memory, 4, &made); }},
        {"cudaHostGetDevicePointer", [&] { return gnnserve_cuda_register(0, &memory, 4, &made); }},
        {"cudaHostUnregister", [&] { return gnnserve_cuda_unregister(&memory); }},
        {"cudaStreamBeginCapture", [] { return gnnserve_cuda_capture(nullptr); }},
        {"cudaStreamEndCapture", [&] { return gnnserve_cuda_capture_end(nullptr, &made); }},
        {"cudaGraphInstantiate", [&] { return gnnserve_cuda_capture_end(nullptr, &made); }},
        {"cudaGraphLaunch", [] { return gnnserve_cuda_replay(nullptr, nullptr); }},
        {"cudaGraphExecDestroy", [] { return gnnserve_cuda_forget(nullptr); }},
    };
    for (const auto& [name, call] : calls) {
        cuda_stub::fails = name;
        CHECK(call() == cudaErrorUnknown);
        CHECK(cudaGetLastError() == cudaSuccess);
        cuda_stub::fails.clear();
        CHECK(call() == cudaSuccess);
    }
}

void test_memory_is_pinned_by_the_device_that_reads_it() {
    int memory = 0;
    std::uint64_t seen = 0;
    CHECK(gnnserve_cuda_register(3, &memory, 4, &seen) == cudaSuccess);
    CHECK(cuda_stub::device == 3 && seen == reinterpret_cast<std::uint64_t>(&memory));
}

}  // namespace

int main() {
    test_a_failure_is_told_once();
    test_memory_is_pinned_by_the_device_that_reads_it();
}
