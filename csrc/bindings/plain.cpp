#include "plain.hpp"

#include "infer.hpp"

namespace gnnserve::bindings {
namespace {

namespace nb = nanobind;
using front::PlainInput;
using front::PlainModel;
using front::PlainRequest;

// Throws for what would have the front look beyond the model's counts or the tensor's rows.
void check(const PlainModel& model, const PlainInput& input) {
    const auto fail = [&input](const char* what) {
        throw nb::value_error((input.name + ": " + what).c_str());
    };
    if (input.element == nullptr) {
        fail("no tensor has this datatype");
    }
    const bool wide = input.element->datatype == "INT64";
    if ((input.also_int32 || input.numbers_graphs || input.counts_graphs) && !input.is_index()) {
        fail("only indices may come as INT32, number graphs or have sizes of graphs");
    }
    if (input.counts_graphs && input.shape.size() != 1) {
        fail("sizes of graphs are counted of an index with one axis");
    }
    if (input.ascends && (!input.is_index() || input.shape.size() != 1)) {
        fail("only an index with one axis ascends");
    }
    if ((input.also_int32 && !wide) ||
        (input.is_index() && !wide && input.element->datatype != "INT32")) {
        fail("indices are INT64, or INT32");
    }
    for (const std::int64_t size : input.shape) {
        if (size == 0 || (size < 0 && front::count_of_size(size) >= model.counts)) {
            fail("a size is positive, or one of the model's counts");
        }
    }
    for (const std::size_t count : input.below) {
        if (count >= model.counts) {
            fail("its values are below one of the model's counts");
        }
    }
    if (input.below.size() > 1 &&
        (input.shape.empty() || input.shape[0] != static_cast<std::int64_t>(input.below.size()))) {
        fail("each row has a count, or all rows have one");
    }
}

nb::list tensors_of(const PlainRequest& request) {
    nb::list found;
    for (const PlainRequest::Tensor& tensor : request.tensors()) {
        found.append(nb::make_tuple(to_str(tensor.input->name), to_str(tensor.element->dtype),
                                    to_shape(tensor.shape), tensor.offset));
    }
    return found;
}

nb::dict graph_sizes_of(const PlainRequest& request) {
    nb::dict found;
    for (const PlainRequest::Tensor& tensor : request.tensors()) {
        if (tensor.input->counts_graphs) {
            found[to_str(tensor.input->name)] =
                nb::make_tuple(tensor.pairs, tensor.largest + 1, tensor.most);
        }
    }
    return found;
}

nb::dict largest_of(const PlainRequest& request) {
    nb::dict found;
    for (const PlainRequest::Tensor& tensor : request.tensors()) {
        if (tensor.input->numbers_graphs && tensor.largest >= 0) {
            found[to_str(tensor.input->name)] = tensor.largest;
        }
    }
    return found;
}

nb::list wanted_of(const PlainRequest& request) {
    nb::list found;
    for (const InferTensor& output : request.head().requested) {
        found.append(to_str(output.name));
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
    nb::class_<PlainModel>(module, "PlainModel",
                           "What the front must know of a model to stage its plain requests.")
        .def(
            "__init__",
            [](PlainModel* self, std::uint64_t token, std::size_t counts, std::size_t node_counts,
               bool narrow_edges, bool counts_loops) {
                if (node_counts > counts) {
                    throw nb::value_error("node_counts: there are not so many counts");
                }
                new (self)
                    PlainModel{token, counts, node_counts, {}, {}, narrow_edges, counts_loops};
            },
            nb::kw_only(), nb::arg("token"), nb::arg("counts"), nb::arg("node_counts"),
            nb::arg("narrow_edges") = false, nb::arg("counts_loops") = false,
            "Describe a model without inputs and outputs.\n\n"
            "A request's shapes tell `counts` numbers; the first `node_counts` are of nodes. With\n"
            "`narrow_edges` INT32 edges stay so; with `counts_loops` self-loops are counted. Both\n"
            "need the second count to be that of edges.")
        .def(
            "add_input",
            [](PlainModel& self, std::string name, const std::string& datatype,
               std::vector<std::int64_t> shape, bool required, bool also_int32,
               std::vector<std::size_t> below, std::int64_t low, std::int64_t high,
               bool numbers_graphs, bool counts_graphs, bool ascends) {
                PlainInput input{std::move(name),
                                 front::find_element(datatype),
                                 also_int32,
                                 required,
                                 std::move(shape),
                                 std::move(below),
                                 low,
                                 high,
                                 numbers_graphs,
                                 counts_graphs,
                                 ascends};
                check(self, input);
                self.inputs.push_back(std::move(input));
            },
            nb::arg("name"), nb::arg("datatype"), nb::arg("shape"), nb::kw_only(),
            nb::arg("required"), nb::arg("also_int32") = false,
            nb::arg("below") = std::vector<std::size_t>{}, nb::arg("low") = 0, nb::arg("high") = 1,
            nb::arg("numbers_graphs") = false, nb::arg("counts_graphs") = false,
            nb::arg("ascends") = false,
            nb::sig("def add_input(self, name: str, datatype: str, shape: list[int], *, "
                    "required: bool, also_int32: bool = False, below: list[int] = [], "
                    "low: int = 0, high: int = 1, numbers_graphs: bool = False, "
                    "counts_graphs: bool = False, ascends: bool = False) -> None"),
            "Add the next input. A size of its shape that is the n-th count is -1 - n.\n\n"
            "Values of indices are `below` these counts, one for each row or one for all; those "
            "of\n"
            "other integers are in [low, high]. With `numbers_graphs` the largest is told, with\n"
            "`counts_graphs` the sizes of graphs. With `ascends` no value is less than the one\n"
            "before it. Raises ValueError for what cannot be.")
        .def(
            "add_output",
            [](PlainModel& self, std::string name, double constant, std::vector<double> per) {
                if (per.size() != self.counts) {
                    throw nb::value_error("per: it must have a number for each count");
                }
                self.outputs.push_back({std::move(name), constant, std::move(per)});
            },
            nb::arg("name"), nb::arg("constant"), nb::arg("per"),
            nb::sig("def add_output(self, name: str, constant: float, per: list[float]) -> None"),
            "Add the next output, of at most constant + \u03a3 per \u00b7 count bytes. Raises\n"
            "ValueError.");
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
        .def_prop_ro(
            "counts", [](const PlainRequest& self) { return to_shape(self.counts()); },
            nb::sig("def counts(self) -> tuple[int, ...]"),
            "The model's counts, as its shapes tell them.")
        .def_prop_ro("largest", &largest_of, nb::sig("def largest(self) -> dict[str, int]"),
                     "Largest value, by name, of each index that numbers graphs and has values.")
        .def_prop_ro(
            "graph_sizes", &graph_sizes_of,
            nb::sig("def graph_sizes(self) -> dict[str, tuple[int, int, int]]"),
            "By name of each index of which they are counted: pairs of things in one graph,\n"
            "each with itself, graphs, and things of the largest.")
        .def_prop_ro("wanted", &wanted_of, nb::sig("def wanted(self) -> list[str]"),
                     "Names of the outputs asked for; empty for all.")
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
                     "Place of the outputs in the pool.")
        .def_prop_ro("output_capacity_bytes", &PlainRequest::output_capacity,
                     "Size of the outputs' place.")
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
