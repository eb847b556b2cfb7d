// Rows of a resident graph's features, copied to where a lane reads them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace gnnserve {

// How features are stored; they are always handed out as 32-bit floats.
enum class FeatureType : std::uint8_t { kFloat32 = 4, kFloat16 = 2, kUint8 = 1 };

// Features [N, width]: row v is patch row p where patched[p], ascending, is v, else row v of
// `rows`. Patch rows are 32-bit floats.
struct Features {
    std::span<const std::byte> rows;
    FeatureType type = FeatureType::kFloat32;
    std::size_t width = 0;
    std::span<const std::int64_t> patched;
    std::span<const float> patched_rows;
};

// Copies the rows of `ids` to `target`, ids.size() * width floats. Every id has a row. Throws
// std::invalid_argument for one that has none.
void gather_rows(const Features& features, std::span<const std::int64_t> ids,
                 std::span<float> target);

}  // namespace gnnserve
