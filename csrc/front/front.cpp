#include "front.hpp"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <iterator>
#include <new>
#include <stdexcept>
#include <string_view>

#include "peers.hpp"
#include "system_calls.hpp"

namespace gnnserve::front {
namespace {

constexpr std::size_t kReadBytes = 256 << 10;
// Of one connection before the others, and what was polled for, have their turn.
constexpr std::size_t kTurnBytes = 1 << 20;
constexpr std::int64_t kLookEvery_ns = 500'000'000;
// Calls that are refused at one look as their messages do not come; and the time to the next look
// when there may be more.
constexpr std::size_t kLateAtOnce = 1000;
constexpr std::int64_t kLookSoon_ns = 20'000'000;
// Who has read something within this time is no slow reader, until so many times the limit is
// unsent: a byte now and then is something.
constexpr std::int64_t kReads_ns = 1'000'000'000;
constexpr std::size_t kUnsentWhileReading = 2;
// Told at once by `poll`: of ends, and of calls.
constexpr std::size_t kMostEvents = 4;
// Sockets that are looked at before what came of them is told.
constexpr std::size_t kTurnSockets = 4;
// Largest packet of `watch_packets`, as of lanes.
constexpr std::size_t kPacketBytes = 128 << 10;
// Until memory is asked for again.
constexpr int kShortOfMemory_ms = 1;

}  // namespace

Front::Front(FrontOptions options)
    : options_(std::move(options)), buffer_(kReadBytes), tls_(options_.tls) {
    std::string why;
    api_ = h2_api(why);
    if (api_ == nullptr) {
        throw std::runtime_error(why);
    }
    try {
        epoll_ = checked(epoll_create1(EPOLL_CLOEXEC), "epoll_create1");
        wake_ = checked(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC), "eventfd");
        watch(wake_, nullptr, EPOLLIN, false);
        keep_spare();
        listen();
    } catch (...) {
        for (const int fd : listeners_) {
            close(fd);
        }
        for (const int fd : {epoll_, wake_, spare_}) {
            if (fd >= 0) {
                close(fd);
            }
        }
        throw;
    }
}

Front::~Front() {
    while (!clients_.empty()) {
        end(*clients_.front());
    }
    ended_clients_.clear();
    for (const int fd : listeners_) {
        close(fd);
    }
    for (const int fd : {epoll_, wake_, spare_}) {
        close(fd);
    }
}

// Null in the epoll set is the bell; what has a bit of kWatched is no socket. Of a handshake, which
// waits for its turn, it tells once that there is something.
void Front::watch(int fd, Socket* socket, std::uint32_t events, bool known) {
    epoll_event event{};
    const bool once = socket != nullptr && socket->connection->shakes_hands();
    event.events = EPOLLIN | events | (once ? static_cast<std::uint32_t>(EPOLLET) : 0u);
    event.data.ptr = socket;
    checked(epoll_ctl(epoll_, known ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, fd, &event), "epoll_ctl");
}

void Front::watch_as(Watched what, int fd) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = static_cast<std::uint64_t>(fd) << 2 | static_cast<std::uint64_t>(what);
    checked(epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event), "epoll_ctl");
}

void Front::watch_also(int fd) {
    if (other_ >= 0) {
        epoll_ctl(epoll_, EPOLL_CTL_DEL, other_, nullptr);
    }
    other_ = fd;
    if (fd >= 0) {
        watch_as(Watched::kOther, fd);
    }
}

void Front::watch_packets(int fd) {
    packet_buffer_.resize(kPacketBytes);
    watch_as(Watched::kPackets, fd);
}

void Front::unwatch_packets(int fd) { epoll_ctl(epoll_, EPOLL_CTL_DEL, fd, nullptr); }

// Reads one packet: what follows the end of a run waits for the next turn.
void Front::take_packet(int fd) {
    packets_.reserve(packets_.size() + 1);
    ssize_t size = 0;
    do {
        size = recv(fd, packet_buffer_.data(), packet_buffer_.size(), MSG_DONTWAIT);
    } while (size < 0 && errno == EINTR);
    if (size < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
        return;
    }
    std::string packet;
    try {
        packet.assign(packet_buffer_.data(), size > 0 ? static_cast<std::size_t>(size) : 0);
    } catch (const std::bad_alloc&) {
        // What cannot be told is told as the other end's end, of which everybody knows what to do.
    }
    packets_.emplace_back(fd, std::move(packet));
}

Polled Front::poll(std::int64_t until_ns) {
    poller_ = std::this_thread::get_id();
    for (bool looked = false;;) {
        try {
            if (auto found = turn(until_ns, looked)) {
                return std::move(*found);
            }
        } catch (const std::bad_alloc&) {
            // Nothing was lost that is not there the next time.
            ::poll(nullptr, 0, kShortOfMemory_ms);
        }
    }
}

