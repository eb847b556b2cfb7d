// Blocks of a region of memory that several threads allocate, such as a shared memory file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>

#include "offset_allocator.hpp"

namespace gnnserve {

// Thread-safe. It lives as long as a block of it does.
class BlockPool : public std::enable_shared_from_this<BlockPool> {
public:
    // Frees its range when the last owner lets go of it.
    class Block {
    public:
        Block(std::shared_ptr<BlockPool> pool, std::int64_t offset)
            : pool_(std::move(pool)), offset_(offset) {}
        ~Block() { pool_->free(offset_); }
        Block(const Block&) = delete;
        Block& operator=(const Block&) = delete;

        std::int64_t offset() const { return offset_; }
        // Address of the region's byte at `offset`, counted from the region's start.
        std::byte* at(std::int64_t offset) const { return pool_->memory_ + offset; }

    private:
        const std::shared_ptr<BlockPool> pool_;
        const std::int64_t offset_;
    };

    // `owner` keeps the memory where it is. Throws as OffsetAllocator does.
    BlockPool(std::byte* memory, std::int64_t capacity, std::int64_t alignment,
              std::shared_ptr<const void> owner)
        : memory_(memory), owner_(std::move(owner)), allocator_(capacity, alignment) {}

    // As OffsetAllocator's functions of these names.
    std::int64_t alloc(std::int64_t size) {
        const std::lock_guard held(lock_);
        return allocator_.alloc(size);
    }
    void free(std::int64_t offset) {
        const std::lock_guard held(lock_);
        allocator_.free(offset);
    }
    std::int64_t capacity() const { return allocator_.capacity(); }
    std::int64_t used() const {
        const std::lock_guard held(lock_);
        return allocator_.used();
    }

    // Returns null without a free range of that size.
    std::shared_ptr<Block> block(std::int64_t size) {
        const std::int64_t offset = alloc(size);
        if (offset == OffsetAllocator::kNoSpace) {
            return nullptr;
        }
        return std::make_shared<Block>(shared_from_this(), offset);
    }

private:
    std::byte* const memory_;
    const std::shared_ptr<const void> owner_;
    mutable std::mutex lock_;
    OffsetAllocator allocator_;
};

}  // namespace gnnserve
