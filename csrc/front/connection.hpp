// One HTTP/2 connection: a socket, libnghttp2's session over it, and its streams.
//
// Bytes that go out are not copied together: frames are a list of pieces for `sendmsg`, and a piece
// of a body points to where the body lies. Everything here belongs to the thread that polls.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "nghttp2_api.hpp"
#include "tls.hpp"

namespace gnnserve::front {

using Header = std::pair<std::string, std::string>;
using Headers = std::vector<Header>;

// Bytes to send, and what keeps them where they are until they are sent.
struct Piece {
    const char* data = nullptr;
    std::size_t size = 0;
    std::shared_ptr<const void> owner;
    // They lie where others wait for room: what the peer does not take at once is copied.
    bool lent = false;

    static Piece of(std::string bytes);
};

class Connection;

// What its user keeps with a stream.
struct StreamRole {
    virtual ~StreamRole() = default;
};

class Stream {
public:
    Stream(Connection& connection, std::int32_t id) : connection_(connection), id_(id) {}

    Connection& connection() const { return connection_; }
    std::int32_t id() const { return id_; }

    // For `headers` alone: what it tells of.
    Headers received;
    std::size_t received_header_bytes = 0;
    // The peer has sent all it will.
    bool peer_ended = false;
    // Response headers, or a request, were submitted.
    bool begun = false;
    std::unique_ptr<StreamRole> role;

    bool finished() const { return finished_; }

    // Appends to the body; `sent` tells when bytes of it are on their way.
    void write(Piece piece);
    // The same with a copy; small ones share memory.
    void write_copy(std::string_view bytes);
    // Ends the body, with trailers if there are any.
    void finish(Headers trailers);
    // Bytes of the body that are not on their way.
    std::size_t waiting_bytes() const { return body_bytes_; }
    // Drops these bytes, of a stream that is to be reset.
    void discard();
    // Nanoseconds of `now_ns` when the body last became shorter, or was empty and got bytes.
    std::int64_t progress_ns() const { return progress_ns_; }

private:
    friend class Connection;
    Connection& connection_;
    const std::int32_t id_;
    std::deque<Piece> body_;
    // What the body's last piece points to, when it is a copy.
    std::shared_ptr<std::string> copies_;
    std::size_t body_bytes_ = 0;
    std::int64_t progress_ns_ = 0;
    bool has_headers_ = false;
    bool finished_ = false;
    bool deferred_ = false;
    Headers trailers_;
};

// What a connection tells its user. A stream passed to `closed` is gone when that returns.
class ConnectionEvents {
public:
    virtual ~ConnectionEvents() = default;
    // Headers are complete: the first ones (of a request or a response), or trailers.
    virtual void headers(Stream& stream, bool first) = 0;
    virtual void data(Stream& stream, std::string_view bytes) = 0;
    virtual void ended(Stream& stream) = 0;
    virtual void closed(Stream& stream, std::uint32_t error_code) = 0;
    // That many bytes of the stream's body were put on their way.
    virtual void sent(Stream& stream, std::size_t bytes) = 0;
    // There may be something to flush.
    virtual void touched() noexcept = 0;
    // The peer resets streams faster than anybody gives up on requests, or sends more frames that
    // belong to no call than calls need: the connection ends.
    virtual void reset_flood() {}
    virtual void control_flood() {}
    // A header list is larger than is taken; the stream is reset.
    virtual void headers_too_large() {}
    // There was no memory for what the peer sent or is sent: the connection ends.
    virtual void out_of_memory() noexcept {}
    // The peer begins nothing new on this connection.
    virtual void going_away() {}
    // False while what came is to be dealt with before more is read.
    virtual bool takes_more() const { return true; }
};

struct ConnectionLimits {
    std::uint32_t streams = 0;
    std::uint32_t header_bytes = 16 << 10;
    // Bytes a peer may send before they are consumed: of a stream, of the connection.
    std::uint32_t stream_window_bytes = 1 << 20;
    std::uint32_t connection_window_bytes = 16 << 20;
    // Streams may be reset at a limited rate.
    bool bounds_resets = true;
};

// So many at once, and so many more for each second.
class Tokens {
public:
    Tokens(double most, double per_second) : most_(most), per_second_(per_second), left_(most) {}

    void earn(double count) { left_ = left_ + count < most_ ? left_ + count : most_; }
    // How many there are; negative when more were spent.
    double left(std::int64_t now_ns) {
        earn(static_cast<double>(now_ns - at_ns_) / 1e9 * per_second_);
        at_ns_ = now_ns;
        return left_;
    }
    void spend(double count) { left_ -= count; }
    // False when there is none.
    bool take(std::int64_t now_ns) {
        left(now_ns);
        spend(1);
        return left_ >= 0;
    }

private:
    const double most_, per_second_;
    double left_;
    std::int64_t at_ns_ = 0;
};

class Connection {
public:
    enum class Side { kServer, kClient };

