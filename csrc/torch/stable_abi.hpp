// The part of PyTorch's stable C interface for operators that we use (torch/csrc/stable/c/shim.h).
// It is found at run time in the libtorch of this process, so building needs no PyTorch.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <optional>
#include <span>

namespace gnnserve::torch_abi {

// An argument or result: a number in its low bytes, or a tensor's handle. For an optional one it is
// null or a pointer to another such value.
using Value = std::uint64_t;
using Boxed = void (*)(Value* stack, std::uint64_t inputs, std::uint64_t outputs);

enum class Dtype : std::uint8_t { kFloat32, kInt32, kInt64, kUint8, kOther };

// As PyTorch numbers them.
struct Device {
    std::int32_t type = 0, index = 0;
};

// Owns its handle.
class Tensor {
public:
    explicit Tensor(void* handle) : handle_(handle) {}
    Tensor(Tensor&& other) noexcept : handle_(other.release()) {}
    Tensor(const Tensor&) = delete;
    Tensor& operator=(Tensor&&) = delete;
    Tensor& operator=(const Tensor&) = delete;
    ~Tensor();

    // Returns a new contiguous tensor of one or two axes, on the processor or on a device. Throws
    // bad_alloc.
    using Shape = std::initializer_list<std::int64_t>;
    static Tensor empty(Shape shape, Dtype dtype);
    static Tensor empty_on(Device device, Shape shape, Dtype dtype);

    std::int64_t dim() const;
    std::int64_t size(std::int64_t axis) const;
    std::int64_t stride(std::int64_t axis) const;
    std::int64_t numel() const;
    Dtype dtype() const;
    bool is_contiguous() const;
    Device device() const;
    template <typename T>
    T* data() const {
        return static_cast<T*>(address());
    }

    void* release() {
        void* handle = handle_;
        handle_ = nullptr;
        return handle;
    }

private:
    void* address() const;

    void* handle_;
};

// Takes an operator's arguments from its stack in order; take all before anything can throw.
class Arguments {
public:
    explicit Arguments(Value* stack) : next_(stack) {}
    Tensor tensor() { return Tensor(reinterpret_cast<void*>(*next_++)); }
    std::optional<Tensor> optional_tensor();
    std::int64_t integer() { return static_cast<std::int64_t>(*next_++); }
    bool flag() { return (*next_++ & 0xFF) != 0; }
    float real() {
        double value;
        std::memcpy(&value, next_++, sizeof value);
        return static_cast<float>(value);
    }

private:
    Value* next_;
};

struct Schema {
    const char* name;
    const char* text;  // with the name, as torch.library takes it
};

struct Kernel {
    const char* name;
    Boxed run;
};

// Defines operators in a namespace, and what runs them for a dispatch key such as "CPU", each once
// per process. Both throw runtime_error that says what is missing when PyTorch is not loaded or
// refuses.
void define(const char* library, std::span<const Schema> schemas);
void implement(const char* library, const char* key, std::span<const Kernel> kernels);

// Returns CUDA's current stream of that device. Throws runtime_error where PyTorch has no CUDA.
void* current_cuda_stream(std::int32_t device);

}  // namespace gnnserve::torch_abi
