// Tables that lanes' loops read: none goes while a run reads it.

#include "../cuda/resident_tables.hpp"

#include <atomic>
#include <chrono>
#include <thread>

#include "check.hpp"

namespace {

void test_a_table_stays_while_a_run_reads_it() {
    gnnserve::ResidentTables tables;
    tables.add(1, {1000, 2, 3, 4, "float32"});
    tables.set_hot(1, {2000, 3000});
    auto reading = tables.read(1);
    CHECK(reading->table().row_bytes() == 12 && reading->hot().slot_of == 3000);
    std::atomic<int> ended = 0;
    std::thread cools([&] { tables.clear_hot(1), ++ended; });
    while (tables.read(1)->hot().rows != 0) {
        std::this_thread::yield();
    }
    std::thread removes([&] { tables.remove(1), ++ended; });
    while (tables.read(1) != nullptr) {
        std::this_thread::yield();
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    CHECK(ended == 0);
    reading.reset();
    cools.join();
    removes.join();
}

}  // namespace

int main() { test_a_table_stays_while_a_run_reads_it(); }