    // Takes the socket, which `tls` encrypts if it is not null. Throws std::runtime_error.
    Connection(const H2Api& api, int fd, Side side, const ConnectionLimits& limits,
               ConnectionEvents& events, std::unique_ptr<TlsSession> tls = nullptr);
    ~Connection();
    Connection(const Connection&) = delete;
    Connection& operator=(const Connection&) = delete;

    int fd() const { return fd_; }
    std::size_t streams() const { return streams_.size(); }
    const std::unordered_map<std::int32_t, std::unique_ptr<Stream>>& open_streams() const {
        return streams_;
    }
    // Bytes wait for the peer to take what was sent before.
    bool blocked() const { return first_ < pieces_.size() || !encrypted_.empty(); }
    std::size_t blocked_bytes() const;
    // Nanoseconds of `now_ns` when the peer last took bytes, or when there was nothing to take.
    std::int64_t progress_ns() const { return progress_ns_; }
    // When a stream last ended without an error; 0 when none has.
    std::int64_t answered_ns() const { return answered_ns_; }
    // It is encrypted, and the two sides have not agreed on how.
    bool shakes_hands() const { return tls_ != nullptr && !tls_->ready(); }

    // Reads for about a millisecond, and at most `most` bytes, while more is taken; false when the
    // connection is over.
    bool receive(char* buffer, std::size_t size, std::size_t most);
    // Sends what there is to send and the socket takes; false when the connection is over.
    bool flush();
    // Copies lent pieces that `flush` has left.
    void keep_lent();
    // `flush` has left bytes that the socket may take, as it had sent many.
    bool yields() const { return yields_; }
    // Has `flush` tell that the connection is over.
    void abandon() noexcept {
        abandoned_ = true;
        events_.touched();
    }
    // Begins a request; returns null when the peer takes no more of them.
    Stream* request(const Headers& headers, bool has_body);
    void respond(Stream& stream, const Headers& headers, bool has_body);
    void reset(Stream& stream, std::uint32_t error_code);
    // Lets the peer send as many bytes more, after that many were dealt with.
    void consumed(Stream& stream, std::size_t bytes);
    // The same for bytes of a stream that is closed, or whose own window opens later.
    void consumed(std::size_t bytes);
    // Opens the window of the stream alone.
    void consumed_stream(Stream& stream, std::size_t bytes);
    // Tells the peer to begin nothing new here.
    void announce_end();

    // Names of the certificate that the peer showed, with commas between them.
    std::string certificate_names() { return tls_ == nullptr ? std::string() : tls_->names(); }

    static std::int64_t now_ns();

private:
    friend class Stream;
    struct Out {
        Piece piece;  // data null: in small_ at `offset`
        std::size_t offset = 0;
    };
    static constexpr std::size_t kLeastReadBytes = 2 << 10;
    struct Hooks;
    template <auto hook>
    struct Guarded;

    static H2Callbacks* callbacks(const H2Api& api);
    static H2Option* option(const H2Api& api, bool bounds_resets);
    Stream* find(std::int32_t id);
    void append_small(const std::uint8_t* data, std::size_t size);
    bool full() const;
    bool take(const char* bytes, std::size_t size);
    bool decrypt(const char* bytes, std::size_t size);
    bool write_out(std::size_t& most);
    bool encrypt_out(std::size_t& most);
    bool send_encrypted();
    void written(std::size_t bytes);
    void forget_sent();
    void resume(Stream& stream);
    ssize_t read_body(Stream& stream, std::size_t length, std::uint32_t& flags);
    void send_body(Stream& stream, const std::uint8_t* head, std::size_t size);
    void count_reset();
    void count(Tokens& tokens, void (ConnectionEvents::*flood)());

    const H2Api& api_;
    const std::unique_ptr<TlsSession> tls_;
    // Encrypted bytes that the socket has not taken.
    std::string encrypted_;
    const int fd_;
    const Side side_;
    const ConnectionLimits limits_;
    ConnectionEvents& events_;
    H2Session* session_ = nullptr;
    std::unordered_map<std::int32_t, std::unique_ptr<Stream>> streams_;
    std::string small_;
    std::vector<Out> pieces_;
    // Streams that lent pieces were written to.
    std::vector<std::int32_t> lending_;
    std::size_t first_ = 0;
    // Read at once: few while a few take long, as of many small calls.
    std::size_t read_bytes_ = kLeastReadBytes;
    std::int64_t progress_ns_;
    std::int64_t answered_ns_ = 0;
    // Of streams that the peer resets or has us reset, and of frames that belong to no call.
    Tokens resets_, control_;
    bool flooded_ = false, abandoned_ = false, yields_ = false;
};

}  // namespace gnnserve::front
