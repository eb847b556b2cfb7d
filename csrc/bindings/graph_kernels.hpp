#pragma once

#include <nanobind/nanobind.h>

void bind_graph_kernels(nanobind::module_& module);