// Does what there is to do, and waits for more. Returns what there is to tell.
std::optional<Polled> Front::turn(std::int64_t until_ns, bool& looked) {
    apply_replies();
    flush_touched();
    const bool waits = resume_some();
    shake_hands();
    flush_touched();
    const std::int64_t now_ns = Connection::now_ns();
    bool woken = false;
    {
        const std::lock_guard held(lock_);
        woken = woken_;
    }
    if (!ends_.empty() || !telling_.empty() || !packets_.empty() || other_ready_ || woken ||
        (until_ns >= 0 && now_ns >= until_ns)) {
        if (!looked) {
            // What was left of the last time must not hide the other descriptor.
            wait(0);
        }
        std::optional<Polled> found(std::in_place);
        found->events.reserve(2 * kMostEvents);
        tell_some(found->events);
        found->packets = std::exchange(packets_, {});
        found->other = std::exchange(other_ready_, false);
        const std::lock_guard held(lock_);
        woken_ = false;
        return found;
    }
    looked = true;
    std::int64_t wait_ns =
        clients_.empty() ? -1 : std::max<std::int64_t>(next_look_ns_ - now_ns, 0);
    if (until_ns >= 0 && (wait_ns < 0 || until_ns - now_ns < wait_ns)) {
        wait_ns = until_ns - now_ns;
    }
    if (const std::int64_t left_ns = until_handshake_ns();
        left_ns >= 0 && (wait_ns < 0 || left_ns < wait_ns)) {
        wait_ns = left_ns;
    }
    wait(waits || !resumable_.empty() ? 0 : wait_ns);
    return std::nullopt;
}

// Tells ends of calls, and then calls: one of each client in turn, so that whoever has the most
// does not keep the others waiting. Neither keeps the other waiting. `events` has room.
void Front::tell_some(std::vector<Event>& events) {
    const auto last =
        ends_.begin() + static_cast<std::ptrdiff_t>(std::min(ends_.size(), kMostEvents));
    std::move(ends_.begin(), last, std::back_inserter(events));
    ends_.erase(ends_.begin(), last);
    for (std::size_t i = 0; i < kMostEvents && !telling_.empty(); ++i) {
        events.push_back(telling_.front()->told_next());
    }
}

// Takes what the sockets have, after at most `wait_ns` (negative: for ever), and now and then ends
// what takes too long: in this order, as this process may have been stopped meanwhile.
void Front::wait(std::int64_t wait_ns) {
    std::array<epoll_event, kTurnSockets> ready;
    const std::int64_t wait_ms = wait_ns <= 0 ? wait_ns : wait_ns / 1'000'000 + 1;
    const int count =
        epoll_wait(epoll_, ready.data(), ready.size(),
                   wait_ms < 0 ? -1 : static_cast<int>(std::min<std::int64_t>(wait_ms, 1'000'000)));
    if (count < 0) {
        if (errno != EINTR) {
            fail_with("epoll_wait");
        }
        return;
    }
    for (int i = 0; i < count; ++i) {
        const epoll_event& event = ready[static_cast<std::size_t>(i)];
        if (event.data.ptr == nullptr) {
            eventfd_t rung = 0;
            eventfd_read(wake_, &rung);
            continue;
        }
        switch (static_cast<Watched>(event.data.u64 & kWatched)) {
            case Watched::kSocket:
                take(*static_cast<Socket*>(event.data.ptr), event.events);
                break;
            case Watched::kListener:
                accept_some();
                break;
            case Watched::kOther:
                other_ready_ = true;
                break;
            case Watched::kPackets:
                take_packet(static_cast<int>(event.data.u64 >> 2));
                break;
        }
    }
    if (const std::int64_t now_ns = Connection::now_ns(); now_ns >= next_look_ns_) {
        look(now_ns);
    }
}

void Front::flush() {
    apply_replies();
    flush_touched();
}

void Front::take(Socket& socket, std::uint32_t events) {
    if (socket.over) {
        return;
    }
    socket.touched();
    try {
        if (socket.connection->shakes_hands()) {
            wait_for_turn(static_cast<Client&>(socket), events);
            return;
        }
        if ((events & (EPOLLIN | EPOLLHUP | EPOLLERR)) &&
            !socket.connection->receive(buffer_.data(), buffer_.size(), kTurnBytes)) {
            end(socket);
        }
    } catch (const std::bad_alloc&) {
        short_of_memory(*socket.connection);
    }
}

void Front::flush_touched() {
    while (touched_ != nullptr) {
        Socket& socket = *std::exchange(touched_, touched_->next_touched);
        socket.is_touched = false;
        if (socket.over) {
            continue;
        }
        try {
            flush(socket);
        } catch (const std::bad_alloc&) {
            counts_.connections += 1;
            end(socket);
        }
    }
    ended_clients_.clear();
    while (ended_backends_ != nullptr) {
        ended_backends_ = std::move(ended_backends_->ended_before);
    }
}

