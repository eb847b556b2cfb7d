// Copies a request's tensors to their final place and checks them in the same pass, without an
// intermediate copy. Spans need no alignment. Every element is read once, so the value that was
// checked is the value that is used, even if the source changes meanwhile.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace gnnserve {

// Returned when every element passed the check.
inline constexpr std::ptrdiff_t kAllGood = -1;

enum class IndexWidth : std::uint8_t { k32 = 4, k64 = 8 };

// Copies signed indices of `width` bytes to `target`, as 64-bit or unchanged, and checks 0 <= index
// < bound. Requires width <= to, target.size() / to == source.size() / width, and no overlap.
// Returns kAllGood, or the flat position of the first index out of range; `target` is then only
// partly written.
std::ptrdiff_t stage_indices(std::span<const std::byte> source, IndexWidth width,
                             std::int64_t bound, std::span<std::byte> target,
                             IndexWidth to = IndexWidth::k64);

// Copies indices likewise without a check.
void copy_indices(std::span<const std::byte> source, IndexWidth width, std::span<std::byte> target,
                  IndexWidth to);

// Copies 32-bit floats to `target`; with `check_finite` it also looks for NaN and infinities.
// Requires equal sizes, a multiple of 4, and no overlap. Returns kAllGood, or the flat position of
// the first value that is not finite; `target` is then only partly written.
std::ptrdiff_t stage_features(std::span<const std::byte> source, std::span<std::byte> target,
                              bool check_finite);

}  // namespace gnnserve
