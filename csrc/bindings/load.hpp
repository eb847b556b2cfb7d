// The load generator's sender in `serve._core`.
#pragma once

#include <nanobind/nanobind.h>

namespace gnnserve::bindings {

void bind_load(nanobind::module_& module);

}  // namespace gnnserve::bindings
