#pragma once

#include <nanobind/nanobind.h>

namespace gnnserve::bindings {

void bind_sql_rows(nanobind::module_& module);

}  // namespace gnnserve::bindings
