#include "arriving.hpp"

#include <nanobind/stl/pair.h>

#include <system_error>
#include <utility>

#include "buffer.hpp"
#include "gnnserve/arriving.hpp"

namespace gnnserve::bindings {
namespace {

std::pair<std::size_t, bool> read(int socket, nb::handle dst) {
    const Buffer target(dst, PyBUF_WRITABLE);
    Arrived arrived;
    int failed = 0;
    {
        const nb::gil_scoped_release release;
        try {
            arrived = read_arriving(socket, target.bytes());
        } catch (const std::system_error& error) {
            failed = error.code().value();
        }
    }
    if (failed != 0) {
        errno = failed;
        PyErr_SetFromErrno(PyExc_OSError);
        throw nb::python_error();
    }
    return {arrived.size_bytes, arrived.ended};
}

}  // namespace

void bind_arriving(nb::module_& module) {
    module.def("read_arriving", &read, nb::arg("socket"), nb::arg("dst"),
               nb::sig("def read_arriving(socket: int, dst: serve.native.BytesLike) "
                       "-> tuple[int, bool]"));
}

}  // namespace gnnserve::bindings
