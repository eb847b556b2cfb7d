#include "gnnserve/staging.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>

namespace gnnserve {
namespace {

// Elements between two checks of the flags: enough for the copy to run at full speed, few enough
// that a second look for the first bad element costs nothing.
constexpr std::size_t kBlock = 1024;

template <typename Word>
constexpr Word kTop = static_cast<Word>(Word{1} << (8 * sizeof(Word) - 1));

// Copies `count` elements, sign-extending Source to Word, and returns the `or` of their flags. A
// flag has its top bit set exactly when its element is bad. The loop has no branch and its
// operations exist for every vector width, so compilers vectorise it for any x86-64. Every element
// is read once, so the checked value is the copied one. memcpy, which compiles to plain loads and
// stores, allows any alignment.
template <typename Source, typename Word, typename Flag>
Word copy_block(const std::byte* __restrict source, std::byte* __restrict target, std::size_t count,
                Flag flag) {
    Word seen = 0;
    for (std::size_t i = 0; i < count; ++i) {
        Source element;
        std::memcpy(&element, source + i * sizeof element, sizeof element);
        const auto word = static_cast<Word>(static_cast<std::make_signed_t<Word>>(element));
        std::memcpy(target + i * sizeof word, &word, sizeof word);
        seen = static_cast<Word>(seen | flag(word));
    }
    return seen;
}

template <typename Source, typename Word, typename Flag>
std::ptrdiff_t stage(std::span<const std::byte> source, std::span<std::byte> target, Flag flag) {
    constexpr Word kBad = kTop<Word>;
    const std::size_t total = target.size() / sizeof(Word);
    for (std::size_t start = 0; start < total; start += kBlock) {
        const std::size_t count = std::min(kBlock, total - start);
        std::byte* block = target.data() + start * sizeof(Word);
        const Word seen =
            copy_block<Source, Word>(source.data() + start * sizeof(Source), block, count, flag);
        if ((seen & kBad) == 0) {
            continue;
        }
        for (std::size_t i = 0; i < count; ++i) {
            Word word;
            std::memcpy(&word, block + i * sizeof word, sizeof word);
            if ((flag(word) & kBad) != 0) {
                return static_cast<std::ptrdiff_t>(start + i);
            }
        }
    }
    return kAllGood;
}

// Stages floats whose bits are those of a Word. Magnitudes of NaN and infinities are those from
// `infinity` on: adding what it lacks to the top bit carries these, and only these, into that bit.
template <typename Word>
std::ptrdiff_t stage_finite(std::span<const std::byte> source, std::span<std::byte> target,
                            Word infinity) {
    constexpr Word kMagnitude = static_cast<Word>(~kTop<Word>);
    const auto carry = static_cast<Word>(kTop<Word> - infinity);
    return stage<Word, Word>(source, target, [carry](Word bits) {
        return static_cast<Word>(static_cast<Word>(bits & kMagnitude) + carry);
    });
}

template <typename Number>
std::ptrdiff_t stage_range(std::span<const std::byte> source, std::int64_t low, std::int64_t high,
                           std::span<std::byte> target) {
    using Word = std::make_unsigned_t<Number>;
    using Limits = std::numeric_limits<Number>;
    low = std::max(low, static_cast<std::int64_t>(Limits::min()));
    high = std::min(high, static_cast<std::int64_t>(Limits::max()));
    if (low > high) {
        return source.empty() ? kAllGood : 0;
    }
    const auto first = static_cast<Word>(low);
    const auto most = static_cast<Word>(static_cast<Word>(high) - first);
    return stage<Number, Word>(source, target, [first, most](Word word) {
        return static_cast<Word>(word - first) > most ? kTop<Word> : Word{0};
    });
}

}  // namespace

std::ptrdiff_t stage_indices(std::span<const std::byte> source, IndexWidth width,
                             std::int64_t bound, std::span<std::byte> target, IndexWidth to) {
    if (to == IndexWidth::k32) {
        // No int32 exceeds 2^31 - 1, whatever the bound is.
        const auto last = static_cast<std::uint32_t>(std::min(bound, std::int64_t{1} << 31) - 1);
        return stage<std::int32_t, std::uint32_t>(
            source, target, [last](std::uint32_t index) { return index | (last - index); });
    }
    // A bound of 0 gives all ones here, which flags every index.
    const std::uint64_t last = static_cast<std::uint64_t>(bound) - 1;
    // The sign bit is set when the index is negative or exceeds the last allowed one.
    const auto outside = [last](std::uint64_t index) { return index | (last - index); };
    return width == IndexWidth::k32 ? stage<std::int32_t, std::uint64_t>(source, target, outside)
                                    : stage<std::int64_t, std::uint64_t>(source, target, outside);
}

void copy_indices(std::span<const std::byte> source, IndexWidth width, std::span<std::byte> target,
                  IndexWidth to) {
    if (target.empty()) {
        return;
    }
    if (width == to) {
        std::memcpy(target.data(), source.data(), target.size());
    } else {
        copy_block<std::int32_t, std::uint64_t>(source.data(), target.data(),
                                                target.size() / sizeof(std::uint64_t),
                                                [](std::uint64_t) { return std::uint64_t{0}; });
    }
}

std::ptrdiff_t stage_features(std::span<const std::byte> source, std::span<std::byte> target,
                              bool check_finite, std::size_t bytes) {
    if (!check_finite) {
        if (!target.empty()) {
            std::memcpy(target.data(), source.data(), target.size());
        }
        return kAllGood;
    }
    switch (bytes) {
        case 2:
            return stage_finite<std::uint16_t>(source, target, 0x7c00);
        case 4:
            return stage_finite<std::uint32_t>(source, target, 0x7f800000);
        default:
            return stage_finite<std::uint64_t>(source, target, 0x7ff0000000000000);
    }
}

std::ptrdiff_t stage_integers(std::span<const std::byte> source, std::size_t bytes, bool is_signed,
                              std::int64_t low, std::int64_t high, std::span<std::byte> target) {
    switch (bytes) {
        case 1:
            return is_signed ? stage_range<std::int8_t>(source, low, high, target)
                             : stage_range<std::uint8_t>(source, low, high, target);
        case 2:
            return is_signed ? stage_range<std::int16_t>(source, low, high, target)
                             : stage_range<std::uint16_t>(source, low, high, target);
        case 4:
            return is_signed ? stage_range<std::int32_t>(source, low, high, target)
                             : stage_range<std::uint32_t>(source, low, high, target);
        default:
            return stage_range<std::int64_t>(source, low, high, target);
    }
}

}  // namespace gnnserve
