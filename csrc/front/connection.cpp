#include "connection.hpp"

#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <stdexcept>

namespace gnnserve::front {
namespace {

// Pieces of one `sendmsg`, and bytes of frames other than bodies; frames beyond wait in the
// session, which ends the connection when a thousand of them are answers to pings and settings.
constexpr std::size_t kMostPieces = 64;
constexpr std::size_t kMostSmallBytes = 64 << 10;
// Most bytes of a TLS record, and encrypted bytes that wait for the socket.
constexpr std::size_t kRecordBytes = 16 << 10;
constexpr std::size_t kMostEncryptedBytes = 256 << 10;
// Copies of less than this share memory.
constexpr std::size_t kSharedCopyBytes = 16 << 10;
// Largest frame of a body: others' frames go between two of them.
constexpr std::int64_t kFrameBytes = 1 << 20;
// Streams a peer may reset at once, and more for each second: libnghttp2's own defaults, which
// releases before 1.57 lack.
constexpr double kResetBurst = 1000, kResetsPerSecond = 33;
// Frames that belong to no call: at once, more for each second, and more for each frame of a call.
// Clients that estimate their bandwidth send a ping for some of the frames that they receive.
constexpr double kControlBurst = 1000, kControlPerSecond = 33, kControlPerFrame = 1;

const std::uint8_t* bytes(const std::string& text) {
    return reinterpret_cast<const std::uint8_t*>(text.data());
}

std::vector<H2Field> fields(const Headers& headers) {
    std::vector<H2Field> found;
    found.reserve(headers.size());
    for (const auto& [name, value] : headers) {
        found.push_back({bytes(name), bytes(value), name.size(), value.size(), 0});
    }
    return found;
}

void check(int code, const char* what) {
    if (code != 0) {
        throw std::runtime_error(std::string("nghttp2_") + what +
                                 " failed: " + std::to_string(code));
    }
}

}  // namespace

Piece Piece::of(std::string text) {
    auto owner = std::make_shared<const std::string>(std::move(text));
    return {owner->data(), owner->size(), owner};
}

void Stream::write(Piece piece) {
    if (piece.size == 0) {
        return;
    }
    if (body_bytes_ == 0) {
        progress_ns_ = Connection::now_ns();
    }
    body_bytes_ += piece.size;
    if (piece.lent) {
        connection_.lending_.push_back(id_);
    }
    body_.push_back(std::move(piece));
    connection_.resume(*this);
}

void Stream::write_copy(std::string_view bytes) {
    const bool joins = copies_ != nullptr && !body_.empty() && body_.back().owner == copies_ &&
                       copies_->size() + bytes.size() <= copies_->capacity();
    if (joins) {
        copies_->append(bytes);
        body_.back().size += bytes.size();
        body_bytes_ += bytes.size();
        connection_.resume(*this);
        return;
    }
    auto text = std::make_shared<std::string>();
    text->reserve(body_.empty() ? bytes.size() : std::max(bytes.size(), kSharedCopyBytes));
    text->append(bytes);
    copies_ = text;
    write({text->data(), text->size(), text});
}

void Stream::finish(Headers trailers) {
    finished_ = true;
    trailers_ = std::move(trailers);
    connection_.resume(*this);
}

void Stream::discard() {
    body_.clear();
    body_bytes_ = 0;
}

// The library's callbacks; `user` is the connection.
struct Connection::Hooks {
    // The peer broke a rule that holds for one stream, and the library reset it.
    static bool is_violation(std::uint32_t error_code) {
        return error_code == kProtocolError || error_code == kFlowControlError ||
               error_code == kStreamClosed || error_code == kFrameSizeError;
    }

    static Connection& self(void* user) { return *static_cast<Connection*>(user); }

    static ssize_t send(H2Session*, const std::uint8_t* data, std::size_t size, int, void* user) {
        Connection& c = self(user);
        if (c.full()) {
            return kWouldBlock;
        }
        c.append_small(data, size);
        return static_cast<ssize_t>(size);
    }

