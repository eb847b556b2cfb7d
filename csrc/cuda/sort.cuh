// Sorts keys with their values: CUB's radix sort on the device, the standard library elsewhere.
#pragma once

#include <cstdint>

#include "simt.cuh"

#ifdef __CUDACC__
#include <cub/device/device_radix_sort.cuh>
#else
#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>
#endif

namespace gnnserve {

// Upper bound of CUB's scratch space: a kilobyte for each block of thousands of keys, and some for
// each pass. It is linear in the number of keys because memory estimates are linear.
constexpr std::int64_t kSortBytes = 128 << 10;
constexpr std::int64_t kSortBytesPerKey = 1;

inline std::int64_t aligned(std::int64_t bytes) { return (bytes + 255) / 256 * 256; }

inline std::int64_t sort_scratch_bytes(std::int64_t count) {
    const std::int64_t pairs =
        4 * aligned(count * static_cast<std::int64_t>(sizeof(std::uint32_t)));
    return pairs + kSortBytes + kSortBytesPerKey * count;
}

// Unsorted pairs are written to `key` and `value`; after `sort` these point to the sorted pairs.
struct SortedPairs {
    std::int64_t count;
    std::uint32_t* key;
    std::uint32_t* value;

    SortedPairs(void* scratch, std::int64_t count_) : count(count_) {
        const std::int64_t each = aligned(count * static_cast<std::int64_t>(sizeof(std::uint32_t)));
        auto* at = static_cast<unsigned char*>(scratch);
        key = reinterpret_cast<std::uint32_t*>(at);
        value = reinterpret_cast<std::uint32_t*>(at + each);
        other_key_ = reinterpret_cast<std::uint32_t*>(at + 2 * each);
        other_value_ = reinterpret_cast<std::uint32_t*>(at + 3 * each);
        rest_ = at + 4 * each;
    }

    // Sorts stably; keys are at most `largest`.
    int sort(std::int64_t largest, void* stream) {
#ifdef __CUDACC__
        int bits = 1;
        while (bits < 32 && (largest >> bits) != 0) {
            ++bits;
        }
        cub::DoubleBuffer<std::uint32_t> keys(key, other_key_);
        cub::DoubleBuffer<std::uint32_t> values(value, other_value_);
        auto bytes = static_cast<std::size_t>(kSortBytes + kSortBytesPerKey * count);
        const cudaError_t error =
            cub::DeviceRadixSort::SortPairs(rest_, bytes, keys, values, static_cast<int>(count), 0,
                                            bits, static_cast<cudaStream_t>(stream));
        key = keys.Current();
        value = values.Current();
        return error;
#else
        (void)largest;
        (void)stream;
        std::vector<std::size_t> order(static_cast<std::size_t>(count));
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(),
                         [&](std::size_t a, std::size_t b) { return key[a] < key[b]; });
        for (std::size_t p = 0; p < order.size(); ++p) {
            other_key_[p] = key[order[p]];
            other_value_[p] = value[order[p]];
        }
        key = other_key_;
        value = other_value_;
        // CUB writes here too: tests must notice if anything that is still needed lies here.
        std::memset(rest_, 0xFF, static_cast<std::size_t>(kSortBytes + kSortBytesPerKey * count));
        return kSuccess;
#endif
    }

private:
    std::uint32_t* other_key_;
    std::uint32_t* other_value_;
    unsigned char* rest_;
};

}  // namespace gnnserve
