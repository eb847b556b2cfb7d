#include "peers.hpp"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <exception>
#include <functional>
#include <system_error>

namespace gnnserve::front {
namespace {

// Connects to a Unix socket: of a path, or an abstract one.
int connect_unix(const std::string& name) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    const std::size_t at = name.starts_with('/') ? 0 : 1;
    if (at + name.size() > sizeof address.sun_path) {
        throw std::system_error(ENAMETOOLONG, std::generic_category(), name);
    }
    std::memcpy(address.sun_path + at, name.data(), name.size());
    const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + at + name.size());
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    const bool few_left = fd >= 0 && is_one_of_the_last(fd);
    if (fd < 0 || few_left || connect(fd, reinterpret_cast<const sockaddr*>(&address), size) != 0) {
        const int error = few_left ? EMFILE : errno;
        if (fd >= 0) {
            close(fd);
        }
        throw std::system_error(error, std::generic_category(), name);
    }
    return fd;
}

// Notices a peer that is gone without a word: after a minute of silence, four questions.
void keep_alive(int fd) {
    const auto set = [fd](int level, int name, int value) {
        setsockopt(fd, level, name, &value, sizeof value);
    };
    set(IPPROTO_TCP, TCP_NODELAY, 1);
    set(SOL_SOCKET, SO_KEEPALIVE, 1);
    set(IPPROTO_TCP, TCP_KEEPIDLE, 60);
    set(IPPROTO_TCP, TCP_KEEPINTVL, 5);
    set(IPPROTO_TCP, TCP_KEEPCNT, 4);
}

}  // namespace

void Front::Socket::touched() noexcept {
    if (!is_touched && connection != nullptr) {
        is_touched = true;
        next_touched = front.touched_;
        front.touched_ = this;
    }
}

// Bytes forwarded make room for as many from where they came.
void Front::Socket::sent(Stream& stream, std::size_t bytes) {
    const auto* forwarded = dynamic_cast<Forwarded*>(stream.role.get());
    if (forwarded != nullptr && forwarded->other != nullptr) {
        Stream& from = *forwarded->other;
        static_cast<Forwarded&>(*from.role).wait_for(-static_cast<std::ptrdiff_t>(bytes));
        from.connection().consumed(from, bytes);
    }
}

Front::Held::Held(Client& client, std::size_t bytes) : client(client) { hold(bytes); }

Front::Held::~Held() { hold(0); }

void Front::Held::hold(std::size_t now) {
    client.held_bytes += now - bytes;
    client.front.receiving_bytes_ += now - bytes;
    bytes = now;
}

void Front::Forwarded::wait_for(std::ptrdiff_t more) {
    waiting_bytes += static_cast<std::size_t>(more);
    hold(kCallBytes + waiting_bytes);
}

void Front::Forwarded::part(Stream& own) {
    other = nullptr;
    own.connection().consumed(own, std::exchange(waiting_bytes, 0));
    hold(0);
}

Front::Client::Client(Front& front, int fd, const TlsContext* tls, bool inside)
    : Socket(front),
      inside(inside),
      max_bytes(inside ? SIZE_MAX : front.options_.max_receiving_bytes_of_connection) {
    keep_alive(fd);
    ConnectionLimits limits;
    limits.streams = front.options_.max_streams;
    // The gateway resets the calls of all HTTP clients that hang up.
    limits.bounds_resets = !inside;
    connection =
        std::make_unique<Connection>(*front.api_, fd, Connection::Side::kServer, limits, *this,
                                     tls == nullptr ? nullptr : std::make_unique<TlsSession>(*tls));
}

Front::Client::~Client() {
    if (!untold_.empty()) {
        front.telling_.erase(turn_);
    }
}

// Tells of the certificate that the client showed, after whatever it says itself.
void Front::Client::add_certificate(Headers& headers) {
    const std::string names = connection->certificate_names();
    if (!names.empty() && front.options_.certified.size() == 2) {
        headers.push_back(front.options_.certified[0]);
        headers.emplace_back(front.options_.certified[1].first, names);
    }
}

void Front::Client::headers(Stream& stream, bool first) {
    if (!first) {
        return;  // trailers of a request mean nothing in gRPC
    }
    add_certificate(stream.received);
    CallHead head = read_head(stream.received);
    if (!head.grpc) {
        refuse_media_type(stream);
    } else if (front.options_.asks && !is_admitted(head)) {
        ask(stream, head);
    } else {
        begin(stream, std::move(head), stream.received, !stream.peer_ended, front.next_handle_++,
              Connection::now_ns());
    }
}

// Serves a call whose caller may make it.
void Front::Client::begin(Stream& stream, CallHead head, const Headers& headers, bool has_body,
                          std::uint64_t handle, std::int64_t began_ns) {
    const FrontOptions& options = front.options_;
    if (head.plain && head.path == options.stream_method) {
        begin_stream(stream, head, handle, began_ns);
    } else if (head.plain && head.path == options.method) {
        begin_unary(stream, std::move(head), handle, began_ns);
    } else {
        forward(stream, headers, has_body);
    }
}

