// Copies rows of a resident graph's features to where a lane reads them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace gnnserve {

// The dtype in which features are stored; they are always read as 32-bit floats.
enum class FeatureType : std::uint8_t { kFloat32 = 4, kFloat16 = 2, kUint8 = 1 };

// Features [N, width]. When patched[p] is v, row v is row p of the patch; otherwise it is row v of
// `rows`. `patched` ascends; patch rows are 32-bit floats.
struct Features {
    std::span<const std::byte> rows;
    FeatureType type = FeatureType::kFloat32;
    std::size_t width = 0;
    std::span<const std::int64_t> patched;
    std::span<const float> patched_rows;
};

// Copies the rows of `ids` to `target`, which holds ids.size() * width floats. Throws
// std::invalid_argument for an id without a row.
void gather_rows(const Features& features, std::span<const std::int64_t> ids,
                 std::span<float> target);

}  // namespace gnnserve
