#include "gnnserve/staging.hpp"

#include <algorithm>
#include <cstring>

namespace gnnserve {
namespace {

// Elements checked at once: the block is still in the first-level cache when it is read back.
constexpr std::size_t kBlock = 1024;
constexpr std::uint64_t kSign64 = std::uint64_t{1} << 63;
constexpr std::uint32_t kSign32 = std::uint32_t{1} << 31;
constexpr std::uint32_t kMagnitude = 0x7fffffff;
constexpr std::uint32_t kInfinity = 0x7f800000;

// Spans of bytes have no alignment; every access goes through memcpy, which compiles to a load.
template <typename T>
T load(const std::byte* bytes, std::size_t position) {
    T value;
    std::memcpy(&value, bytes + position * sizeof(T), sizeof(T));
    return value;
}

// Has its top bit set exactly when the index is outside [0, last]. Subtraction and `or` are all
// it takes, so the loop vectorises on every x86-64, where 64-bit compares would not.
std::uint64_t outside(std::uint64_t index, std::uint64_t last) { return index | (last - index); }

// Has its top bit clear exactly when the float is NaN or infinite.
std::uint32_t finite(std::uint32_t bits) { return (bits & kMagnitude) - kInfinity; }

void widen(const std::byte* source, std::byte* target, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
        const std::int64_t value = load<std::int32_t>(source, i);
        std::memcpy(target + i * sizeof value, &value, sizeof value);
    }
}

bool all_inside(const std::byte* indices, std::size_t count, std::uint64_t last) {
    std::uint64_t seen = 0;
    for (std::size_t i = 0; i < count; ++i) {
        seen |= outside(load<std::uint64_t>(indices, i), last);
    }
    return (seen & kSign64) == 0;
}

bool all_finite(const std::byte* values, std::size_t count) {
    std::uint32_t seen = kSign32;
    for (std::size_t i = 0; i < count; ++i) {
        seen &= finite(load<std::uint32_t>(values, i));
    }
    return (seen & kSign32) != 0;
}

// Position of the first element for which `is_bad` holds; there is one.
template <typename T, typename Predicate>
std::size_t locate(const std::byte* block, std::size_t start, Predicate is_bad) {
    std::size_t i = 0;
    while (!is_bad(load<T>(block, i))) {
        ++i;
    }
    return start + i;
}

}  // namespace

std::ptrdiff_t stage_indices(std::span<const std::byte> source, IndexWidth width,
                             std::int64_t bound, std::span<std::byte> target) {
    const std::size_t total = target.size() / sizeof(std::int64_t);
    const std::size_t source_step = static_cast<std::size_t>(width);
    // With bound 0 this is all ones, and every index is outside.
    const std::uint64_t last = static_cast<std::uint64_t>(bound) - 1;
    for (std::size_t start = 0; start < total; start += kBlock) {
        const std::size_t count = std::min(kBlock, total - start);
        const std::byte* from = source.data() + start * source_step;
        std::byte* block = target.data() + start * sizeof(std::int64_t);
        if (width == IndexWidth::k64) {
            std::memcpy(block, from, count * sizeof(std::int64_t));
        } else {
            widen(from, block, count);
        }
        if (!all_inside(block, count, last)) {
            return static_cast<std::ptrdiff_t>(locate<std::uint64_t>(
                block, start,
                [last](auto index) { return (outside(index, last) & kSign64) != 0; }));
        }
    }
    return kAllGood;
}

std::ptrdiff_t stage_features(std::span<const std::byte> source, std::span<std::byte> target,
                              bool check_finite) {
    if (!check_finite) {
        if (!target.empty()) {
            std::memcpy(target.data(), source.data(), target.size());
        }
        return kAllGood;
    }
    const std::size_t total = target.size() / sizeof(float);
    for (std::size_t start = 0; start < total; start += kBlock) {
        const std::size_t count = std::min(kBlock, total - start);
        std::byte* block = target.data() + start * sizeof(float);
        std::memcpy(block, source.data() + start * sizeof(float), count * sizeof(float));
        if (!all_finite(block, count)) {
            return static_cast<std::ptrdiff_t>(locate<std::uint32_t>(
                block, start, [](auto bits) { return (finite(bits) & kSign32) == 0; }));
        }
    }
    return kAllGood;
}

}  // namespace gnnserve
