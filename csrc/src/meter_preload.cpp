// libgnnserve_meter.so: preloaded into a process (LD_PRELOAD), it measures aligned allocations,
// which is where PyTorch's CPU tensors live (posix_memalign and free), by standing in front of
// the C library's functions. Everything is passed on; nothing is allocated here; no lock is held,
// so a process may fork at any moment and its child goes on measuring its own copy.

#include <dlfcn.h>

#include <atomic>
#include <cerrno>
#include <cstddef>

#include "gnnserve/memory_meter.hpp"

#define GNNSERVE_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constinit gnnserve::MemoryMeter meter;

// Set while this thread is inside dlsym, which may itself free.
thread_local constinit bool resolving __attribute__((tls_model("initial-exec"))) = false;

// One function of the next library in line, looked up on first use: hooks are called by other
// libraries' constructors, before any of ours could run.
template <typename Function>
class Next {
public:
    explicit constexpr Next(const char* name) : name_(name) {}

    // Null only when the thread is inside dlsym.
    Function* get() {
        if (void* known = address_.load(std::memory_order_acquire)) {
            return reinterpret_cast<Function*>(known);
        }
        if (resolving) {
            return nullptr;
        }
        resolving = true;
        void* found = dlsym(RTLD_NEXT, name_);
        resolving = false;
        address_.store(found, std::memory_order_release);
        return reinterpret_cast<Function*>(found);
    }

private:
    const char* name_;
    std::atomic<void*> address_{nullptr};
};

constinit Next<int(void**, std::size_t, std::size_t)> next_posix_memalign{"posix_memalign"};
constinit Next<void*(std::size_t, std::size_t)> next_aligned_alloc{"aligned_alloc"};
constinit Next<void*(std::size_t, std::size_t)> next_memalign{"memalign"};
constinit Next<void*(void*, std::size_t)> next_realloc{"realloc"};
constinit Next<void(void*)> next_free{"free"};

void note_alloc(void* block, std::size_t alignment, std::size_t size) {
    if (block != nullptr && gnnserve::MemoryMeter::tracks(alignment, size)) {
        meter.on_alloc(block, size);
    }
}

}  // namespace

GNNSERVE_EXPORT int posix_memalign(void** block, std::size_t alignment, std::size_t size) {
    auto* next = next_posix_memalign.get();
    if (next == nullptr) {
        return ENOMEM;
    }
    const int error = next(block, alignment, size);
    if (error == 0) {
        note_alloc(*block, alignment, size);
    }
    return error;
}

GNNSERVE_EXPORT void* aligned_alloc(std::size_t alignment, std::size_t size) {
    auto* next = next_aligned_alloc.get();
    void* block = next == nullptr ? nullptr : next(alignment, size);
    note_alloc(block, alignment, size);
    return block;
}

GNNSERVE_EXPORT void* memalign(std::size_t alignment, std::size_t size) {
    auto* next = next_memalign.get();
    void* block = next == nullptr ? nullptr : next(alignment, size);
    note_alloc(block, alignment, size);
    return block;
}

GNNSERVE_EXPORT void* realloc(void* block, std::size_t size) {
    auto* next = next_realloc.get();
    if (next == nullptr) {
        return nullptr;
    }
    const std::size_t old_size = meter.on_free(block);
    void* moved = next(block, size);
    if (old_size != 0) {
        if (moved != nullptr) {
            meter.on_alloc(moved, size);
        } else if (size != 0) {
            meter.on_alloc(block, old_size);  // refused: the old block lives on
        }
    }
    return moved;
}

GNNSERVE_EXPORT void free(void* block) {
    if (block == nullptr) {
        return;
    }
    meter.on_free(block);
    // Inside dlsym the block is leaked: a few bytes, once, against an endless recursion.
    if (auto* next = next_free.get()) {
        next(block);
    }
}

// Version of the functions below; its presence tells that the library is preloaded.
GNNSERVE_EXPORT int gnnserve_meter_present() { return 1; }

GNNSERVE_EXPORT void gnnserve_meter_reset() { meter.reset(); }

GNNSERVE_EXPORT std::size_t gnnserve_meter_live_bytes() { return meter.live(); }

GNNSERVE_EXPORT std::size_t gnnserve_meter_peak_bytes() { return meter.peak(); }

GNNSERVE_EXPORT std::size_t gnnserve_meter_untracked_blocks() { return meter.untracked(); }
