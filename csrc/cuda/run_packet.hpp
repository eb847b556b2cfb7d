// The packets between server and lane that captured runs need, in msgpack as serve/ipc/messages has
// them: RunTask is read, the others are written.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace gnnserve {

// Sizes of a tensor's axes; those of messages have few.
struct Shape {
    static constexpr int kMostAxes = 8;
    std::array<std::int64_t, kMostAxes> sizes{};
    int axes = 0;

    bool operator==(const Shape&) const = default;
    // Product of the sizes of axes [first, last).
    std::int64_t product(int first, int last) const;
};

// A tensor in the shared pool. The texts are those of the packet.
struct PacketTensor {
    std::string_view name, dtype;
    Shape shape;
    std::uint64_t offset = 0;
};

// Features to gather: rows `ids` of a table of a resident graph, of which those `at` positions are
// replaced by `rows`.
struct PacketGather {
    std::uint64_t table = 0;
    std::string_view dtype;
    Shape table_shape;
    PacketTensor ids, at, rows;
};

struct PacketPart {
    // Where features are gathered, the first one stands for them: it has no place in the pool.
    std::vector<PacketTensor> inputs, outputs;
    bool gathers = false;
    PacketGather gather;
    // Place of the only output of a model that declares none.
    std::uint64_t output_offset = 0, output_capacity = 0;
};

struct RunPacket {
    std::uint64_t task_id = 0;
    std::string_view key;
    std::vector<PacketPart> parts;
    // Upper bound of memory, apart from inputs and outputs.
    std::int64_t limit_bytes = 0;
    std::int64_t run_ns = 0;
    bool bounded = false;
};

// Reads a RunTask. Returns false for any other packet. `packet` must outlive `run`.
bool read_run(std::span<const unsigned char> packet, RunPacket& run);

// Writes the TaskDone of a run whose outputs are finite and whose memory was not measured, with
// these rows of each part.
void write_done(std::uint64_t task_id, std::span<const std::int64_t> rows, std::int64_t columns,
                std::int64_t run_ns, std::string& packet);

// Writes the TakesLess of a run that takes this much of the device's memory.
void write_less(std::uint64_t task_id, std::int64_t memory_bytes, std::string& packet);

// Writes the TaskError of a run that needs more memory than it has.
void write_overrun(std::uint64_t task_id, std::string_view message, std::string& packet);

}  // namespace gnnserve
