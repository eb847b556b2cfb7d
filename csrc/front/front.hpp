// The front end: one thread that speaks HTTP/2 and gRPC to clients, polled by Python.
//
// Unary calls of one method, and the messages of one method's streams, come out of `poll`: staged,
// where they are plain requests, else as bytes. They are answered by `answer` or `fail` from any
// thread. Where not everybody may call, each call comes out of `poll` once its headers are there,
// and goes on when it is admitted. Every other call is forwarded, stream by stream, to a gRPC
// server behind it on a Unix socket, over a connection of its own for each client.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "connection.hpp"
#include "grpc_head.hpp"
#include "plain_request.hpp"

namespace gnnserve::front {

struct FrontOptions {
    std::string host;
    int port = 0;
    // Unix socket of the server behind: a path, or the name of an abstract one.
    std::string backend;
    // Path of the unary method whose calls come out of `poll`.
    std::string method;
    // Path of the method whose streams' messages do, too; empty: it is forwarded.
    std::string stream_method;
    // Streams of it at once, of all clients; beyond it, the one that is idle for the longest ends.
    std::size_t max_open_streams = 64;
    // Requests of a stream that are not answered, or whose answers are not sent.
    std::size_t stream_window = 256;
    // After which a client that reads no answer of its stream may lose it.
    std::int64_t unread_timeout_ns = 10'000'000'000;
    std::size_t max_message_bytes = 64 << 20;
    // Bytes in memory of calls that are not complete, and of answers that are not sent, of all
    // clients. Beyond it, whoever has the most of the former loses a call, and whoever has read
    // nothing for the longest loses an answer. Blocks of the pool in which messages are received
    // have the same limit, and half the pool; further ones are not read until there is room.
    std::size_t max_receiving_bytes = 256 << 20;
    // The same of one connection, but of those to `inside`: of calls that are not complete, of
    // their blocks, and of answers that are not sent.
    std::size_t max_receiving_bytes_of_connection = 128 << 20;
    // Of all clients, and of those at one address (of IPv6: in one network of 64 bits).
    std::size_t max_connections = 1024;
    std::size_t max_connections_of_peer = 256;
    std::uint32_t max_streams = 1024;
    // For a call's message to arrive; longer while it comes with so many bytes a second.
    std::int64_t receive_timeout_ns = 10'000'000'000;
    std::size_t receive_bytes_per_s = 64 << 10;
    // How long a client may take none of what it is sent.
    std::int64_t send_timeout_ns = 30'000'000'000;
    // Where plain requests are staged; null: all messages come out as bytes.
    std::shared_ptr<BlockPool> pool;
    // Features of plain requests must be finite numbers.
    bool check_finite = true;
    // Calls wait for `admit`, but those for which the same was asked on their connection before;
    // calls of `stream_method` always do.
    bool asks = false;
    // For encrypted connections; null: they are not encrypted.
    std::shared_ptr<const TlsContext> tls;
    // Abstract Unix socket on which processes of this user connect without encryption; empty: none.
    std::string inside;
    // Headers after those of a call from a client with a certificate: the first one as it is, the
    // second one with the certificate's names.
    Headers certified;
};

// A call that waits for `admit`; a call whose message is complete; its end, answered or not. With
// `asks`, streams end too.
struct Event {
    enum class Kind { kAsked, kCall, kEnded };
    Kind kind;
    std::uint64_t handle;
    // One of them, of a call. A staged request may have values that its model cannot take.
    std::shared_ptr<const std::string> message;
    std::shared_ptr<PlainRequest> plain;
    std::int64_t began_ns = 0;
    // Of the call's beginning, negative: none.
    std::int64_t timeout_ns = -1;
    // When the message was complete.
    std::int64_t arrived_ns = 0;
    // Headers that tell whom the call comes from.
    Headers credentials = {};
    // Handle of its stream, which is its own when the stream itself is asked for; 0: it is unary.
    // In a stream errors are messages, unless the first one is to end it.
    std::uint64_t stream = 0;
    bool raises = false;
    // Of a call that is asked for, with how many of its connection are of the same method and
    // credentials, this one among them: what is said of it is said of all.
    std::string path = {};
    std::size_t calls = 1;
    // `traceparent` of the call or of its stream; empty without.
    std::string trace_parent = {};
};

// What `poll` has to tell.
struct Polled {
    std::vector<Event> events;
    // By descriptor of `watch_packets`; empty: its other end is closed.
    std::vector<std::pair<int, std::string>> packets;
    // The descriptor of `watch_also` is readable.
    bool other = false;
};

// Why calls or connections were refused here, with how many were.
struct FrontCounts {
    // `called` counts all that come out of `poll`, `plain` those of them that were staged. Both
    // count the messages of `streams`.
    std::atomic<std::uint64_t> called{0}, plain{0}, streams{0}, forwarded{0};
    std::atomic<std::uint64_t> no_message{0}, message_size{0}, malformed{0}, header_size{0},
        receiving_bytes{0}, connections{0}, peer_connections{0}, media_type{0}, resets{0},
        control_frames{0}, slow_reader{0}, open_calls_refused{0}, idle_stream{0}, handshakes{0};
    // Calls that ended, not refused, before their message was there or came out of `poll`.
    std::atomic<std::uint64_t> unread{0};
    std::atomic<std::uint64_t> open_connections{0}, open_calls{0};
};

// True for a descriptor that leaves too few to the rest of the process.
bool is_one_of_the_last(int fd);

class Front {
public:
    // Listens; throws std::system_error when it cannot, std::runtime_error without libnghttp2.
    explicit Front(FrontOptions options);
    ~Front();
    Front(const Front&) = delete;
    Front& operator=(const Front&) = delete;

