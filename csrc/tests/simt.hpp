// Runs kernels on the host as CUDA would: every thread of a block is a fiber, and blocks run one
// after another. The lanes of a warp meet at shuffles. A lane that is missing there, because it
// took another branch or left, is an error here (on a device it may hang). For tests: nothing is
// fast.
#pragma once

// The fortified longjmp knows one stack only.
#undef _FORTIFY_SOURCE

#include <setjmp.h>
#include <ucontext.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <vector>

#define __global__ static
#define __device__
#define __host__
#define __forceinline__ inline
#define __restrict__ __restrict

struct dim3 {
    unsigned x = 1;
    unsigned y = 1;
    unsigned z = 1;
    // NOLINTNEXTLINE: CUDA's own is not explicit either.
    dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

// Vector that a thread reads at once.
struct uint2 {
    unsigned x, y;
};
struct uint4 {
    unsigned x, y, z, w;
};

// Coordinates of a thread, set before it runs.
inline dim3 threadIdx;
inline dim3 blockIdx;
inline dim3 blockDim;
inline dim3 gridDim;

namespace simt {

constexpr unsigned kLanes = 32;
constexpr std::size_t kStackBytes = 64 << 10;

[[noreturn]] inline void fail(const char* what) {
    std::fprintf(stderr, "simt: %s (block %u,%u thread %u)\n", what, blockIdx.x, blockIdx.y,
                 threadIdx.x);
    std::abort();
}

// The threads of one block. Lanes run one after another, each up to its next shuffle. When all
// lanes that a shuffle asks for are there, they continue with the others' values.
class Block {
public:
    static Block& current() {
        static Block block;
        return block;
    }

    void run(unsigned threads, const std::function<void()>& body) {
        body_ = &body;
        for (unsigned first = 0; first < threads; first += kLanes) {
            run_warp(first, threads - first < kLanes ? threads - first : kLanes);
        }
    }

    // Returns the 32 bits that lane `other` brought.
    std::uint32_t shuffle(unsigned lanes, std::uint32_t value, unsigned other) {
        const unsigned lane = threadIdx.x % kLanes;
        if ((lanes >> lane & 1U) == 0 || (lanes >> other & 1U) == 0) {
            fail("a shuffle with a lane that is not asked to it");
        }
        brought_[lane] = value;
        waits_for_[lane] = lanes;
        change(fibers_[lane], caller_);
        return taken_[other];
    }

private:
    // Saved state of a stopped fiber or of the caller.
    struct Place {
        ucontext_t context;
        jmp_buf registers;
    };

    // Stops at `from` and continues at `to`. Several times faster than ucontext, which asks the
    // kernel for the signal mask; but a sanitizer needs to see the switch.
    static void change(Place& from, Place& to) {
#ifdef __SANITIZE_ADDRESS__
        swapcontext(&from.context, &to.context);
#else
        if (_setjmp(from.registers) == 0) {
            _longjmp(to.registers, 1);
        }
#endif
    }

    // A fiber runs one thread after another until the process ends.
    static void enter() {
        Block& block = current();
        for (;;) {
            const unsigned lane = threadIdx.x % kLanes;
            (*block.body_)();
            block.ended_ |= 1U << lane;
            change(block.fibers_[lane], block.caller_);
        }
    }

    void run_warp(unsigned first, unsigned lanes) {
        const unsigned all = lanes == kLanes ? 0xFFFFFFFFU : (1U << lanes) - 1U;
        ended_ = 0;
        for (unsigned ready = all; ready != 0; ready = met(all)) {
            for (unsigned lane = 0; lane < lanes; ++lane) {
                if ((ready >> lane & 1U) != 0) {
                    threadIdx = dim3(first + lane);
                    waits_for_[lane] = 0;
                    resume(lane);
                }
            }
        }
        if (ended_ != all) {
            fail("lanes wait in a shuffle for others that never come");
        }
    }

    void resume(unsigned lane) {
        Place& fiber = fibers_[lane];
        if (stacks_[lane] != nullptr) {
            change(caller_, fiber);
            return;
        }
        stacks_[lane] = std::make_unique<char[]>(kStackBytes);
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = stacks_[lane].get();
        fiber.context.uc_stack.ss_size = kStackBytes;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, &Block::enter, 0);
        if (_setjmp(caller_.registers) == 0) {
            swapcontext(&caller_.context, &fiber.context);
        }
    }

    // Returns the waiting lanes whose partners all wait at the same shuffle; they may continue.
    unsigned met(unsigned all) {
        unsigned found = 0;
        for (unsigned lane = 0; lane < kLanes; ++lane) {
            if (((all & ~ended_) >> lane & 1U) == 0) {
                continue;
            }
            bool complete = true;
            for (unsigned other = 0; other < kLanes; ++other) {
                const bool asked = (waits_for_[lane] >> other & 1U) != 0;
                const bool here = ((all & ~ended_) >> other & 1U) != 0;
                complete = complete && (!asked || (here && waits_for_[other] == waits_for_[lane]));
            }
            if (complete) {
                found |= 1U << lane;
                taken_[lane] = brought_[lane];
            }
        }
        return found;
    }

    const std::function<void()>* body_ = nullptr;
    Place caller_{};
    Place fibers_[kLanes]{};
    std::unique_ptr<char[]> stacks_[kLanes];
    unsigned ended_ = 0;
    unsigned waits_for_[kLanes]{};
    std::uint32_t brought_[kLanes]{};
    std::uint32_t taken_[kLanes]{};
};

}  // namespace simt

inline float __shfl_xor_sync(unsigned lanes, float value, int distance) {
    const unsigned other = threadIdx.x % simt::kLanes ^ static_cast<unsigned>(distance);
    return std::bit_cast<float>(
        simt::Block::current().shuffle(lanes, std::bit_cast<std::uint32_t>(value), other));
}

template <typename Value>
Value __shfl_sync(unsigned lanes, Value value, int from, int width) {
    const unsigned lane = threadIdx.x % simt::kLanes;
    const unsigned other = lane / static_cast<unsigned>(width) * static_cast<unsigned>(width) +
                           static_cast<unsigned>(from % width);
    return std::bit_cast<Value>(
        simt::Block::current().shuffle(lanes, std::bit_cast<std::uint32_t>(value), other));
}

inline std::int32_t atomicMax(std::int32_t* to, std::int32_t value) {
    const std::int32_t before = *to;
    *to = value > before ? value : before;
    return before;
}

inline void __trap() { simt::fail("trap"); }

namespace gnnserve {

constexpr int kSuccess = 0;
constexpr int kInvalidValue = 1;

template <typename... Parameters, typename... Arguments>
int launch(void (*kernel)(Parameters...), dim3 grid, int threads, void*, Arguments... arguments) {
    gridDim = grid;
    blockDim = dim3(static_cast<unsigned>(threads));
    for (unsigned y = 0; y < grid.y; ++y) {
        for (unsigned x = 0; x < grid.x; ++x) {
            blockIdx = dim3(x, y);
            simt::Block::current().run(blockDim.x, [&] { kernel(arguments...); });
        }
    }
    return kSuccess;
}

}  // namespace gnnserve
