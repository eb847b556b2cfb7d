// The front in `serve._core`.
#pragma once

#include <nanobind/nanobind.h>

namespace gnnserve::bindings {

void bind_front(nanobind::module_& module);

}  // namespace gnnserve::bindings
