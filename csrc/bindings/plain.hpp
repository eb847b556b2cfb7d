// Plain models and requests of the front as Python has them.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>

#include "../front/plain_request.hpp"

namespace gnnserve::bindings {

// A call's message, which Python reads as a buffer.
struct Message {
    std::shared_ptr<const std::string> bytes;
};

void bind_plain(nanobind::module_& module);

}  // namespace gnnserve::bindings
