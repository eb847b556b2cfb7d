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

// Copies floats of `bytes` bytes, 2, 4 or 8, to `target`; with `check_finite` it also looks for NaN
// and infinities. Requires equal sizes, a multiple of `bytes`, and no overlap. Returns kAllGood, or
// the flat position of the first value that is not finite; `target` is then only partly written.
std::ptrdiff_t stage_features(std::span<const std::byte> source, std::span<std::byte> target,
                              bool check_finite, std::size_t bytes = 4);

// Copies integers of `bytes` bytes, 1, 2, 4 or 8, to `target` and checks low <= integer <= high.
// Requires equal sizes, a multiple of `bytes`, and no overlap. Returns as `stage_features` does.
std::ptrdiff_t stage_integers(std::span<const std::byte> source, std::size_t bytes, bool is_signed,
                              std::int64_t low, std::int64_t high, std::span<std::byte> target);

}  // namespace gnnserve
