// Assigns reads to threads when rows of host memory are gathered over the bus. Plain arithmetic,
// the same on the device and in tests on the host.
//
// The bus carries requests of whole 128-byte lines. A warp that starts in the middle of a line
// touches one line more than it needs at every step of the row. Reading therefore starts at the
// first line boundary inside the row, and the bytes before it come last: the circular shift of
// PyTorch-Direct (Min et al. 2021, section 3.2.1, listing 2), here within a row.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define GNNSERVE_BOTH __host__ __device__ __forceinline__
#else
#define GNNSERVE_BOTH inline
#endif

namespace gnnserve {

constexpr std::int64_t kLineBytes = 128;
constexpr int kWarpThreads = 32;

// Grid of one gather: blocks of (x, y) threads, x along a row and y rows at once.
struct GatherShape {
    int unit_bytes;      // what one thread reads at once: 1, 2, 4, 8 or 16
    std::int64_t units;  // in a row
    int x;               // a power of two
    int y;
    std::int64_t blocks;  // in the grid; each goes on with further rows
    bool shift;
};

// Returns the largest unit, at most 16 bytes, that divides the row and all addresses.
GNNSERVE_BOTH int gather_unit_bytes(std::uint64_t table, std::uint64_t out,
                                    std::int64_t row_bytes) {
    const std::uint64_t all = table | out | static_cast<std::uint64_t>(row_bytes) | 16u;
    return static_cast<int>(all & (~all + 1));
}

// `most_threads` is an upper bound of the grid: few of the device's processors keep the bus busy.
inline GatherShape gather_shape(std::uint64_t table, std::uint64_t out, std::int64_t row_bytes,
                                std::int64_t rows, bool shift, std::int64_t most_threads) {
    constexpr int kBlockThreads = 256;
    GatherShape shape{};
    shape.unit_bytes = gather_unit_bytes(table, out, row_bytes);
    shape.units = row_bytes / shape.unit_bytes;
    shape.x = 1;
    while (shape.x < kBlockThreads && shape.x < shape.units) {
        shape.x *= 2;
    }
    shape.y = kBlockThreads / shape.x;
    const std::int64_t wanted = (rows + shape.y - 1) / shape.y;
    const std::int64_t most = most_threads < kBlockThreads ? 1 : most_threads / kBlockThreads;
    shape.blocks = wanted < 1 ? 1 : wanted < most ? wanted : most;
    // A row within one line gains nothing, and a row of whole aligned lines needs no shift.
    shape.shift = shift && row_bytes > kLineBytes;
    return shape;
}

// Returns the unit of the row that is read at step `j` in [0, units); each is read exactly once.
GNNSERVE_BOTH std::int64_t gather_column(std::int64_t j, std::int64_t units, int unit_bytes,
                                         std::uint64_t row_address, bool shift) {
    if (!shift) {
        return j;
    }
    const std::uint64_t past = row_address % static_cast<std::uint64_t>(kLineBytes);
    const std::uint64_t to_line = past == 0 ? 0 : static_cast<std::uint64_t>(kLineBytes) - past;
    const std::int64_t column =
        j + static_cast<std::int64_t>(to_line / static_cast<std::uint64_t>(unit_bytes));
    return column < units ? column : column - units;
}

}  // namespace gnnserve
