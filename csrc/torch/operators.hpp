// The kernels along edges as PyTorch operators; serve/lane/executors/kernels.py documents them.
// `variant` is a place in kVariants of pieces.hpp; the processor has one way only.
#pragma once

#include <string>

#include "stable_abi.hpp"

namespace gnnserve {

inline constexpr torch_abi::Schema kSchemas[] = {
    {"csr", "csr(Tensor edge_index, SymInt rows, bool replace_loops, bool edges) -> Tensor"},
    {"spread", "spread(Tensor graph, SymInt rows, Tensor value, float missing) -> Tensor"},
    {"normalise", "normalise(Tensor graph, SymInt rows, bool edges, Tensor? weight) -> Tensor"},
    {"aggregate",
     "aggregate(Tensor graph, Tensor x, Tensor? weight, int reduce, Tensor? skip, "
     "float skip_scale, Tensor? bias, bool relu, int variant=0) -> Tensor"},
    {"combine",
     "combine(Tensor graph, SymInt rows, SymInt width, bool edges, Tensor? x, Tensor? target, "
     "Tensor? edge, Tensor? map, Tensor? value, int gate, int reduce, Tensor? skip, "
     "float skip_scale, Tensor? bias) -> Tensor"},
    {"attend",
     "attend(Tensor graph, bool edges, bool added_loops, int score, Tensor left, Tensor right, "
     "Tensor value, int heads, float scale, bool average, Tensor? att, Tensor? edge, "
     "Tensor? skip, Tensor? bias, int variant=0) -> Tensor"},
    {"attend_kept",
     "attend_kept(Tensor graph, bool edges, bool added_loops, int score, Tensor left, "
     "Tensor right, Tensor value, int heads, float scale, bool average, Tensor? att, "
     "Tensor? edge, Tensor? skip, Tensor? bias) -> (Tensor, Tensor)"},
    {"attention_gradient",
     "attention_gradient(Tensor graph, bool edges, Tensor reversed, int score, Tensor left, "
     "Tensor right, Tensor value, Tensor alpha, int heads, float scale, bool average, "
     "Tensor? att, Tensor gradient) -> (Tensor, Tensor, Tensor, Tensor)"},
    {"head_dots", "head_dots(Tensor x, Tensor att, int heads) -> Tensor"},
};

// Defines torch.ops.gnnserve.* once per process, for the processor; throws runtime_error when
// PyTorch is not loaded.
void define_operators();

// Has a compiled library of csrc/cuda run them from now on: for CUDA, on the current stream, or for
// `library`, another namespace with the same operators, on the processor. Throws runtime_error for
// a library without them, and as above.
void use_device_operators(const std::string& path);
void define_simulated_operators(const std::string& path, const std::string& library);

}  // namespace gnnserve
