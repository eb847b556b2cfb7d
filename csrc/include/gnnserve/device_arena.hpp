// Placement of device memory. One slab is taken from the device once. Every lane gets a buffer of
// the size that its task is estimated to need; everything else (weights, workspaces of libraries)
// gets a place of its own. Buffers are taken from the low end of the slab and the rest from the
// high end, as in CoGNN, so that a model that is loaded beside tasks does not stay in the
// middle of what they leave. The arena never touches the memory that it places, so it runs without
// a device.
//
// The host is ahead of the device: a freed block may still be read by work that was launched
// before. Memory is therefore reused only where order makes it safe: inside a lane (one stream at a
// time) and inside the static memory of one stream. A lane's buffer returns to the slab by `clear`,
// which the caller calls once the lane's work has ended.
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "gnnserve/offset_allocator.hpp"

namespace gnnserve {

class DeviceArena {
public:
    static constexpr std::int64_t kAlignment = 512;
    // Static memory is taken from the slab in multiples of this.
    static constexpr std::int64_t kStaticSegment = std::int64_t{2} << 20;

    // Counters of one lane's current or last task. Bytes are rounded up to kAlignment unless their
    // name says "requested".
    struct Usage {
        std::int64_t limit = 0;
        std::int64_t live = 0;
        std::int64_t peak = 0;
        std::int64_t requested = 0;
        std::int64_t requested_peak = 0;
        std::int64_t blocks = 0;
        std::int64_t blocks_peak = 0;
        // Requested size of the block refused last to the current task; 0 when none was.
        std::int64_t refused = 0;
        // Number of blocks that fitted no hole of the buffer and were placed beside it.
        std::int64_t spills = 0;
        std::int64_t refusals = 0;
    };

    // `base` is a multiple of kAlignment. Throws std::invalid_argument otherwise, or when not even
    // one unit fits.
    DeviceArena(std::uintptr_t base, std::int64_t capacity);

    // Adds a lane and returns its number: 0, 1, ...
    int add_lane();

    // Starts a task on the lane: at most `limit` bytes live at once, in a buffer of that size.
    // Returns false, with nothing changed, when the slab has less left. When the free memory is in
    // pieces, the buffer starts with the largest piece and grows by others as blocks need them.
    // Throws std::invalid_argument while the lane's last task has not been cleared.
    bool insert(int lane, std::int64_t limit);

    // Returns the address of a block of `size` bytes, or 0 when it would pass the limit (see
    // Usage::refused). A size of 0 also returns 0 and is no refusal.
    std::uintptr_t alloc(int lane, std::int64_t size);
    // Allocates outside tasks, until the process ends; freed memory is reused on the same stream
    // only.
    std::uintptr_t alloc_static(std::int64_t size, std::uintptr_t stream);

    // Frees a block, from any thread. Returns false when no block was handed out at `address`.
    bool free(std::uintptr_t address);

    // Ends the task; its work on the device must have ended. Returns the bytes still live: only
    // these blocks stay out of others' reach until they are freed. Peaks stay readable.
    std::int64_t clear(int lane);

    Usage usage(int lane) const;
    std::int64_t capacity() const { return slab_.capacity(); }
    // Bytes of lanes' buffers, static memory and blocks that outlived their task.
    std::int64_t held() const;
    std::int64_t held_static() const;
    // Bytes of blocks that outlived their task, a part of `held`.
    std::int64_t held_outlived() const;

    // Starts to record every block of the lane: +size when allocated, -size when freed.
    void start_trace(int lane);
    // Returns the record, oldest first, and ends the recording.
    std::vector<std::int64_t> take_trace(int lane);

private:
    struct Pool;
    // A range of the slab that holds blocks of one pool.
    struct Segment {
        std::int64_t offset;  // in the slab
        OffsetAllocator ranges;
        Pool* pool;
    };
    struct Pool {
        Usage usage;
        std::vector<std::unique_ptr<Segment>> segments;
        bool inserted = false;
        bool traced = false;
        std::vector<std::int64_t> trace;
    };
    struct Block {
        Segment* segment;     // null: it outlived its task, and lies in the slab by itself
        std::int64_t offset;  // in the segment, or in the slab
        std::int64_t requested;
        std::int64_t rounded;
    };

    Pool& lane_at(int lane);
    const Pool& lane_at(int lane) const;
    enum class End { low, high };
    // Returns null when no free range of the slab holds it.
    Segment* add_segment(Pool& pool, std::int64_t size, End end);
    void keep_blocks(const Segment& segment);
    bool place(Segment& segment, std::int64_t requested, std::int64_t rounded,
               std::uintptr_t& address);
    std::uintptr_t refuse(Pool& pool, std::int64_t size);

    mutable std::mutex mutex_;
    std::uintptr_t base_;
    OffsetAllocator slab_;
    std::vector<std::unique_ptr<Pool>> lanes_;
    std::map<std::uintptr_t, Pool> statics_;  // by stream
    std::int64_t outlived_ = 0;
    std::unordered_map<std::uintptr_t, Block> blocks_;
};

}  // namespace gnnserve
