// What only the CUDA runtime can do: the slab, host memory the device may read, the gather.
// Every function returns a cudaError_t as a number, 0 for success; see gnnserve_cuda_error.

#include <cuda_runtime.h>

#include <cstdint>

#include "gnnserve/gather_index.hpp"

#define GNNSERVE_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using gnnserve::GatherShape;

// The grid is GatherShape's; a row whose id has a slot is taken from `hot` instead.
template <typename Unit>
__global__ void gather_rows(const unsigned char* __restrict__ table,
                            const std::int64_t* __restrict__ ids, std::int64_t rows,
                            const unsigned char* __restrict__ hot,
                            const std::int32_t* __restrict__ slot_of,
                            unsigned char* __restrict__ out, GatherShape shape) {
    const std::int64_t row_bytes = shape.units * static_cast<std::int64_t>(sizeof(Unit));
    const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * blockDim.y;
    for (std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
         row < rows; row += stride) {
        const std::int64_t id = ids[row];
        const std::int32_t slot = slot_of == nullptr ? -1 : slot_of[id];
        const unsigned char* source =
            slot < 0 ? table + id * row_bytes : hot + static_cast<std::int64_t>(slot) * row_bytes;
        const auto address = reinterpret_cast<std::uint64_t>(source);
        unsigned char* target = out + row * row_bytes;
        for (std::int64_t j = threadIdx.x; j < shape.units; j += blockDim.x) {
            const std::int64_t column = gnnserve::gather_column(
                j, shape.units, static_cast<int>(sizeof(Unit)), address, shape.shift);
            reinterpret_cast<Unit*>(target)[column] = reinterpret_cast<const Unit*>(source)[column];
        }
    }
}

template <typename Unit>
cudaError_t launch(const GatherShape& shape, const void* table, const std::int64_t* ids,
                   std::int64_t rows, const void* hot, const std::int32_t* slot_of, void* out,
                   cudaStream_t stream) {
    const dim3 block(static_cast<unsigned>(shape.x), static_cast<unsigned>(shape.y));
    gather_rows<Unit><<<static_cast<unsigned>(shape.blocks), block, 0, stream>>>(
        static_cast<const unsigned char*>(table), ids, rows, static_cast<const unsigned char*>(hot),
        slot_of, static_cast<unsigned char*>(out), shape);
    return cudaGetLastError();
}

}  // namespace

GNNSERVE_EXPORT const char* gnnserve_cuda_error(int code) {
    return cudaGetErrorString(static_cast<cudaError_t>(code));
}

// Takes `bytes` of the device's memory, for as long as the process lives.
GNNSERVE_EXPORT int gnnserve_cuda_slab(int device, std::int64_t bytes, std::uint64_t* address) {
    void* slab = nullptr;
    cudaError_t error = cudaSetDevice(device);
    if (error == cudaSuccess) {
        error = cudaMalloc(&slab, static_cast<std::size_t>(bytes));
    }
    *address = reinterpret_cast<std::uint64_t>(slab);
    // What failed must not be found by the next call that asks for the last error.
    if (error != cudaSuccess) {
        (void)cudaGetLastError();
    }
    return error;
}

// Pins host memory where it lies; `address` is where the device sees it.
GNNSERVE_EXPORT int gnnserve_cuda_register(void* memory, std::int64_t bytes,
                                           std::uint64_t* address) {
    void* seen = nullptr;
    cudaError_t error =
        cudaHostRegister(memory, static_cast<std::size_t>(bytes), cudaHostRegisterPortable);
    if (error == cudaSuccess) {
        error = cudaHostGetDevicePointer(&seen, memory, 0);
        if (error != cudaSuccess) {
            (void)cudaHostUnregister(memory);
        }
    }
    if (error != cudaSuccess) {
        (void)cudaGetLastError();
    }
    *address = reinterpret_cast<std::uint64_t>(seen);
    return error;
}

GNNSERVE_EXPORT int gnnserve_cuda_unregister(void* memory) { return cudaHostUnregister(memory); }

// Until gnnserve_cuda_capture_end, what this thread launches on the stream is written down, not
// run.
GNNSERVE_EXPORT int gnnserve_cuda_capture(void* stream) {
    // Thread-local: other lanes go on with what a capture forbids.
    return cudaStreamBeginCapture(static_cast<cudaStream_t>(stream),
                                  cudaStreamCaptureModeThreadLocal);
}

// What was written down, ready to be replayed; it reads and writes where it did when captured.
GNNSERVE_EXPORT int gnnserve_cuda_capture_end(void* stream, std::uint64_t* replay) {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t ready = nullptr;
    cudaError_t error = cudaStreamEndCapture(static_cast<cudaStream_t>(stream), &graph);
    if (error == cudaSuccess) {
        error = cudaGraphInstantiate(&ready, graph, 0);
        (void)cudaGraphDestroy(graph);
    }
    if (error != cudaSuccess) {
        (void)cudaGetLastError();
    }
    *replay = reinterpret_cast<std::uint64_t>(ready);
    return error;
}

GNNSERVE_EXPORT int gnnserve_cuda_replay(void* replay, void* stream) {
    return cudaGraphLaunch(static_cast<cudaGraphExec_t>(replay), static_cast<cudaStream_t>(stream));
}

GNNSERVE_EXPORT int gnnserve_cuda_forget(void* replay) {
    return cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(replay));
}

// out[i] = row ids[i] of the table; rows of `row_bytes`, one after the other. `hot` and `slot_of`
// (by row of the table, -1: not hot) may be null. All but the table's memory is the device's; ids
// must be in range: nobody looks. `most_threads` caps the grid.
GNNSERVE_EXPORT int gnnserve_cuda_gather(const void* table, const std::int64_t* ids,
                                         std::int64_t rows, std::int64_t row_bytes, const void* hot,
                                         const std::int32_t* slot_of, void* out, int shift,
                                         std::int64_t most_threads, void* stream) {
    if (rows <= 0 || row_bytes <= 0) {
        return rows < 0 || row_bytes < 0 ? cudaErrorInvalidValue : cudaSuccess;
    }
    const auto seen = reinterpret_cast<std::uint64_t>(table) | reinterpret_cast<std::uint64_t>(hot);
    const GatherShape shape = gnnserve::gather_shape(seen, reinterpret_cast<std::uint64_t>(out),
                                                     row_bytes, rows, shift != 0, most_threads);
    const auto on = static_cast<cudaStream_t>(stream);
    switch (shape.unit_bytes) {
        case 16:
            return launch<uint4>(shape, table, ids, rows, hot, slot_of, out, on);
        case 8:
            return launch<uint2>(shape, table, ids, rows, hot, slot_of, out, on);
        case 4:
            return launch<unsigned int>(shape, table, ids, rows, hot, slot_of, out, on);
        case 2:
            return launch<unsigned short>(shape, table, ids, rows, hot, slot_of, out, on);
        default:
            return launch<unsigned char>(shape, table, ids, rows, hot, slot_of, out, on);
    }
}
