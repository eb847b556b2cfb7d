// The two kinds of connections of the front: a client's, and the one behind it for what is
// forwarded.
#pragma once

#include "front.hpp"

namespace gnnserve::front {

// Something in the epoll set.
struct Front::Socket : ConnectionEvents {
    Socket(Front& front) : front(front) {}

    Front& front;
    // Null for listeners and the like.
    std::unique_ptr<Connection> connection;
    // Waits in `touched_`.
    bool is_touched = false;
    // Asks epoll for room to write, too.
    bool wants_room = false;
    // Is over, and gone at the end of this turn.
    bool over = false;

    void touched() final;
    void sent(Stream& stream, std::size_t bytes) final;
};

// A unary call whose message comes out of `poll`.
struct Front::Call : StreamRole {
    explicit Call(Front& front) : front(front) {}
    ~Call() override;

    Front& front;
    std::uint64_t handle = 0;
    std::int64_t began_ns = 0;
    std::int64_t timeout_ns = -1;
    std::string head;
    std::size_t size = 0;
    std::shared_ptr<std::string> message;
    // Bytes of `message`'s that count as being received.
    std::size_t counted_bytes = 0;
    // Came out of `poll`.
    bool handed = false;

    void grow(std::size_t bytes);
};

// One of two streams that carry the same call, on the client's side or behind.
struct Front::Forwarded : StreamRole {
    explicit Forwarded(Stream* other) : other(other) {}
    Stream* other;
};

class Front::Client final : public Front::Socket {
public:
    Client(Front& front, int fd);

    void headers(Stream& stream, bool first) override;
    void data(Stream& stream, std::string_view bytes) override;
    void ended(Stream& stream) override;
    void closed(Stream& stream, std::uint32_t error_code) override;
    bool reset_flood() override;
    void headers_too_large() override;

    // Refuses calls whose message has not come in time.
    void refuse_late(std::int64_t now_ns);

    std::unique_ptr<Backend> backend;
    std::list<std::unique_ptr<Client>>::iterator place;

private:
    void receive(Stream& stream, Call& call, std::string_view bytes);
    void forward(Stream& stream);
    void refuse(Stream& stream, GrpcCode code, std::string text, std::atomic<std::uint64_t>& count);

    // Streams whose message is not complete.
    std::unordered_map<std::int32_t, Stream*> awaited_;
};

class Front::Backend final : public Front::Socket {
public:
    // Throws std::system_error when the server behind cannot be reached.
    Backend(Front& front, Client& client);

    void headers(Stream& stream, bool first) override;
    void data(Stream& stream, std::string_view bytes) override;
    void ended(Stream& stream) override;
    void closed(Stream& stream, std::uint32_t error_code) override;

    Client& client;
};

}  // namespace gnnserve::front
