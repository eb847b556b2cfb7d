#include "gnnserve/staging.hpp"

#include <array>
#include <cstring>
#include <limits>
#include <random>
#include <type_traits>
#include <vector>

#include "check.hpp"

using gnnserve::IndexWidth;
using gnnserve::kAllGood;
using gnnserve::stage_features;
using gnnserve::stage_indices;
using gnnserve::stage_integers;

namespace {

// Exactly of the requested size and `shift` bytes off any alignment, so that AddressSanitizer sees
// every byte touched beyond the end.
class Bytes {
public:
    Bytes(std::size_t size, std::size_t shift) : storage_(size + shift), shift_(shift) {}
    std::span<std::byte> span() { return std::span(storage_).subspan(shift_); }

private:
    std::vector<std::byte> storage_;
    std::size_t shift_;
};

template <typename T>
void put(std::span<std::byte> bytes, std::size_t position, T value) {
    std::memcpy(bytes.data() + position * sizeof value, &value, sizeof value);
}

template <typename T>
T get(std::span<const std::byte> bytes, std::size_t position) {
    T value;
    std::memcpy(&value, bytes.data() + position * sizeof value, sizeof value);
    return value;
}

// Sizes around the block of 1024 and the widths of vectors.
constexpr std::array<std::size_t, 9> kSizes{0, 1, 2, 3, 17, 1023, 1024, 1025, 5000};
constexpr std::array<std::size_t, 3> kShifts{0, 1, 7};

template <typename T>
void test_indices(IndexWidth width) {
    std::mt19937_64 random(1);
    for (const std::size_t size : kSizes) {
        for (const std::size_t shift : kShifts) {
            Bytes source(size * sizeof(T), shift);
            Bytes target(size * sizeof(std::int64_t), shift);
            const T bound = 1000;
            for (std::size_t i = 0; i < size; ++i) {
                put(source.span(), i, static_cast<T>(random() % 1000));
            }
            CHECK(stage_indices(source.span(), width, bound, target.span()) == kAllGood);
            for (std::size_t i = 0; i < size; ++i) {
                CHECK(get<std::int64_t>(target.span(), i) == get<T>(source.span(), i));
            }
            for (const T bad :
                 {T{-1}, bound, std::numeric_limits<T>::min(), std::numeric_limits<T>::max()}) {
                for (std::size_t i = 0; i < size; i += 1 + size / 7) {
                    const T kept = get<T>(source.span(), i);
                    const T last = get<T>(source.span(), size - 1);
                    put(source.span(), size - 1, bad);
                    put(source.span(), i, bad);
                    CHECK(stage_indices(source.span(), width, bound, target.span()) ==
                          static_cast<std::ptrdiff_t>(i));
                    put(source.span(), size - 1, last);
                    put(source.span(), i, kept);
                }
            }
        }
    }
}

void test_extreme_bounds() {
    constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
    Bytes source(8, 0);
    Bytes target(8, 0);
    put(source.span(), 0, kMost - 1);
    CHECK(stage_indices(source.span(), IndexWidth::k64, kMost, target.span()) == kAllGood);
    put(source.span(), 0, kMost);
    CHECK(stage_indices(source.span(), IndexWidth::k64, kMost, target.span()) == 0);
    put(source.span(), 0, std::int64_t{0});
    CHECK(stage_indices(source.span(), IndexWidth::k64, 0, target.span()) == 0);
    CHECK(stage_indices(source.span(), IndexWidth::k64, 1, target.span()) == kAllGood);
}

template <typename Number>
void test_integers() {
    constexpr auto kLeast = std::numeric_limits<Number>::min();
    constexpr auto kMost = std::numeric_limits<Number>::max();
    constexpr bool kSigned = std::is_signed_v<Number>;
    const auto staged = [](Bytes& source, std::int64_t low, std::int64_t high, Bytes& target) {
        return stage_integers(source.span(), sizeof(Number), kSigned, low, high, target.span());
    };
    for (const std::size_t size : kSizes) {
        for (const std::size_t shift : kShifts) {
            Bytes source(size * sizeof(Number), shift), target(size * sizeof(Number), shift);
            for (std::size_t i = 0; i < size; ++i) {
                put(source.span(), i, static_cast<Number>(3 + i % 100));
            }
            CHECK(staged(source, 3, 102, target) == kAllGood);
            CHECK(size == 0 || std::memcmp(source.span().data(), target.span().data(),
                                           size * sizeof(Number)) == 0);
            for (const Number bad : {Number{2}, Number{103}, kLeast, kMost}) {
                for (std::size_t i = 0; i < size; i += 1 + size / 7) {
                    const auto kept = get<Number>(source.span(), i);
                    put(source.span(), i, bad);
                    CHECK(staged(source, 3, 102, target) == static_cast<std::ptrdiff_t>(i));
                    CHECK(staged(source, kLeast, INT64_MAX, target) == kAllGood);
                    put(source.span(), i, kept);
                }
            }
            // Ranges beyond what the type holds, on one side or on both.
            CHECK(staged(source, INT64_MIN, INT64_MAX, target) == kAllGood);
            CHECK(staged(source, 1000, 2000, target) == (size == 0 ? kAllGood : 0));
            CHECK(staged(source, 5, 4, target) == (size == 0 ? kAllGood : 0));
        }
    }
}

// Floats by their bits: the largest finite one is below `infinity`.
template <typename Word>
void test_floats(Word infinity) {
    const auto top = static_cast<Word>(Word{1} << (8 * sizeof(Word) - 1));
    for (const std::size_t size : kSizes) {
        Bytes source(size * sizeof(Word), 1), target(size * sizeof(Word), 7);
        for (std::size_t i = 0; i < size; ++i) {
            put(source.span(), i, static_cast<Word>((infinity - 1) | (i % 2 == 0 ? top : Word{0})));
        }
        CHECK(stage_features(source.span(), target.span(), true, sizeof(Word)) == kAllGood);
        for (std::size_t i = 0; i < size; i += 1 + size / 7) {
            for (const Word bad : {infinity, static_cast<Word>(infinity | top),
                                   static_cast<Word>(infinity + 1), static_cast<Word>(~Word{0})}) {
                const Word kept = get<Word>(source.span(), i);
                put(source.span(), i, bad);
                CHECK(stage_features(source.span(), target.span(), true, sizeof(Word)) ==
                      static_cast<std::ptrdiff_t>(i));
                CHECK(stage_features(source.span(), target.span(), false, sizeof(Word)) ==
                      kAllGood);
                put(source.span(), i, kept);
            }
        }
    }
}

void test_features() {
    using limits = std::numeric_limits<float>;
    for (const std::size_t size : kSizes) {
        for (const std::size_t shift : kShifts) {
            Bytes source(size * sizeof(float), shift);
            Bytes target(size * sizeof(float), shift);
            const std::array<float, 5> fine{-limits::max(), limits::denorm_min(), -0.0F, 1.5F,
                                            limits::max()};
            for (std::size_t i = 0; i < size; ++i) {
                put(source.span(), i, fine[i % fine.size()]);
            }
            CHECK(stage_features(source.span(), target.span(), true) == kAllGood);
            CHECK(size == 0 ||
                  std::memcmp(source.span().data(), target.span().data(), size * 4) == 0);
            for (const float bad : {limits::infinity(), -limits::infinity(), limits::quiet_NaN(),
                                    -limits::quiet_NaN(), limits::signaling_NaN()}) {
                for (std::size_t i = 0; i < size; i += 1 + size / 7) {
                    const float kept = get<float>(source.span(), i);
                    put(source.span(), i, bad);
                    CHECK(stage_features(source.span(), target.span(), true) ==
                          static_cast<std::ptrdiff_t>(i));
                    CHECK(stage_features(source.span(), target.span(), false) == kAllGood);
                    CHECK(std::memcmp(source.span().data(), target.span().data(), size * 4) == 0);
                    put(source.span(), i, kept);
                }
            }
        }
    }
}

}  // namespace

int main() {
    test_indices<std::int32_t>(IndexWidth::k32);
    test_indices<std::int64_t>(IndexWidth::k64);
    test_extreme_bounds();
    test_features();
    test_integers<std::int8_t>();
    test_integers<std::uint8_t>();
    test_integers<std::int16_t>();
    test_integers<std::uint16_t>();
    test_integers<std::int32_t>();
    test_integers<std::int64_t>();
    test_floats<std::uint16_t>(0x7c00);
    test_floats<std::uint32_t>(0x7f800000);
    test_floats<std::uint64_t>(0x7ff0000000000000);
}
