#include "gnnserve/device_arena.hpp"

#include <algorithm>
#include <map>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.hpp"

namespace {

using gnnserve::DeviceArena;

constexpr std::uintptr_t kBase = 0x7f0000000000;
constexpr std::int64_t kMiB = 1 << 20;

template <typename Work>
bool refuses(Work work) {
    try {
        work();
    } catch (const std::invalid_argument&) {
        return true;
    }
    return false;
}

void test_a_task_from_insert_to_clear() {
    DeviceArena arena(kBase, kMiB);
    const int lane = arena.add_lane();
    CHECK(arena.alloc(lane, 1) == 0);  // no task: no memory
    CHECK(arena.insert(lane, 4096));
    CHECK(arena.held() == 4096);
    const auto first = arena.alloc(lane, 100), second = arena.alloc(lane, 1000);
    CHECK(first >= kBase && first % DeviceArena::kAlignment == 0 && second != first);
    CHECK(arena.alloc(lane, 0) == 0);
    auto usage = arena.usage(lane);
    CHECK(usage.live == 512 + 1024 && usage.requested == 1100 && usage.blocks == 2);
    CHECK(usage.refused == 0);
    CHECK(arena.free(first) && !arena.free(first) && arena.free(second));
    usage = arena.usage(lane);
    CHECK(usage.live == 0 && usage.peak == 1536 && usage.requested_peak == 1100);
    CHECK(refuses([&] { arena.insert(lane, 512); }));
    CHECK(arena.clear(lane) == 0 && arena.held() == 0);
    CHECK(arena.usage(lane).peak == 1536);
    CHECK(arena.insert(lane, 512) && arena.usage(lane).peak == 0);
}

void test_an_overrun_is_one_lanes_own() {
    DeviceArena arena(kBase, kMiB);
    const int greedy = arena.add_lane(), modest = arena.add_lane();
    CHECK(arena.insert(greedy, 2048) && arena.insert(modest, 2048));
    CHECK(arena.alloc(greedy, 2048) != 0);
    CHECK(arena.usage(greedy).refusals == 0);
    CHECK(arena.alloc(greedy, 1) == 0 && arena.usage(greedy).refused == 1);
    CHECK(arena.alloc(greedy, 1) == 0 && arena.usage(greedy).refusals == 2);
    CHECK(arena.alloc(modest, 2048) != 0 && arena.usage(modest).refused == 0);
    CHECK(arena.alloc(greedy, std::numeric_limits<std::int64_t>::max()) == 0);
    CHECK(arena.alloc(greedy, -1) == 0);
}

// The limit applies to live bytes, wherever they lie.
void test_holes_do_not_count_as_use() {
    DeviceArena arena(kBase, kMiB);
    const int lane = arena.add_lane();
    CHECK(arena.insert(lane, 4 * 512));
    std::vector<std::uintptr_t> blocks;
    for (int i = 0; i < 4; ++i) {
        blocks.push_back(arena.alloc(lane, 512));
    }
    arena.free(blocks[0]);
    arena.free(blocks[2]);
    const auto large = arena.alloc(lane, 1024);  // two holes of 512 do not hold it
    CHECK(large != 0 && arena.usage(lane).spills == 1 && arena.usage(lane).live == 4 * 512);
    CHECK(arena.alloc(lane, 512) == 0);
    for (const auto block : {blocks[1], blocks[3], large}) {
        arena.free(block);
    }
    CHECK(arena.clear(lane) == 0 && arena.held() == 0);
}

void test_a_buffer_of_pieces() {
    DeviceArena arena(kBase, 8 * 512);
    std::vector<int> lanes;
    for (int i = 0; i < 4; ++i) {
        lanes.push_back(arena.add_lane());
        CHECK(arena.insert(lanes[static_cast<std::size_t>(i)], 2 * 512));
    }
    CHECK(arena.clear(lanes[0]) == 0 && arena.clear(lanes[2]) == 0);
    CHECK(!arena.insert(lanes[0], 5 * 512));
    CHECK(arena.insert(lanes[0], 4 * 512));  // in two pieces of 2
    CHECK(arena.alloc(lanes[0], 1024) != 0 && arena.alloc(lanes[0], 1024) != 0);
    CHECK(arena.alloc(lanes[0], 1) == 0);
    CHECK(arena.held() == 8 * 512);
}

void test_blocks_that_outlive_their_task() {
    DeviceArena arena(kBase, 8 * 512);
    const int lane = arena.add_lane();
    CHECK(arena.insert(lane, 8 * 512));
    const auto before = arena.alloc(lane, 512), kept = arena.alloc(lane, 10),
               between = arena.alloc(lane, 1024), last = arena.alloc(lane, 1);
    CHECK(arena.free(before) && arena.free(between));
    CHECK(arena.clear(lane) == 2 * 512);
    CHECK(arena.held() == 2 * 512 && arena.held_outlived() == 2 * 512);
    // Others get all the rest, but not these.
    CHECK(!arena.insert(lane, 7 * 512));
    CHECK(arena.insert(lane, 6 * 512));
    for (int block = 0; block < 6; ++block) {
        const auto address = arena.alloc(lane, 512);
        CHECK(address != 0 && address != kept && address != last);
    }
    CHECK(arena.alloc(lane, 1) == 0);
    CHECK(arena.free(kept) && !arena.free(kept));
    CHECK(arena.held_outlived() == 512 && arena.usage(lane).live == 6 * 512);
    CHECK(arena.clear(lane) == 6 * 512);
    CHECK(arena.held() == 7 * 512 && arena.held_outlived() == 7 * 512);
    CHECK(arena.free(last));
    CHECK(arena.insert(lane, 2 * 512));
    CHECK(arena.alloc(lane, 512) != 0 && arena.alloc(lane, 512) != 0 && arena.held() == 8 * 512);
}

void test_a_refusal_is_its_own_tasks() {
    DeviceArena arena(kBase, 8 * 512);
    const int lane = arena.add_lane();
    CHECK(arena.insert(lane, 512) && arena.alloc(lane, 1000) == 0);
    CHECK(arena.usage(lane).refused == 1000);
    arena.clear(lane);
    CHECK(!arena.insert(lane, 9 * 512) && arena.usage(lane).refused == 0);
}

void test_static_memory_stays_with_its_stream() {
    DeviceArena arena(kBase, 8 * kMiB);
    const auto first = arena.alloc_static(100, 1);
    CHECK(arena.free(first));
    CHECK(arena.alloc_static(100, 2) != first);
    CHECK(arena.alloc_static(100, 1) == first);
    CHECK(arena.held_static() == 2 * DeviceArena::kStaticSegment);
    CHECK(arena.alloc_static(3 * kMiB, 1) != 0);
    CHECK(arena.held_static() == 8 * kMiB && arena.held() == 8 * kMiB);
    CHECK(arena.alloc_static(2 * kMiB, 1) == 0);
    const int lane = arena.add_lane();
    CHECK(!arena.insert(lane, 512));
}

// What a model takes while tasks run is not in the way once they have ended.
void test_static_memory_leaves_the_buffers_of_tasks_whole() {
    DeviceArena arena(kBase, 16 * kMiB);
    const int lane = arena.add_lane(), other = arena.add_lane();
    CHECK(arena.insert(lane, 3 * kMiB));
    CHECK(arena.alloc_static(kMiB, 1) != 0);
    CHECK(arena.insert(other, 3 * kMiB));
    CHECK(arena.alloc_static(2 * kMiB, 1) != 0);
    CHECK(arena.clear(lane) == 0 && arena.clear(other) == 0);
    const std::int64_t left = arena.capacity() - arena.held_static();
    CHECK(left == 12 * kMiB && arena.insert(lane, left));
    // One piece holds all of it.
    CHECK(arena.alloc(lane, left) != 0 && arena.usage(lane).spills == 0);
}

void test_trace() {
    DeviceArena arena(kBase, kMiB);
    const int lane = arena.add_lane();
    CHECK(arena.insert(lane, 8192));
    const auto before = arena.alloc(lane, 7);
    arena.start_trace(lane);
    const auto block = arena.alloc(lane, 600);
    arena.free(block);
    arena.free(before);
    CHECK((arena.take_trace(lane) == std::vector<std::int64_t>{600, -600, -7}));
    arena.free(arena.alloc(lane, 1));
    CHECK(arena.take_trace(lane).empty());
}

void test_refusals() {
    CHECK(refuses([] { DeviceArena(kBase + 1, kMiB); }));
    CHECK(refuses([] { DeviceArena(0, kMiB); }));
    CHECK(refuses([] { DeviceArena(kBase, 1); }));
    DeviceArena arena(kBase, kMiB);
    CHECK(refuses([&] { arena.insert(0, 512); }));
    CHECK(refuses([&] { arena.usage(-1); }));
    CHECK(!arena.free(kBase));
    const int lane = arena.add_lane();
    CHECK(!arena.insert(lane, std::numeric_limits<std::int64_t>::max()));
}

// Compares with a model: blocks never overlap, counts are correct, and peaks stay apart.
void test_random_use() {
    std::mt19937 random(11);
    DeviceArena arena(kBase, 4 * kMiB);
    constexpr int kLanes = 4;
    struct Model {
        bool inserted = false;
        std::int64_t limit = 0, live = 0, peak = 0;
        std::vector<std::uintptr_t> blocks;
    };
    std::vector<Model> lanes(kLanes);
    std::map<std::uintptr_t, std::int64_t> all;
    std::vector<std::uintptr_t> outlived;
    for (int i = 0; i < kLanes; ++i) {
        arena.add_lane();
    }
    for (int step = 0; step < 50000; ++step) {
        const int number = static_cast<int>(random() % kLanes);
        Model& lane = lanes[static_cast<std::size_t>(number)];
        if (!lane.inserted) {
            const std::int64_t limit = 512 * (1 + static_cast<std::int64_t>(random() % 3000));
            if (arena.insert(number, limit)) {
                lane = {true, limit, 0, 0, {}};
            }
        } else if (random() % 64 == 0) {
            // Some blocks outlive the task and are freed later by any thread.
            const bool all_freed = random() % 2 == 0;
            std::int64_t left = 0;
            for (const auto block : lane.blocks) {
                if (all_freed || random() % 8 != 0) {
                    CHECK(arena.free(block));
                    all.erase(block);
                } else {
                    outlived.push_back(block);
                    left += all.at(block);
                }
            }
            CHECK(arena.usage(number).peak == lane.peak);
            CHECK(arena.clear(number) == left);
            lane = {};
        } else if (random() % 16 == 0 && !outlived.empty()) {
            CHECK(arena.free(outlived.back()));
            all.erase(outlived.back());
            outlived.pop_back();
        } else if (random() % 3 != 0 || lane.blocks.empty()) {
            const std::int64_t size = 1 + static_cast<std::int64_t>(random() % 60000);
            const std::int64_t rounded = (size + 511) / 512 * 512;
            const auto address = arena.alloc(number, size);
            CHECK(address == 0 || lane.live + rounded <= lane.limit);
            if (address == 0) {
                CHECK(arena.usage(number).refused == size);
                continue;
            }
            CHECK(address >= kBase && address + static_cast<std::uintptr_t>(rounded) <=
                                          kBase + static_cast<std::uintptr_t>(arena.capacity()));
            const auto after = all.lower_bound(address);
            CHECK(after == all.end() ||
                  address + static_cast<std::uintptr_t>(rounded) <= after->first);
            CHECK(after == all.begin() ||
                  std::prev(after)->first + static_cast<std::uintptr_t>(std::prev(after)->second) <=
                      address);
            all.emplace(address, rounded);
            lane.blocks.push_back(address);
            lane.live += rounded;
            lane.peak = std::max(lane.peak, lane.live);
        } else {
            const std::size_t index = random() % lane.blocks.size();
            const auto block = lane.blocks[index];
            lane.live -= all.at(block);
            all.erase(block);
            lane.blocks.erase(lane.blocks.begin() + static_cast<std::ptrdiff_t>(index));
            CHECK(arena.free(block));
        }
        CHECK(arena.usage(number).live == lane.live);
    }
}

void test_many_threads() {
    DeviceArena arena(kBase, 64 * kMiB);
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
        threads.emplace_back([&arena, lane = arena.add_lane()] {
            for (int task = 0; task < 200; ++task) {
                CHECK(arena.insert(lane, 64 * 512));
                std::vector<std::uintptr_t> blocks;
                for (int block = 0; block < 32; ++block) {
                    blocks.push_back(arena.alloc(lane, 1000));
                    CHECK(blocks.back() != 0);
                }
                std::for_each(blocks.begin(), blocks.end(), [&](auto b) { arena.free(b); });
                CHECK(arena.usage(lane).peak == 64 * 512 && arena.clear(lane) == 0);
            }
        });
    }
    for (auto& thread : threads) {
        thread.join();
    }
    CHECK(arena.held() == 0);
}

}  // namespace

int main() {
    test_a_task_from_insert_to_clear();
    test_an_overrun_is_one_lanes_own();
    test_holes_do_not_count_as_use();
    test_a_buffer_of_pieces();
    test_blocks_that_outlive_their_task();
    test_a_refusal_is_its_own_tasks();
    test_static_memory_stays_with_its_stream();
    test_static_memory_leaves_the_buffers_of_tasks_whole();
    test_trace();
    test_refusals();
    test_random_use();
    test_many_threads();
}