void Front::flush(Socket& socket) {
    Connection& connection = *socket.connection;
    if (!connection.flush()) {
        end(socket);
        return;
    }
    if (!connection.yields()) {
        connection.keep_lent();
    }
    if (const bool waits = connection.yields() || connection.blocked();
        waits != socket.wants_room) {
        socket.wants_room = waits;
        watch(connection.fd(), &socket, waits ? static_cast<std::uint32_t>(EPOLLOUT) : 0u, true);
    }
}

// Ends a connection for which there is no memory, but not at once, as its caller may use it.
void Front::short_of_memory(Connection& connection) noexcept {
    counts_.connections += 1;
    connection.abandon();
}

// Closes the connection; the socket itself lives to the end of this turn, as others may name it.
void Front::end(Socket& socket) noexcept {
    socket.over = true;
    epoll_ctl(epoll_, EPOLL_CTL_DEL, socket.connection->fd(), nullptr);
    if (auto* client = dynamic_cast<Client*>(&socket)) {
        ended_clients_.splice(ended_clients_.end(), clients_, client->place);
        lose_turn(*client);
        leave(client->peer);
        counts_.open_connections -= 1;
        client->connection.reset();
        if (client->backend != nullptr) {
            end(*client->backend);
        }
    } else {
        auto& backend = static_cast<Backend&>(socket);
        socket.connection.reset();
        backend.ended_before = std::move(ended_backends_);
        ended_backends_ = std::move(backend.client.backend);
    }
}

// Ends what takes too long: messages that do not come, clients that do not read. Of the former only
// so many that others need not wait for that.
void Front::look(std::int64_t now_ns) {
    std::size_t left = kLateAtOnce;
    for (const auto& client : clients_) {
        client->refuse_late(now_ns, left);
    }
    end_those_in_the_way(now_ns);
    end_late_streams(now_ns);
    end_slow_handshakes(now_ns);
    end_slow_readers(now_ns);
    next_look_ns_ = now_ns + (left > 0 ? kLookEvery_ns : kLookSoon_ns);
}

void Front::end_slow_readers(std::int64_t now_ns) {
    struct Slow {
        std::int64_t since_ns;
        Client* client;
        Stream* stream;  // null: the whole connection
        std::size_t bytes;
    };
    std::vector<Slow> slow;
    std::size_t unsent_bytes = 0;
    const auto count = [&](const Slow& one) {
        unsent_bytes += one.bytes;
        one.client->unsent_bytes += one.bytes;
        slow.push_back(one);
    };
    for (const auto& client : clients_) {
        client->unsent_bytes = 0;
        const Connection& connection = *client->connection;
        if (connection.blocked()) {
            count({connection.progress_ns(), client.get(), nullptr, connection.blocked_bytes()});
        }
        for (const auto& [id, stream] : connection.open_streams()) {
            const bool answers =
                stream->finished() || dynamic_cast<StreamCall*>(stream->role.get()) != nullptr;
            if (answers && stream->waiting_bytes() > 0) {
                count({stream->progress_ns(), client.get(), stream.get(), stream->waiting_bytes()});
            }
        }
    }
    std::sort(slow.begin(), slow.end(),
              [](const Slow& a, const Slow& b) { return a.since_ns < b.since_ns; });
    for (const Slow& one : slow) {
        // A stream that is open may wait until its place is needed.
        const bool timed = one.stream == nullptr || one.stream->finished();
        const std::int64_t waited_ns = now_ns - one.since_ns;
        // Of all or its connection, so many times what may be unsent is.
        const auto over = [&](std::size_t times) {
            return unsent_bytes / times > options_.max_receiving_bytes ||
                   one.client->unsent_bytes / times > one.client->max_bytes;
        };
        const bool ends = (timed && waited_ns >= options_.send_timeout_ns) ||
                          (waited_ns >= kReads_ns && over(1)) || over(kUnsentWhileReading);
        if (!ends || one.client->over) {
            continue;
        }
        counts_.slow_reader += 1;
        unsent_bytes -= one.bytes;
        one.client->unsent_bytes -= one.bytes;
        if (one.stream == nullptr) {
            end(*one.client);
        } else {
            one.stream->discard();
            one.client->connection->reset(*one.stream, kEnhanceYourCalm);
        }
    }
}

namespace {

// What is to be left when more than that is held: calls lose some more than needed, as all of a
// client are looked at each time.
std::size_t enough(std::size_t most) { return most - most / 32; }

std::string too_much(std::size_t bytes, std::string_view what, std::size_t most) {
    return "message: " + std::to_string(bytes) + " bytes of " + std::string(what) +
           " are being received, at most " + std::to_string(most) + " may be";
}

}  // namespace