void Front::Client::begin_unary(Stream& stream, CallHead head, std::uint64_t handle,
                                std::int64_t began_ns) {
    auto call = std::make_unique<Call>(*this, handle);
    call->began_ns = call->since_ns = began_ns;
    call->timeout_ns = head.timeout_ns.value_or(-1);
    call->credentials = std::move(head.credentials);
    call->trace_parent = std::move(head.trace_parent);
    stream.role = std::move(call);
    front.counts_.open_calls += 1;
    front.expect_end();
    front.calls_.emplace(handle, &stream);
    awaited_.emplace(stream.id(), &stream);
    bound_receiving();
}

void Front::Client::data(Stream& stream, std::string_view bytes) {
    if (auto* forwarded = dynamic_cast<Forwarded*>(stream.role.get())) {
        if (forwarded->other != nullptr) {
            forwarded->wait_for(static_cast<std::ptrdiff_t>(bytes.size()));
            forwarded->other->write_copy(bytes);
            bound_receiving();
            return;
        }
    } else if (auto* asked = dynamic_cast<Unadmitted*>(stream.role.get());
               asked != nullptr && !asked->over) {
        asked->unread.append(bytes);
        asked->hold(Held::kCallBytes + asked->unread.size());
        bound_receiving();
        return;
    } else if (auto* call = dynamic_cast<Receiving*>(stream.role.get())) {
        // Its own window opens as bytes are taken.
        connection->consumed(bytes.size());
        receive(stream, *call, bytes);
        return;
    }
    connection->consumed(stream, bytes.size());
}

void Front::Client::ended(Stream& stream) {
    if (auto* forwarded = dynamic_cast<Forwarded*>(stream.role.get())) {
        if (forwarded->other != nullptr) {
            forwarded->other->finish({});
        }
        return;
    }
    if (auto* streaming = dynamic_cast<StreamCall*>(stream.role.get())) {
        end_stream(stream, *streaming);
        return;
    }
    auto* call = dynamic_cast<Call*>(stream.role.get());
    if (call == nullptr || call->over) {
        return;
    }
    if (!call->incoming || !call->incoming->complete()) {
        refuse(stream, GrpcCode::kUnimplemented,
               '"' + front.options_.method + "\" requires exactly one request message.",
               front.counts_.malformed);
        return;
    }
    hand_over(stream, *call);
}

void Front::Client::closed(Stream& stream, std::uint32_t error_code) {
    if (auto* forwarded = dynamic_cast<Forwarded*>(stream.role.get())) {
        stream.connection().consumed(forwarded->waiting_bytes);
        if (Stream* other = forwarded->other) {
            static_cast<Forwarded&>(*other->role).part(*other);
            const bool whole = error_code == kNoError && other->peer_ended && other->finished();
            if (!whole) {
                other->connection().reset(*other, kCancel);
            }
        }
    } else if (auto* asked = dynamic_cast<Unadmitted*>(stream.role.get())) {
        stream.connection().consumed(asked->unread.size());
        leave(stream, *asked);
    } else if (auto* call = dynamic_cast<Receiving*>(stream.role.get())) {
        awaited_.erase(stream.id());
        front.stop_waiting(*call);
        front.counts_.open_calls -= 1;
        if (auto* streaming = dynamic_cast<StreamCall*>(call)) {
            closed_stream(*streaming);
        } else if (static_cast<Call*>(call)->handed) {
            end_call(call->handle);
        } else {
            front.calls_.erase(call->handle);
            front.counts_.unread += call->over ? 0 : 1;
        }
    }
}

void Front::Client::reset_flood() { front.counts_.resets += 1; }

void Front::Client::control_flood() { front.counts_.control_frames += 1; }

void Front::Client::headers_too_large() { front.counts_.header_size += 1; }

bool Front::Client::refuse_largest(std::size_t bytes, const std::string& text) {
    std::vector<std::pair<std::size_t, std::int32_t>> calls;
    for (const auto& [id, stream] : connection->open_streams()) {
        std::size_t its = 0;
        if (const auto* held = dynamic_cast<Held*>(stream->role.get())) {
            its = held->bytes;
        }
        if (const auto* forwarded = dynamic_cast<Forwarded*>(stream->role.get());
            forwarded != nullptr && forwarded->other != nullptr) {
            its += static_cast<Held&>(*forwarded->other->role).bytes;
        }
        if (its > 0) {
            calls.emplace_back(its, id);
        }
    }
    std::sort(calls.begin(), calls.end(), std::greater<>());
    std::size_t refused = 0;
    for (auto one = calls.begin(); one != calls.end() && refused < bytes; ++one) {
        // Ending one may end another.
        const auto at = connection->open_streams().find(one->second);
        if (at != connection->open_streams().end()) {
            refuse_for_others(*at->second, text);
        }
        refused += one->first;
    }
    return refused > 0;
}

