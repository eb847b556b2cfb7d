// Allocator of ranges of a region that it never touches, such as a shared memory segment. Best fit:
// the smallest free range that holds the request, the lowest of equal ones. Freed ranges merge with
// their neighbours at once. O(log n) in the number of ranges. Not thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <utility>

namespace gnnserve {

class OffsetAllocator {
public:
    using Ranges = std::map<std::int64_t, std::int64_t>;  // offset -> size

    static constexpr std::int64_t kNoSpace = -1;

    // `alignment` is a power of two; capacity is rounded down to a multiple of it.
    // Throws std::invalid_argument otherwise.
    OffsetAllocator(std::int64_t capacity, std::int64_t alignment);

    // Returns the offset of a range of at least `size` bytes (an empty one takes one alignment
    // unit), or kNoSpace. Throws std::invalid_argument when `size` is negative.
    std::int64_t alloc(std::int64_t size);

    // As `alloc`, at the highest address that fits. Ranges that stay for long are taken from this
    // end, so that those that come and go do not leave them in the middle. O(free ranges).
    std::int64_t alloc_high(std::int64_t size);

    // Frees a range; throws std::invalid_argument when none was handed out at `offset`.
    void free(std::int64_t offset);

    // Frees a range except `kept`: parts of it in whole units, each of which becomes a range of its
    // own. Throws std::invalid_argument, with nothing changed, when no range was handed out at
    // `offset` or a part is not inside it.
    void free_but(std::int64_t offset, const Ranges& kept);

    const Ranges& taken() const { return taken_; }
    std::int64_t capacity() const { return capacity_; }
    // Sum of the ranges in use, each rounded up to the alignment.
    std::int64_t used() const { return used_; }
    // Size of the largest request that would succeed now.
    std::int64_t largest_free() const;

private:
    // Returns the size as it is taken, or kNoSpace when it is larger than the region.
    std::int64_t rounded_up(std::int64_t size) const;
    // Takes `size` bytes at `offset`, inside the free range.
    void take(Ranges::iterator range, std::int64_t offset, std::int64_t size);
    void insert_free(std::int64_t offset, std::int64_t size);
    void erase_free(Ranges::iterator range);

    std::int64_t capacity_;
    std::int64_t alignment_;
    std::int64_t used_ = 0;
    Ranges taken_;
    Ranges free_;
    std::set<std::pair<std::int64_t, std::int64_t>> free_by_size_;  // (size, offset)
};

}  // namespace gnnserve