    int port() const { return port_; }
    const FrontCounts& counts() const { return counts_; }

    // Serves until there is something to tell, `wake` is called, or the monotonic clock shows
    // `until_ns` (negative: for ever). Tells few events at a time, so that their receiver sees to
    // the other descriptor in between. One thread at a time.
    Polled poll(std::int64_t until_ns);
    // Sends what was answered, without waiting. For the thread that polls.
    void flush();
    // Has `poll` watch a descriptor, negative: none. Not while it runs.
    void watch_also(int fd);
    // Has `poll` read the packets of a socket that keeps them apart, one at a time; or not any
    // more. Not while it runs.
    void watch_packets(int fd);
    void unwatch_packets(int fd);

    // Any thread: models whose plain requests are staged from now on.
    void set_models(std::shared_ptr<const PlainModels> models);
    // Any thread: what connections get that begin from now on.
    void set_tls(std::shared_ptr<const TlsContext> tls);
    // Any thread; nothing happens when the call has ended meanwhile. Sends a message of pieces.
    void answer(std::uint64_t handle, std::vector<Piece> message);
    // Ends the call, which may be a whole stream or one that waits for `admit`.
    void fail(std::uint64_t handle, GrpcStatus status);
    // Has a call go on that was asked for, and those that were asked for with it.
    void admit(std::uint64_t handle);
    // Reads no more of the stream, and ends it once its requests are answered.
    void finish(std::uint64_t handle, GrpcStatus status);
    // Asks for all calls that begin from now on.
    void forget_admitted();
    // Sends a message of the stream instead of an answer to one of its requests.
    void tell(std::uint64_t handle, Piece message);
    void wake();
    // Tells all clients to begin nothing new on their connections.
    void announce_end();

private:
    class Client;
    class Backend;
    // Of what waits: the round of its address, and a number within it.
    using Turn = std::pair<std::uint64_t, std::uint64_t>;
    struct Peer {
        std::size_t connections = 0;
        // Of its last handshake that had to wait.
        std::uint64_t round = 0;
    };
    struct Held;
    struct Receiving;
    struct Unadmitted;
    struct Call;
    struct StreamCall;
    struct Forwarded;
    struct Socket;
    struct Reply {
        enum class Way { kAnswer, kFailure, kMessage, kAdmit, kFinish };
        std::uint64_t handle;
        Way way;
        std::vector<Piece> message;
        GrpcStatus status;

        // Of the message.
        std::size_t size() const;
        // Writes the message, once.
        void write_to(Stream& stream);
    };

    // The low bits of what stands in the epoll set: of an address, or beside a descriptor.
    enum class Watched : std::uint64_t { kSocket, kListener, kOther, kPackets };
    static constexpr std::uint64_t kWatched = 3;
    // Of this thread's time, for handshakes: at once, and of each second.
    static constexpr double kHandshakeBurst_s = 0.1, kHandshakeShare = 0.25;

