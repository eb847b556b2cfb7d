#include "gnnserve/offset_allocator.hpp"

#include <limits>
#include <map>
#include <random>
#include <stdexcept>
#include <vector>

#include "check.hpp"

using gnnserve::OffsetAllocator;

namespace {

template <typename Action>
bool refuses(Action action) {
    try {
        action();
    } catch (const std::invalid_argument&) {
        return true;
    }
    return false;
}

void test_best_fit_and_merging() {
    OffsetAllocator ranges(1024, 64);
    CHECK(ranges.alloc(100) == 0);  // takes 128
    CHECK(ranges.alloc(64) == 128);
    CHECK(ranges.alloc(200) == 192);  // takes 256
    CHECK(ranges.alloc(64) == 448);
    CHECK(ranges.used() == 512);
    ranges.free(192);
    ranges.free(0);
    CHECK(ranges.largest_free() == 512);
    CHECK(ranges.alloc(128) == 0);  // the tightest hole, not the first nor the tail
    CHECK(ranges.alloc(256) == 192);
    ranges.free(192);
    ranges.free(128);  // merges with the hole to its right
    CHECK(ranges.alloc(320) == 128);
    ranges.free(128);
    ranges.free(448);
    ranges.free(0);
    CHECK(ranges.used() == 0);
    CHECK(ranges.alloc(1024) == 0);  // everything is one range again
    CHECK(ranges.alloc(0) == OffsetAllocator::kNoSpace);
    CHECK(ranges.largest_free() == 0);
}

void test_both_ends() {
    OffsetAllocator ranges(1024, 64);
    CHECK(ranges.alloc_high(100) == 896);  // takes 128
    CHECK(ranges.alloc(64) == 0);
    CHECK(ranges.alloc_high(64) == 832);
    CHECK(ranges.alloc_high(0) == 768 && ranges.used() == 320);
    ranges.free(832);
    CHECK(ranges.alloc_high(128) == 640);  // the hole above is too small
    CHECK(ranges.alloc_high(64) == 832);
    CHECK(ranges.alloc_high(577) == OffsetAllocator::kNoSpace);
    CHECK(ranges.alloc_high(2000) == OffsetAllocator::kNoSpace);
    CHECK(ranges.alloc_high(576) == 64 && ranges.largest_free() == 0);
    CHECK(ranges.alloc_high(0) == OffsetAllocator::kNoSpace);
    CHECK(refuses([&] { ranges.alloc_high(-1); }));
    for (const std::int64_t offset : {0, 64, 640, 768, 832, 896}) {
        ranges.free(offset);
    }
    CHECK(ranges.used() == 0 && ranges.largest_free() == 1024);
}

// Returns the bytes outside the largest free range after long lives have come between short ones
// and the short ones have ended, beyond those that the long ones take.
std::int64_t cut_off(bool both_ends) {
    std::mt19937 random(11);
    OffsetAllocator ranges(1 << 20, 64);
    std::vector<std::int64_t> brief;
    for (int step = 0; step < 400; ++step) {
        // At most 32 short lives of 2 KiB at once, and 40 long ones in all.
        if (step % 10 == 0) {
            const std::int64_t size = static_cast<std::int64_t>(1 + random() % 2048);
            CHECK((both_ends ? ranges.alloc_high(size) : ranges.alloc(size)) >= 0);
        } else if (brief.size() < 32 && random() % 2 == 0) {
            brief.push_back(ranges.alloc(static_cast<std::int64_t>(1 + random() % 2048)));
            CHECK(brief.back() >= 0);
        } else if (!brief.empty()) {
            const auto chosen =
                brief.begin() + static_cast<std::ptrdiff_t>(random() % brief.size());
            ranges.free(*chosen);
            brief.erase(chosen);
        }
    }
    for (const std::int64_t offset : brief) {
        ranges.free(offset);
    }
    return ranges.capacity() - ranges.used() - ranges.largest_free();
}

void test_long_lives_from_the_far_end_leave_the_rest_whole() {
    CHECK(cut_off(false) > 0);
    CHECK(cut_off(true) == 0);
}

void test_edges() {
    constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
    OffsetAllocator ranges(1000, 64);
    CHECK(ranges.capacity() == 960);
    CHECK(ranges.alloc(961) == OffsetAllocator::kNoSpace);
    CHECK(ranges.alloc(kMost) == OffsetAllocator::kNoSpace);
    CHECK(ranges.alloc(0) == 0);
    CHECK(ranges.alloc(0) == 64);
    CHECK(refuses([&] { ranges.alloc(-1); }));
    CHECK(refuses([&] { ranges.free(32); }));
    ranges.free(64);
    CHECK(refuses([&] { ranges.free(64); }));
    CHECK(refuses([] { OffsetAllocator(1000, 48); }));
    CHECK(refuses([] { OffsetAllocator(1000, 0); }));
    CHECK(refuses([] { OffsetAllocator(63, 64); }));
    CHECK(OffsetAllocator(kMost, 64).alloc(kMost - 64) == 0);
}

// Ranges in use never overlap, are counted correctly, and leave nothing behind.
void test_random_use() {
    std::mt19937 random(7);
    OffsetAllocator ranges(1 << 16, 64);
    std::map<std::int64_t, std::int64_t> live;
    std::int64_t used = 0;
    for (int step = 0; step < 20000; ++step) {
        if (random() % 2 == 0 || live.empty()) {
            const std::int64_t size = static_cast<std::int64_t>(random() % 3000);
            const std::int64_t rounded = size == 0 ? 64 : (size + 63) / 64 * 64;
            const std::int64_t largest = ranges.largest_free();
            const std::int64_t offset =
                random() % 4 == 0 ? ranges.alloc_high(size) : ranges.alloc(size);
            CHECK((offset == OffsetAllocator::kNoSpace) == (rounded > largest));
            if (offset != OffsetAllocator::kNoSpace) {
                CHECK(offset % 64 == 0 && offset >= 0 && offset + rounded <= ranges.capacity());
                const auto after = live.lower_bound(offset);
                CHECK(after == live.end() || offset + rounded <= after->first);
                CHECK(after == live.begin() ||
                      std::prev(after)->first + std::prev(after)->second <= offset);
                live.emplace(offset, rounded);
                used += rounded;
            }
        } else {
            const auto chosen = std::next(live.begin(), random() % live.size());
            ranges.free(chosen->first);
            used -= chosen->second;
            live.erase(chosen);
        }
        CHECK(ranges.used() == used);
    }
    for (const auto& [offset, size] : live) {
        ranges.free(offset);
    }
    CHECK(ranges.used() == 0 && ranges.largest_free() == ranges.capacity());
}

void test_parts_of_a_range_are_kept() {
    OffsetAllocator ranges(1024, 64);
    CHECK(ranges.alloc(64) == 0 && ranges.alloc(640) == 64);
    const auto refused = [&](const OffsetAllocator::Ranges& kept) {
        return refuses([&] { ranges.free_but(64, kept); }) && ranges.used() == 704;
    };
    CHECK(refused({{0, 64}}) && refused({{640, 128}}) && refused({{128, 0}}));
    CHECK(refused({{128, 32}}) && refused({{128, 128}, {192, 64}}));
    CHECK(refuses([&] { ranges.free_but(128, {}); }));
    ranges.free_but(64, {{64, 64}, {256, 128}});
    CHECK(ranges.used() == 64 + 64 + 128 && ranges.largest_free() == 640);
    CHECK(ranges.alloc(128) == 128);  // between the two
    ranges.free(256);
    ranges.free_but(128, {});  // gives back all of it
    ranges.free(64);
    CHECK(ranges.used() == 64 && ranges.largest_free() == 960);
}

}  // namespace

int main() {
    test_best_fit_and_merging();
    test_both_ends();
    test_long_lives_from_the_far_end_leave_the_rest_whole();
    test_parts_of_a_range_are_kept();
    test_edges();
    test_random_use();
}
