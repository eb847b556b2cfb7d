#include "block_pool.hpp"

#include "buffer.hpp"

namespace gnnserve::bindings {

namespace nb = nanobind;

PythonPool::PythonPool(nb::handle memory, std::int64_t capacity, std::int64_t alignment) {
    // Whoever lets go of it last need not hold the interpreter lock.
    const std::shared_ptr<Buffer> buffer(new Buffer(memory, PyBUF_WRITABLE), [](Buffer* held) {
        const nb::gil_scoped_acquire locked;
        delete held;
    });
    if (capacity < 0 || static_cast<std::size_t>(capacity) > buffer->size()) {
        throw nb::value_error("capacity_bytes: the memory has fewer");
    }
    pool_ = std::make_shared<BlockPool>(buffer->bytes().data(), capacity, alignment, buffer);
}

const std::shared_ptr<BlockPool>& PythonPool::get() const {
    if (pool_ == nullptr) {
        throw nb::value_error("the pool is closed");
    }
    return pool_;
}

void bind_block_pool(nb::module_& module) {
    nb::class_<PythonPool>(
        module, "BlockPool",
        "Allocator of ranges of a writable buffer, for several threads; see OffsetAllocator.")
        .def(nb::init<nb::handle, std::int64_t, std::int64_t>(), nb::arg("memory"),
             nb::arg("capacity_bytes"), nb::arg("alignment"),
             nb::sig("def __init__(self, memory: memoryview, capacity_bytes: int, "
                     "alignment: int) -> None"),
             "Allocate from the first `capacity_bytes` of `memory`, which it holds until it is\n"
             "closed and every block is freed.")
        .def(
            "alloc",
            [](const PythonPool& self, std::int64_t size) { return self.get()->alloc(size); },
            nb::arg("size"), "See OffsetAllocator.")
        .def(
            "free", [](const PythonPool& self, std::int64_t offset) { self.get()->free(offset); },
            nb::arg("offset"), "See OffsetAllocator.")
        .def_prop_ro(
            "used_bytes", [](const PythonPool& self) { return self.get()->used(); },
            "See OffsetAllocator.")
        .def("close", &PythonPool::close, "Let go of the memory once no block is left.");
}

}  // namespace gnnserve::bindings