    static int send_data(H2Session*, H2Frame* frame, const std::uint8_t* head, std::size_t size,
                         H2Source*, void* user) {
        Connection& c = self(user);
        if (c.full()) {
            return kWouldBlock;
        }
        Stream* stream = c.find(frame->head.stream_id);
        if (stream == nullptr) {
            return kStreamFails;
        }
        c.send_body(*stream, head, size);
        return 0;
    }

    static ssize_t read(H2Session*, std::int32_t id, std::uint8_t*, std::size_t length,
                        std::uint32_t* flags, H2Source*, void* user) {
        Stream* stream = self(user).find(id);
        return stream ? self(user).read_body(*stream, length, *flags) : kStreamFails;
    }

    static ssize_t length(H2Session*, std::uint8_t, std::int32_t, std::int32_t session_window,
                          std::int32_t stream_window, std::uint32_t max_frame_bytes, void*) {
        return static_cast<ssize_t>(
            std::min<std::int64_t>({session_window, stream_window, max_frame_bytes, kFrameBytes}));
    }

    static int begin_headers(H2Session*, const H2Frame* frame, void* user) {
        Connection& c = self(user);
        const std::int32_t id = frame->head.stream_id;
        if (c.side_ == Side::kServer && frame->head.type == kHeadersFrame &&
            frame->headers.category == kRequestHeaders) {
            c.streams_.emplace(id, std::make_unique<Stream>(c, id));
        }
        if (Stream* stream = c.find(id)) {
            stream->received.clear();
            stream->received_header_bytes = 0;
        }
        return 0;
    }

    static int header(H2Session*, const H2Frame* frame, const std::uint8_t* name,
                      std::size_t name_size, const std::uint8_t* value, std::size_t value_size,
                      std::uint8_t, void* user) {
        Connection& c = self(user);
        Stream* stream = c.find(frame->head.stream_id);
        if (stream == nullptr) {
            return 0;
        }
        // 32 bytes for each, as RFC 9113 section 6.5.2 counts.
        stream->received_header_bytes += name_size + value_size + 32;
        if (stream->received_header_bytes > c.limits_.header_bytes) {
            c.events_.headers_too_large();
            return kStreamFails;
        }
        stream->received.emplace_back(
            std::string(reinterpret_cast<const char*>(name), name_size),
            std::string(reinterpret_cast<const char*>(value), value_size));
        return 0;
    }

    static int data_chunk(H2Session*, std::uint8_t, std::int32_t id, const std::uint8_t* data,
                          std::size_t size, void* user) {
        Connection& c = self(user);
        if (Stream* stream = c.find(id)) {
            c.events_.data(*stream, {reinterpret_cast<const char*>(data), size});
        } else {
            c.api_.session_consume_connection(c.session_, size);
        }
        return 0;
    }

    static int frame_received(H2Session*, const H2Frame* frame, void* user) {
        Connection& c = self(user);
        const bool ends = frame->head.flags & kEndStream;
        switch (frame->head.type) {
            case kResetFrame:
                c.count(c.resets_, &ConnectionEvents::reset_flood);
                return 0;
            case kWindowFrame:
                return 0;
            case kGoAwayFrame:
                c.events_.going_away();
                return 0;
            case kHeadersFrame:
                c.control_.earn(kControlPerFrame);
                break;
            case kDataFrame:
                if (frame->head.length > 0 || ends) {
                    c.control_.earn(kControlPerFrame);
                    break;
                }
                [[fallthrough]];
            default:
                c.count(c.control_, &ConnectionEvents::control_flood);
                return 0;
        }
        Stream* stream = c.find(frame->head.stream_id);
        if (stream == nullptr) {
            return 0;
        }
        if (ends) {
            stream->peer_ended = true;
        }
        if (frame->head.type == kHeadersFrame) {
            c.events_.headers(*stream, !std::exchange(stream->has_headers_, true));
            stream->received = {};
        }
        if (ends && (stream = c.find(frame->head.stream_id))) {
            c.events_.ended(*stream);
        }
        return 0;
    }

