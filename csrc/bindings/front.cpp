#include "front.hpp"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cerrno>
#include <cstring>
#include <mutex>
#include <system_error>
#include <utility>
#include <vector>

#include "../front/front.hpp"
#include "block_pool.hpp"
#include "plain.hpp"

namespace gnnserve::bindings {
namespace {

namespace nb = nanobind;
using front::Event;
using front::FrontOptions;
using front::Piece;

// Objects whose bytes were sent. The next holder of the interpreter lock releases them, as the
// sending thread does not hold it.
class Sent {
public:
    void add(PyObject* object) {
        const std::lock_guard held(lock_);
        objects_.push_back(object);
    }

    // Call it with the interpreter lock.
    void release() {
        std::vector<PyObject*> objects;
        {
            const std::lock_guard held(lock_);
            objects.swap(objects_);
        }
        for (PyObject* object : objects) {
            Py_DECREF(object);
        }
    }

private:
    std::mutex lock_;
    std::vector<PyObject*> objects_;
};

// Text of which each byte is one character.
nb::object text_of(const std::string& bytes) {
    return nb::steal(
        PyUnicode_DecodeLatin1(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), nullptr));
}

// Names and values; None when there are none.
nb::object headers_of(const front::Headers& headers) {
    if (headers.empty()) {
        return nb::none();
    }
    nb::list found;
    for (const auto& [name, value] : headers) {
        found.append(nb::make_tuple(text_of(name), text_of(value)));
    }
    return found;
}

class Front {
public:
    Front(std::string host, int port, std::string backend, std::string method,
          std::string stream_method, std::size_t max_open_streams, std::size_t stream_window,
          double unread_timeout_s, std::size_t max_message_bytes, std::size_t max_receiving_bytes,
          std::size_t max_receiving_bytes_of_connection, std::size_t max_connections,
          std::size_t max_connections_of_peer, std::uint32_t max_streams, double receive_timeout_s,
          std::size_t receive_bytes_per_s, double send_timeout_s, const PythonPool* pool,
          bool check_finite, bool asks, std::shared_ptr<front::TlsContext> tls, std::string inside,
          front::Headers certified) {
        FrontOptions options;
        options.host = std::move(host);
        options.port = port;
        options.backend = std::move(backend);
        options.method = std::move(method);
        options.stream_method = std::move(stream_method);
        options.max_open_streams = max_open_streams;
        options.stream_window = stream_window;
        options.unread_timeout_ns = static_cast<std::int64_t>(unread_timeout_s * 1e9);
        options.max_message_bytes = max_message_bytes;
        options.max_receiving_bytes = max_receiving_bytes;
        options.max_receiving_bytes_of_connection = max_receiving_bytes_of_connection;
        options.max_connections = max_connections;
        options.max_connections_of_peer = max_connections_of_peer;
        options.max_streams = max_streams;
        options.receive_timeout_ns = static_cast<std::int64_t>(receive_timeout_s * 1e9);
        options.receive_bytes_per_s = receive_bytes_per_s;
        options.send_timeout_ns = static_cast<std::int64_t>(send_timeout_s * 1e9);
        options.pool = pool == nullptr ? nullptr : pool->get();
        options.check_finite = check_finite;
        options.asks = asks;
        options.tls = std::move(tls);
        options.inside = std::move(inside);
        options.certified = std::move(certified);
        try {
            front_ = std::make_unique<front::Front>(std::move(options));
        } catch (const std::system_error& error) {
            errno = error.code().value();
            PyErr_SetFromErrno(PyExc_OSError);
            throw nb::python_error();
        }
    }

    ~Front() { close(); }

    int port() const { return open().port(); }

    nb::tuple poll(std::int64_t until_ns) {
        front::Polled polled;
        {
            const nb::gil_scoped_release unlocked;
            polled = open().poll(until_ns);
        }
        sent_->release();
        nb::list found;
        for (Event& event : polled.events) {
            nb::object content = nb::none();
            if (event.plain != nullptr) {
                content = nb::cast(std::move(event.plain));
            } else if (event.kind == Event::Kind::kCall) {
                content = nb::cast(Message{std::move(event.message)});
            } else if (event.kind == Event::Kind::kAsked) {
                content = text_of(event.path);
            }
            found.append(nb::make_tuple(event.handle, content, event.began_ns, event.timeout_ns,
                                        event.arrived_ns, headers_of(event.credentials),
                                        event.stream, event.raises, text_of(event.trace_parent),
                                        event.calls));
        }
        nb::list packets;
        for (const auto& [fd, packet] : polled.packets) {
            packets.append(nb::make_tuple(fd, nb::bytes(packet.data(), packet.size())));
        }
        return nb::make_tuple(polled.other, packets, found);
    }

