// Live and peak bytes of a process's tensors and of all its large blocks, with a limit for each
// run. Lock-free, allocation-free and constant-initialised, so it is fit for malloc hooks. It
// counts requested sizes, as a framework's own profiler does.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "gnnserve/block_table.hpp"
#include "gnnserve/high_water.hpp"

namespace gnnserve {

class MemoryMeter {
public:
    // Every tracked block lies at a multiple of this. Other addresses are dismissed without a
    // lookup; they are most of what a process frees.
    static constexpr std::size_t kGranule = 64;
    // Blocks of this size and more count even if they are no tensors, such as kernels' scratch
    // space.
    static constexpr std::size_t kLarge = std::size_t{64} << 10;

    enum class Kind : std::size_t { other = 0, tensor = 1 };

    static bool is_tensor(std::size_t alignment, std::size_t size) {
        return alignment >= kGranule && size >= kGranule;
    }

    // Call before an allocation; returns false when it must be refused. Only tensors are refused:
    // their callers handle a refusal, and other blocks serve tensors. When it returns true,
    // `on_alloc` must follow.
    bool admit(Kind kind, std::size_t size) {
        const bool limited = kind == Kind::tensor;
        if ((limited && stopped()) ||
            !add(kind, size, limited ? limit_.load(std::memory_order_relaxed) : kUnlimited)) {
            refused_.store(size, std::memory_order_relaxed);
            return false;
        }
        return true;
    }

    // Counts an admitted block; a null block could not be allocated.
    void on_alloc(void* block, Kind kind, std::size_t size) {
        const auto address = reinterpret_cast<std::uintptr_t>(block);
        if (block == nullptr) {
            subtract(kind, size);
        } else if (!table_.insert(address, tag(kind, size))) {
            subtract(kind, size);
            untracked_.fetch_add(1, std::memory_order_relaxed);
        } else {
            held_.mark();
            if (kind == Kind::tensor) {
                tensors_.mark();
            }
        }
    }

    // Counts a block that was not asked about, unless `on_free` could not recognise it.
    void adopt(void* block, Kind kind, std::size_t size) {
        if (block != nullptr && reinterpret_cast<std::uintptr_t>(block) % kGranule == 0) {
            add(kind, size, kUnlimited);
            on_alloc(block, kind, size);
        }
    }

    struct Block {
        std::size_t size = 0;  // 0: it was not tracked
        Kind kind = Kind::other;
    };

    // Forgets a block. Call it before the block is freed: a moment later its address may belong to
    // another thread.
    Block on_free(void* block) {
        const auto address = reinterpret_cast<std::uintptr_t>(block);
        if (address % kGranule != 0 || address == 0) {
            return {};
        }
        const std::size_t tagged = table_.remove(address).value_or(0);
        const Block found{tagged >> 1, static_cast<Kind>(tagged & 1)};
        subtract(found.kind, found.size);
        return found;
    }

    // Allows at most `bytes` more than are live now, and restarts the peaks.
    void insert(std::size_t bytes) {
        const std::size_t base = held_.now();
        base_.store(base, std::memory_order_relaxed);
        limit_.store(bytes < kUnlimited - base ? base + bytes : kUnlimited,
                     std::memory_order_relaxed);
        refused_.store(0, std::memory_order_relaxed);
        reset();
    }

    // Ends the limit of `insert` and the effect of `stop_when`.
    void clear() {
        limit_.store(kUnlimited, std::memory_order_relaxed);
        stop_word_.store(nullptr, std::memory_order_relaxed);
    }

    // Refuses tensors while `*word` is `value`, until `clear`. Another process that can write the
    // word thus ends a run in the same way as running out of memory does.
    void stop_when(const std::atomic<std::uint64_t>* word, std::uint64_t value) {
        stop_value_.store(value, std::memory_order_relaxed);
        stop_word_.store(word, std::memory_order_relaxed);
    }

    // Restarts the peaks at what is live now.
    void reset() {
        tensors_.reset();
        held_.reset();
    }

    // Bytes of tensors.
    std::size_t live() const { return tensors_.now(); }
    std::size_t peak() const { return tensors_.peak(); }
    // Bytes of tensors and large blocks.
    std::size_t held() const { return held_.now(); }
    // Peak of these beyond what was live at `insert`.
    std::size_t held_peak() const { return held_.peak() - base_.load(std::memory_order_relaxed); }
    // Size of the tensor refused last since `insert`; 0 when none was.
    std::size_t refused() const { return refused_.load(std::memory_order_relaxed); }
    // Number of blocks since the start that the table had no room for; unless 0, peaks are too low.
    std::size_t untracked() const { return untracked_.load(std::memory_order_relaxed); }

private:
    static constexpr std::size_t kUnlimited = std::numeric_limits<std::size_t>::max();

    bool stopped() const {
        const auto* word = stop_word_.load(std::memory_order_relaxed);
        return word != nullptr &&
               word->load(std::memory_order_relaxed) == stop_value_.load(std::memory_order_relaxed);
    }

    static std::size_t tag(Kind kind, std::size_t size) {
        return size << 1 | static_cast<std::size_t>(kind);
    }

    bool add(Kind kind, std::size_t size, std::size_t limit) {
        if (!held_.add(size, limit)) {
            return false;
        }
        if (kind == Kind::tensor) {
            tensors_.add(size, kUnlimited);
        }
        return true;
    }

    void subtract(Kind kind, std::size_t size) {
        held_.subtract(size);
        if (kind == Kind::tensor) {
            tensors_.subtract(size);
        }
    }

    HighWater tensors_;
    HighWater held_;
    std::atomic<std::size_t> base_{0};
    std::atomic<std::size_t> limit_{kUnlimited};
    std::atomic<std::size_t> refused_{0};
    std::atomic<std::size_t> untracked_{0};
    std::atomic<const std::atomic<std::uint64_t>*> stop_word_{nullptr};
    std::atomic<std::uint64_t> stop_value_{0};
    BlockTable<8192> table_;  // 65,536 blocks in 1 MiB, touched as it fills
};

}  // namespace gnnserve