    static int frame_sent(H2Session*, const H2Frame* frame, void* user) {
        Connection& c = self(user);
        if (frame->head.type != kHeadersFrame && frame->head.type != kDataFrame) {
            return 0;
        }
        c.control_.earn(kControlPerFrame);
        if (c.side_ == Side::kServer && (frame->head.flags & kEndStream)) {
            // Answered before the request was complete: the rest of it is not wanted.
            Stream* stream = c.find(frame->head.stream_id);
            if (stream != nullptr && !stream->peer_ended) {
                c.reset(*stream, kNoError);
            }
        }
        return 0;
    }

    static int stream_closed(H2Session*, std::int32_t id, std::uint32_t error_code, void* user) {
        Connection& c = self(user);
        const auto at = c.streams_.find(id);
        if (at != c.streams_.end()) {
            const std::unique_ptr<Stream> stream = std::move(at->second);
            c.streams_.erase(at);
            c.events_.closed(*stream, error_code);
            if (is_violation(error_code)) {
                c.count(c.resets_, &ConnectionEvents::reset_flood);
            }
        }
        return 0;
    }
};

H2Callbacks* Connection::callbacks(const H2Api& api) {
    static H2Callbacks* const made = [&api] {
        H2Callbacks* one = nullptr;
        check(api.session_callbacks_new(&one), "session_callbacks_new");
        api.session_callbacks_set_send_callback(one, Hooks::send);
        api.session_callbacks_set_send_data_callback(one, Hooks::send_data);
        api.session_callbacks_set_data_source_read_length_callback(one, Hooks::length);
        api.session_callbacks_set_on_begin_headers_callback(one, Hooks::begin_headers);
        api.session_callbacks_set_on_header_callback(one, Hooks::header);
        api.session_callbacks_set_on_data_chunk_recv_callback(one, Hooks::data_chunk);
        api.session_callbacks_set_on_frame_recv_callback(one, Hooks::frame_received);
        api.session_callbacks_set_on_frame_send_callback(one, Hooks::frame_sent);
        api.session_callbacks_set_on_stream_close_callback(one, Hooks::stream_closed);
        return one;
    }();
    return made;
}

H2Option* Connection::option(const H2Api& api) {
    static H2Option* const made = [&api] {
        H2Option* one = nullptr;
        check(api.option_new(&one), "option_new");
        // Windows open as bytes are dealt with: that is the back-pressure.
        api.option_set_no_auto_window_update(one, 1);
        return one;
    }();
    return made;
}

Connection::Connection(const H2Api& api, int fd, Side side, const ConnectionLimits& limits,
                       ConnectionEvents& events, std::unique_ptr<TlsSession> tls)
    : api_(api),
      tls_(std::move(tls)),
      fd_(fd),
      side_(side),
      limits_(limits),
      events_(events),
      progress_ns_(now_ns()),
      resets_(kResetBurst, kResetsPerSecond),
      control_(kControlBurst, kControlPerSecond) {
    const auto make = side == Side::kServer ? api_.session_server_new2 : api_.session_client_new2;
    check(make(&session_, callbacks(api), this, option(api)), "session_new");
    const std::array<H2Setting, 4> settings{{
        {kMaxConcurrentStreams, limits.streams},
        {kInitialWindowSize, limits.stream_window_bytes},
        {kMaxFrameSize, 1 << 20},
        {kMaxHeaderListSize, limits.header_bytes},
    }};
    // A client takes no streams: it leaves out their number.
    const std::size_t skipped = side == Side::kServer ? 0 : 1;
    check(api_.submit_settings(session_, 0, settings.data() + skipped, settings.size() - skipped),
          "submit_settings");
    check(api_.session_set_local_window_size(
              session_, 0, 0, static_cast<std::int32_t>(limits.connection_window_bytes)),
          "session_set_local_window_size");
}

Connection::~Connection() {
    api_.session_del(std::exchange(session_, nullptr));
    for (auto left = std::move(streams_); auto& [id, stream] : left) {
        events_.closed(*stream, kCancel);
    }
    close(fd_);
}

Stream* Connection::find(std::int32_t id) {
    const auto at = streams_.find(id);
    return at == streams_.end() ? nullptr : at->second.get();
}

bool Connection::receive(char* buffer, std::size_t size, std::size_t most) {
    for (std::size_t total = 0; total < most;) {
        const ssize_t got = recv(fd_, buffer, size, MSG_DONTWAIT);
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            return true;
        }
        if (got <= 0) {
            return false;
        }
        const auto count = static_cast<std::size_t>(got);
        if (!(tls_ == nullptr ? take(buffer, count) : decrypt(buffer, count))) {
            flush();  // what it has to say of it
            return false;
        }
        total += static_cast<std::size_t>(got);
        if (static_cast<std::size_t>(got) < size) {
            return true;
        }
    }
    return true;
}

