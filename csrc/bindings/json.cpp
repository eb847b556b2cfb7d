#include "json.hpp"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "buffer.hpp"
#include "gnnserve/json_lists.hpp"

namespace gnnserve::bindings {
namespace {

using Shape = std::vector<std::int64_t>;

NumberKind kind_of(const std::string& code) {
    static constexpr std::pair<std::string_view, NumberKind> kCodes[] = {
        {"b1", NumberKind::kBool}, {"u1", NumberKind::kU8},  {"u2", NumberKind::kU16},
        {"u4", NumberKind::kU32},  {"u8", NumberKind::kU64}, {"i1", NumberKind::kI8},
        {"i2", NumberKind::kI16},  {"i4", NumberKind::kI32}, {"i8", NumberKind::kI64},
        {"f4", NumberKind::kF32},  {"f8", NumberKind::kF64},
    };
    for (const auto& [name, kind] : kCodes) {
        if (name == code) {
            return kind;
        }
    }
    throw nb::value_error(("unknown kind of numbers: " + code).c_str());
}

// Raises ValueError unless `size` bytes are elements of `shape`.
void require_size(const Shape& shape, NumberKind kind, std::size_t size) {
    std::uint64_t count = 1;
    bool fits = true;
    for (const std::int64_t length : shape) {
        fits = fits && length >= 0 &&
               !__builtin_mul_overflow(count, static_cast<std::uint64_t>(length), &count);
    }
    if (!fits || count > size || count * size_of(kind) != size) {
        throw nb::value_error("the buffer does not have the size of the shape");
    }
}

std::string_view view_of(const Buffer& buffer) {
    return {reinterpret_cast<const char*>(buffer.bytes().data()), buffer.size()};
}

nb::tuple cut(nb::handle document, int depth, const std::string& key) {
    const Buffer source(document, PyBUF_SIMPLE);
    const CutDocument found =
        unlocked(source.size(), [&] { return cut_lists(view_of(source), depth, key); });
    return nb::make_tuple(nb::bytes(found.rest.data(), found.rest.size()), found.lists);
}

Shape shape(nb::handle text, std::size_t most) {
    const Buffer source(text, PyBUF_SIMPLE);
    try {
        return unlocked(source.size(), [&] { return shape_of_list(view_of(source), most); });
    } catch (const JsonListError& error) {
        throw nb::value_error(error.what());
    }
}

void read(nb::handle text, const std::string& code, const Shape& shape, nb::handle target) {
    const Buffer source(text, PyBUF_SIMPLE);
    const Buffer elements(target, PyBUF_WRITABLE);
    const NumberKind kind = kind_of(code);
    require_size(shape, kind, elements.size());
    try {
        unlocked(source.size(), [&] { read_list(view_of(source), kind, shape, elements.bytes()); });
    } catch (const JsonListError& error) {
        throw nb::value_error(error.what());
    }
}

nb::bytes write(nb::handle elements, const std::string& code, const Shape& shape) {
    const Buffer source(elements, PyBUF_SIMPLE);
    const NumberKind kind = kind_of(code);
    require_size(shape, kind, source.size());
    try {
        const std::string text =
            unlocked(source.size(), [&] { return write_list(source.bytes(), kind, shape); });
        return nb::bytes(text.data(), text.size());
    } catch (const JsonListError& error) {
        throw nb::value_error(error.what());
    }
}

}  // namespace

void bind_json(nb::module_& module) {
    module.def("cut_json_lists", &cut, nb::arg("document"), nb::arg("depth"), nb::arg("key"),
               nb::sig("def cut_json_lists(document: serve.native.BytesLike, depth: int, "
                       "key: str) -> tuple[bytes, list[tuple[int, int]]]"));
    module.def("shape_of_json_list", &shape, nb::arg("text"), nb::arg("most"),
               nb::sig("def shape_of_json_list(text: serve.native.BytesLike, most: int) "
                       "-> list[int]"));
    module.def("read_json_list", &read, nb::arg("text"), nb::arg("code"), nb::arg("shape"),
               nb::arg("dst"),
               nb::sig("def read_json_list(text: serve.native.BytesLike, code: str, "
                       "shape: collections.abc.Sequence[int], "
                       "dst: serve.native.BytesLike) -> None"));
    module.def("write_json_list", &write, nb::arg("src"), nb::arg("code"), nb::arg("shape"),
               nb::sig("def write_json_list(src: serve.native.BytesLike, code: str, "
                       "shape: collections.abc.Sequence[int]) -> bytes"));
}

}  // namespace gnnserve::bindings
