// Messages of ModelInfer as Python has them, and the parts of them that others use.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string_view>
#include <vector>

#include "gnnserve/infer_message.hpp"

namespace gnnserve::bindings {

// Thrown for text that is not UTF-8: such a message is for the protobuf library, which words it.
struct NotPlain {};

nanobind::str to_str(std::string_view text);
nanobind::tuple to_shape(const std::vector<std::int64_t>& shape);
// Parameters by name.
nanobind::dict to_dict(const std::vector<InferParameter>& parameters);

void bind_infer(nanobind::module_& module);

}  // namespace gnnserve::bindings