    void listen();
    void listen_inside();
    void watch_as(Watched what, int fd);
    void watch(int fd, Socket* socket, std::uint32_t events, bool known);
    void accept_some();
    void admit(int fd, std::string peer, bool inside);
    bool make_room(const std::string* peer);
    void leave(const std::string& peer);
    void wait_for_turn(Client& client, std::uint32_t events);
    void lose_turn(Client& client) noexcept;
    void shake_hands();
    std::int64_t until_handshake_ns();
    void end_slow_handshakes(std::int64_t now_ns);
    void keep_spare();
    void take(Socket& socket, std::uint32_t events);
    void take_packet(int fd);
    void end(Socket& socket) noexcept;
    void short_of_memory(Connection& connection) noexcept;
    void ring();
    void put(Reply reply);
    void apply_replies();
    void apply(Stream& stream, Reply reply);
    void flush_touched();
    void flush(Socket& socket);
    std::optional<Polled> turn(std::int64_t until_ns, bool& looked);
    void wait(std::int64_t wait_ns);
    std::shared_ptr<const PlainModels> plain_models();
    bool find_room(Receiving& call);
    void wait_for_room(Stream& stream, Receiving& call);
    void stop_waiting(const Receiving& call) noexcept;
    bool waits_for_room(const Receiving& call) const;
    bool retry_waiting(std::size_t most_bytes);
    bool resume_some();
    void expect_end();
    void end_request(std::uint64_t handle) noexcept;
    void tell_some(std::vector<Event>& events);
    bool make_stream_room();
    void end_late_streams(std::int64_t now_ns);
    void end_those_in_the_way(std::int64_t now_ns);
    void look(std::int64_t now_ns);
    void end_slow_readers(std::int64_t now_ns);
    void bound_receiving();
    void reply(Stream& stream, const GrpcStatus& status) noexcept;

    const FrontOptions options_;
    const H2Api* api_ = nullptr;
    int epoll_ = -1;
    int wake_ = -1;
    // Given up for a moment when there are no file descriptors for a connection to be refused.
    int spare_ = -1;
    std::vector<int> listeners_;
    int port_ = 0;
    std::vector<char> buffer_;
    std::list<std::unique_ptr<Client>> clients_;
    // By where connections come from.
    std::unordered_map<std::string, Peer> peers_;
    // Connections whose handshake goes on when it is their turn; which round has its turn, and a
    // number for the next one that waits.
    std::map<Turn, Client*> handshakes_;
    std::uint64_t round_ = 0, next_turn_ = 0;
    // Seconds of this thread's time that handshakes may take.
    Tokens handshake_s_{kHandshakeBurst_s, kHandshakeShare};
    // The first socket that may have something to flush; each names the next one.
    Socket* touched_ = nullptr;
    // Those that ended in this turn.
    std::list<std::unique_ptr<Client>> ended_clients_;
    std::unique_ptr<Backend> ended_backends_;
    std::unordered_map<std::uint64_t, Stream*> calls_;
    std::uint64_t next_handle_ = 1;
    std::size_t receiving_bytes_ = 0;
    // Blocks of messages that are not complete, and the calls that wait for one, the oldest first.
    std::int64_t receiving_blocks_ = 0;
    std::map<std::uint64_t, Stream*> waiting_;
    // Open streams of requests, and those whose bytes can be taken on, by a key of their own.
    std::map<std::uint64_t, Stream*> streams_, resumable_;
    std::int64_t next_look_ns_ = 0;
    // Ends of calls that were told. Has room for that of each call in `calls_`, which thus can
    // always be told.
    std::vector<Event> ends_;
    // Clients with calls that were not told, in turn.
    std::list<Client*> telling_;
    // Counts calls of `forget_admitted`.
    std::atomic<std::uint64_t> admissions_{0};
    int other_ = -1;
    bool other_ready_ = false;
    std::vector<char> packet_buffer_;
    std::vector<std::pair<int, std::string>> packets_;
    FrontCounts counts_;
    // The thread that polls, or did so last.
    std::atomic<std::thread::id> poller_;

    std::mutex lock_;
    std::vector<Reply> replies_;
    std::shared_ptr<const PlainModels> models_;
    std::shared_ptr<const TlsContext> tls_;
    bool announces_end_ = false;
    bool woken_ = false;
};

}  // namespace gnnserve::front
