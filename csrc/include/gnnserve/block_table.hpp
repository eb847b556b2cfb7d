// Sizes of live blocks by address. A fixed table that never allocates, takes no lock and needs no
// construction, so it works inside malloc hooks, from any thread, before main and after fork.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace gnnserve {

// Every address has two candidate buckets and lies in any slot of either. A lookup therefore reads
// at most four cache lines, whatever was removed before (no tombstones). With two choices of eight
// slots the table fills to over 90 % before an insert finds no room.
//
// NOTE: the caller guarantees what an allocator gives: one thread inserts an address before any
// other thread can know it, and it is removed once. Threads thus compete only for empty slots,
// never for an address, and one compare-and-swap suffices.
template <std::size_t kBuckets>
class BlockTable {
    static_assert((kBuckets & (kBuckets - 1)) == 0, "the number of buckets is a power of two");

public:
    static constexpr std::size_t kSlotsPerBucket = 8;
    static constexpr std::size_t kCapacity = kBuckets * kSlotsPerBucket;

    // Returns false when both buckets are full: the block stays unknown.
    bool insert(std::uintptr_t address, std::size_t size) {
        const std::uint64_t hash = mix(address);
        return insert_into(bucket(hash), address, size) ||
               insert_into(other_bucket(hash), address, size);
    }

    // Returns the size given to `insert`; nullopt when the address is not in the table.
    std::optional<std::size_t> remove(std::uintptr_t address) {
        const std::uint64_t hash = mix(address);
        if (const auto size = remove_from(bucket(hash), address)) {
            return size;
        }
        return remove_from(other_bucket(hash), address);
    }

private:
    struct Slot {
        std::atomic<std::uintptr_t> address{0};  // 0: empty
        std::atomic<std::size_t> size{0};
    };
    struct alignas(64) Bucket {
        std::array<Slot, kSlotsPerBucket> slots;
    };

    static bool insert_into(Bucket& bucket, std::uintptr_t address, std::size_t size) {
        for (Slot& slot : bucket.slots) {
            std::uintptr_t empty = slot.address.load(std::memory_order_relaxed);
            // Acquire pairs with the release in `remove_from`, which has read the old size.
            if (empty == 0 &&
                slot.address.compare_exchange_strong(empty, address, std::memory_order_acquire)) {
                slot.size.store(size, std::memory_order_relaxed);
                return true;
            }
        }
        return false;
    }

    static std::optional<std::size_t> remove_from(Bucket& bucket, std::uintptr_t address) {
        for (Slot& slot : bucket.slots) {
            if (slot.address.load(std::memory_order_relaxed) == address) {
                const std::size_t size = slot.size.load(std::memory_order_relaxed);
                slot.address.store(0, std::memory_order_release);
                return size;
            }
        }
        return std::nullopt;
    }

    // Blocks are aligned to 64 bytes or more; the multiplier is that of the golden ratio.
    static std::uint64_t mix(std::uintptr_t address) {
        const std::uint64_t hash = (address >> 6) * 0x9e3779b97f4a7c15u;
        return hash ^ (hash >> 32);
    }
    Bucket& bucket(std::uint64_t hash) { return buckets_[hash & (kBuckets - 1)]; }
    Bucket& other_bucket(std::uint64_t hash) { return buckets_[(hash >> 24) & (kBuckets - 1)]; }

    std::array<Bucket, kBuckets> buckets_{};
};

}  // namespace gnnserve
