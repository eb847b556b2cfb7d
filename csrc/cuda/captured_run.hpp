// A captured run as a lane's loop knows it: which tasks it serves, and the copies of one of them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "copy.hpp"
#include "resident_tables.hpp"
#include "run_packet.hpp"

namespace gnnserve {

// An input or output of the captured run, at a fixed address of the device.
struct CapturedTensor {
    std::string name, dtype;
    Shape shape;
    std::int64_t item_bytes = 0;
    std::uint64_t address = 0;
    // Axis and symbol of its entries, -1 where sizes are fixed.
    int axis = -1, symbol = -1;
    // Byte that spare room is filled with.
    int spare = 0;
    // Of an index, the symbols that its rows point to, or the one that all of them do.
    std::vector<int> points;

    std::int64_t bytes() const { return item_bytes * shape.product(0, shape.axes); }
};

// Counts of what a symbol stands for that the run serves, those of all parts together.
struct Served {
    std::int64_t least = 0, most = 0;
};

// The copies of a task; kept from one to the next for the room of its vectors.
struct Plan {
    std::vector<Copy> up, down, patches;
    std::vector<Gather> gathers;
    std::vector<Fill> spare;
    // Tables that the gathers read.
    std::vector<std::unique_ptr<ResidentTables::Reading>> tables;
    // Of the device, what is gathered takes.
    std::int64_t gathered_bytes = 0;
    // Rows of each part, as TaskDone tells them.
    std::vector<std::int64_t> rows;
    // Of the part at hand: its entries for each symbol, and those of the parts before it.
    std::vector<std::int64_t> counts, firsts;
    // Indices of later parts, which count from the first part's.
    std::vector<unsigned char> shifted;
    std::size_t shifted_bytes = 0;
};

// Shared host memory that inputs come from and outputs go to.
struct Pool {
    std::uint64_t address = 0, bytes = 0;

    // Returns the address of these bytes, or 0 where they are not in the pool.
    std::uint64_t at(std::uint64_t offset, std::int64_t length) const;
};

// Memory that a plan's copies and gathers use beside the captured run's own.
struct Surroundings {
    Pool pool;
    ResidentTables* tables = nullptr;
    // Of the device, for ids of rows to gather.
    std::uint64_t scratch = 0;
    std::int64_t scratch_bytes = 0;
};

struct CapturedRun {
    std::string key;
    // Number of the kind of stream.
    int kind = 0;
    std::uint64_t stream = 0, graph = 0;
    // Sum of all counts up to which runs are replayed.
    std::int64_t most = 0;
    // Runs of several parts may use it.
    bool any_size = false;
    // The model declares its outputs: their places are among the packet's.
    bool declared = false;
    // Threads of a gather.
    std::int64_t gather_threads = 0;
    // Outputs are looked through for values that are not finite.
    bool checked = false;
    std::vector<Served> symbols;
    std::vector<CapturedTensor> inputs, outputs;
    // When it was last replayed, as a count of replays.
    std::uint64_t used = 0;

    // Makes the plan of a task; returns false when the run does not serve it. The plan is good
    // until the next one is made.
    bool plan(const RunPacket& task, const Surroundings& around, Plan& made) const;

    // Returns true when all floats of the answers are finite. They are in host memory.
    bool all_finite(const Plan& made) const;

private:
    bool count(const PacketPart& part, Plan& made) const;
    bool place_input(const CapturedTensor& input, const PacketTensor& given, const Pool& pool,
                     Plan& made) const;
    bool place_gather(const PacketGather& gather, const Surroundings& around, Plan& made) const;
    bool place_outputs(const PacketPart& part, const Pool& pool, Plan& made) const;
    void fill_spare(Plan& made) const;
};

}  // namespace gnnserve
