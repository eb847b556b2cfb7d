// Plain models and requests of the front as Python has them.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "../front/plain_request.hpp"

namespace gnnserve::bindings {

void bind_plain(nanobind::module_& module);

}  // namespace gnnserve::bindings
