#include "connection.hpp"

#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <mutex>
#include <new>
#include <stdexcept>
#include <tuple>

namespace gnnserve::front {
namespace {

// Copies of less than this share memory.
constexpr std::size_t kSharedCopyBytes = 16 << 10;
// Largest frame of a body: others' frames go between two of them.
constexpr std::int64_t kFrameBytes = 1 << 20;
// Streams a peer may reset at once, and more for each second: clients reset the calls whose time is
// over, and of a slow server that may be most.
constexpr std::uint64_t kResetBurst = 1000, kResetsPerSecond = 200;
// As good as any number.
constexpr std::uint64_t kFreeResets = 1'000'000'000;
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
                c.count_reset();
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
            if (error_code == kNoError) {
                c.answered_ns_ = now_ns();
            }
            if (is_violation(error_code)) {
                c.count_reset();
            }
        }
        return 0;
    }
};

// A callback of which no exception goes through the library, which is C: instead, what called the
// library hears that the session is over. The library passes `user` last.
template <typename Result, typename... Arguments, Result (*hook)(Arguments...)>
struct Connection::Guarded<hook> {
    static Result call(Arguments... arguments) noexcept {
        try {
            return hook(arguments...);
        } catch (...) {
            void* const user = std::get<sizeof...(arguments) - 1>(std::tie(arguments...));
            Hooks::self(user).events_.out_of_memory();
            return kSessionFails;
        }
    }
};

H2Callbacks* Connection::callbacks(const H2Api& api) {
    static H2Callbacks* const made = [&api] {
        H2Callbacks* one = nullptr;
        check(api.session_callbacks_new(&one), "session_callbacks_new");
        api.session_callbacks_set_send_callback(one, Guarded<Hooks::send>::call);
        api.session_callbacks_set_send_data_callback(one, Guarded<Hooks::send_data>::call);
        api.session_callbacks_set_data_source_read_length_callback(one,
                                                                   Guarded<Hooks::length>::call);
        api.session_callbacks_set_on_begin_headers_callback(one,
                                                            Guarded<Hooks::begin_headers>::call);
        api.session_callbacks_set_on_header_callback(one, Guarded<Hooks::header>::call);
        api.session_callbacks_set_on_data_chunk_recv_callback(one,
                                                              Guarded<Hooks::data_chunk>::call);
        api.session_callbacks_set_on_frame_recv_callback(one, Guarded<Hooks::frame_received>::call);
        api.session_callbacks_set_on_frame_send_callback(one, Guarded<Hooks::frame_sent>::call);
        api.session_callbacks_set_on_stream_close_callback(one,
                                                           Guarded<Hooks::stream_closed>::call);
        return one;
    }();
    return made;
}

H2Option* Connection::option(const H2Api& api, bool bounds_resets) {
    const auto make = [&api](std::uint64_t resets, std::uint64_t resets_per_s) {
        H2Option* one = nullptr;
        check(api.option_new(&one), "option_new");
        // Windows open as bytes are dealt with: that is the back-pressure.
        api.option_set_no_auto_window_update(one, 1);
        // Releases since 1.57 have a limit of their own, of 33 a second.
        if (api.option_set_stream_reset_rate_limit != nullptr) {
            api.option_set_stream_reset_rate_limit(one, resets, resets_per_s);
        }
        return one;
    };
    // More than `resets_` allows, which is to be the first: the library would end the connection
    // without a count.
    static H2Option* const bounded = make(2 * kResetBurst, 2 * kResetsPerSecond);
    static H2Option* const free = make(kFreeResets, kFreeResets);
    return bounds_resets ? bounded : free;
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
    check(make(&session_, callbacks(api), this, option(api, limits.bounds_resets)), "session_new");
    const std::array<H2Setting, 4> settings{{
        {kMaxConcurrentStreams, limits.streams},
        {kInitialWindowSize, limits.stream_window_bytes},
        {kMaxFrameSize, 1 << 20},
        {kMaxHeaderListSize, limits.header_bytes},
    }};
    // A client takes no streams: it leaves out their number.
    const std::size_t skipped = side == Side::kServer ? 0 : 1;
    try {
        check(
            api_.submit_settings(session_, 0, settings.data() + skipped, settings.size() - skipped),
            "submit_settings");
        check(api_.session_set_local_window_size(
                  session_, 0, 0, static_cast<std::int32_t>(limits.connection_window_bytes)),
              "session_set_local_window_size");
    } catch (...) {
        api_.session_del(session_);
        throw;
    }
}

Connection::~Connection() {
    api_.session_del(std::exchange(session_, nullptr));
    for (auto left = std::move(streams_); auto& [id, stream] : left) {
        try {
            events_.closed(*stream, kCancel);
        } catch (const std::bad_alloc&) {
            events_.out_of_memory();
        }
    }
    close(fd_);
}

Stream* Connection::find(std::int32_t id) {
    const auto at = streams_.find(id);
    return at == streams_.end() ? nullptr : at->second.get();
}

Stream* Connection::request(const Headers& headers, bool has_body) {
    const auto list = fields(headers);
    const H2Provider provider{{}, Guarded<Hooks::read>::call};
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
    const H2Provider provider{{}, Guarded<Hooks::read>::call};
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

void Connection::count_reset() {
    if (limits_.bounds_resets) {
        count(resets_, &ConnectionEvents::reset_flood);
    }
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
