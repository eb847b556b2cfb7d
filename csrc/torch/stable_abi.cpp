#include "stable_abi.hpp"

#include <dlfcn.h>

#include <array>
#include <new>
#include <stdexcept>
#include <string>

namespace gnnserve::torch_abi {
namespace {

using Handle = void*;
using Library = void*;

// PyTorch's functions by name; all but those that return numbers return 0 on success.
struct Api {
    std::int32_t (*delete_tensor_object)(Handle);
    std::int32_t (*empty_strided)(std::int64_t, const std::int64_t*, const std::int64_t*,
                                  std::int32_t, std::int32_t, std::int32_t, Handle*);
    std::int32_t (*get_data_ptr)(Handle, void**);
    std::int32_t (*get_dim)(Handle, std::int64_t*);
    std::int32_t (*get_size)(Handle, std::int64_t, std::int64_t*);
    std::int32_t (*get_stride)(Handle, std::int64_t, std::int64_t*);
    std::int32_t (*get_numel)(Handle, std::int64_t*);
    std::int32_t (*get_dtype)(Handle, std::int32_t*);
    std::int32_t (*is_contiguous)(Handle, bool*);
    std::int32_t (*library_init_fragment)(const char*, const char*, std::uint32_t, Library*);
    std::int32_t (*library_init_impl)(const char*, const char*, const char*, std::uint32_t,
                                      Library*);
    std::int32_t (*library_def)(Library, const char*);
    std::int32_t (*library_impl)(Library, const char*, Boxed);
    std::int32_t (*get_device_type)(Handle, std::int32_t*);
    std::int32_t (*get_device_index)(Handle, std::int32_t*);
    std::int32_t float32, int32, int64, uint8, cpu;
    // Null where PyTorch has no CUDA.
    std::int32_t (*get_current_cuda_stream)(std::int32_t, void**);
};

Api api;

template <typename Function>
Function found(void* torch, const std::string& name) {
    void* address = dlsym(torch, ("aoti_torch_" + name).c_str());
    if (address == nullptr) {
        throw std::runtime_error("PyTorch has no aoti_torch_" + name);
    }
    return reinterpret_cast<Function>(address);
}

void find_api() {
    void* torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
    if (torch == nullptr) {
        throw std::runtime_error("PyTorch is not loaded");
    }
    const auto find = [torch]<typename Function>(Function& into, const char* name) {
        into = found<Function>(torch, name);
    };
    const auto number = [torch](const char* name) {
        return found<std::int32_t (*)()>(torch, name)();
    };
    find(api.delete_tensor_object, "delete_tensor_object");
    find(api.empty_strided, "empty_strided");
    find(api.get_data_ptr, "get_data_ptr");
    find(api.get_dim, "get_dim");
    find(api.get_size, "get_size");
    find(api.get_stride, "get_stride");
    find(api.get_numel, "get_numel");
    find(api.get_dtype, "get_dtype");
    find(api.is_contiguous, "is_contiguous");
    find(api.library_init_fragment, "library_init_fragment");
    find(api.library_init_impl, "library_init_impl");
    find(api.library_def, "library_def");
    find(api.library_impl, "library_impl");
    find(api.get_device_type, "get_device_type");
    find(api.get_device_index, "get_device_index");
    if (void* cuda = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD)) {
        api.get_current_cuda_stream =
            found<decltype(api.get_current_cuda_stream)>(cuda, "get_current_cuda_stream");
    }
    api.float32 = number("dtype_float32");
    api.int32 = number("dtype_int32");
    api.int64 = number("dtype_int64");
    api.uint8 = number("dtype_uint8");
    api.cpu = number("device_type_cpu");
}

void require(std::int32_t code, const char* what) {
    if (code != 0) {
        throw std::runtime_error(std::string("PyTorch refused ") + what);
    }
}

}  // namespace

Tensor::~Tensor() {
    if (handle_ != nullptr) {
        api.delete_tensor_object(handle_);
    }
}

