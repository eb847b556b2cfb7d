// Gathers rows of a table in host memory over the bus, and hot rows from their copy on the device.
// gnnserve/gather_index.hpp assigns the reads to threads.
#pragma once

#include <cstdint>

#include "gnnserve/gather_index.hpp"
#include "simt.cuh"

namespace gnnserve {

// The grid is that of GatherShape; a row whose id has a slot is read from `hot` instead.
template <typename Unit>
__global__ void gather_kernel(const unsigned char* __restrict__ table,
                              const std::int64_t* __restrict__ ids, std::int64_t rows,
                              const unsigned char* __restrict__ hot,
                              const std::int32_t* __restrict__ slot_of,
                              unsigned char* __restrict__ out, GatherShape shape) {
    const std::int64_t row_bytes = shape.units * static_cast<std::int64_t>(sizeof(Unit));
    const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * shape.y;
    const int x = static_cast<int>(threadIdx.x) % shape.x;
    const int y = static_cast<int>(threadIdx.x) / shape.x;
    for (std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * shape.y + y; row < rows;
         row += stride) {
        const std::int64_t id = ids[row];
        const std::int32_t slot = slot_of == nullptr ? -1 : slot_of[id];
        const unsigned char* source =
            slot < 0 ? table + id * row_bytes : hot + static_cast<std::int64_t>(slot) * row_bytes;
        const auto address = reinterpret_cast<std::uint64_t>(source);
        unsigned char* target = out + row * row_bytes;
        for (std::int64_t j = x; j < shape.units; j += shape.x) {
            const std::int64_t column =
                gather_column(j, shape.units, static_cast<int>(sizeof(Unit)), address, shape.shift);
            reinterpret_cast<Unit*>(target)[column] = reinterpret_cast<const Unit*>(source)[column];
        }
    }
}

template <typename Unit>
int gather_by(const GatherShape& shape, const void* table, const std::int64_t* ids,
              std::int64_t rows, const void* hot, const std::int32_t* slot_of, void* out,
              void* stream) {
    return launch(gather_kernel<Unit>, dim3(static_cast<unsigned>(shape.blocks)), shape.x * shape.y,
                  stream, static_cast<const unsigned char*>(table), ids, rows,
                  static_cast<const unsigned char*>(hot), slot_of, static_cast<unsigned char*>(out),
                  shape);
}

}  // namespace gnnserve

// out[i] = row ids[i] of the table; rows have `row_bytes` and are contiguous. `hot` and `slot_of`
// (by row of the table; -1 for a row that is not hot) may be null. All memory but the table is the
// device's. Ids are not checked and must be in range. `most_threads` is an upper bound of the grid.
GNNSERVE_EXPORT int gnnserve_cuda_gather(const void* table, const std::int64_t* ids,
                                         std::int64_t rows, std::int64_t row_bytes, const void* hot,
                                         const std::int32_t* slot_of, void* out, int shift,
                                         std::int64_t most_threads, void* stream) {
    using namespace gnnserve;
    if (rows <= 0 || row_bytes <= 0) {
        return rows < 0 || row_bytes < 0 ? kInvalidValue : kSuccess;
    }
    const auto seen = reinterpret_cast<std::uint64_t>(table) | reinterpret_cast<std::uint64_t>(hot);
    const GatherShape shape = gather_shape(seen, reinterpret_cast<std::uint64_t>(out), row_bytes,
                                           rows, shift != 0, most_threads);
    switch (shape.unit_bytes) {
        case 16:
            return gather_by<uint4>(shape, table, ids, rows, hot, slot_of, out, stream);
        case 8:
            return gather_by<uint2>(shape, table, ids, rows, hot, slot_of, out, stream);
        case 4:
            return gather_by<unsigned int>(shape, table, ids, rows, hot, slot_of, out, stream);
        case 2:
            return gather_by<unsigned short>(shape, table, ids, rows, hot, slot_of, out, stream);
        default:
            return gather_by<unsigned char>(shape, table, ids, rows, hot, slot_of, out, stream);
    }
}
