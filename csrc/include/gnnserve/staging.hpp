// Copying a request's tensors into their final place while checking them: one pass, no
// intermediate copy. Spans need no alignment. Every element is read once: a value that passed the
// check is the value that will be used, also when the source changes underneath.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace gnnserve {

// No element broke the rule.
inline constexpr std::ptrdiff_t kAllGood = -1;

enum class IndexWidth : std::uint8_t { k32 = 4, k64 = 8 };

// Copies signed indices to `target`, as 64-bit ones or as wide as they come, and checks
// 0 <= index < bound. Requires width <= to, target.size() / to == source.size() / width, and no
// overlap. Returns kAllGood, or the
// flat position of the first index out of range; `target` is then only partly written.
std::ptrdiff_t stage_indices(std::span<const std::byte> source, IndexWidth width,
                             std::int64_t bound, std::span<std::byte> target,
                             IndexWidth to = IndexWidth::k64);

// Copies 32-bit floats to `target`, and with `check_finite` looks for NaN and infinities.
// Requires equal sizes, a multiple of 4, and no overlap. Returns kAllGood, or the flat position
// of the first value that is not finite; `target` is then only partly written.
std::ptrdiff_t stage_features(std::span<const std::byte> source, std::span<std::byte> target,
                              bool check_finite);

}  // namespace gnnserve
