// Gathers rows of a table in host memory over the bus, and hot rows from their copy on the device.
// gnnserve/gather_index.hpp assigns the reads to threads.
#pragma once

#include <cstdint>

#include "gnnserve/gather_index.hpp"
#include "simt.cuh"

namespace gnnserve {

// What one element of a table becomes. Halves come as their bits: both are exact.
__device__ inline float to_float(unsigned char value) { return static_cast<float>(value); }
__device__ inline float to_float(unsigned short half) {
    union {
        unsigned bits;
        float value;
    } made, scale;
    const unsigned sign = static_cast<unsigned>(half & 0x8000U) << 16;
    const unsigned rest = static_cast<unsigned>(half & 0x7FFFU) << 13;
    if (rest >= 0x0F800000U) {  // infinite, or no number
        made.bits = sign | 0x7F800000U | (rest & 0x007FFFFFU);
        return made.value;
    }
    // The exponent counts from another bias, also of numbers too small for a whole one.
    made.bits = rest;
    scale.bits = (127U + 112U) << 23;
    made.value *= scale.value;
    made.bits |= sign;
    return made.value;
}

// Writes a unit to its column of the row: each Item of it as a float, or, for none, as it is.
template <typename Unit, typename Item>
struct Placed {
    static __device__ void at(unsigned char* row, std::int64_t column, const Unit unit) {
        constexpr int kItems = static_cast<int>(sizeof(Unit) / sizeof(Item));
        const Item* items = reinterpret_cast<const Item*>(&unit);
        float* target = reinterpret_cast<float*>(row) + column * kItems;
        for (int i = 0; i < kItems; ++i) {
            target[i] = to_float(items[i]);
        }
    }
};
template <typename Unit>
struct Placed<Unit, void> {
    static __device__ void at(unsigned char* row, std::int64_t column, const Unit unit) {
        reinterpret_cast<Unit*>(row)[column] = unit;
    }
};

// The grid is that of GatherShape; a row whose id has a slot is read from `hot` instead. Rows go
// out with `out_bytes` each.
template <typename Unit, typename Item = void>
__global__ void gather_kernel(const unsigned char* __restrict__ table,
                              const std::int64_t* __restrict__ ids, std::int64_t rows,
                              const unsigned char* __restrict__ hot,
                              const std::int32_t* __restrict__ slot_of,
                              unsigned char* __restrict__ out, std::int64_t out_bytes,
                              GatherShape shape) {
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
        unsigned char* target = out + row * out_bytes;
        for (std::int64_t j = x; j < shape.units; j += shape.x) {
            const std::int64_t column =
                gather_column(j, shape.units, static_cast<int>(sizeof(Unit)), address, shape.shift);
            Placed<Unit, Item>::at(target, column, reinterpret_cast<const Unit*>(source)[column]);
        }
    }
}

struct GatherCall {
    const void* table;
    const std::int64_t* ids;
    std::int64_t rows;
    const void* hot;
    const std::int32_t* slot_of;
    void* out;
    std::int64_t out_bytes;
    void* stream;
};

template <typename Unit, typename Item = void>
int gather_by(const GatherShape& shape, const GatherCall& call) {
    return launch(gather_kernel<Unit, Item>, dim3(static_cast<unsigned>(shape.blocks)),
                  shape.x * shape.y, call.stream, static_cast<const unsigned char*>(call.table),
                  call.ids, call.rows, static_cast<const unsigned char*>(call.hot), call.slot_of,
                  static_cast<unsigned char*>(call.out), call.out_bytes, shape);
}

// As floats, from elements of type Item.
template <typename Item>
int gather_floats_by(const GatherShape& shape, const GatherCall& call) {
    switch (shape.unit_bytes) {
        case 16:
            return gather_by<uint4, Item>(shape, call);
        case 8:
            return gather_by<uint2, Item>(shape, call);
        case 4:
            return gather_by<unsigned int, Item>(shape, call);
        case 2:
            return gather_by<unsigned short, Item>(shape, call);
        default:
            return gather_by<unsigned char, Item>(shape, call);
    }
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
    const GatherCall call{table, ids, rows, hot, slot_of, out, row_bytes, stream};
    switch (shape.unit_bytes) {
        case 16:
            return gather_by<uint4>(shape, call);
        case 8:
            return gather_by<uint2>(shape, call);
        case 4:
            return gather_by<unsigned int>(shape, call);
        case 2:
            return gather_by<unsigned short>(shape, call);
        default:
            return gather_by<unsigned char>(shape, call);
    }
}

// The same, but the rows become float32: those of tables of float32 (elements of 4 bytes), float16
// (2) or uint8 (1). Addresses are the device's, as numbers.
GNNSERVE_EXPORT int gnnserve_cuda_gather_floats(std::uint64_t table, std::uint64_t ids,
                                                std::int64_t rows, std::int64_t row_bytes,
                                                std::int64_t item_bytes, std::uint64_t hot,
                                                std::uint64_t slot_of, std::uint64_t out,
                                                std::int64_t most_threads, void* stream) {
    using namespace gnnserve;
    const GatherCall call{reinterpret_cast<const void*>(table),
                          reinterpret_cast<const std::int64_t*>(ids),
                          rows,
                          reinterpret_cast<const void*>(hot),
                          reinterpret_cast<const std::int32_t*>(slot_of),
                          reinterpret_cast<void*>(out),
                          4 * (row_bytes / (item_bytes < 1 ? 1 : item_bytes)),
                          stream};
    if (item_bytes == 4) {
        return gnnserve_cuda_gather(call.table, call.ids, rows, row_bytes, call.hot, call.slot_of,
                                    call.out, 1, most_threads, stream);
    }
    if (rows <= 0 || row_bytes <= 0 || (item_bytes != 1 && item_bytes != 2)) {
        return rows == 0 || row_bytes == 0 ? kSuccess : kInvalidValue;
    }
    // Floats go out one by one: their place need not be as a unit's.
    const GatherShape shape = gather_shape(table | hot, 0, row_bytes, rows, true, most_threads);
    return item_bytes == 2 ? gather_floats_by<unsigned short>(shape, call)
                           : gather_floats_by<unsigned char>(shape, call);
}
