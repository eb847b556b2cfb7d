// libgnnserve_meter.so. Preloaded into a process (LD_PRELOAD), it measures and limits the memory of
// PyTorch's CPU tensors (posix_memalign and free). It also counts large blocks that kernels
// allocate (malloc). It interposes the C library's functions and passes every call on. It allocates
// nothing and holds no lock, so a process may fork at any moment; the child measures its own copy.

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "gnnserve/memory_meter.hpp"

#define GNNSERVE_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constinit gnnserve::MemoryMeter meter;

// True while this thread is inside dlsym, which may itself call free.
thread_local constinit bool resolving __attribute__((tls_model("initial-exec"))) = false;

// One function of the next library, looked up on first use: constructors of other libraries call
// hooks before any constructor of ours could run.
template <typename Function>
class Next {
public:
    explicit constexpr Next(const char* name) : name_(name) {}

    // Null only while the thread is inside dlsym.
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
constinit Next<void*(std::size_t)> next_malloc{"malloc"};
constinit Next<void*(void*, std::size_t)> next_realloc{"realloc"};
constinit Next<void(void*)> next_free{"free"};

using Kind = gnnserve::MemoryMeter::Kind;

// Returns the metered result of `allocate`; null when the limit refuses it.
template <typename Allocate>
void* metered(Kind kind, std::size_t size, Allocate allocate) {
    if (!meter.admit(kind, size)) {
        return nullptr;
    }
    void* block = allocate();
    meter.on_alloc(block, kind, size);
    return block;
}

template <typename Next>
void* aligned_by(Next& source, std::size_t alignment, std::size_t size) {
    auto* next = source.get();
    if (next == nullptr) {
        errno = ENOMEM;
        return nullptr;
    }
    if (!gnnserve::MemoryMeter::is_tensor(alignment, size)) {
        return next(alignment, size);
    }
    void* block = metered(Kind::tensor, size, [=] { return next(alignment, size); });
    if (block == nullptr && meter.refused() != 0) {
        errno = ENOMEM;
    }
    return block;
}

}  // namespace

GNNSERVE_EXPORT int posix_memalign(void** block, std::size_t alignment, std::size_t size) {
    auto* next = next_posix_memalign.get();
    if (next == nullptr) {
        return ENOMEM;
    }
    if (!gnnserve::MemoryMeter::is_tensor(alignment, size)) {
        return next(block, alignment, size);
    }
    int error = ENOMEM;
    void* found = metered(Kind::tensor, size, [&]() -> void* {
        void* made = nullptr;
        error = next(&made, alignment, size);
        return error == 0 ? made : nullptr;
    });
    if (error == 0) {
        *block = found;
    }
    return error;
}

GNNSERVE_EXPORT void* aligned_alloc(std::size_t alignment, std::size_t size) {
    return aligned_by(next_aligned_alloc, alignment, size);
}

GNNSERVE_EXPORT void* memalign(std::size_t alignment, std::size_t size) {
    return aligned_by(next_memalign, alignment, size);
}

// Large blocks are aligned like tensors, so that `free` can tell them from the many small ones.
GNNSERVE_EXPORT void* malloc(std::size_t size) {
    if (size >= gnnserve::MemoryMeter::kLarge) {
        if (auto* next = next_memalign.get()) {
            return metered(Kind::other, size,
                           [=] { return next(gnnserve::MemoryMeter::kGranule, size); });
        }
    }
    auto* next = next_malloc.get();
    return next == nullptr ? nullptr : next(size);
}

// A tracked block moves to an aligned place, where it remains tracked.
GNNSERVE_EXPORT void* realloc(void* block, std::size_t size) {
    auto* resize = next_realloc.get();
    auto* make = next_memalign.get();
    auto* drop = next_free.get();
    if (resize == nullptr || make == nullptr || drop == nullptr) {
        return nullptr;
    }
    const auto old = meter.on_free(block);
    if (old.size == 0 || size == 0) {
        void* moved = resize(block, size);
        if (size >= gnnserve::MemoryMeter::kLarge) {
            meter.adopt(moved, Kind::other, size);
        }
        return moved;
    }
    void* moved = make(gnnserve::MemoryMeter::kGranule, size);
    if (moved == nullptr) {
        meter.adopt(block, old.kind, old.size);  // the old block lives on
        return nullptr;
    }
    meter.adopt(moved, old.kind, size);
    std::memcpy(moved, block, std::min(old.size, size));
    drop(block);
    return moved;
}

GNNSERVE_EXPORT void free(void* block) {
    if (block == nullptr) {
        return;
    }
    meter.on_free(block);
    // Inside dlsym the block is leaked: a few bytes, once, instead of an endless recursion.
    if (auto* next = next_free.get()) {
        next(block);
    }
}

// Version of the functions below; its presence shows that the library is preloaded.
GNNSERVE_EXPORT int gnnserve_meter_present() { return 3; }

GNNSERVE_EXPORT void gnnserve_meter_insert(std::size_t bytes) { meter.insert(bytes); }

GNNSERVE_EXPORT void gnnserve_meter_stop_when(const std::atomic<std::uint64_t>* word,
                                              std::uint64_t value) {
    meter.stop_when(word, value);
}

GNNSERVE_EXPORT void gnnserve_meter_clear() { meter.clear(); }

GNNSERVE_EXPORT void gnnserve_meter_reset() { meter.reset(); }

GNNSERVE_EXPORT std::size_t gnnserve_meter_live_bytes() { return meter.live(); }

GNNSERVE_EXPORT std::size_t gnnserve_meter_peak_bytes() { return meter.peak(); }

GNNSERVE_EXPORT std::size_t gnnserve_meter_held_bytes() { return meter.held(); }

GNNSERVE_EXPORT std::size_t gnnserve_meter_held_peak_bytes() { return meter.held_peak(); }

GNNSERVE_EXPORT std::size_t gnnserve_meter_refused_bytes() { return meter.refused(); }

GNNSERVE_EXPORT std::size_t gnnserve_meter_untracked_blocks() { return meter.untracked(); }
