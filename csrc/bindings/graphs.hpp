// Resident graphs in `serve._core`.
#pragma once

#include <nanobind/nanobind.h>

namespace gnnserve::bindings {

void bind_graphs(nanobind::module_& module);

}  // namespace gnnserve::bindings