    // The lock is kept: nothing waits here, and taking it back among busy threads costs more.
    void flush() { open().flush(); }

    void watch_also(int fd) { open().watch_also(fd); }
    void watch_packets(int fd) { open().watch_packets(fd); }
    void unwatch_packets(int fd) { open().unwatch_packets(fd); }

    void set_models(const nb::list& models) {
        auto table = std::make_shared<front::PlainModels>();
        for (const nb::handle item : models) {
            const auto& [name, version, model] =
                nb::cast<std::tuple<std::string, std::string, std::shared_ptr<front::PlainModel>>>(
                    item);
            table->add(name, version, model);
        }
        open().set_models(std::move(table));
    }

    void set_tls(std::shared_ptr<front::TlsContext> tls) { open().set_tls(std::move(tls)); }

    void answer(std::uint64_t handle, const nb::bytes& message) {
        open().answer(handle, {piece_of(message)});
    }

    void answer_staged(std::uint64_t handle, const nb::bytes& head,
                       const std::shared_ptr<front::PlainRequest>& request,
                       const std::vector<std::pair<std::int64_t, std::int64_t>>& outputs) {
        const auto block = request->block();
        const std::int64_t first = request->output_offset();
        const std::int64_t end = first + request->output_capacity();
        // Each message of raw contents follows the bytes that precede it.
        std::string text(head.c_str(), head.size());
        std::vector<Piece> pieces;
        for (const auto& [offset, size] : outputs) {
            if (block == nullptr || size < 0 || offset < first || offset > end - size) {
                throw nb::value_error("outputs: there is no such output of this request");
            }
            text += raw_prefix(InferKind::kResponse, static_cast<std::size_t>(size));
            pieces.push_back(Piece::of(std::exchange(text, {})));
            const auto* output = reinterpret_cast<const char*>(block->at(offset));
            pieces.push_back({output, static_cast<std::size_t>(size), block, true});
        }
        pieces.push_back(Piece::of(std::move(text)));
        open().answer(handle, std::move(pieces));
    }

    void fail(std::uint64_t handle, int code, std::string text, std::int64_t retry_after_ms) {
        open().fail(handle, {code, std::move(text), retry_after_ms});
    }

    void admit(std::uint64_t handle) { open().admit(handle); }

    void finish(std::uint64_t handle, int code, std::string text) {
        open().finish(handle, {code, std::move(text), -1});
    }

    void forget_admitted() { open().forget_admitted(); }

    void tell(std::uint64_t handle, const nb::bytes& message) {
        open().tell(handle, piece_of(message));
    }

    void wake() { open().wake(); }
    void announce_end() { open().announce_end(); }

    nb::dict counts() const {
        const front::FrontCounts& counts = open().counts();
        nb::dict found;
        const auto add = [&found](const char* name, const auto& count) {
            found[name] = count.load(std::memory_order_relaxed);
        };
        add("called", counts.called);
        add("plain", counts.plain);
        add("streams", counts.streams);
        add("forwarded", counts.forwarded);
        add("open_calls_refused", counts.open_calls_refused);
        add("idle_stream", counts.idle_stream);
        add("open_connections", counts.open_connections);
        add("open_calls", counts.open_calls);
        add("no_message", counts.no_message);
        add("message_size", counts.message_size);
        add("malformed", counts.malformed);
        add("header_size", counts.header_size);
        add("receiving_bytes", counts.receiving_bytes);
        add("connections", counts.connections);
        add("peer_connections", counts.peer_connections);
        add("media_type", counts.media_type);
        add("resets", counts.resets);
        add("control_frames", counts.control_frames);
        add("slow_reader", counts.slow_reader);
        add("handshake", counts.handshakes);
        add("unread", counts.unread);
        return found;
    }

