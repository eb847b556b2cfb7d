// Stands in for the gather of gather.cuh, whose kernels have tests of their own: tables of bytes
// and of floats, row by row.
#pragma once

#include <cstdint>

#include "cuda_runtime.h"

extern "C" inline int gnnserve_cuda_gather_floats(std::uint64_t table, std::uint64_t ids,
                                                  std::int64_t rows, std::int64_t row_bytes,
                                                  std::int64_t item_bytes, std::uint64_t hot,
                                                  std::uint64_t slot_of, std::uint64_t out,
                                                  std::int64_t, void* stream) {
    cuda_stub::said.push_back(cuda_stub::named('s', stream) + " gathers " + std::to_string(rows));
    const auto* slots = reinterpret_cast<const std::int32_t*>(slot_of);
    auto* target = reinterpret_cast<float*>(out);
    for (std::int64_t row = 0; row < rows; ++row) {
        const std::int64_t id = reinterpret_cast<const std::int64_t*>(ids)[row];
        const bool is_hot = slots != nullptr && slots[id] >= 0;
        const std::uint64_t from =
            (is_hot ? hot : table) +
            static_cast<std::uint64_t>((is_hot ? slots[id] : id) * row_bytes);
        for (std::int64_t i = 0; i < row_bytes / item_bytes; ++i) {
            *target++ = item_bytes == 4
                            ? reinterpret_cast<const float*>(from)[i]
                            : static_cast<float>(reinterpret_cast<const unsigned char*>(from)[i]);
        }
    }
    return cuda_stub::end_of("gather");
}
