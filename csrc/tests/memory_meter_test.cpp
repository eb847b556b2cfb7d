#include "gnnserve/memory_meter.hpp"

#include <thread>
#include <vector>

#include "check.hpp"

using gnnserve::BlockTable;
using gnnserve::MemoryMeter;

namespace {

void* address(std::size_t number) { return reinterpret_cast<void*>(number * 64); }

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
    meter.on_alloc(address(1), 1000);
    meter.on_alloc(address(2), 500);
    CHECK(meter.live() == 1500 && meter.peak() == 1500);
    CHECK(meter.on_free(address(1)) == 1000);
    CHECK(meter.on_free(address(1)) == 0);
    CHECK(meter.on_free(reinterpret_cast<void*>(72)) == 0);
    CHECK(meter.on_free(nullptr) == 0);
    meter.on_alloc(address(3), 100);
    CHECK(meter.live() == 600 && meter.peak() == 1500);
    meter.reset();
    CHECK(meter.peak() == 600);
    CHECK(MemoryMeter::tracks(64, 64) && !MemoryMeter::tracks(32, 64));
    CHECK(!MemoryMeter::tracks(64, 63));
}

void test_says_what_it_missed() {
    static MemoryMeter meter;
    constexpr std::size_t kBlocks = 70'000;  // the table has 65,536 slots
    for (std::size_t i = 1; i <= kBlocks; ++i) {
        meter.on_alloc(address(i), 64);
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
                meter.on_alloc(address(own * kBlocks + i), 64 + i);
            }
            for (std::size_t i = 1; i <= kBlocks; ++i) {
                CHECK(meter.on_free(address(own * kBlocks + i)) == 64 + i);
            }
        }
        for (std::size_t i = 1; i <= kBlocks; ++i) {
            CHECK(meter.on_free(address((kThreads + other) * kBlocks + i)) == 64 + i);
        }
    };
    std::size_t handed_over = 0;
    for (std::size_t block = 0; block < kThreads * kBlocks; ++block) {
        const std::size_t i = 1 + block % kBlocks;
        meter.on_alloc(address((kThreads + block / kBlocks) * kBlocks + i), 64 + i);
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
    test_says_what_it_missed();
    test_threads();
}