    void close() {
        front_.reset();
        sent_->release();
    }

private:
    Piece piece_of(const nb::bytes& message) {
        sent_->release();
        Py_INCREF(message.ptr());
        std::shared_ptr<const void> owner(message.ptr(), [sent = sent_](const void* object) {
            sent->add(static_cast<PyObject*>(const_cast<void*>(object)));
        });
        return {message.c_str(), message.size(), std::move(owner)};
    }

    front::Front& open() const {
        if (front_ == nullptr) {
            throw nb::value_error("the front is closed");
        }
        return *front_;
    }

    std::unique_ptr<front::Front> front_;
    std::shared_ptr<Sent> sent_ = std::make_shared<Sent>();
};

}  // namespace

void bind_front(nb::module_& module) {
    module.def(
        "front_lacks",
        [] {
            std::string why;
            front::h2_api(why);
            return why;
        },
        "Return why the native front cannot run on this machine; empty when it can.");
    module.def("tls_lacks", front::tls_lacks,
               "Return why the native front cannot encrypt on this machine; empty when it can.");
    nb::class_<front::TlsContext>(module, "TlsContext",
                                  "A server's certificate and key, for connections that begin.")
        .def(nb::init<const std::string&, const std::string&, const std::string&>(),
             nb::arg("certificate"), nb::arg("key"), nb::arg("client_ca") = "",
             "Read files in PEM format. With `client_ca`, clients must show a certificate of its\n"
             "authorities. Raises RuntimeError when the files, or the library, cannot be used.");
    nb::class_<Front>(
        module, "Front",
        "HTTP/2 and gRPC for clients on one thread, which polls it.\n\n"
        "Unary calls of `method` and messages of streams of `stream_method` come out\n"
        "of `poll`; all others go to the gRPC server on the Unix socket\n"
        "`backend`. Plain requests of the models of `set_models` are staged in `pool`.\n\n"
        "With `asks` a call waits, once its headers are there, until `admit` or `fail`. Calls of\n"
        "the same method and credentials on the same connection do not wait again, but those\n"
        "of `stream_method`.\n\n"
        "With `tls` connections are encrypted, but those to the abstract Unix socket\n"
        "`inside`, which takes processes of this user. The headers `certified` are\n"
        "added to calls of clients that show a certificate, whose alternative names\n"
        "are the second one's value.")
        .def(
            nb::init<std::string, int, std::string, std::string, std::string, std::size_t,
                     std::size_t, double, std::size_t, std::size_t, std::size_t, std::size_t,
                     std::size_t, std::uint32_t, double, std::size_t, double, const PythonPool*,
                     bool, bool, std::shared_ptr<front::TlsContext>, std::string, front::Headers>(),
            nb::kw_only(), nb::arg("host"), nb::arg("port"), nb::arg("backend"), nb::arg("method"),
            nb::arg("stream_method") = "", nb::arg("max_open_streams") = 64,
            nb::arg("stream_window") = 256, nb::arg("unread_timeout_s") = 10.0,
            nb::arg("max_message_bytes"), nb::arg("max_receiving_bytes"),
            nb::arg("max_receiving_bytes_of_connection"), nb::arg("max_connections"),
            nb::arg("max_connections_of_peer"), nb::arg("max_streams"),
            nb::arg("receive_timeout_s"), nb::arg("receive_bytes_per_s"), nb::arg("send_timeout_s"),
            nb::arg("pool") = nb::none(), nb::arg("check_finite") = true, nb::arg("asks") = false,
            nb::arg("tls") = nb::none(), nb::arg("inside") = "",
            nb::arg("certified") = front::Headers{},
            "Listen. Raises OSError when the address cannot be had, RuntimeError when the\n"
            "library is missing.")
        .def_prop_ro("port", &Front::port, "The port it listens on.")
        .def(
            "poll", &Front::poll, nb::arg("until_ns"),
            nb::sig("def poll(self, until_ns: int) -> tuple[bool, list[tuple[int, bytes]], "
                    "list[tuple[int, Message | PlainRequest | str | None, int, int, int, "
                    "list[tuple[str, str]] | None, int, bool, str, int]]]"),
            "Serve until something has to be decided, `wake` is called, or the monotonic clock\n"
            "shows `until_ns` (negative: no limit). One thread at a time.\n\n"
            "Returns whether the descriptor of `watch_also` is readable; the packets of\n"
            "`watch_packets` by descriptor, empty when the other end is closed; and a few events:\n"
            "(handle, request, began_ns, timeout_ns, arrived_ns, credentials, stream, raises,\n"
            "traceparent, calls)\n"
            "for a call, or a message of a stream, that was complete at arrived_ns;\n"
            "(handle, method, …) for a call that waits for `admit`, which for one of\n"
            "`stream_method` has its handle in `stream`, too; (handle, None, …) when it has "
            "ended,\n"
            "answered or not, or a stream that was asked for has. The request is a Message\n"
            "unless it is staged. stream is the handle of a message's stream, 0 for a call. "
            "timeout_ns counts from began_ns; it is negative for a call\n"
            "without one. The credentials are the headers that tell whom the call comes from,\n"
            "None when there are none; a stream's messages have none. In a stream an error is\n"
            "for `tell`, unless `raises`; `fail` ends the whole stream. traceparent is that header "
            "of\n"
            "the call or its stream, empty without. calls is the number of calls that wait for "
            "the\n"
            "same `admit` or `fail`, else 1.")
        .def("flush", &Front::flush,
             "Send what was answered, without waiting. For the thread that polls.")
        .def("watch_also", &Front::watch_also, nb::arg("fd"),
             "Have `poll` watch a descriptor too; -1: none. Not while it runs.")
        .def("watch_packets", &Front::watch_packets, nb::arg("fd"),
             "Have `poll` read the packets of a SEQPACKET socket, one at a time. Not while it\n"
             "runs.")
        .def("unwatch_packets", &Front::unwatch_packets, nb::arg("fd"),
             "Have `poll` leave the socket alone. Not while it runs.")
        .def("set_tls", &Front::set_tls, nb::arg("tls"),
             "Begin connections with these certificates from now on. Any thread.")
        .def("set_models", &Front::set_models, nb::arg("models"),
             nb::sig("def set_models(self, models: list[tuple[str, str, PlainModel]]) -> None"),
             "Stage plain requests of these models from now on: name, version, what it takes.\n"
             "The default version is given once more with an empty one. Any thread.")
        .def("answer", &Front::answer, nb::arg("handle"), nb::arg("message"),
             "Answer a call with a serialized message. Any thread; nothing happens when the call\n"
             "has ended.")
        .def(
            "answer_staged", &Front::answer_staged, nb::arg("handle"), nb::arg("head"),
            nb::arg("request"), nb::arg("outputs"),
            nb::sig("def answer_staged(self, handle: int, head: bytes, request: PlainRequest, "
                    "outputs: list[tuple[int, int]]) -> None"),
            "Answer a call with the message `head`, and as its raw contents these places in the\n"
            "pool, offset and size of each, within that of the request's outputs. Its block stays\n"
            "until they are sent.")
        .def("fail", &Front::fail, nb::arg("handle"), nb::arg("code"), nb::arg("text"),
             nb::arg("retry_after_ms") = -1, "End a call with a status code of gRPC. Any thread.")
        .def("admit", &Front::admit, nb::arg("handle"),
             "Have a call go on that waits for it. Any thread.")
        .def("finish", &Front::finish, nb::arg("handle"), nb::arg("code"), nb::arg("text"),
             "Read no more of a stream, and end it with a status code of gRPC once its requests\n"
             "are answered. Any thread.")
        .def("forget_admitted", &Front::forget_admitted,
             "Have each kind of call wait for `admit` once more. Any thread.")
        .def("tell", &Front::tell, nb::arg("handle"), nb::arg("message"),
             "Send a message of a stream in place of an answer to one of its requests. Any thread.")
        .def("wake", &Front::wake, "Make `poll` return. Any thread.")
        .def("announce_end", &Front::announce_end,
             "Tell all clients to begin no more calls on their connections. Any thread.")
        .def("counts", &Front::counts, nb::sig("def counts(self) -> dict[str, int]"),
             "Return the counters of calls, refusals and connections, by name.")
        .def("close", &Front::close, "End all connections. No thread may poll.");
}

}  // namespace gnnserve::bindings
