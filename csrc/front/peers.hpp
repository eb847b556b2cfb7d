// The two kinds of connections of the front: a client's, and the one behind it for what is
// forwarded.
#pragma once

#include <deque>
#include <optional>
#include <unordered_set>

#include "front.hpp"
#include "incoming.hpp"

namespace gnnserve::front {

// Something in the epoll set.
struct Front::Socket : ConnectionEvents {
    Socket(Front& front) : front(front) {}

    Front& front;
    // Null for listeners and the like.
    std::unique_ptr<Connection> connection;
    // Waits in `touched_`, before that one.
    bool is_touched = false;
    Socket* next_touched = nullptr;
    // Asks epoll for room to write, too.
    bool wants_room = false;
    // Is over, and gone at the end of this turn.
    bool over = false;

    void touched() noexcept final;
    void out_of_memory() noexcept final { front.counts_.connections += 1; }
    void sent(Stream& stream, std::size_t bytes) override;
};

// What a stream has in memory of its client's: it counts against the client and against all.
struct Front::Held : StreamRole {
    Held(Client& client, std::size_t bytes);
    ~Held() override;
    void hold(std::size_t bytes);

    // Beside its messages: the stream's and the session's own memory.
    static constexpr std::size_t kCallBytes = 2048;

    Client& client;
    std::size_t bytes = 0;
};

// A call that begins when Python admits it. Its bytes wait, and its windows with them.
struct Front::Unadmitted : Held {
    Unadmitted(Client& client, std::uint64_t handle) : Held(client, kCallBytes), handle(handle) {}

    std::uint64_t handle;
    // Of one that is asked for: its kind, and those of the same kind that wait for the same answer,
    // the oldest first. Of these: the one that is asked for, else null.
    std::string kind;
    std::map<std::uint64_t, Stream*> others;
    Stream* first = nullptr;
    // Its messages come out of `poll`.
    bool streams = false;
    std::int64_t began_ns = 0;
    Headers headers;
    std::string unread;
    // Was refused: whatever comes is dropped.
    bool over = false;
};

// A call whose messages are received here.
struct Front::Receiving : Held {
    Receiving(Client& client, std::uint64_t handle) : Held(client, kCallBytes), handle(handle) {}
    ~Receiving() override;

    // Of the message that is received, or comes next.
    std::uint64_t handle;
    // When the call began, and its time from there (negative: any).
    std::int64_t began_ns = 0, timeout_ns = -1;
    // Of its headers, empty without.
    std::string trace_parent;
    // When the message, or its call, began.
    std::int64_t since_ns = 0;
    std::string head;
    std::optional<Incoming> incoming;
    // Bytes that came and are not taken.
    std::string unread;
    // Its block while it is received.
    std::int64_t block_bytes = 0;
    // Was refused, or takes no more: whatever comes is dropped.
    bool over = false;

    // Bytes of its message that came.
    std::size_t received() const;

    // Holds what is in memory of it.
    void hold_received();
    // Has no block that counts as being received.
    void received_block();
};

// A unary call.
struct Front::Call : Receiving {
    using Receiving::Receiving;

    Headers credentials;
    // Came out of `poll`.
    bool handed = false;
};

// A stream of requests.
struct Front::StreamCall : Receiving {
    using Receiving::Receiving;

    // Handle of the stream itself.
    std::uint64_t key = 0;
    // How it ends once its requests are answered, although its client would send more.
    std::optional<GrpcStatus> last;
    // The first error ends it with its status.
    bool raises = false;
    // Requests that came out of `poll`: those without an answer, and those whose answers are not
    // all on their way.
    struct Unsent {
        std::uint64_t handle;
        std::size_t bytes;
    };
    std::unordered_set<std::uint64_t> unanswered;
    std::deque<Unsent> unsent;
    // When an answer was sent last, or was the only one to send.
    std::int64_t progress_ns = 0;

    bool is_full() const;
    bool is_idle(std::int64_t now_ns) const;
};

// One of two streams that carry the same call, on the client's side or behind.
struct Front::Forwarded : Held {
    Forwarded(Client& client, Stream* other) : Held(client, kCallBytes), other(other) {}
    Stream* other;
    // Bytes that came by this stream and are not on their way at the other.
    std::size_t waiting_bytes = 0;

    void wait_for(std::ptrdiff_t more);
    // Has nothing more to do with the other stream; `own` is this one.
    void part(Stream& own);
};

class Front::Client final : public Front::Socket {
public:
    // The connection is encrypted unless `tls` is null. From `inside`, it is of this user's
    // processes.
    Client(Front& front, int fd, const TlsContext* tls, bool inside);
    ~Client() override;

    void headers(Stream& stream, bool first) override;
    void data(Stream& stream, std::string_view bytes) override;
    void ended(Stream& stream) override;
    void closed(Stream& stream, std::uint32_t error_code) override;
    void reset_flood() override;
    void control_flood() override;
    void headers_too_large() override;
    bool takes_more() const override { return untold_.size() + joined_ < kMostUntold; }

