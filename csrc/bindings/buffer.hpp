// Python buffers as spans, and when to let go of the interpreter lock.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace gnnserve::bindings {

namespace nb = nanobind;

// A C-contiguous buffer of any bytes-like object, held for as long as this lives.
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

    // The same as elements of T; raises ValueError naming `what` unless they are whole and aligned.
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

// Runs `work` without the interpreter lock when there is enough of it: below this many bytes it
// is done in a few microseconds, and taking the lock back among busy threads costs more.
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
