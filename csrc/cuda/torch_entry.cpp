// C functions over one process-wide arena, for torch.cuda.memory.CUDAPluggableAllocator and,
// through ctypes, for serve.lane.cuda.arena. Streams are opaque here, so building needs no CUDA.
//
// NOTE: torch does not check for a null pointer, so a refusal must be an exception. It reaches
// Python as a RuntimeError, whose text may get lost on the way (inside compiled packages). The
// reliable sign of a refusal is the lane's refused bytes.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <new>
#include <string>

#include "export.hpp"
#include "gnnserve/device_arena.hpp"

namespace {

using gnnserve::DeviceArena;

constexpr int kStatic = -1;

// Never destroyed: torch frees tensors until the process ends.
DeviceArena* the_arena = nullptr;
thread_local int bound_lane = kStatic;
// Allocations of this thread are refused while the word holds the value.
thread_local const std::atomic<std::uint64_t>* stop_word = nullptr;
thread_local std::uint64_t stop_value = 0;

class BufferFull : public std::bad_alloc {
public:
    explicit BufferFull(std::size_t size)
        : text_(std::make_shared<std::string>("gnnserve: " + std::to_string(size) +
                                              " bytes do not fit into the device buffer")) {}
    const char* what() const noexcept override { return text_->c_str(); }

private:
    std::shared_ptr<std::string> text_;
};

class Stopped : public std::exception {
public:
    const char* what() const noexcept override { return "gnnserve: the run was stopped"; }
};

// Returns -1 for any exception: none may reach ctypes.
template <typename Work>
std::int64_t guarded(Work work) {
    try {
        return the_arena == nullptr ? -1 : static_cast<std::int64_t>(work(*the_arena));
    } catch (const std::exception&) {
        return -1;
    }
}

}  // namespace

// Opens the arena over [base, base + capacity), once per process. Returns 0, or -1 when refused.
GNNSERVE_EXPORT std::int64_t gnnserve_device_open(std::uint64_t base, std::int64_t capacity) {
    if (the_arena != nullptr) {
        return -1;
    }
    try {
        the_arena = new DeviceArena(base, capacity);
    } catch (const std::exception&) {
        return -1;
    }
    return 0;
}

GNNSERVE_EXPORT std::int64_t gnnserve_device_add_lane() {
    return guarded([](DeviceArena& arena) { return arena.add_lane(); });
}

// Binds this thread's allocations to that lane's task; -1 binds them to none.
GNNSERVE_EXPORT void gnnserve_device_bind(int lane) {
    bound_lane = lane < 0 ? kStatic : lane;
    stop_word = nullptr;
}

// Refuses this thread's allocations once the word holds the value, until the next `bind`.
GNNSERVE_EXPORT void gnnserve_device_stop_when(const std::atomic<std::uint64_t>* word,
                                               std::uint64_t value) {
    stop_value = value;
    stop_word = word;
}

// Returns 1 when the lane has its buffer, 0 when there is no room, -1 when it already has a task.
GNNSERVE_EXPORT std::int64_t gnnserve_device_insert(int lane, std::int64_t limit) {
    return guarded([&](DeviceArena& arena) { return arena.insert(lane, limit) ? 1 : 0; });
}

GNNSERVE_EXPORT std::int64_t gnnserve_device_clear(int lane) {
    return guarded([&](DeviceArena& arena) { return arena.clear(lane); });
}

// Fields: those of DeviceArena::Usage in order; from 100 on capacity, held, held_static and
// held_outlived.
GNNSERVE_EXPORT std::int64_t gnnserve_device_read(int lane, int field) {
    return guarded([&](DeviceArena& arena) -> std::int64_t {
        switch (field) {
            case 100:
                return arena.capacity();
            case 101:
                return arena.held();
            case 102:
                return arena.held_static();
            case 103:
                return arena.held_outlived();
            default:
                break;
        }
        const DeviceArena::Usage usage = arena.usage(lane);
        switch (field) {
            case 0:
                return usage.limit;
            case 1:
                return usage.live;
            case 2:
                return usage.peak;
            case 3:
                return usage.requested;
            case 4:
                return usage.requested_peak;
            case 5:
                return usage.blocks;
            case 6:
                return usage.blocks_peak;
            case 7:
                return usage.refused;
            case 8:
                return usage.spills;
            case 9:
                return usage.refusals;
            default:
                return -1;
        }
    });
}

GNNSERVE_EXPORT std::int64_t gnnserve_device_start_trace(int lane) {
    return guarded([&](DeviceArena& arena) {
        arena.start_trace(lane);
        return 0;
    });
}

// Copies at most `capacity` events and ends the trace; returns the number of events.
GNNSERVE_EXPORT std::int64_t gnnserve_device_take_trace(int lane, std::int64_t* into,
                                                        std::int64_t capacity) {
    return guarded([&](DeviceArena& arena) {
        const auto events = arena.take_trace(lane);
        for (std::size_t i = 0; i < events.size() && static_cast<std::int64_t>(i) < capacity; ++i) {
            into[i] = events[i];
        }
        return events.size();
    });
}

// torch's signature: alloc(size, device, stream).
GNNSERVE_EXPORT void* gnnserve_device_alloc(std::size_t size, int /*device*/, void* stream) {
    if (size == 0) {
        return nullptr;
    }
    if (the_arena == nullptr) {
        throw BufferFull(size);
    }
    if (stop_word != nullptr && stop_word->load(std::memory_order_relaxed) == stop_value) {
        throw Stopped();
    }
    const auto wanted = static_cast<std::int64_t>(size);
    const std::uintptr_t address =
        bound_lane == kStatic
            ? the_arena->alloc_static(wanted, reinterpret_cast<std::uintptr_t>(stream))
            : the_arena->alloc(bound_lane, wanted);
    if (address == 0) {
        throw BufferFull(size);
    }
    return reinterpret_cast<void*>(address);
}

// torch's signature: free(pointer, size, device, stream). Called from any thread, also at exit.
GNNSERVE_EXPORT void gnnserve_device_free(void* pointer, std::size_t /*size*/, int /*device*/,
                                          void* /*stream*/) {
    if (pointer != nullptr && the_arena != nullptr) {
        the_arena->free(reinterpret_cast<std::uintptr_t>(pointer));
    }
}