bool Connection::take(const char* bytes, std::size_t size) {
    return api_.session_mem_recv(session_, reinterpret_cast<const std::uint8_t*>(bytes), size) >= 0;
}

bool Connection::decrypt(const char* bytes, std::size_t size) {
    tls_->put(bytes, size);
    std::array<char, kRecordBytes> plain;
    for (;;) {
        const ssize_t got = tls_->read(plain.data(), plain.size());
        if (got <= 0) {
            return got == 0;
        }
        if (!take(plain.data(), static_cast<std::size_t>(got))) {
            return false;
        }
    }
}

bool Connection::flush() {
    if (tls_ != nullptr && !tls_->ready()) {
        tls_->collect(encrypted_);
        return send_encrypted();
    }
    for (;;) {
        if (api_.session_send(session_) != 0) {
            return false;
        }
        const bool more = full();
        if (!write_out()) {
            return false;
        }
        if (blocked()) {
            return !flooded_;
        }
        progress_ns_ = now_ns();
        if (!more) {
            return api_.session_want_read(session_) || api_.session_want_write(session_);
        }
    }
}

void Connection::keep_lent() {
    if (lending_.empty()) {
        return;
    }
    const auto keep = [](Piece& piece) {
        if (piece.lent) {
            piece = Piece::of(std::string(piece.data, piece.size));
        }
    };
    for (std::size_t i = first_; i < pieces_.size(); ++i) {
        Out& out = pieces_[i];
        if (out.piece.lent) {
            out.piece.data += std::exchange(out.offset, 0);
            keep(out.piece);
        }
    }
    for (const std::int32_t id : std::exchange(lending_, {})) {
        if (Stream* stream = find(id)) {
            std::for_each(stream->body_.begin(), stream->body_.end(), keep);
        }
    }
}

Stream* Connection::request(const Headers& headers, bool has_body) {
    const auto list = fields(headers);
    const H2Provider provider{{}, Hooks::read};
    const std::int32_t id = api_.submit_request(session_, nullptr, list.data(), list.size(),
                                                has_body ? &provider : nullptr, nullptr);
    if (id < 0) {
        return nullptr;
    }
    const auto [at, _] = streams_.emplace(id, std::make_unique<Stream>(*this, id));
    at->second->begun = true;
    events_.touched();
    return at->second.get();
}

void Connection::respond(Stream& stream, const Headers& headers, bool has_body) {
    const auto list = fields(headers);
    const H2Provider provider{{}, Hooks::read};
    stream.begun = true;
    events_.touched();
    api_.submit_response(session_, stream.id(), list.data(), list.size(),
                         has_body ? &provider : nullptr);
}

