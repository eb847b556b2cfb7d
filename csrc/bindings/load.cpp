#include "load.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <stdexcept>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "../load/sender.hpp"

namespace gnnserve::bindings {
namespace {

namespace nb = nanobind;
using load::Protocol;
using load::Result;
using load::SenderOptions;

// Messages that stay where they are as long as this is there.
class Messages {
public:
    explicit Messages(const nb::sequence& given) : held_(nb::tuple(given)) {
        for (const nb::handle one : held_) {
            if (!nb::isinstance<nb::bytes>(one)) {
                throw nb::type_error("messages must be bytes");
            }
            const auto bytes = nb::borrow<nb::bytes>(one);
            views_.emplace_back(bytes.c_str(), bytes.size());
        }
    }

    const std::vector<std::string_view>& views() const { return views_; }

private:
    nb::tuple held_;
    std::vector<std::string_view> views_;
};

class Sender {
public:
    Sender(std::string host, int port, std::string path, bool http, std::size_t connections,
           double timeout_s, double connect_timeout_s, bool whole_answers)
        : sender_(options(std::move(host), port, std::move(path), http, connections, timeout_s,
                          connect_timeout_s, whole_answers)) {}

    void send_at(const nb::sequence& messages, const std::vector<std::int64_t>& offsets_ns) {
        const Messages held(messages);
        unlocked([&] { sender_.send_at(held.views(), offsets_ns); });
    }

    void keep_in_flight(const nb::sequence& messages, std::size_t in_flight, double duration_s,
                        std::size_t most) {
        const Messages held(messages);
        unlocked([&] {
            sender_.keep_in_flight(held.views(), in_flight,
                                   static_cast<std::int64_t>(duration_s * 1e9), most);
        });
    }

    nb::tuple take() {
        const std::vector<Result> results = sender_.take();
        std::vector<std::array<std::int64_t, 6>> rows;
        rows.reserve(results.size());
        nb::list answers, texts;
        for (const Result& one : results) {
            rows.push_back({static_cast<std::int64_t>(one.index), one.due_ns, one.sent_ns,
                            one.ended_ns, one.code, static_cast<std::int64_t>(one.answer_bytes)});
            answers.append(nb::bytes(one.answer.data(), one.answer.size()));
            // A server may send any bytes.
            texts.append(nb::steal(PyUnicode_DecodeUTF8(
                one.text.data(), static_cast<Py_ssize_t>(one.text.size()), "replace")));
        }
        return nb::make_tuple(nb::bytes(rows.data(), rows.size() * sizeof rows[0]), answers, texts);
    }

    void stop() { sender_.stop(); }
    std::int64_t started_ns() const { return sender_.started_ns(); }
    std::size_t sent() const { return sender_.sent(); }

private:
    static SenderOptions options(std::string host, int port, std::string path, bool http,
                                 std::size_t connections, double timeout_s,
                                 double connect_timeout_s, bool whole_answers) {
        SenderOptions found;
        found.protocol = http ? Protocol::kHttp : Protocol::kGrpc;
        found.channel.host = std::move(host);
        found.channel.port = port;
        found.channel.path = std::move(path);
        found.channel.connections = connections;
        found.channel.connect_timeout_ns = static_cast<std::int64_t>(connect_timeout_s * 1e9);
        found.timeout_ns = static_cast<std::int64_t>(timeout_s * 1e9);
        found.whole_answers = whole_answers;
        return found;
    }

    // Runs without the interpreter lock; system errors become OSError.
    template <typename Work>
    static void unlocked(Work work) {
        try {
            const nb::gil_scoped_release release;
            work();
        } catch (const std::system_error& error) {
            const nb::object arguments = nb::make_tuple(error.code().value(), error.what());
            PyErr_SetObject(PyExc_OSError, arguments.ptr());
            throw nb::python_error();
        }
    }

    load::Sender sender_;
};

}  // namespace

void bind_load(nb::module_& module) {
    nb::class_<Sender>(
        module, "LoadSender",
        "Sends requests to one server and notes when each was answered, on the calling thread.\n\n"
        "gRPC over HTTP/2 connections that take requests in turn; with `http`, POST over at most\n"
        "`connections` of HTTP/1.1, one request each. A request that has no answer `timeout_s`\n"
        "after it was due ends with DEADLINE_EXCEEDED, one whose connection is lost with\n"
        "UNAVAILABLE. Connections are opened anew.")
        .def(nb::init<std::string, int, std::string, bool, std::size_t, double, double, bool>(),
             nb::kw_only(), nb::arg("host"), nb::arg("port"), nb::arg("path"),
             nb::arg("http") = false, nb::arg("connections") = 1, nb::arg("timeout_s") = 30.0,
             nb::arg("connect_timeout_s") = 10.0, nb::arg("whole_answers") = false)
        .def("send_at", &Sender::send_at, nb::arg("messages"), nb::arg("offsets_ns"),
             nb::sig("def send_at(self, messages: Sequence[bytes], offsets_ns: Sequence[int]) -> "
                     "None"),
             "Send each message so long after the start (open loop); offsets ascend.\n\n"
             "Returns when all have ended, or after `stop`. Raises OSError when nobody takes a\n"
             "connection at first, RuntimeError when libnghttp2 is missing, ValueError when\n"
             "messages and offsets do not fit together.")
        .def("keep_in_flight", &Sender::keep_in_flight, nb::arg("messages"), nb::arg("in_flight"),
             nb::arg("duration_s"), nb::arg("most") = 1'000'000,
             nb::sig("def keep_in_flight(self, messages: Sequence[bytes], in_flight: int, "
                     "duration_s: float, most: int = 1000000) -> None"),
             "Keep requests in flight, messages in turn, for a time or until `most` were sent\n"
             "(closed loop). Returns and raises as `send_at` does.")
        .def("take", &Sender::take,
             nb::sig("def take(self) -> tuple[bytes, list[bytes], list[str]]"),
             "Return the results since the last call, in the order of ending. Any thread.\n\n"
             "Rows of six int64: number of the request, when it was due, sent and ended on the\n"
             "monotonic clock, status code of gRPC, bytes of the answer. Then each answer (its\n"
             "fields before the raw contents, unless `whole_answers`), and each error's text.")
        .def("stop", &Sender::stop,
             "End the run, now and for good; requests in flight have no result. Any thread.")
        .def_prop_ro("started_ns", &Sender::started_ns,
                     "When the last run began, on the monotonic clock; 0 before the first.")
        .def_prop_ro("sent", &Sender::sent, "Number of requests sent in the last run.");
}

}  // namespace gnnserve::bindings
