// Runs with libgnnserve_meter.so preloaded (see CMakeLists.txt) and watches its own allocations.

#include <dlfcn.h>
#include <malloc.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <thread>
#include <vector>

#include "check.hpp"

namespace {

template <typename Function>
Function* find(const char* name) {
    auto* found = reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, name));
    CHECK(found != nullptr);
    return found;
}

auto* const live = find<std::size_t()>("gnnserve_meter_live_bytes");
auto* const peak = find<std::size_t()>("gnnserve_meter_peak_bytes");
auto* const held = find<std::size_t()>("gnnserve_meter_held_bytes");
auto* const insert = find<void(std::size_t)>("gnnserve_meter_insert");
auto* const clear = find<void()>("gnnserve_meter_clear");
auto* const refused = find<std::size_t()>("gnnserve_meter_refused_bytes");
auto* const held_peak = find<std::size_t()>("gnnserve_meter_held_peak_bytes");
auto* const reset = find<void()>("gnnserve_meter_reset");

void* aligned(std::size_t size) {
    void* block = nullptr;
    CHECK(posix_memalign(&block, 64, size) == 0);
    return block;
}

void test_every_way_in_and_out() {
    const std::size_t before = live();
    reset();
    void* first = aligned(1'000'000);
    void* second = std::aligned_alloc(4096, 8192);
    void* third = memalign(128, 300);
    CHECK(live() == before + 1'008'492);
    std::free(first);
    CHECK(live() == before + 8492 && peak() == before + 1'008'492);
    second = std::realloc(second, 20'000);
    CHECK(live() == before + 20'300);
    third = std::realloc(third, 100);
    CHECK(live() == before + 20'100);
    std::free(second);
    std::free(third);
    CHECK(live() == before);
}

void test_what_is_not_counted() {
    const std::size_t before = live();
    void* plain = std::malloc(1'000'000);
    void* small = aligned(63);
    CHECK(live() == before);
    plain = std::realloc(plain, 2'000'000);
    CHECK(live() == before);
    std::free(plain);
    std::free(small);
    std::free(nullptr);
    void* refused = nullptr;
    CHECK(posix_memalign(&refused, 64, std::size_t{1} << 60) != 0);
    CHECK(posix_memalign(&refused, 65, 100) != 0);
    CHECK(live() == before);
}

void test_large_plain_blocks_are_held() {
    const std::size_t before = held();
    insert(std::size_t{1} << 30);
    void* plain = std::malloc(1'000'000);
    CHECK(held() == before + 1'000'000);
    static_cast<char*>(plain)[999'999] = 1;
    plain = std::realloc(plain, 3'000'000);
    CHECK(static_cast<char*>(plain)[999'999] == 1);
    std::free(plain);
    CHECK(held() == before);
    CHECK(held_peak() >= 1'000'000);
    auto* made = new char[200'000];
    CHECK(held() == before + 200'000);
    delete[] made;
    void* small = std::malloc(60'000);
    CHECK(held() == before);
    std::free(small);
    clear();
}

void test_limit() {
    insert(10'000);
    void* block = nullptr;
    CHECK(posix_memalign(&block, 64, 10'001) == ENOMEM && block == nullptr);
    CHECK(refused() == 10'001);
    errno = 0;
    CHECK(std::aligned_alloc(64, 10'048) == nullptr && errno == ENOMEM);
    void* within = aligned(10'000);
    void* plain = std::malloc(100'000);  // not for tensors: never refused
    CHECK(within != nullptr && plain != nullptr && held_peak() == 110'000);
    clear();
    std::free(plain);
    std::free(within);
    std::free(aligned(20'000));
}

void test_refused_realloc_keeps_the_block() {
    const std::size_t before = live();
    void* block = aligned(5000);
    volatile std::size_t absurd = std::size_t{1} << 60;
    CHECK(std::realloc(block, absurd) == nullptr);
    CHECK(live() == before + 5000);
    std::free(block);
    CHECK(live() == before);
}

void test_child_measures_its_own() {
    void* inherited = aligned(4000);
    const std::size_t before = live();
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        reset();
        void* own = aligned(10'000);
        std::free(inherited);
        std::free(own);
        _exit(peak() == before + 10'000 && live() == before - 4000 ? 0 : 1);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK(live() == before);
    std::free(inherited);
}

void test_threads() {
    const std::size_t before = live();
    std::vector<std::thread> threads;
    for (std::size_t t = 0; t < 4; ++t) {
        threads.emplace_back([t] {
            for (int round = 0; round < 2000; ++round) {
                void* small = aligned(100 + t);
                void* large = aligned(200'000);
                std::free(small);
                std::free(large);
            }
        });
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
    CHECK(live() == before);
}

}  // namespace

int main() {
    CHECK(find<int()>("gnnserve_meter_present")() == 3);
    test_every_way_in_and_out();
    test_what_is_not_counted();
    test_large_plain_blocks_are_held();
    test_limit();
    test_refused_realloc_keeps_the_block();
    test_child_measures_its_own();
    test_threads();
}