void Connection::reset(Stream& stream, std::uint32_t error_code) {
    events_.touched();
    api_.submit_rst_stream(session_, 0, stream.id(), error_code);
}

void Connection::consumed(Stream& stream, std::size_t size) {
    events_.touched();
    api_.session_consume(session_, stream.id(), size);
}

void Connection::consumed(std::size_t size) {
    if (session_ != nullptr && size > 0) {
        events_.touched();
        api_.session_consume_connection(session_, size);
    }
}

void Connection::consumed_stream(Stream& stream, std::size_t size) {
    if (size > 0) {
        events_.touched();
        api_.session_consume_stream(session_, stream.id(), size);
    }
}

void Connection::announce_end() {
    api_.submit_shutdown_notice(session_);
    events_.touched();
}

std::int64_t Connection::now_ns() {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<std::int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

void Connection::append_small(const std::uint8_t* data, std::size_t size) {
    const bool joins = pieces_.size() > first_ && pieces_.back().piece.data == nullptr;
    if (joins) {
        pieces_.back().piece.size += size;
    } else {
        pieces_.push_back({{nullptr, size, nullptr, false}, small_.size()});
    }
    small_.append(reinterpret_cast<const char*>(data), size);
}

std::size_t Connection::blocked_bytes() const {
    std::size_t bytes = encrypted_.size();
    for (std::size_t i = first_; i < pieces_.size(); ++i) {
        bytes += pieces_[i].piece.size;
    }
    return bytes;
}

bool Connection::full() const {
    return pieces_.size() - first_ + 8 > kMostPieces || small_.size() > kMostSmallBytes;
}

// Makes `pieces_` and `small_` no longer than what waits, for a peer that never catches up.
void Connection::forget_sent() {
    if (first_ < kMostPieces) {
        return;
    }
    pieces_.erase(pieces_.begin(), pieces_.begin() + static_cast<std::ptrdiff_t>(first_));
    first_ = 0;
    const auto is_small = [](const Out& out) { return out.piece.data == nullptr; };
    const auto at = std::find_if(pieces_.begin(), pieces_.end(), is_small);
    const std::size_t gone = at == pieces_.end() ? small_.size() : at->offset;
    small_.erase(0, gone);
    for (Out& out : pieces_) {
        out.offset -= is_small(out) ? gone : 0;
    }
}

// Hands pieces to the socket; false when the connection is over.
bool Connection::write_out() {
    if (tls_ != nullptr) {
        return encrypt_out();
    }
    while (blocked()) {
        std::array<iovec, kMostPieces> list;
        std::size_t count = 0;
        for (std::size_t i = first_; i < pieces_.size() && count < list.size(); ++i, ++count) {
            const Out& out = pieces_[i];
            const char* base = out.piece.data ? out.piece.data : small_.data();
            list[count] = {const_cast<char*>(base + out.offset), out.piece.size};
        }
        msghdr message{};
        message.msg_iov = list.data();
        message.msg_iovlen = count;
        ssize_t written = sendmsg(fd_, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (written < 0) {
            if (errno == EINTR) {
                continue;
            }
            forget_sent();
            return errno == EAGAIN || errno == EWOULDBLOCK;
        }
        progress_ns_ = now_ns();
        this->written(static_cast<std::size_t>(written));
    }
    pieces_.clear();
    small_.clear();
    first_ = 0;
    return true;
}

// Goes past that many bytes of the pieces.
void Connection::written(std::size_t left) {
    while (left > 0) {
        Out& out = pieces_[first_];
        const std::size_t part = std::min(left, out.piece.size);
        out.offset += part;
        out.piece.size -= part;
        left -= part;
        if (out.piece.size == 0) {
            out.piece.owner.reset();
            ++first_;
        }
    }
}

// The same as `write_out`, encrypted: a record's bytes are put together, as each costs.
bool Connection::encrypt_out() {
    std::array<char, kRecordBytes> plain;
    tls_->collect(encrypted_);
    while (first_ < pieces_.size() && encrypted_.size() < kMostEncryptedBytes) {
        std::size_t size = 0;
        for (std::size_t i = first_; i < pieces_.size() && size < plain.size(); ++i) {
            const Out& out = pieces_[i];
            const char* base = out.piece.data ? out.piece.data : small_.data();
            const std::size_t part = std::min(out.piece.size, plain.size() - size);
            std::memcpy(plain.data() + size, base + out.offset, part);
            size += part;
        }
        if (!tls_->write(plain.data(), size)) {
            return false;
        }
        written(size);
        tls_->collect(encrypted_);
        const bool last = first_ == pieces_.size();
        if ((last || encrypted_.size() >= kMostEncryptedBytes) && !send_encrypted()) {
            return false;
        }
    }
    if (!send_encrypted()) {
        return false;
    }
    if (first_ < pieces_.size()) {
        forget_sent();
        return true;
    }
    pieces_.clear();
    small_.clear();
    first_ = 0;
    return true;
}

// Hands encrypted bytes to the socket; false when the connection is over.
bool Connection::send_encrypted() {
    std::size_t sent = 0;
    while (sent < encrypted_.size()) {
        const ssize_t count = send(fd_, encrypted_.data() + sent, encrypted_.size() - sent,
                                   MSG_NOSIGNAL | MSG_DONTWAIT);
        if (count < 0 && errno == EINTR) {
            continue;
        }
        if (count < 0) {
            encrypted_.erase(0, sent);
            return errno == EAGAIN || errno == EWOULDBLOCK;
        }
        progress_ns_ = now_ns();
        sent += static_cast<std::size_t>(count);
    }
    encrypted_.clear();
    return true;
}

void Connection::resume(Stream& stream) {
    events_.touched();
    if (stream.deferred_) {
        stream.deferred_ = false;
        api_.session_resume_data(session_, stream.id());
    }
}

// How much of the stream's body the next frame takes; the library asks.
ssize_t Connection::read_body(Stream& stream, std::size_t length, std::uint32_t& flags) {
    const std::size_t size = std::min(length, stream.body_bytes_);
    if (size == 0 && !stream.finished_) {
        stream.deferred_ = true;
        return kDeferred;
    }
    flags |= kNoCopy;
    if (stream.finished_ && size == stream.body_bytes_) {
        flags |= kDataEnds;
        if (!stream.trailers_.empty()) {
            flags |= kNoEndStream;
            const auto list = fields(stream.trailers_);
            api_.submit_trailer(session_, stream.id(), list.data(), list.size());
        }
    }
    return static_cast<ssize_t>(size);
}

// Queues a frame of the stream's body, of which `size` bytes were read just now.
void Connection::send_body(Stream& stream, const std::uint8_t* head, std::size_t size) {
    constexpr std::size_t kFrameHead = 9;
    append_small(head, kFrameHead);
    stream.body_bytes_ -= size;
    stream.progress_ns_ = now_ns();
    for (std::size_t left = size; left > 0;) {
        Piece& piece = stream.body_.front();
        const std::size_t part = std::min(left, piece.size);
        pieces_.push_back({{piece.data, part, piece.owner, piece.lent}, 0});
        piece.data += part;
        piece.size -= part;
        left -= part;
        if (piece.size == 0) {
            stream.body_.pop_front();
        }
    }
    events_.sent(stream, size);
}

// Takes a token for something that the peer did; ends the connection when there is none.
void Connection::count(Tokens& tokens, void (ConnectionEvents::*flood)()) {
    if (side_ == Side::kServer && session_ != nullptr && !flooded_ && !tokens.take(now_ns())) {
        flooded_ = true;
        (events_.*flood)();
        api_.session_terminate_session(session_, kEnhanceYourCalm);
        events_.touched();
    }
}

}  // namespace gnnserve::front
