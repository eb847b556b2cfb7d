#include "gnnserve/gather.hpp"

#include <bit>
#include <cmath>
#include <stdexcept>
#include <vector>

#include "check.hpp"

using gnnserve::Features;
using gnnserve::FeatureType;
using gnnserve::gather_rows;

namespace {

template <typename T>
std::span<const std::byte> bytes(const std::vector<T>& values) {
    return std::as_bytes(std::span(values));
}

void test_floats_and_patch() {
    const std::vector<float> rows{0, 1, 2, 3, 4, 5};
    const std::vector<std::int64_t> patched{1, 3};
    const std::vector<float> patched_rows{-1, -2, -3, -4};
    const Features features{bytes(rows), FeatureType::kFloat32, 2, patched, patched_rows};
    const std::vector<std::int64_t> ids{3, 0, 1, 2, 0};
    std::vector<float> target(10);
    gather_rows(features, ids, target);
    CHECK((target == std::vector<float>{-3, -4, 0, 1, -1, -2, 4, 5, 0, 1}));
    bool refused = false;
    try {
        const std::vector<std::int64_t> beyond{4};
        std::vector<float> row(2);
        gather_rows(features, beyond, row);
    } catch (const std::invalid_argument&) {
        refused = true;
    }
    CHECK(refused);
}

void test_bytes() {
    const std::vector<std::uint8_t> rows{0, 1, 127, 128, 255, 7};
    const Features features{bytes(rows), FeatureType::kUint8, 3, {}, {}};
    const std::vector<std::int64_t> ids{1, 0};
    std::vector<float> target(6);
    gather_rows(features, ids, target);
    CHECK((target == std::vector<float>{128, 255, 7, 0, 1, 127}));
}

// Compares every 16-bit float with the definition of the format.
void test_halves() {
    std::vector<std::uint16_t> rows(65536);
    for (std::size_t i = 0; i < rows.size(); ++i) {
        rows[i] = static_cast<std::uint16_t>(i);
    }
    const Features features{bytes(rows), FeatureType::kFloat16, 256, {}, {}};
    for (std::int64_t id = 0; id < 256; ++id) {
        std::vector<float> target(256);
        const std::vector<std::int64_t> ids{id};
        gather_rows(features, ids, target);
        for (int i = 0; i < 256; ++i) {
            const auto half = static_cast<int>(id) * 256 + i;
            const int exponent = (half >> 10) & 31;
            const int mantissa = half & 1023;
            const float found = target[static_cast<std::size_t>(i)];
            CHECK(std::signbit(found) == ((half & 0x8000) != 0));
            if (exponent == 31) {
                CHECK(mantissa == 0 ? std::isinf(found) : std::isnan(found));
            } else if (exponent == 0) {
                CHECK(std::fabs(found) == std::ldexp(static_cast<float>(mantissa), -24));
            } else {
                CHECK(std::fabs(found) ==
                      std::ldexp(static_cast<float>(1024 + mantissa), exponent - 25));
            }
        }
    }
}

}  // namespace

int main() {
    test_floats_and_patch();
    test_bytes();
    test_halves();
}
