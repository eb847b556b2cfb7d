// Python buffers as spans, and the rule when to release the interpreter lock.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace gnnserve::bindings {

namespace nb = nanobind;

// A C-contiguous buffer of any bytes-like object, held for the lifetime of this object.
class Buffer {
public:
    Buffer(nb::handle object, int flags) {
        if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) {
            throw nb::python_error();
        }
    }
    ~Buffer() { PyBuffer_Release(&view_); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    std::size_t size() const { return static_cast<std::size_t>(view_.len); }
    std::span<std::byte> bytes() const { return {static_cast<std::byte*>(view_.buf), size()}; }

    // Returns the buffer as elements of T; raises ValueError naming `what` unless they are whole
    // and aligned.
    template <typename T>
    std::span<T> as(const char* what) const {
        if (size() % sizeof(T) != 0 || reinterpret_cast<std::uintptr_t>(view_.buf) % alignof(T)) {
            const std::string text = std::string(what) + ": " + std::to_string(size()) +
                                     " bytes are no aligned elements of " +
                                     std::to_string(sizeof(T)) + " bytes";
            throw nb::value_error(text.c_str());
        }
        return {static_cast<T*>(view_.buf), size() / sizeof(T)};
    }

private:
    Py_buffer view_{};
};

// Least `size` in bytes for which `unlocked` runs `work` without the interpreter lock. Smaller work
// takes a few microseconds, and retaking the lock among busy threads costs more.
inline constexpr std::size_t kWorthReleasing = 64 * 1024;

template <typename Work>
auto unlocked(std::size_t size, Work work) {
    if (size < kWorthReleasing) {
        return work();
    }
    const nb::gil_scoped_release release;
    return work();
}

}  // namespace gnnserve::bindings
