#include "gnnserve/gather.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <stdexcept>
#include <string>

namespace gnnserve {
namespace {

constexpr std::size_t kLine = 64;
// Prefetch distance in rows, and the bytes of each that are prefetched; the hardware continues.
constexpr std::size_t kAhead = 4;
constexpr std::size_t kFetched = 8 * kLine;

// Converts a 16-bit float to 32 bits without a branch, so that compilers vectorise it for any
// x86-64. A multiplication corrects the exponent and also normalises the smallest numbers.
float widen(std::uint16_t half) {
    constexpr std::uint32_t kMagnitude = 0x7fff;
    constexpr std::uint32_t kInfinity = 0x7c00;
    const std::uint32_t magnitude = half & kMagnitude;
    const auto scale = std::bit_cast<float>(std::uint32_t{(127 + 112) << 23});
    const auto scaled = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude << 13) * scale);
    const std::uint32_t not_finite = magnitude >= kInfinity ? std::uint32_t{0xff} << 23 : 0;
    const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000) << 16;
    return std::bit_cast<float>(scaled | not_finite | sign);
}

void copy_row(const std::byte* __restrict row, FeatureType type, std::size_t width,
              float* __restrict target) {
    switch (type) {
        case FeatureType::kFloat32:
            std::memcpy(target, row, width * sizeof(float));
            break;
        case FeatureType::kFloat16:
            for (std::size_t i = 0; i < width; ++i) {
                std::uint16_t half;
                std::memcpy(&half, row + i * sizeof half, sizeof half);
                target[i] = widen(half);
            }
            break;
        case FeatureType::kUint8:
            for (std::size_t i = 0; i < width; ++i) {
                target[i] = static_cast<float>(static_cast<std::uint8_t>(row[i]));
            }
            break;
    }
}

}  // namespace

void gather_rows(const Features& features, std::span<const std::int64_t> ids,
                 std::span<float> target) {
    const std::size_t width = features.width;
    const std::size_t row_bytes = width * static_cast<std::size_t>(features.type);
    const std::size_t base_rows = row_bytes == 0 ? 0 : features.rows.size() / row_bytes;
    const auto patched = features.patched;
    for (std::size_t i = 0; i < ids.size(); ++i) {
        if (i + kAhead < ids.size()) {
            const auto ahead = static_cast<std::size_t>(ids[i + kAhead]);
            if (ahead < base_rows) {
                const std::byte* row = features.rows.data() + ahead * row_bytes;
                for (std::size_t at = 0; at < std::min(row_bytes, kFetched); at += kLine) {
                    __builtin_prefetch(row + at);
                }
            }
        }
        float* place = target.data() + i * width;
        if (!patched.empty()) {
            const auto found = std::lower_bound(patched.begin(), patched.end(), ids[i]);
            if (found != patched.end() && *found == ids[i]) {
                const auto at = static_cast<std::size_t>(found - patched.begin());
                std::memcpy(place, features.patched_rows.data() + at * width,
                            width * sizeof(float));
                continue;
            }
        }
        const auto at = static_cast<std::size_t>(ids[i]);
        if (at >= base_rows) {
            throw std::invalid_argument("id " + std::to_string(ids[i]) + " has no row");
        }
        copy_row(features.rows.data() + at * row_bytes, features.type, width, place);
    }
}

}  // namespace gnnserve
