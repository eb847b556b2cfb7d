// Keeps multiprocessors of a device free of long runs: a green context over all the others, and
// streams in it. The driver's functions are found at run time, so that the library loads where
// there is no driver. Every function returns a cudaError_t as a number, as the driver's own codes
// are; an older driver says that it does not support this.

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "export.hpp"

namespace {

// The first version of the driver that has streams of green contexts.
constexpr unsigned kVersion = 12050;

struct Driver {
    decltype(&cuDeviceGet) device_get;
    decltype(&cuDeviceGetDevResource) resource_of;
    decltype(&cuDevSmResourceSplitByCount) split;
    decltype(&cuDevResourceGenerateDesc) describe;
    decltype(&cuGreenCtxCreate) create;
    decltype(&cuGreenCtxStreamCreate) create_stream;
};

template <typename Function>
int find(const char* name, Function& function) {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion(name, &found, kVersion, cudaEnableDefault, &result);
    function = reinterpret_cast<Function>(found);
    if (error != cudaSuccess) {
        (void)cudaGetLastError();
        return error;
    }
    return found == nullptr || result != cudaDriverEntryPointSuccess ? cudaErrorNotSupported
                                                                     : cudaSuccess;
}

int find_driver(Driver& driver) {
    int error = find("cuDeviceGet", driver.device_get);
    error = error != 0 ? error : find("cuDeviceGetDevResource", driver.resource_of);
    error = error != 0 ? error : find("cuDevSmResourceSplitByCount", driver.split);
    error = error != 0 ? error : find("cuDevResourceGenerateDesc", driver.describe);
    error = error != 0 ? error : find("cuGreenCtxCreate", driver.create);
    return error != 0 ? error : find("cuGreenCtxStreamCreate", driver.create_stream);
}

}  // namespace

// Makes a context of all multiprocessors of the device but `reserved` ones, until the process ends.
// `kept` is how many stay free, at least `reserved`, as they come in groups; `all` is how many
// there are.
GNNSERVE_EXPORT int gnnserve_cuda_partition(int device, int reserved, std::uint64_t* context,
                                            int* kept, int* all) {
    Driver driver{};
    int error = cudaSetDevice(device);  // it has its primary context from now on
    error = error != 0 ? error : find_driver(driver);
    if (error != 0) {
        (void)cudaGetLastError();
        return error;
    }
    CUdevice number = 0;
    CUdevResource whole{};
    CUdevResource free{};
    CUdevResource rest{};
    CUdevResourceDesc described = nullptr;
    CUgreenCtx made = nullptr;
    unsigned groups = 1;
    error = driver.device_get(&number, device);
    error = error != 0 ? error : driver.resource_of(number, &whole, CU_DEV_RESOURCE_TYPE_SM);
    error = error != 0
                ? error
                : driver.split(&free, &groups, &whole, &rest, 0, static_cast<unsigned>(reserved));
    error = error != 0 ? error : driver.describe(&described, &rest, 1);
    error =
        error != 0 ? error : driver.create(&made, described, number, CU_GREEN_CTX_DEFAULT_STREAM);
    *context = reinterpret_cast<std::uint64_t>(made);
    *kept = static_cast<int>(free.sm.smCount);
    *all = static_cast<int>(whole.sm.smCount);
    return error;
}

// Makes a stream of the context, of CUDA's ordinary priority, until the process ends.
GNNSERVE_EXPORT int gnnserve_cuda_partition_stream(std::uint64_t context, std::uint64_t* stream) {
    Driver driver{};
    int error = find_driver(driver);
    CUstream made = nullptr;
    error = error != 0 ? error
                       : driver.create_stream(&made, reinterpret_cast<CUgreenCtx>(context),
                                              CU_STREAM_NON_BLOCKING, 0);
    *stream = reinterpret_cast<std::uint64_t>(made);
    return error;
}
