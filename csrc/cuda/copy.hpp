// Work that a captured run needs around its launch, as those who plan and who do it share it.
#pragma once

#include <cstdint>

namespace gnnserve {

// `bytes` from one address to another, one of them on the device.
struct Copy {
    std::uint64_t to, from;
    std::int64_t bytes;
};

// `bytes` of the device that all get the value of one byte.
struct Fill {
    std::uint64_t to;
    std::int64_t bytes, value;
};

// Rows of a table in host memory, gathered as float32 [rows, columns] to `out`. All addresses are
// the device's; `hot` and `slot_of` may be 0.
struct Gather {
    std::uint64_t table, ids, hot, slot_of, out;
    std::int64_t rows, row_bytes, item_bytes, most_threads;
};

// All that a task does on its device: copies up, then gathers, then patches of what was gathered,
// also from the host, and so on.
struct Replay {
    void* stream;
    void* graph;
    const Copy* up;
    std::int64_t up_count;
    const Gather* gathers;
    std::int64_t gather_count;
    const Copy* patches;
    std::int64_t patch_count;
    const Fill* spare;
    std::int64_t spare_count;
    const Copy* down;
    std::int64_t down_count;
};

// Does it and returns when the answer is there; returns an error as a number, 0 for success. After
// an error nothing of it is under way.
using ReplayTask = int (*)(const void* route, const Replay* replay);

}  // namespace gnnserve
