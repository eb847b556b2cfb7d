// A counter and its peak. Lock-free, constant-initialised.
#pragma once

#include <atomic>
#include <cstddef>

namespace gnnserve {

class HighWater {
public:
    // Adds to the counter; returns false, with nothing changed, when that would pass `limit`. The
    // peak stays, as the allocation may still be refused elsewhere; see `mark`.
    bool add(std::size_t size, std::size_t limit) {
        const std::size_t before = now_.fetch_add(size, std::memory_order_relaxed);
        if (before <= limit && size <= limit - before) {
            return true;
        }
        subtract(size);
        return false;
    }

    void subtract(std::size_t size) { now_.fetch_sub(size, std::memory_order_relaxed); }

    // Raises the peak to the current value.
    void mark() {
        const std::size_t now = now_.load(std::memory_order_relaxed);
        std::size_t peak = peak_.load(std::memory_order_relaxed);
        while (peak < now && !peak_.compare_exchange_weak(peak, now, std::memory_order_relaxed)) {
        }
    }

    // Restarts the peak at the current value.
    void reset() { peak_.store(now_.load(std::memory_order_relaxed), std::memory_order_relaxed); }

    std::size_t now() const { return now_.load(std::memory_order_relaxed); }
    std::size_t peak() const { return peak_.load(std::memory_order_relaxed); }

private:
    std::atomic<std::size_t> now_{0};
    std::atomic<std::size_t> peak_{0};
};

}  // namespace gnnserve
