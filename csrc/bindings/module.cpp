// serve._core. Only the files of this folder use both Python and this library.

#include <nanobind/nanobind.h>

#include <stdexcept>
#include <string>

#include "arriving.hpp"
#include "block_pool.hpp"
#include "buffer.hpp"
#include "front.hpp"
#include "gnnserve/aggregate.hpp"
#include "gnnserve/offset_allocator.hpp"
#include "gnnserve/staging.hpp"
#include "graphs.hpp"
#include "infer.hpp"
#include "json.hpp"
#include "load.hpp"
#include "plain.hpp"
#include "sql_rows.hpp"
#include "torch/operators.hpp"

namespace nb = nanobind;

namespace {

using gnnserve::bindings::Buffer;
using gnnserve::bindings::unlocked;

void require_sizes(bool right, const char* what, const Buffer& source, const Buffer& target) {
    if (!right) {
        const std::string text = std::string(what) + ": source has " +
                                 std::to_string(source.size()) + " bytes, target " +
                                 std::to_string(target.size());
        throw nb::value_error(text.c_str());
    }
}

std::ptrdiff_t stage_indices(nb::handle src, bool is_int32, std::int64_t bound, nb::handle dst,
                             bool narrow) {
    if (bound < 0) {
        throw nb::value_error("bound must be at least 0");
    }
    if (narrow && !is_int32) {
        throw nb::value_error("int64 indices cannot be narrowed");
    }
    const auto width = is_int32 ? gnnserve::IndexWidth::k32 : gnnserve::IndexWidth::k64;
    const auto to = narrow ? gnnserve::IndexWidth::k32 : gnnserve::IndexWidth::k64;
    const auto step = static_cast<std::size_t>(width);
    const auto to_step = static_cast<std::size_t>(to);
    const Buffer source(src, PyBUF_SIMPLE);
    const Buffer target(dst, PyBUF_WRITABLE);
    require_sizes(source.size() % step == 0 && target.size() % to_step == 0 &&
                      source.size() / step == target.size() / to_step,
                  "stage_indices", source, target);
    return unlocked(target.size(), [&] {
        return gnnserve::stage_indices(source.bytes(), width, bound, target.bytes(), to);
    });
}

std::ptrdiff_t stage_features(nb::handle src, nb::handle dst, bool check_finite) {
    const Buffer source(src, PyBUF_SIMPLE);
    const Buffer target(dst, PyBUF_WRITABLE);
    require_sizes(source.size() == target.size() && target.size() % sizeof(float) == 0,
                  "stage_features", source, target);
    return unlocked(target.size(), [&] {
        return gnnserve::stage_features(source.bytes(), target.bytes(), check_finite);
    });
}

}  // namespace

NB_MODULE(_core, module) {
    // A process that is told to end does not wait for its threads, and these may hold our objects.
    nb::set_leak_warnings(false);

    using gnnserve::OffsetAllocator;
    using namespace nb::literals;

    module.doc() = "Compiled part of gnnserve; use it through serve.native.";
    module.def("stage_indices", &stage_indices, "src"_a, "is_int32"_a, "bound"_a, "dst"_a,
               "narrow"_a = false,
               nb::sig("def stage_indices(src: serve.native.BytesLike, is_int32: bool, "
                       "bound: int, dst: serve.native.BytesLike, narrow: bool = False) -> int"));
    module.def("stage_features", &stage_features, "src"_a, "dst"_a, "check_finite"_a,
               nb::sig("def stage_features(src: serve.native.BytesLike, "
                       "dst: serve.native.BytesLike, check_finite: bool) -> int"));
    module.def("define_operators", &gnnserve::define_operators);
    module.def("use_device_operators", &gnnserve::use_device_operators, "path"_a);
    module.def("define_simulated_operators", &gnnserve::define_simulated_operators, "path"_a,
               "library"_a);
    module.attr("MOST_HEADS") = gnnserve::kMostHeads;
    nb::class_<OffsetAllocator>(
        module, "OffsetAllocator",
        "Allocator of ranges of a region that it never touches, such as a shared memory file.\n\n"
        "Best fit: the smallest free range that holds the request, the lowest of equal ones;\n"
        "freed ranges merge with their neighbours at once. Not thread-safe.")
        .def(nb::init<std::int64_t, std::int64_t>(), "capacity_bytes"_a, "alignment"_a,
             "`alignment` is a power of two; the capacity is rounded down to a multiple of it.")
        .def("alloc", &OffsetAllocator::alloc, "size"_a,
             "Return the offset of a range of at least `size` bytes, or -1 without a free one.\n\n"
             "An empty range takes one alignment unit, so that offsets are unique.\n"
             "Raises ValueError for a negative size.")
        .def("free", &OffsetAllocator::free, "offset"_a,
             "Free a range; raises ValueError when none was handed out at `offset`.")
        .def_prop_ro("capacity_bytes", &OffsetAllocator::capacity, "Bytes of the region.")
        .def_prop_ro("used_bytes", &OffsetAllocator::used,
                     "Bytes in use, each range rounded up to the alignment.")
        .def_prop_ro("largest_free_bytes", &OffsetAllocator::largest_free,
                     "Size of the largest request that would succeed now.");
    gnnserve::bindings::bind_arriving(module);
    gnnserve::bindings::bind_graphs(module);
    gnnserve::bindings::bind_block_pool(module);
    gnnserve::bindings::bind_plain(module);
    gnnserve::bindings::bind_front(module);
    gnnserve::bindings::bind_infer(module);
    gnnserve::bindings::bind_json(module);
    gnnserve::bindings::bind_load(module);
    gnnserve::bindings::bind_sql_rows(module);
}
