// The kernel's index arithmetic, run for every thread of the grid on the host.

#include "gnnserve/gather_index.hpp"

#include <cstddef>
#include <set>
#include <vector>

#include "check.hpp"

namespace {

using gnnserve::gather_column;
using gnnserve::gather_shape;
using gnnserve::GatherShape;

// Does the work of the kernel in cuda/gather.cuh, one thread after another; calls visit(row, from,
// to, bytes) for every read, in order of warps.
template <typename Visit>
void emulate(const GatherShape& shape, std::uint64_t table, const std::vector<std::int64_t>& ids,
             std::int64_t row_bytes, Visit visit) {
    const auto rows = static_cast<std::int64_t>(ids.size());
    for (std::int64_t block = 0; block < shape.blocks; ++block) {
        for (int y = 0; y < shape.y; ++y) {
            for (std::int64_t row = block * shape.y + y; row < rows;
                 row += shape.blocks * shape.y) {
                const std::uint64_t start =
                    table + static_cast<std::uint64_t>(ids[static_cast<std::size_t>(row)]) *
                                static_cast<std::uint64_t>(row_bytes);
                for (std::int64_t step = 0; step < shape.units; step += shape.x) {
                    for (int x = 0; x < shape.x && step + x < shape.units; ++x) {
                        const std::int64_t column = gather_column(
                            step + x, shape.units, shape.unit_bytes, start, shape.shift);
                        visit(row, x, start + static_cast<std::uint64_t>(column * shape.unit_bytes),
                              row * row_bytes + column * shape.unit_bytes);
                    }
                }
            }
        }
    }
}

// Every byte of every row arrives once and in its place, for all alignments.
void test_every_byte_once() {
    const std::vector<std::int64_t> ids{3, 0, 3, 7, 1};
    for (std::int64_t row_bytes = 1; row_bytes <= 1100; row_bytes += row_bytes < 140 ? 1 : 12) {
        for (std::uint64_t base = 0; base < 128; base += base < 20 ? 1 : 9) {
            for (const bool shift : {false, true}) {
                const std::uint64_t table = 4096 + base;
                const auto shape = gather_shape(table, 0, row_bytes, 5, shift, 512);
                CHECK(row_bytes % shape.unit_bytes == 0);
                CHECK(table % static_cast<std::uint64_t>(shape.unit_bytes) == 0);
                CHECK(shape.x * shape.y == 256 && shape.blocks >= 1 && shape.blocks <= 2);
                std::vector<int> written(ids.size() * static_cast<std::size_t>(row_bytes), 0);
                emulate(shape, table, ids, row_bytes,
                        [&](std::int64_t row, int, std::uint64_t from, std::int64_t to) {
                            const auto id = ids[static_cast<std::size_t>(row)];
                            CHECK(from - table == static_cast<std::uint64_t>(id * row_bytes + to -
                                                                             row * row_bytes));
                            for (int byte = 0; byte < shape.unit_bytes; ++byte) {
                                ++written[static_cast<std::size_t>(to + byte)];
                            }
                        });
                for (const int times : written) {
                    CHECK(times == 1);
                }
            }
        }
    }
}

// Counts the lines that one row requests from the bus, warp by warp.
std::size_t lines_of_row(std::uint64_t address, std::int64_t row_bytes, int unit_bytes,
                         bool shift) {
    std::size_t lines = 0;
    const std::int64_t units = row_bytes / unit_bytes;
    for (std::int64_t warp = 0; warp < units; warp += gnnserve::kWarpThreads) {
        std::set<std::uint64_t> seen;
        for (std::int64_t j = warp; j < units && j < warp + gnnserve::kWarpThreads; ++j) {
            const auto column = gather_column(j, units, unit_bytes, address, shift);
            seen.insert((address + static_cast<std::uint64_t>(column * unit_bytes)) / 128);
        }
        lines += seen.size();
    }
    return lines;
}

// The paper's figure 5: the second of rows of 480 bytes takes 8 requests unshifted, 5 shifted.
void test_requests_of_the_paper() {
    CHECK(lines_of_row(480, 480, 4, false) == 8);
    CHECK(lines_of_row(480, 480, 4, true) == 5);
}

// A shifted row requests at most the lines it lies in and one more for the wrap.
void test_requests_of_any_row() {
    for (std::int64_t row_bytes = 132; row_bytes <= 4096; row_bytes += 4) {
        for (std::uint64_t address = 0; address < 128; address += 4) {
            const auto end = address + static_cast<std::uint64_t>(row_bytes);
            const std::size_t lain_in = (end + 127) / 128 - address / 128;
            const int unit = gnnserve::gather_unit_bytes(address, 0, row_bytes);
            const std::size_t shifted = lines_of_row(address, row_bytes, unit, true);
            CHECK(shifted <= lain_in + 1);
            CHECK(shifted <= lines_of_row(address, row_bytes, unit, false) + 1);
        }
    }
}

void test_units() {
    CHECK(gnnserve::gather_unit_bytes(4096, 0, 512) == 16);
    CHECK(gnnserve::gather_unit_bytes(4096, 0, 500 * 4) == 16);
    CHECK(gnnserve::gather_unit_bytes(4096, 0, 602 * 4) == 8);
    CHECK(gnnserve::gather_unit_bytes(4096 + 4, 0, 512) == 4);
    CHECK(gnnserve::gather_unit_bytes(4096, 8, 512) == 8);
    CHECK(gnnserve::gather_unit_bytes(4096, 0, 3) == 1);
}

// Tables beyond 2^31 elements, and grids at their upper bound.
void test_large() {
    const auto shape = gather_shape(0, 0, 4096, std::int64_t{1} << 33, true, 1 << 20);
    CHECK(shape.blocks == (1 << 20) / 256 && shape.x == 256 && shape.y == 1);
    const std::uint64_t address = (std::uint64_t{1} << 40) + 4;
    CHECK(gather_column(0, 1000, 4, address, true) == 31);
    CHECK(gather_column(999, 1000, 4, address, true) == 30);
}

}  // namespace

int main() {
    test_every_byte_once();
    test_requests_of_the_paper();
    test_requests_of_any_row();
    test_units();
    test_large();
}
