#include "gnnserve/device_arena.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

namespace gnnserve {

namespace {

std::int64_t round_up(std::int64_t size, std::int64_t unit) {
    return (size + unit - 1) / unit * unit;
}

// Callers pass sizes as unsigned numbers; a size that cannot be rounded up cannot be placed.
bool placeable(std::int64_t size) {
    return size > 0 &&
           size <= std::numeric_limits<std::int64_t>::max() - DeviceArena::kStaticSegment;
}

}  // namespace

DeviceArena::DeviceArena(std::uintptr_t base, std::int64_t capacity)
    : base_(base), slab_(capacity, kAlignment) {
    if (base == 0 || base % kAlignment != 0) {
        throw std::invalid_argument("the slab must start at a multiple of " +
                                    std::to_string(kAlignment) + ", not at " +
                                    std::to_string(base));
    }
}

int DeviceArena::add_lane() {
    const std::lock_guard lock(mutex_);
    lanes_.push_back(std::make_unique<Pool>());
    return static_cast<int>(lanes_.size()) - 1;
}

bool DeviceArena::insert(int lane, std::int64_t limit) {
    const std::lock_guard lock(mutex_);
    Pool& pool = lane_at(lane);
    if (pool.inserted) {
        throw std::invalid_argument("lane " + std::to_string(lane) + " has a task already");
    }
    if (limit > slab_.capacity()) {
        return false;
    }
    const std::int64_t rounded = round_up(std::max<std::int64_t>(limit, 1), kAlignment);
    if (rounded > slab_.capacity() - slab_.used() ||
        add_segment(pool, std::min(rounded, slab_.largest_free()), End::low) == nullptr) {
        return false;
    }
    pool.usage = Usage{};
    pool.usage.limit = rounded;
    pool.inserted = true;
    return true;
}

std::uintptr_t DeviceArena::alloc(int lane, std::int64_t size) {
    const std::lock_guard lock(mutex_);
    Pool& pool = lane_at(lane);
    if (size == 0) {
        return 0;
    }
    if (!placeable(size)) {
        return refuse(pool, size);
    }
    const std::int64_t rounded = round_up(size, kAlignment);
    if (rounded > pool.usage.limit - pool.usage.live) {
        return refuse(pool, size);
    }
    std::uintptr_t address = 0;
    for (const auto& segment : pool.segments) {
        if (place(*segment, size, rounded, address)) {
            return address;
        }
    }
    // Live bytes are within the limit; only the holes between them are too small.
    Segment* beside = add_segment(pool, rounded, End::low);
    if (beside == nullptr) {
        return refuse(pool, size);
    }
    ++pool.usage.spills;
    place(*beside, size, rounded, address);
    return address;
}

std::uintptr_t DeviceArena::alloc_static(std::int64_t size, std::uintptr_t stream) {
    const std::lock_guard lock(mutex_);
    Pool& pool = statics_[stream];
    if (size == 0) {
        return 0;
    }
    if (!placeable(size)) {
        return refuse(pool, size);
    }
    const std::int64_t rounded = round_up(size, kAlignment);
    std::uintptr_t address = 0;
    for (const auto& segment : pool.segments) {
        if (place(*segment, size, rounded, address)) {
            return address;
        }
    }
    Segment* added = add_segment(pool, round_up(rounded, kStaticSegment), End::high);
    if (added == nullptr) {
        added = add_segment(pool, rounded, End::high);
    }
    if (added == nullptr) {
        return refuse(pool, size);
    }
    place(*added, size, rounded, address);
    return address;
}

bool DeviceArena::free(std::uintptr_t address) {
    const std::lock_guard lock(mutex_);
    const auto found = blocks_.find(address);
    if (found == blocks_.end()) {
        return false;
    }
    const Block block = found->second;
    blocks_.erase(found);
    if (block.segment == nullptr) {
        slab_.free(block.offset);
        outlived_ -= block.rounded;
        return true;
    }
    block.segment->ranges.free(block.offset);
    Pool& pool = *block.segment->pool;
    pool.usage.live -= block.rounded;
    pool.usage.requested -= block.requested;
    --pool.usage.blocks;
    if (pool.traced) {
        pool.trace.push_back(-block.requested);
    }
    return true;
}

std::int64_t DeviceArena::clear(int lane) {
    const std::lock_guard lock(mutex_);
    Pool& pool = lane_at(lane);
    for (const auto& segment : pool.segments) {
        keep_blocks(*segment);
    }
    pool.segments.clear();
    pool.inserted = false;
    pool.usage.limit = 0;
    pool.usage.requested = pool.usage.blocks = pool.usage.refused = 0;
    outlived_ += pool.usage.live;
    return std::exchange(pool.usage.live, 0);
}

DeviceArena::Usage DeviceArena::usage(int lane) const {
    const std::lock_guard lock(mutex_);
    return lane_at(lane).usage;
}

std::int64_t DeviceArena::held() const {
    const std::lock_guard lock(mutex_);
    return slab_.used();
}

std::int64_t DeviceArena::held_static() const {
    const std::lock_guard lock(mutex_);
    std::int64_t sum = 0;
    for (const auto& [stream, pool] : statics_) {
        for (const auto& segment : pool.segments) {
            sum += segment->ranges.capacity();
        }
    }
    return sum;
}

std::int64_t DeviceArena::held_outlived() const {
    const std::lock_guard lock(mutex_);
    return outlived_;
}

void DeviceArena::start_trace(int lane) {
    const std::lock_guard lock(mutex_);
    Pool& pool = lane_at(lane);
    pool.trace.clear();
    pool.traced = true;
}

std::vector<std::int64_t> DeviceArena::take_trace(int lane) {
    const std::lock_guard lock(mutex_);
    Pool& pool = lane_at(lane);
    pool.traced = false;
    return std::exchange(pool.trace, {});
}

DeviceArena::Pool& DeviceArena::lane_at(int lane) {
    return const_cast<Pool&>(std::as_const(*this).lane_at(lane));
}

const DeviceArena::Pool& DeviceArena::lane_at(int lane) const {
    if (lane < 0 || static_cast<std::size_t>(lane) >= lanes_.size()) {
        throw std::invalid_argument("there is no lane " + std::to_string(lane));
    }
    return *lanes_[static_cast<std::size_t>(lane)];
}

DeviceArena::Segment* DeviceArena::add_segment(Pool& pool, std::int64_t size, End end) {
    const std::int64_t offset = end == End::high ? slab_.alloc_high(size) : slab_.alloc(size);
    if (offset == OffsetAllocator::kNoSpace) {
        return nullptr;
    }
    pool.segments.push_back(
        std::make_unique<Segment>(Segment{offset, OffsetAllocator(size, kAlignment), &pool}));
    return pool.segments.back().get();
}

// Frees the segment except the blocks in it, which from then on lie in the slab by themselves.
void DeviceArena::keep_blocks(const Segment& segment) {
    OffsetAllocator::Ranges kept;
    for (const auto& [offset, size] : segment.ranges.taken()) {
        const std::int64_t in_slab = segment.offset + offset;
        Block& block = blocks_.at(base_ + static_cast<std::uintptr_t>(in_slab));
        block.segment = nullptr;
        block.offset = in_slab;
        kept.emplace(in_slab, size);
    }
    slab_.free_but(segment.offset, kept);
}

bool DeviceArena::place(Segment& segment, std::int64_t requested, std::int64_t rounded,
                        std::uintptr_t& address) {
    const std::int64_t offset = segment.ranges.alloc(requested);
    if (offset == OffsetAllocator::kNoSpace) {
        return false;
    }
    address = base_ + static_cast<std::uintptr_t>(segment.offset + offset);
    blocks_.emplace(address, Block{&segment, offset, requested, rounded});
    Pool& pool = *segment.pool;
    Usage& usage = pool.usage;
    usage.live += rounded;
    usage.requested += requested;
    ++usage.blocks;
    usage.peak = std::max(usage.peak, usage.live);
    usage.requested_peak = std::max(usage.requested_peak, usage.requested);
    usage.blocks_peak = std::max(usage.blocks_peak, usage.blocks);
    if (pool.traced) {
        pool.trace.push_back(requested);
    }
    return true;
}

std::uintptr_t DeviceArena::refuse(Pool& pool, std::int64_t size) {
    pool.usage.refused = size;
    ++pool.usage.refusals;
    return 0;
}

}  // namespace gnnserve