// Refuses a call as more bytes are held than allowed.
void Front::Client::refuse_for_others(Stream& stream, const std::string& text) {
    if (auto* forwarded = dynamic_cast<Forwarded*>(stream.role.get())) {
        front.counts_.receiving_bytes += 1;
        give_up(stream, *forwarded);
        return;
    }
    if (auto* asked = dynamic_cast<Unadmitted*>(stream.role.get())) {
        front.counts_.receiving_bytes += 1;
        refuse(stream, *asked, {static_cast<int>(GrpcCode::kResourceExhausted), text});
        return;
    }
    refuse(stream, GrpcCode::kResourceExhausted, text, front.counts_.receiving_bytes);
}

// Ends a call that is forwarded, on both sides, without what waits to be sent.
void Front::Client::give_up(Stream& stream, Forwarded& role) {
    if (Stream* other = role.other) {
        static_cast<Forwarded&>(*other->role).part(*other);
        other->discard();
        other->connection().reset(*other, kCancel);
    }
    role.part(stream);
    stream.discard();
    connection->reset(stream, kEnhanceYourCalm);
}

// Connects to the server behind, if need be with the descriptor of an idle client.
void Front::Client::connect_backend() {
    try {
        backend = std::make_unique<Backend>(front, *this);
    } catch (const std::system_error& error) {
        if (error.code().value() != EMFILE || !front.make_room(nullptr)) {
            throw;
        }
        front.counts_.connections += 1;
        backend = std::make_unique<Backend>(front, *this);
    }
}

// Has the server behind serve the call.
void Front::Client::forward(Stream& stream, const Headers& headers, bool has_body) {
    front.counts_.forwarded += 1;
    Stream* other = nullptr;
    try {
        if (backend == nullptr) {
            connect_backend();
        }
        other = backend->connection->request(headers, has_body);
    } catch (const std::exception&) {
        // Told below.
    }
    if (other == nullptr) {
        front.reply(stream, {static_cast<int>(GrpcCode::kUnavailable),
                             "the server cannot take this call now; try again later"});
        return;
    }
    stream.role = std::make_unique<Forwarded>(*this, other);
    other->role = std::make_unique<Forwarded>(*this, &stream);
    bound_receiving();
}

// As the protocol over HTTP/2 asks.
void Front::Client::refuse_media_type(Stream& stream) {
    front.counts_.media_type += 1;
    connection->respond(stream, {{":status", "415"}, {"content-type", "text/plain"}}, true);
    stream.write(Piece::of("content-type: this port takes application/grpc alone\n"));
    stream.finish({});
}

Front::Backend::Backend(Front& front, Client& client) : Socket(front), client(client) {
    const int fd = connect_unix(front.options_.backend);
    ConnectionLimits limits;
    limits.header_bytes = 64 << 10;
    try {
        connection =
            std::make_unique<Connection>(*front.api_, fd, Connection::Side::kClient, limits, *this);
    } catch (...) {
        close(fd);
        throw;
    }
    front.watch(fd, this, 0, false);
}

void Front::Backend::headers(Stream& stream, bool first) {
    Stream* other = static_cast<Forwarded&>(*stream.role).other;
    if (other == nullptr) {
        return;
    }
    if (first) {
        other->connection().respond(*other, stream.received, !stream.peer_ended);
    } else {
        other->finish(stream.received);
    }
}

void Front::Backend::data(Stream& stream, std::string_view bytes) {
    auto& role = static_cast<Forwarded&>(*stream.role);
    if (role.other != nullptr) {
        role.wait_for(static_cast<std::ptrdiff_t>(bytes.size()));
        role.other->write_copy(bytes);
        client.bound_receiving();
    } else {
        connection->consumed(stream, bytes.size());
    }
}

void Front::Backend::ended(Stream& stream) {
    Stream* other = static_cast<Forwarded&>(*stream.role).other;
    if (other != nullptr && !other->finished()) {
        other->finish({});
    }
}

void Front::Backend::closed(Stream& stream, std::uint32_t error_code) {
    auto& role = static_cast<Forwarded&>(*stream.role);
    stream.connection().consumed(role.waiting_bytes);
    Stream* other = role.other;
    if (other == nullptr) {
        return;
    }
    static_cast<Forwarded&>(*other->role).part(*other);
    if (error_code == kNoError && stream.peer_ended) {
        return;  // what is left of the answer goes out by itself
    }
    if (other->begun) {
        other->connection().reset(*other, error_code == kNoError ? kInternalError : error_code);
    } else {
        front.reply(*other, {static_cast<int>(GrpcCode::kUnavailable),
                             "the call was not answered; try again"});
    }
}

}  // namespace gnnserve::front