    // Refuses calls whose message has not come in time, at most `left`, which it lowers.
    void refuse_late(std::int64_t now_ns, std::size_t& left);
    // Refuses calls whose blocks others need, and which come too slowly to be complete in time.
    void refuse_slow(std::int64_t now_ns);
    // Goes on with a call that had to wait.
    void resume(Stream& stream);
    void sent(Stream& stream, std::size_t bytes) override;
    void answer(Stream& stream, StreamCall& call, Reply reply);
    void end_stream(Stream& stream, StreamCall& call, const GrpcStatus& status);
    // Begins or refuses a call that was asked for.
    void decided(Stream& stream, Reply reply);
    void finish_stream(Stream& stream, StreamCall& call, GrpcStatus status);
    // Drops what came of the call's message, and what is still to come.
    void stop_receiving(Stream& stream, Receiving& call);
    // Refuses the calls that hold the most, so many bytes together, with these words; false when
    // none holds any.
    bool refuse_largest(std::size_t bytes, const std::string& text);
    // Keeps what is held of this client, and of all, within the limits.
    void bound_receiving();
    // Has the first of the calls that are held back try to get a block again.
    void let_on() noexcept;
    bool has_room(const Receiving& call) const;
    // Takes the oldest event that was not told, of a client in `Front::telling_`, and gives the
    // others their turn.
    Event told_next() noexcept;

    std::unique_ptr<Backend> backend;
    std::list<std::unique_ptr<Client>>::iterator place;
    // Where it comes from.
    std::string peer;
    // Of this user's processes.
    const bool inside;
    const std::int64_t since_ns = Connection::now_ns();
    // Of its handshake, in `Front::handshakes_` while that waits.
    std::optional<Turn> handshake;
    // Most bytes of each of the following.
    const std::size_t max_bytes;
    // Of its calls, of their blocks, and of answers that were not sent at the last look.
    std::size_t held_bytes = 0;
    std::int64_t block_bytes = 0;
    std::size_t unsent_bytes = 0;
    // Calls that wait for a block until others of this client give theirs back, the oldest first.
    std::map<std::uint64_t, Stream*> held_back;

private:
    // Calls that were not told, beyond which no more are read.
    static constexpr std::size_t kMostUntold = 16;

    void add_certificate(Headers& headers);
    bool is_admitted(const CallHead& head);
    void remember(const CallHead& head);
    void ask(Stream& stream, const CallHead& head);
    bool join(Stream& stream, std::unique_ptr<Unadmitted>& call, const CallHead& head);
    void decide(Stream& stream, Unadmitted& asked, const Reply& reply);
    void leave(Stream& stream, Unadmitted& call) noexcept;
    void stop_joining(const Unadmitted& call) noexcept;
    void refuse(Stream& stream, Unadmitted& call, const GrpcStatus& status);
    void begin(Stream& stream, CallHead head, const Headers& headers, bool has_body,
               std::uint64_t handle, std::int64_t began_ns);
    void begin_unary(Stream& stream, CallHead head, std::uint64_t handle, std::int64_t began_ns);
    void receive(Stream& stream, Receiving& call, std::string_view bytes);
    bool take_prefix(Stream& stream, Receiving& call, std::string_view& bytes);
    void take(Stream& stream, Receiving& call, std::string_view& bytes);
    void take_messages(Stream& stream, StreamCall& call, std::string_view& bytes);
    bool take_message(Stream& stream, Receiving& call, std::string_view& bytes);
    Event received(Stream& stream, Receiving& call);
    void tell(Event event);
    bool forget(std::uint64_t handle) noexcept;
    void end_call(std::uint64_t handle) noexcept;
    void hand_over(Stream& stream, Call& call);
    void connect_backend();
    void hand_over(Stream& stream, StreamCall& call);
    void begin_stream(Stream& stream, const CallHead& head, std::uint64_t handle,
                      std::int64_t began_ns);
    void end_stream(Stream& stream, StreamCall& call);
    void closed_stream(StreamCall& call);
    void forward(Stream& stream, const Headers& headers, bool has_body);
    void give_up(Stream& stream, Forwarded& role);
    void refuse_media_type(Stream& stream);
    void refuse_for_others(Stream& stream, const std::string& text);
    void refuse(Stream& stream, GrpcCode code, std::string text, std::atomic<std::uint64_t>& count,
                std::int64_t retry_after_ms = -1);

    // By handle, calls that have not come out of `poll`. Those that end meanwhile never do, so that
    // a client cannot have more looked at than it has open.
    std::map<std::uint64_t, Event> untold_;
    // By kind, calls that are asked for and were not told, and how many others wait with some call.
    std::unordered_map<std::string, Stream*> asked_;
    std::size_t joined_ = 0;
    // In `Front::telling_`, unless there are none.
    std::list<Client*>::iterator turn_;
    // Streams whose message is not complete.
    std::unordered_map<std::int32_t, Stream*> awaited_;
    // Methods and credentials of calls that were admitted, the oldest first, and what
    // `Front::admissions_` was then.
    std::deque<std::string> admitted_;
    std::uint64_t admissions_ = 0;
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
    // Ended before this one, in the same turn.
    std::unique_ptr<Backend> ended_before;
};

}  // namespace gnnserve::front