Tensor Tensor::empty(Shape shape, Dtype dtype) { return empty_on({api.cpu, 0}, shape, dtype); }

Tensor Tensor::empty_on(Device device, Shape shape, Dtype dtype) {
    const std::int64_t* sizes = shape.begin();
    const std::array<std::int64_t, 2> of_two{shape.size() == 2 && sizes[1] > 1 ? sizes[1] : 1, 1};
    const std::int64_t* strides = shape.size() == 2 ? of_two.data() : &of_two[1];
    Handle made = nullptr;
    const std::int32_t type = dtype == Dtype::kFloat32 ? api.float32
                              : dtype == Dtype::kUint8 ? api.uint8
                                                       : api.int32;
    if (api.empty_strided(static_cast<std::int64_t>(shape.size()), sizes, strides, type,
                          device.type, device.index, &made) != 0) {
        throw std::bad_alloc();
    }
    return Tensor(made);
}

std::int64_t Tensor::dim() const {
    std::int64_t found = 0;
    require(api.get_dim(handle_, &found), "to tell a dimension");
    return found;
}

std::int64_t Tensor::size(std::int64_t axis) const {
    std::int64_t found = 0;
    require(api.get_size(handle_, axis, &found), "to tell a size");
    return found;
}

std::int64_t Tensor::stride(std::int64_t axis) const {
    std::int64_t found = 0;
    require(api.get_stride(handle_, axis, &found), "to tell a stride");
    return found;
}

std::int64_t Tensor::numel() const {
    std::int64_t found = 0;
    require(api.get_numel(handle_, &found), "to tell a number of elements");
    return found;
}

Dtype Tensor::dtype() const {
    std::int32_t found = 0;
    require(api.get_dtype(handle_, &found), "to tell a dtype");
    return found == api.float32 ? Dtype::kFloat32
           : found == api.int32 ? Dtype::kInt32
           : found == api.int64 ? Dtype::kInt64
           : found == api.uint8 ? Dtype::kUint8
                                : Dtype::kOther;
}

bool Tensor::is_contiguous() const {
    bool found = false;
    require(api.is_contiguous(handle_, &found), "to tell a layout");
    return found;
}

Device Tensor::device() const {
    Device found;
    require(api.get_device_type(handle_, &found.type), "to tell a device");
    require(api.get_device_index(handle_, &found.index), "to tell a device");
    return found;
}

void* Tensor::address() const {
    void* found = nullptr;
    require(api.get_data_ptr(handle_, &found), "to tell an address");
    return found;
}

std::optional<Tensor> Arguments::optional_tensor() {
    auto* inner = reinterpret_cast<Value*>(*next_++);
    if (inner == nullptr) {
        return std::nullopt;
    }
    const Value value = *inner;
    // PyTorch made it with `new`; deleting it is our part.
    delete inner;
    return Tensor(reinterpret_cast<Handle>(value));
}

// Libraries are never deleted: what they define ends with them.
void define(const char* library, std::span<const Schema> schemas) {
    find_api();
    Library into = nullptr;
    require(api.library_init_fragment(library, __FILE__, __LINE__, &into), "a library");
    for (const Schema& schema : schemas) {
        require(api.library_def(into, schema.text), schema.text);
    }
}

void implement(const char* library, const char* key, std::span<const Kernel> kernels) {
    find_api();
    Library into = nullptr;
    require(api.library_init_impl(library, key, __FILE__, __LINE__, &into), "a library");
    for (const Kernel& kernel : kernels) {
        require(api.library_impl(into, kernel.name, kernel.run), kernel.name);
    }
}

void* current_cuda_stream(std::int32_t device) {
    if (api.get_current_cuda_stream == nullptr) {
        throw std::runtime_error("PyTorch has no CUDA");
    }
    void* stream = nullptr;
    require(api.get_current_cuda_stream(device, &stream), "to tell a stream");
    return stream;
}

}  // namespace gnnserve::torch_abi
