// A number that goes up and down, and the highest it has been. Lock-free, constant-initialised.
#pragma once

#include <atomic>
#include <cstddef>

namespace gnnserve {

class HighWater {
public:
    // False, and nothing changed, when that would lift it above `limit`. Does not move the peak:
    // what is asked for may still be refused by others. See `mark`.
    bool add(std::size_t size, std::size_t limit) {
        const std::size_t before = now_.fetch_add(size, std::memory_order_relaxed);
        if (before <= limit && size <= limit - before) {
            return true;
        }
        subtract(size);
        return false;
    }

    void subtract(std::size_t size) { now_.fetch_sub(size, std::memory_order_relaxed); }

    // Raise the peak to what is there now.
    void mark() {
        const std::size_t now = now_.load(std::memory_order_relaxed);
        std::size_t peak = peak_.load(std::memory_order_relaxed);
        while (peak < now && !peak_.compare_exchange_weak(peak, now, std::memory_order_relaxed)) {
        }
    }

    // The peak starts again from what is there now.
    void reset() { peak_.store(now_.load(std::memory_order_relaxed), std::memory_order_relaxed); }

    std::size_t now() const { return now_.load(std::memory_order_relaxed); }
    std::size_t peak() const { return peak_.load(std::memory_order_relaxed); }

private:
    std::atomic<std::size_t> now_{0};
    std::atomic<std::size_t> peak_{0};
};

}  // namespace gnnserve
