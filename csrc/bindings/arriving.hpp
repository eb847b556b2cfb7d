#pragma once

#include <nanobind/nanobind.h>

namespace gnnserve::bindings {

void bind_arriving(nanobind::module_& module);

}  // namespace gnnserve::bindings
