#include "infer.hpp"

#include <bit>
#include <cstring>
#include <list>
#include <string_view>
#include <utility>

#include "buffer.hpp"

namespace gnnserve::bindings {
namespace {

InferKind kind_of(bool is_request) {
    return is_request ? InferKind::kRequest : InferKind::kResponse;
}

nb::object owned(PyObject* object) {
    if (object == nullptr) {
        throw nb::python_error();
    }
    return nb::steal(object);
}

nb::object to_value(const InferParameter& parameter) {
    switch (parameter.choice) {
        case Choice::kBool:
            return nb::bool_(parameter.bits != 0);
        case Choice::kInt64:
            return nb::int_(static_cast<std::int64_t>(parameter.bits));
        case Choice::kDouble:
            return nb::float_(std::bit_cast<double>(parameter.bits));
        case Choice::kString:
            break;
    }
    return to_str(parameter.text);
}

}  // namespace

nb::str to_str(std::string_view text) {
    PyObject* found =
        PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), nullptr);
    if (found == nullptr) {
        PyErr_Clear();
        throw NotPlain{};
    }
    return nb::steal<nb::str>(found);
}

nb::dict to_dict(const std::vector<InferParameter>& parameters) {
    nb::dict found;
    for (const InferParameter& parameter : parameters) {
        found[to_str(parameter.name)] = to_value(parameter);
    }
    return found;
}

nb::tuple to_shape(const std::vector<std::int64_t>& shape) {
    nb::list found;
    for (const std::int64_t size : shape) {
        found.append(size);
    }
    return nb::tuple(found);
}

namespace {

// Returns None for a message that is not plain; the protobuf library reads those.
nb::object decode_infer(bool is_request, nb::handle message) {
    const Buffer buffer(message, PyBUF_SIMPLE);
    const auto* begin = reinterpret_cast<const char*>(buffer.bytes().data());
    const auto parsed = parse_infer(kind_of(is_request), {begin, buffer.size()});
    if (!parsed) {
        return nb::none();
    }
    try {
        nb::list tensors;
        for (const InferTensor& tensor : parsed->tensors) {
            tensors.append(nb::make_tuple(to_str(tensor.name), to_str(tensor.datatype),
                                          to_shape(tensor.shape), to_dict(tensor.parameters),
                                          nb::none()));
        }
        nb::list requested;
        for (const InferTensor& output : parsed->requested) {
            requested.append(nb::make_tuple(to_str(output.name), to_dict(output.parameters)));
        }
        nb::list raws;
        if (!parsed->raws.empty()) {
            const nb::object view = owned(PyMemoryView_FromObject(message.ptr()));
            for (const std::string_view raw : parsed->raws) {
                const auto start = static_cast<Py_ssize_t>(raw.data() - begin);
                const auto end = start + static_cast<Py_ssize_t>(raw.size());
                raws.append(owned(PySequence_GetSlice(view.ptr(), start, end)));
            }
        }
        return nb::make_tuple(to_str(parsed->model), to_str(parsed->version), to_str(parsed->id),
                              to_dict(parsed->parameters), tensors, requested, raws);
    } catch (const NotPlain&) {
        return nb::none();
    }
}

std::string_view to_text(nb::handle str) {
    Py_ssize_t size = 0;
    const char* text = PyUnicode_AsUTF8AndSize(str.ptr(), &size);
    if (text == nullptr) {
        PyErr_Clear();
        throw NotPlain{};
    }
    return {text, static_cast<std::size_t>(size)};
}

InferParameter to_parameter(nb::handle name, nb::handle value) {
    InferParameter found{.name = to_text(name), .choice = Choice::kBool, .bits = 0, .text = {}};
    PyObject* object = value.ptr();
    // Exactly these types: the library converts subclasses by rules of its own.
    if (PyBool_Check(object)) {
        found.bits = object == Py_True;
    } else if (PyLong_CheckExact(object)) {
        found.choice = Choice::kInt64;
        int overflow = 0;
        found.bits = static_cast<std::uint64_t>(PyLong_AsLongLongAndOverflow(object, &overflow));
        if (overflow != 0) {
            throw NotPlain{};
        }
    } else if (PyUnicode_CheckExact(object)) {
        found.choice = Choice::kString;
        found.text = to_text(value);
    } else if (PyFloat_CheckExact(object)) {
        found.choice = Choice::kDouble;
        found.bits = std::bit_cast<std::uint64_t>(PyFloat_AsDouble(object));
    } else {
        throw NotPlain{};
    }
    return found;
}

std::vector<InferParameter> to_parameters(const nb::dict& parameters) {
    std::vector<InferParameter> found;
    found.reserve(parameters.size());
    for (const auto& [name, value] : parameters) {
        if (!value.is_none()) {
            found.push_back(to_parameter(name, value));
        }
    }
    return found;
}

nb::object encode_infer(bool is_request, nb::handle model, nb::handle version, nb::handle id,
                        const nb::dict& parameters, const nb::list& tensors, const nb::list& raws) {
    std::string head;
    try {
        InferMessage message;
        message.model = to_text(model);
        message.version = to_text(version);
        message.id = to_text(id);
        message.parameters = to_parameters(parameters);
        for (const nb::handle item : tensors) {
            const auto tensor = nb::cast<nb::tuple>(item);
            InferTensor& added = message.tensors.emplace_back();
            added.name = to_text(tensor[0]);
            added.datatype = to_text(tensor[1]);
            for (const nb::handle size : nb::cast<nb::tuple>(tensor[2])) {
                added.shape.push_back(nb::cast<std::int64_t>(size));
            }
            added.parameters = to_parameters(nb::cast<nb::dict>(tensor[3]));
        }
        head = write_infer(message);
    } catch (const NotPlain&) {
        return nb::none();
    }
    std::list<Buffer> buffers;
    std::vector<std::string> prefixes;
    std::size_t size = head.size();
    for (const nb::handle raw : raws) {
        buffers.emplace_back(raw, PyBUF_SIMPLE);
        prefixes.push_back(raw_prefix(kind_of(is_request), buffers.back().size()));
        size += prefixes.back().size() + buffers.back().size();
    }
    nb::object message = owned(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size)));
    char* at = PyBytes_AsString(message.ptr());
    const auto put = [&at](const void* from, std::size_t bytes) {
        if (bytes != 0) {
            std::memcpy(at, from, bytes);
            at += bytes;
        }
    };
    put(head.data(), head.size());
    unlocked(size, [&] {
        auto prefix = prefixes.begin();
        for (const Buffer& buffer : buffers) {
            put(prefix->data(), prefix->size());
            put(buffer.bytes().data(), buffer.size());
            ++prefix;
        }
        return 0;
    });
    return message;
}

}  // namespace

void bind_infer(nb::module_& module) {
    using namespace nb::literals;
    module.def("decode_infer", &decode_infer, "is_request"_a, "message"_a,
               nb::sig("def decode_infer(is_request: bool, message: bytes | memoryview) "
                       "-> serve.native.Infer | None"));
    module.def("encode_infer", &encode_infer, "is_request"_a, "model"_a, "version"_a, "id"_a,
               "parameters"_a, "tensors"_a, "raws"_a,
               nb::sig("def encode_infer(is_request: bool, model: str, version: str, id: str, "
                       "parameters: serve.native.Parameters, tensors: "
                       "collections.abc.Sequence[serve.native.TensorHead], "
                       "raws: collections.abc.Sequence[memoryview]) -> bytes | None"));
}

}  // namespace gnnserve::bindings
