#include "plain.hpp"

#include "infer.hpp"

namespace gnnserve::bindings {
namespace {

namespace nb = nanobind;
using front::PlainModel;
using front::PlainRequest;

nb::list tensors_of(const PlainRequest& request) {
    nb::list found;
    for (const PlainRequest::Tensor& tensor : request.tensors()) {
        const char* dtype = !tensor.input->indices ? "float32"
                            : tensor.stays_int32   ? "int32"
                                                   : "int64";
        found.append(nb::make_tuple(to_str(tensor.input->name), dtype, to_shape(tensor.shape),
                                    tensor.offset));
    }
    return found;
}

int get_message(PyObject* self, Py_buffer* view, int flags) {
    const std::string& bytes = *nb::inst_ptr<Message>(nb::handle(self))->bytes;
    return PyBuffer_FillInfo(view, self, const_cast<char*>(bytes.data()),
                             static_cast<Py_ssize_t>(bytes.size()), 1, flags);
}

PyType_Slot message_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(get_message)},
                               {0, nullptr}};

}  // namespace

void bind_plain(nb::module_& module) {
    nb::class_<Message>(module, "Message", nb::type_slots(message_slots),
                        "A call's message; a buffer of its bytes.");
    module.attr("NODES") = front::kNodes;
    module.attr("EDGES") = front::kEdges;
    nb::class_<PlainModel>(module, "PlainModel",
                           "What the front must know of a model to stage its plain requests.")
        .def(
            "__init__",
            [](PlainModel* self, std::uint64_t token, bool narrow_edges, bool counts_loops,
               std::tuple<double, double, double> output) {
                new (self) PlainModel{token,
                                      {},
                                      narrow_edges,
                                      counts_loops,
                                      std::get<0>(output),
                                      std::get<1>(output),
                                      std::get<2>(output)};
            },
            nb::kw_only(), nb::arg("token"), nb::arg("narrow_edges"), nb::arg("counts_loops"),
            nb::arg("output"),
            "Describe a model without inputs. `output`: bytes of the output for each node, for\n"
            "each edge, and besides.")
        .def(
            "add_input",
            [](PlainModel& self, std::string name, std::vector<std::int64_t> shape, bool indices,
               bool also_int32, bool required) {
                self.inputs.push_back(
                    {std::move(name), indices, also_int32, required, std::move(shape)});
            },
            nb::arg("name"), nb::arg("shape"), nb::kw_only(), nb::arg("indices"),
            nb::arg("also_int32"), nb::arg("required"),
            nb::sig("def add_input(self, name: str, shape: list[int], *, indices: bool, "
                    "also_int32: bool, required: bool) -> None"),
            "Add the next input: indices of nodes (INT64), or features (FP32). Its sizes are\n"
            "NODES, EDGES or positive.");
    nb::class_<PlainRequest>(module, "PlainRequest",
                             "A request whose tensors the front has staged.")
        .def_prop_ro(
            "token", [](const PlainRequest& self) { return self.model().token; },
            "Token of its model.")
        .def_prop_ro(
            "version", [](const PlainRequest& self) { return to_str(self.head().version); },
            "Version asked for; empty for the default.")
        .def_prop_ro(
            "client_id", [](const PlainRequest& self) { return to_str(self.head().id); },
            "Id given by the client.")
        .def_prop_ro(
            "parameters", [](const PlainRequest& self) { return to_dict(self.head().parameters); },
            nb::sig("def parameters(self) -> dict[str, bool | int | str | float]"),
            "Parameters of the request by name.")
        .def_prop_ro("num_nodes", &PlainRequest::nodes, "Nodes of its graph.")
        .def_prop_ro("num_edges", &PlainRequest::edges, "Edges of its graph.")
        .def_prop_ro(
            "num_loops",
            [](const PlainRequest& self) -> nb::object {
                return self.loops() < 0 ? nb::none() : nb::object(nb::int_(self.loops()));
            },
            nb::sig("def num_loops(self) -> int | None"),
            "Self-loops among the edges; None where its model's are not counted.")
        .def_prop_ro("narrow_edges", &PlainRequest::narrow, "Edges are staged as int32.")
        .def_prop_ro("tensors", &tensors_of,
                     nb::sig("def tensors(self) -> list[tuple[str, str, tuple[int, ...], int]]"),
                     "Name, dtype, shape and offset in the pool of each tensor.")
        .def_prop_ro("output_offset_bytes", &PlainRequest::output_offset,
                     "Place of the output in the pool.")
        .def_prop_ro("output_capacity_bytes", &PlainRequest::output_capacity,
                     "Size of the output's place.")
        .def_prop_ro("block_bytes", &PlainRequest::block_size, "Size of its block.")
        .def_prop_ro("valid", &PlainRequest::valid,
                     "Whether the model can take every value; if not, the message is to be refused "
                     "in words.")
        .def("stage", &PlainRequest::stage, nb::call_guard<nb::gil_scoped_release>(),
             "Put the tensors in their places again, as a model may have worked in place.\n\n"
             "Returns False when it has, and the message was too large to be kept.")
        .def("release", &PlainRequest::release,
             "Free the block as soon as nothing is sent from it.")
        .def(
            "message",
            [](const PlainRequest& self) {
                return Message{std::make_shared<const std::string>(self.message())};
            },
            nb::call_guard<nb::gil_scoped_release>(),
            "Return the serialized message, written again from what is staged. Not after "
            "`release`.");
}

}  // namespace gnnserve::bindings
