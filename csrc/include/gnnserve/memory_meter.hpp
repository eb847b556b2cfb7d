// Live and peak bytes of the blocks it is told of. Lock-free, allocation-free, constant-
// initialised: fit for malloc hooks. Counts requested sizes, as a framework's own profiler does.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "gnnserve/block_table.hpp"

namespace gnnserve {

class MemoryMeter {
public:
    // Blocks below this size, or aligned to less, are not tracked: an address that is no multiple
    // of it is dismissed without a lookup, which is most of what a process frees.
    static constexpr std::size_t kGranule = 64;

    static bool tracks(std::size_t alignment, std::size_t size) {
        return alignment >= kGranule && size >= kGranule;
    }

    void on_alloc(void* block, std::size_t size) {
        if (!table_.insert(reinterpret_cast<std::uintptr_t>(block), size)) {
            untracked_.fetch_add(1, std::memory_order_relaxed);
            return;
        }
        raise_peak(live_.fetch_add(size, std::memory_order_relaxed) + size);
    }

    // Size of the block if it was tracked, else 0. Call before the block is given back: a moment
    // later its address may belong to another thread.
    std::size_t on_free(void* block) {
        const auto address = reinterpret_cast<std::uintptr_t>(block);
        if (address % kGranule != 0 || address == 0) {
            return 0;
        }
        const std::size_t size = table_.remove(address).value_or(0);
        if (size != 0) {
            live_.fetch_sub(size, std::memory_order_relaxed);
        }
        return size;
    }

    // The peak starts again from what is live now.
    void reset() { peak_.store(live_.load(std::memory_order_relaxed), std::memory_order_relaxed); }

    std::size_t live() const { return live_.load(std::memory_order_relaxed); }
    std::size_t peak() const { return peak_.load(std::memory_order_relaxed); }
    // Blocks the table had no room for, since the process began: not 0 means the peak is too low.
    std::size_t untracked() const { return untracked_.load(std::memory_order_relaxed); }

private:
    void raise_peak(std::size_t live) {
        std::size_t peak = peak_.load(std::memory_order_relaxed);
        while (peak < live && !peak_.compare_exchange_weak(peak, live, std::memory_order_relaxed)) {
        }
    }

    std::atomic<std::size_t> live_{0};
    std::atomic<std::size_t> peak_{0};
    std::atomic<std::size_t> untracked_{0};
    BlockTable<8192> table_;  // 65,536 blocks in 1 MiB, touched as it fills
};

}  // namespace gnnserve
