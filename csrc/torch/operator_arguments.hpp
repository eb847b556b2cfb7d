// What the operators of all devices check of their arguments, and how they give their result.

#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "stable_abi.hpp"

namespace gnnserve::torch_abi {

inline void require(bool holds, const char* otherwise) {
    if (!holds) {
        throw std::invalid_argument(otherwise);
    }
}

// Returns the address of the data of a contiguous float32 tensor of that many elements.
inline float* floats(const Tensor& tensor, std::int64_t count, const char* name) {
    if (tensor.dtype() != Dtype::kFloat32 || tensor.numel() != count || !tensor.is_contiguous()) {
        throw std::invalid_argument(std::string(name) + " must be float32 and contiguous, of " +
                                    std::to_string(count) + " elements");
    }
    return tensor.data<float>();
}

// Null for none.
inline float* floats(const std::optional<Tensor>& tensor, std::int64_t count, const char* name) {
    return tensor ? floats(*tensor, count, name) : nullptr;
}

// The same of any number of elements.
inline float* floats(const std::optional<Tensor>& tensor, const char* name) {
    return tensor ? floats(*tensor, tensor->numel(), name) : nullptr;
}

inline void give(Value* stack, Tensor&& result) {
    stack[0] = reinterpret_cast<Value>(result.release());
}

}  // namespace gnnserve::torch_abi
