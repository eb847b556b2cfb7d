#pragma once

#include <nanobind/nanobind.h>

namespace gnnserve::bindings {

void bind_json(nanobind::module_& module);

}  // namespace gnnserve::bindings
