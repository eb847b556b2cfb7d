// What libgnnserve_cuda has but the kernels, for machines where that was not built or does not run:
// the slab, pinned host memory, copies and captured runs, over the CUDA runtime that torch brings.
// A C++ compiler builds it, without anything of CUDA.

#include <dlfcn.h>

// In this folder's torch_runtime.
#include <cuda_runtime.h>

#include "copies.cu"
#include "device.cu"
#include "export.hpp"

namespace {

// CUDA's number for what is not supported.
constexpr int kNotSupported = 801;

// Runtimes that torch may have loaded for itself alone. Usually all of the process sees it.
constexpr const char* kRuntimes[] = {nullptr, "libcudart.so.13", "libcudart.so.12"};

// Returns the name of a function that the library lacks, null for none.
const char* missing_in(void* library) {
    const char* missing = nullptr;
    const auto find = [&]<typename Function>(Function& function, const char* name) {
        function = reinterpret_cast<Function>(dlsym(library, name));
        missing = function == nullptr ? name : missing;
    };
    find(cudaGetErrorString, "cudaGetErrorString");
#define GNNSERVE_FIND(name, parameters) find(name, #name);
    GNNSERVE_CUDA_FUNCTIONS(GNNSERVE_FIND)
#undef GNNSERVE_FIND
    return missing;
}

}  // namespace

// There is no kernel to gather; lanes' loops without Python are given no tables, so none is asked
// for.
extern "C" int gnnserve_cuda_gather_floats(std::uint64_t, std::uint64_t, std::int64_t, std::int64_t,
                                           std::int64_t, std::uint64_t, std::uint64_t,
                                           std::uint64_t, std::int64_t, void*) {
    return kNotSupported;
}

// Finds the CUDA runtime in this process, before any other function of this file is called. Returns
// the name of a function that no runtime has, null for none.
GNNSERVE_EXPORT const char* gnnserve_cuda_open() {
    const char* missing = nullptr;
    for (const char* name : kRuntimes) {
        void* library = dlopen(name, RTLD_NOW | RTLD_NOLOAD);
        if (library != nullptr) {
            missing = missing_in(library);
            if (missing == nullptr) {
                return nullptr;
            }
        }
    }
    return missing;
}
