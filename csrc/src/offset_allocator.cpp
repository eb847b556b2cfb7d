#include "gnnserve/offset_allocator.hpp"

#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <string>

namespace gnnserve {

OffsetAllocator::OffsetAllocator(std::int64_t capacity, std::int64_t alignment)
    : capacity_(capacity), alignment_(alignment) {
    if (alignment < 1 || (alignment & (alignment - 1)) != 0) {
        throw std::invalid_argument("alignment must be a power of two, got " +
                                    std::to_string(alignment));
    }
    if (capacity < alignment) {
        throw std::invalid_argument("capacity " + std::to_string(capacity) +
                                    " is below one alignment unit of " + std::to_string(alignment));
    }
    capacity_ -= capacity % alignment;
    insert_free(0, capacity_);
}

std::int64_t OffsetAllocator::alloc(std::int64_t size) {
    const std::int64_t rounded = rounded_up(size);
    const auto fit = free_by_size_.lower_bound({rounded, 0});
    if (rounded == kNoSpace || fit == free_by_size_.end()) {
        return kNoSpace;
    }
    const std::int64_t offset = fit->second;
    take(free_.find(offset), offset, rounded);
    return offset;
}

std::int64_t OffsetAllocator::alloc_high(std::int64_t size) {
    const std::int64_t rounded = rounded_up(size);
    if (rounded == kNoSpace) {
        return kNoSpace;
    }
    const auto fit = std::find_if(free_.rbegin(), free_.rend(),
                                  [&](const auto& range) { return range.second >= rounded; });
    if (fit == free_.rend()) {
        return kNoSpace;
    }
    const std::int64_t offset = fit->first + fit->second - rounded;
    take(free_.find(fit->first), offset, rounded);
    return offset;
}

std::int64_t OffsetAllocator::rounded_up(std::int64_t size) const {
    if (size < 0) {
        throw std::invalid_argument("size must be at least 0, got " + std::to_string(size));
    }
    if (size > capacity_) {  // before rounding up, which could overflow
        return kNoSpace;
    }
    return std::max<std::int64_t>(1, (size + alignment_ - 1) / alignment_) * alignment_;
}

void OffsetAllocator::take(Ranges::iterator range, std::int64_t offset, std::int64_t size) {
    const auto [start, range_size] = *range;
    erase_free(range);
    if (start < offset) {
        insert_free(start, offset - start);
    }
    if (offset + size < start + range_size) {
        insert_free(offset + size, start + range_size - offset - size);
    }
    taken_.emplace(offset, size);
    used_ += size;
}

void OffsetAllocator::free(std::int64_t offset) {
    const auto found = taken_.find(offset);
    if (found == taken_.end()) {
        throw std::invalid_argument("no range is handed out at offset " + std::to_string(offset));
    }
    std::int64_t start = offset;
    std::int64_t size = found->second;
    used_ -= size;
    taken_.erase(found);
    const auto after = free_.find(start + size);
    if (after != free_.end()) {
        size += after->second;
        erase_free(after);
    }
    const auto right = free_.lower_bound(start);
    if (right != free_.begin()) {
        const auto before = std::prev(right);
        if (before->first + before->second == start) {
            start = before->first;
            size += before->second;
            erase_free(before);
        }
    }
    insert_free(start, size);
}

void OffsetAllocator::free_but(std::int64_t offset, const Ranges& kept) {
    const auto found = taken_.find(offset);
    if (found == taken_.end()) {
        throw std::invalid_argument("no range is handed out at offset " + std::to_string(offset));
    }
    const std::int64_t end = offset + found->second;
    std::int64_t at = offset;
    for (const auto& [start, size] : kept) {
        if (start < at || size < 1 || size > end - start || (start | size) % alignment_ != 0) {
            throw std::invalid_argument("no part of the range at offset " + std::to_string(offset) +
                                        ": " + std::to_string(size) + " bytes at " +
                                        std::to_string(start));
        }
        at = start + size;
    }
    taken_.erase(found);
    const auto give_back = [&](std::int64_t from, std::int64_t to) {
        if (from < to) {
            taken_.emplace(from, to - from);
            free(from);
        }
    };
    at = offset;
    for (const auto& [start, size] : kept) {
        give_back(at, start);
        at = start + size;
    }
    give_back(at, end);
    taken_.insert(kept.begin(), kept.end());
}

std::int64_t OffsetAllocator::largest_free() const {
    return free_by_size_.empty() ? 0 : free_by_size_.rbegin()->first;
}

void OffsetAllocator::insert_free(std::int64_t offset, std::int64_t size) {
    free_.emplace(offset, size);
    free_by_size_.emplace(size, offset);
}

void OffsetAllocator::erase_free(Ranges::iterator range) {
    free_by_size_.erase({range->second, range->first});
    free_.erase(range);
}

}  // namespace gnnserve
