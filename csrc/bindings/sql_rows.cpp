#include "sql_rows.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include "buffer.hpp"
#include "gnnserve/sql_rows.hpp"

namespace gnnserve::bindings {
namespace {

std::size_t read(SqlRows& rows, nb::handle dst) {
    const Buffer target(dst, PyBUF_WRITABLE);
    const auto numbers = target.as<std::int64_t>("dst");
    return unlocked(target.size(), [&] { return rows.read(numbers); });
}

nb::list names(const SqlRows& rows, std::size_t column) {
    nb::list found;
    for (const std::string& name : rows.names(column)) {
        found.append(nb::bytes(name.data(), name.size()));
    }
    return found;
}

}  // namespace

void bind_sql_rows(nb::module_& module) {
    module.def("sqlite_version", &sqlite_version);
    nb::class_<SqlRows>(module, "SqlRows")
        .def(nb::init<const std::string&, const std::string&, const std::vector<SqlRows::Value>&,
                      std::size_t>(),
             nb::arg("path"), nb::arg("query"), nb::arg("values"), nb::arg("texts"))
        .def_prop_ro("columns", &SqlRows::columns)
        .def("read", &read, nb::arg("dst"),
             nb::sig("def read(self, dst: serve.native.BytesLike) -> int"))
        .def("names", &names, nb::arg("column"),
             nb::sig("def names(self, column: int) -> list[bytes]"));
}

}  // namespace gnnserve::bindings
