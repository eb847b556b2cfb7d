#include "gnnserve/memory_meter.hpp"

#include <thread>
#include <vector>

#include "check.hpp"

using gnnserve::BlockTable;
using gnnserve::MemoryMeter;
using Kind = gnnserve::MemoryMeter::Kind;

namespace {

void* address(std::size_t number) { return reinterpret_cast<void*>(number * 64); }

// Allocates a tensor at `block`; returns false when it is refused.
bool take(MemoryMeter& meter, void* block, std::size_t size) {
    if (!meter.admit(Kind::tensor, size)) {
        return false;
    }
    meter.on_alloc(block, Kind::tensor, size);
    return true;
}

void test_table_fills_up_and_empties() {
    static BlockTable<64> table;
    std::vector<bool> known;
    std::size_t inserted = 0;
    for (std::size_t i = 1; i <= table.kCapacity; ++i) {
        known.push_back(table.insert(i * 64, i));
        inserted += known.back() ? 1 : 0;
    }
    CHECK(inserted > table.kCapacity * 9 / 10);
    for (std::size_t i = 1; i <= table.kCapacity; ++i) {
        CHECK(table.remove(i * 64) == (known[i - 1] ? std::optional(i) : std::nullopt));
        CHECK(!table.remove(i * 64));
    }
    CHECK(table.insert(64, 5) && table.remove(64) == std::size_t{5});
}

void test_counts() {
    static MemoryMeter meter;
    CHECK(take(meter, address(1), 1000));
    CHECK(take(meter, address(2), 500));
    CHECK(meter.live() == 1500 && meter.peak() == 1500);
    CHECK(meter.on_free(address(1)).size == 1000);
    CHECK(meter.on_free(address(1)).size == 0);
    CHECK(meter.on_free(reinterpret_cast<void*>(72)).size == 0);
    CHECK(meter.on_free(nullptr).size == 0);
    CHECK(take(meter, address(3), 100));
    CHECK(meter.live() == 600 && meter.peak() == 1500);
    meter.reset();
    CHECK(meter.peak() == 600);
    CHECK(MemoryMeter::is_tensor(64, 64) && !MemoryMeter::is_tensor(32, 64));
    CHECK(!MemoryMeter::is_tensor(64, 63));
}

void test_a_word_ends_a_stretch_of_work() {
    static MemoryMeter meter;
    std::atomic<std::uint64_t> word{6};
    meter.insert(1000);
    meter.stop_when(&word, 7);
    CHECK(take(meter, address(1), 100));
    word = 7;
    CHECK(!take(meter, address(2), 100));
    CHECK(meter.refused() == 100);
    CHECK(meter.admit(Kind::other, 100));
    meter.on_alloc(address(3), Kind::other, 100);
    meter.clear();
    CHECK(take(meter, address(2), 100));
    meter.insert(1000);
    CHECK(take(meter, address(4), 100));
}

void test_other_blocks_are_held_but_no_tensors() {
    static MemoryMeter meter;
    CHECK(take(meter, address(1), 1000));
    CHECK(meter.admit(Kind::other, 70'000));
    meter.on_alloc(address(2), Kind::other, 70'000);
    CHECK(meter.live() == 1000 && meter.peak() == 1000 && meter.held() == 71'000);
    CHECK(meter.on_free(address(2)).kind == Kind::other);
    CHECK(meter.on_free(address(1)).kind == Kind::tensor);
    CHECK(meter.held() == 0 && meter.live() == 0);
}

void test_limit() {
    static MemoryMeter meter;
    CHECK(take(meter, address(1), 5000));
    meter.insert(1000);
    CHECK(take(meter, address(2), 600));
    CHECK(meter.refused() == 0);
    CHECK(!take(meter, address(3), 401));
    CHECK(meter.refused() == 401 && meter.held() == 5600);
    CHECK(take(meter, address(3), 400));
    CHECK(meter.held_peak() == 1000);
    meter.on_free(address(1));  // what was there before makes room
    CHECK(take(meter, address(1), 5000));
    CHECK(!take(meter, address(4), 64));
    meter.clear();
    CHECK(take(meter, address(4), 1'000'000));
    CHECK(meter.refused() == 64);
    meter.insert(~std::size_t{0});
    CHECK(meter.refused() == 0 && take(meter, address(5), 1'000'000));
}

// Other blocks are not refused but reduce what is left for tensors.
void test_other_blocks_use_up_the_limit() {
    static MemoryMeter meter;
    meter.insert(100'000);
    CHECK(meter.admit(Kind::other, 150'000));
    meter.on_alloc(address(1), Kind::other, 150'000);
    CHECK(!take(meter, address(2), 64));
    CHECK(meter.held_peak() == 150'000);
    meter.on_free(address(1));
    CHECK(take(meter, address(2), 64));
}

void test_what_fails_does_not_count() {
    static MemoryMeter meter;
    CHECK(meter.admit(Kind::tensor, 1 << 30));
    meter.on_alloc(nullptr, Kind::tensor, 1 << 30);
    CHECK(meter.held() == 0 && meter.live() == 0 && meter.peak() == 0);
    meter.adopt(reinterpret_cast<void*>(80), Kind::other, 70'000);
    CHECK(meter.held() == 0);
    meter.adopt(address(1), Kind::other, 70'000);
    CHECK(meter.held() == 70'000 && meter.untracked() == 0);
}

// Threads that ask at once stay within the limit together.
void test_threads_share_the_limit() {
    static MemoryMeter meter;
    meter.insert(1000);
    std::vector<std::thread> threads;
    for (std::size_t t = 0; t < 4; ++t) {
        threads.emplace_back([t] {
            for (int round = 0; round < 10'000; ++round) {
                if (take(meter, address(1 + t), 400)) {
                    CHECK(meter.on_free(address(1 + t)).size == 400);
                }
            }
        });
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
    CHECK(meter.held() == 0);
}

void test_says_what_it_missed() {
    static MemoryMeter meter;
    constexpr std::size_t kBlocks = 70'000;  // the table has 65,536 slots
    for (std::size_t i = 1; i <= kBlocks; ++i) {
        CHECK(take(meter, address(i), 64));
    }
    CHECK(meter.untracked() > 0);
    CHECK(meter.live() == (kBlocks - meter.untracked()) * 64);
    for (std::size_t i = 1; i <= kBlocks; ++i) {
        meter.on_free(address(i));
    }
    CHECK(meter.live() == 0);
}

// Threads allocate, free, and hand blocks to one another; nothing is lost or counted twice.
void test_threads() {
    static MemoryMeter meter;
    constexpr std::size_t kThreads = 4;
    constexpr std::size_t kBlocks = 500;
    constexpr int kRounds = 100;
    const auto work = [](std::size_t own, std::size_t other, int rounds) {
        for (int round = 0; round < rounds; ++round) {
            for (std::size_t i = 1; i <= kBlocks; ++i) {
                CHECK(take(meter, address(own * kBlocks + i), 64 + i));
            }
            for (std::size_t i = 1; i <= kBlocks; ++i) {
                CHECK(meter.on_free(address(own * kBlocks + i)).size == 64 + i);
            }
        }
        for (std::size_t i = 1; i <= kBlocks; ++i) {
            CHECK(meter.on_free(address((kThreads + other) * kBlocks + i)).size == 64 + i);
        }
    };
    std::size_t handed_over = 0;
    for (std::size_t block = 0; block < kThreads * kBlocks; ++block) {
        const std::size_t i = 1 + block % kBlocks;
        CHECK(take(meter, address((kThreads + block / kBlocks) * kBlocks + i), 64 + i));
        handed_over += 64 + i;
    }
    CHECK(meter.live() == handed_over);
    std::vector<std::thread> threads;
    for (std::size_t t = 0; t < kThreads; ++t) {
        threads.emplace_back(work, t, (t + 1) % kThreads, kRounds);
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
    CHECK(meter.live() == 0 && meter.untracked() == 0);
    CHECK(meter.peak() >= handed_over && meter.peak() <= 2 * handed_over);
}

}  // namespace

int main() {
    test_table_fills_up_and_empties();
    test_counts();
    test_other_blocks_are_held_but_no_tensors();
    test_limit();
    test_a_word_ends_a_stretch_of_work();
    test_other_blocks_use_up_the_limit();
    test_what_fails_does_not_count();
    test_says_what_it_missed();
    test_threads();
    test_threads_share_the_limit();
}
