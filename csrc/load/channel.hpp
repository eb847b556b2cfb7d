// Ways of sending requests to one server: gRPC over HTTP/2, or POST over HTTP/1.1.
//
// Everything here belongs to the thread that polls. A request that cannot be sent, and one whose
// connection is lost, ends with a status; nothing is thrown once the first connection stands.
#pragma once

#include <sys/socket.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace gnnserve::load {

// Status codes of gRPC that a request ends with where the server gave none.
enum Code : int {
    kOk = 0,
    kCancelled = 1,
    kUnknown = 2,
    kDeadlineExceeded = 4,
    kPermissionDenied = 7,
    kResourceExhausted = 8,
    kUnimplemented = 12,
    kInternal = 13,
    kUnavailable = 14,
    kUnauthenticated = 16,
};

// An answer as it arrives, of which at most `kept_bytes` are kept.
struct Answer {
    std::string kept;
    std::size_t size_bytes = 0;

    void append(std::string_view bytes, std::size_t kept_bytes);
};

// A request that was sent and has not ended.
struct Flight {
    std::size_t index = 0;
    std::string_view message;
    std::int64_t due_ns = 0;
    std::int64_t sent_ns = 0;
    std::int64_t deadline_ns = 0;
    bool ended = false;
    Answer answer;
    // Of its channel: where it is.
    void* place = nullptr;
};

// What epoll reports to.
class Watched {
public:
    virtual ~Watched() = default;
    virtual void ready(std::uint32_t events) = 0;
};

// The epoll set of a run.
class Poller {
public:
    Poller();
    ~Poller();
    Poller(const Poller&) = delete;
    Poller& operator=(const Poller&) = delete;

    void watch(int fd, Watched* watched, bool room, bool known);
    void forget(int fd);
    // Reports what is ready, waiting at most that long.
    void wait(int timeout_ms);

private:
    int epoll_;
};

struct Address {
    sockaddr_storage bytes{};
    socklen_t size = 0;
};

// Addresses of a host, in the order to try. Throws std::system_error.
std::vector<Address> resolve(const std::string& host, int port);

// Begins to connect; -1 and errno when that fails at once.
int begin_connect(const Address& address);

// Waits until a connection that was begun stands; 0, or why it does not.
int finish_connect(int fd, std::int64_t until_ns);

struct ChannelOptions {
    std::string host;
    int port = 0;
    // gRPC: the full method. HTTP: the path.
    std::string path;
    // gRPC: requests take them in turn. HTTP: the most at once, one request each.
    std::size_t connections = 1;
    std::size_t kept_bytes = 0;
    std::int64_t connect_timeout_ns = 10'000'000'000;
};

class Channel {
public:
    // Called once for each flight, whose answer then holds what was received.
    using Ended = std::function<void(Flight&, int code, std::string text)>;

    virtual ~Channel() = default;
    Channel(const Channel&) = delete;
    Channel& operator=(const Channel&) = delete;

    // Sends the request; it may end before this returns.
    virtual void begin(Flight& flight, std::int64_t now_ns) = 0;
    // Drops a request whose answer is not wanted any more. `ended` is not called.
    virtual void give_up(Flight& flight) = 0;
    // Sends what was begun, and lets go of connections that are over.
    virtual void flush() = 0;

    // When a server that took no connection is tried again; requests until then end at once.
    std::int64_t retry_at_ns() const { return retry_at_ns_; }

protected:
    Channel(Poller& poller, ChannelOptions options, Ended ended);
    // Connects, trying the host's addresses in turn. Throws std::system_error.
    int connect_first();
    // Begins a connection, or says why not and closes the channel for a moment.
    int connect_again(std::string& why);
    void pause(std::int64_t now_ns);

    Poller& poller_;
    const ChannelOptions options_;
    const Ended ended_;
    std::vector<Address> addresses_;
    std::int64_t retry_at_ns_ = 0;
    std::string down_;
};

// Throw std::system_error when nobody takes a connection, std::runtime_error without libnghttp2.
std::unique_ptr<Channel> grpc_channel(Poller& poller, ChannelOptions options, Channel::Ended ended);
std::unique_ptr<Channel> http_channel(Poller& poller, ChannelOptions options, Channel::Ended ended);

// Status code of gRPC for one of HTTP that came without it.
int code_of_http(int status);

// Why a connection is over, from errno; 0: the peer closed it.
std::string lost_text(int error);

}  // namespace gnnserve::load