void Front::Client::bound_receiving() {
    if (held_bytes > max_bytes) {
        refuse_largest(held_bytes - enough(max_bytes),
                       too_much(held_bytes, "this connection's messages", max_bytes));
    }
    front.bound_receiving();
}

// Has clients lose calls, the ones with the most bytes first, when more than allowed are held.
void Front::bound_receiving() {
    if (receiving_bytes_ <= options_.max_receiving_bytes) {
        return;
    }
    const std::size_t most_bytes = options_.max_receiving_bytes, left = enough(most_bytes);
    while (receiving_bytes_ > left) {
        const auto most = std::max_element(
            clients_.begin(), clients_.end(),
            [](const auto& a, const auto& b) { return a->held_bytes < b->held_bytes; });
        if (most == clients_.end() ||
            !(*most)->refuse_largest(receiving_bytes_ - left,
                                     too_much(receiving_bytes_, "messages", most_bytes))) {
            return;
        }
    }
}

// Ends a call with an error, before or instead of an answer.
void Front::reply(Stream& stream, const GrpcStatus& status) noexcept {
    try {
        if (stream.begun) {
            stream.finish(trailers_of(status));
        } else {
            stream.finish({});
            stream.connection().respond(stream, error_headers(status), false);
        }
    } catch (const std::bad_alloc&) {
        short_of_memory(stream.connection());
    }
}

void Front::apply_replies() {
    std::vector<Reply> replies;
    bool ends = false;
    {
        const std::lock_guard held(lock_);
        replies.swap(replies_);
        ends = std::exchange(announces_end_, false);
    }
    for (Reply& one : replies) {
        const auto at = calls_.find(one.handle);
        if (at == calls_.end() || at->second->finished()) {
            continue;
        }
        Connection& connection = at->second->connection();
        try {
            apply(*at->second, std::move(one));
        } catch (const std::bad_alloc&) {
            short_of_memory(connection);
        }
    }
    if (ends) {
        for (const auto& client : clients_) {
            client->connection->announce_end();
        }
    }
}

void Front::apply(Stream& stream, Reply reply) {
    if (auto* asked = dynamic_cast<Unadmitted*>(stream.role.get())) {
        asked->client.decided(stream, std::move(reply));
        return;
    }
    if (auto* streaming = dynamic_cast<StreamCall*>(stream.role.get())) {
        streaming->client.answer(stream, *streaming, std::move(reply));
        return;
    }
    if (reply.way == Reply::Way::kFailure) {
        this->reply(stream, reply.status);
    } else if (reply.way == Reply::Way::kAnswer) {
        stream.connection().respond(stream, response_headers(), true);
        stream.write(Piece::of(message_head(reply.size())));
        reply.write_to(stream);
        stream.finish({{"grpc-status", "0"}});
    }
}

void Front::set_models(std::shared_ptr<const PlainModels> models) {
    const std::lock_guard held(lock_);
    models_ = std::move(models);
}

void Front::set_tls(std::shared_ptr<const TlsContext> tls) {
    const std::lock_guard held(lock_);
    tls_ = std::move(tls);
}

std::size_t Front::Reply::size() const {
    std::size_t found = 0;
    for (const Piece& piece : message) {
        found += piece.size;
    }
    return found;
}

void Front::Reply::write_to(Stream& stream) {
    for (Piece& piece : message) {
        stream.write(std::move(piece));
    }
}

void Front::answer(std::uint64_t handle, std::vector<Piece> message) {
    put({handle, Reply::Way::kAnswer, std::move(message), {}});
}

void Front::fail(std::uint64_t handle, GrpcStatus status) {
    put({handle, Reply::Way::kFailure, {}, std::move(status)});
}

void Front::tell(std::uint64_t handle, Piece message) {
    put({handle, Reply::Way::kMessage, {std::move(message)}, {}});
}

void Front::admit(std::uint64_t handle) { put({handle, Reply::Way::kAdmit, {}, {}}); }

void Front::finish(std::uint64_t handle, GrpcStatus status) {
    put({handle, Reply::Way::kFinish, {}, std::move(status)});
}

void Front::forget_admitted() { admissions_ += 1; }

void Front::put(Reply reply) {
    {
        const std::lock_guard held(lock_);
        replies_.push_back(std::move(reply));
    }
    ring();
}

// The thread that polls sees by itself what it left.
void Front::ring() {
    if (poller_.load() != std::this_thread::get_id()) {
        eventfd_write(wake_, 1);
    }
}

void Front::wake() {
    {
        const std::lock_guard held(lock_);
        woken_ = true;
    }
    ring();
}

void Front::announce_end() {
    {
        const std::lock_guard held(lock_);
        announces_end_ = true;
    }
    ring();
}

}  // namespace gnnserve::front
