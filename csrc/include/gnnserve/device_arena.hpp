// Placement of device memory: one slab, taken from the device once, from which every lane gets a
// buffer of the size its task is estimated to need, and everything else (weights, workspaces of
// libraries) a place of its own. Never touches the memory it places, so it runs without a device.
//
// A block that is freed may still be read by work that was launched before: the host is ahead of
// the device. So memory is reused only where order makes that safe: inside a lane (one stream at
// a time) and inside the static memory of one stream. A lane's buffer goes back to the slab by
// `clear`, which the caller calls once the lane's work has ended.
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

    // What is known of one lane's current or last task. Bytes are rounded up to kAlignment
    // where they are not called requested.
    struct Usage {
        std::int64_t limit = 0;
        std::int64_t live = 0;
        std::int64_t peak = 0;
        std::int64_t requested = 0;
        std::int64_t requested_peak = 0;
        std::int64_t blocks = 0;
        std::int64_t blocks_peak = 0;
        // Requested size of the last block refused to the current task; 0: none was.
        std::int64_t refused = 0;
        // Times a block did not fit into the buffer's holes and got a place beside it.
        std::int64_t spills = 0;
        std::int64_t refusals = 0;
    };

    // `base` is a multiple of kAlignment. Throws std::invalid_argument otherwise, or when not even
    // one unit fits.
    DeviceArena(std::uintptr_t base, std::int64_t capacity);

    // The next lane's number: 0, 1, ...
    int add_lane();

    // Starts a task on the lane: at most `limit` bytes live at once, in a buffer of that size.
    // False, and nothing changed, when the slab has not that much left. Where what is left lies in
    // pieces, the buffer starts with the largest and grows by others as blocks need them.
    // Throws std::invalid_argument while the lane's last task has not been cleared.
    bool insert(int lane, std::int64_t limit);

    // Address of `size` bytes, or 0 when that would pass the limit (see Usage::refused). A size of
    // 0 gives 0 as well, and is no refusal.
    std::uintptr_t alloc(int lane, std::int64_t size);
    // The same outside tasks: for as long as the process lives, reused only on the same stream.
    std::uintptr_t alloc_static(std::int64_t size, std::uintptr_t stream);

    // Takes a block back, from any thread. False when no block is handed out at `address`.
    bool free(std::uintptr_t address);

    // Ends the task; the caller knows that its work on the device has ended. Returns the bytes
    // still live: these blocks, and nothing beside them, are kept from others until they are freed.
    // Peaks stay readable.
    std::int64_t clear(int lane);

    Usage usage(int lane) const;
    std::int64_t capacity() const { return slab_.capacity(); }
    // Held by lanes' buffers, static memory and blocks that outlived their task.
    std::int64_t held() const;
    std::int64_t held_static() const;
    // Of what is held, the blocks that outlived their task.
    std::int64_t held_outlived() const;

    // From here on remember every block of the lane: +size when handed out, -size when taken back.
    void start_trace(int lane);
    // What was remembered, oldest first; ends the tracing.
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
    Segment* add_segment(Pool& pool, std::int64_t size);
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
