// Hands out ranges of a region it never touches, such as a shared memory segment.
// Best fit: the smallest free range that holds the request, the lowest of equal ones. Freed
// ranges merge with their neighbours at once. O(log n) in the number of ranges. Not thread-safe.
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

    // Offset of a range of at least `size` bytes (an empty one takes one alignment unit), or
    // kNoSpace. Throws std::invalid_argument when size is negative.
    std::int64_t alloc(std::int64_t size);

    // Gives a range back; throws std::invalid_argument when none is handed out at `offset`.
    void free(std::int64_t offset);

    // Gives a range back but for `kept`, parts of it in whole units, each of which is a range of
    // its own from now on. Throws std::invalid_argument, and changes nothing, when none is handed
    // out at `offset` or a part is not inside.
    void free_but(std::int64_t offset, const Ranges& kept);

    const Ranges& taken() const { return taken_; }
    std::int64_t capacity() const { return capacity_; }
    // Sum of the ranges handed out, rounded up to the alignment.
    std::int64_t used() const { return used_; }
    // The largest request that would succeed now.
    std::int64_t largest_free() const;

private:
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
