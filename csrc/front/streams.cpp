// Streams of requests: each message is a request like that of a unary call, and is answered when it
// is done.

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "peers.hpp"

namespace gnnserve::front {
namespace {

// When a stream that was refused or ended is worth opening again.
constexpr std::int64_t kRetryAfter_ms = 1000;
// Taken of calls that had to wait before others have their turn, and about for how long.
constexpr std::size_t kTurnBytes = 1 << 20;
constexpr std::int64_t kTurn_ns = 1'000'000;

}  // namespace

bool Front::StreamCall::is_idle(std::int64_t now_ns) const {
    return unanswered.empty() &&
           (unsent.empty() || now_ns - progress_ns >= client.front.options_.unread_timeout_ns);
}

// Requests that are not answered, or whose answers wait to be sent, are bounded: more are not read.
bool Front::StreamCall::is_full() const {
    return unanswered.size() + unsent.size() >= client.front.options_.stream_window;
}

void Front::Client::begin_stream(Stream& stream, const CallHead& head, std::uint64_t handle,
                                 std::int64_t began_ns) {
    const std::size_t most = front.options_.max_open_streams;
    if (front.streams_.size() >= most && !front.make_stream_room()) {
        front.counts_.open_calls_refused += 1;
        front.reply(stream, {static_cast<int>(GrpcCode::kResourceExhausted),
                             std::to_string(most) + " streams are open, and no more are accepted",
                             kRetryAfter_ms});
        return;
    }
    auto call = std::make_unique<StreamCall>(*this, front.next_handle_++);
    call->began_ns = began_ns;
    call->progress_ns = Connection::now_ns();
    call->timeout_ns = head.timeout_ns.value_or(-1);
    call->raises = head.raises;
    call->trace_parent = head.trace_parent;
    call->key = handle;
    stream.role = std::move(call);
    front.counts_.open_calls += 1;
    front.counts_.streams += 1;
    front.expect_end();
    front.calls_.emplace(handle, &stream);
    front.streams_.emplace(handle, &stream);
    bound_receiving();
}

// Ends a stream whose client has sent all, once all is answered.
void Front::Client::end_stream(Stream& stream, StreamCall& call) {
    if (call.over || !stream.peer_ended) {
        return;
    }
    if (call.incoming || !call.head.empty()) {
        refuse(stream, GrpcCode::kInternal, "message: the stream ended before it was complete",
               front.counts_.malformed);
    } else if (call.unread.empty() && call.unanswered.empty()) {
        end_stream(stream, call, {});
    }
}

void Front::Client::end_stream(Stream& stream, StreamCall& call, const GrpcStatus& status) {
    stop_receiving(stream, call);
    front.reply(stream, status);
}

// Reads no more of the stream, and ends it once its requests are answered.
void Front::Client::finish_stream(Stream& stream, StreamCall& call, GrpcStatus status) {
    const bool ends_anyway =
        stream.peer_ended && !call.incoming && call.head.empty() && call.unread.empty();
    if (call.over || ends_anyway) {
        return;
    }
    stop_receiving(stream, call);
    call.last = std::move(status);
    if (call.unanswered.empty()) {
        front.reply(stream, *call.last);
    }
}

// Sends the answer to one of the stream's requests, or an error that ends the stream.
void Front::Client::answer(Stream& stream, StreamCall& call, Reply reply) {
    if (reply.handle == call.key) {
        if (reply.way == Reply::Way::kFinish) {
            finish_stream(stream, call, std::move(reply.status));
        } else if (reply.way == Reply::Way::kFailure) {
            end_stream(stream, call, reply.status);
        }
        return;
    }
    if (!call.unanswered.contains(reply.handle)) {
        return;
    }
    call.unsent.push_back({reply.handle, 0});
    call.unanswered.erase(reply.handle);
    if (reply.way == Reply::Way::kFailure) {
        end_stream(stream, call, reply.status);
        return;
    }
    if (call.unsent.size() == 1) {
        call.progress_ns = Connection::now_ns();
    }
    std::size_t size = reply.size();
    std::string prefix;
    if (reply.way == Reply::Way::kAnswer) {
        prefix = stream_answer_prefix(size);
        size += prefix.size();
    }
    if (!stream.begun) {
        connection->respond(stream, response_headers(), true);
    }
    call.unsent.back().bytes = kMessageHead + size;
    stream.write(Piece::of(message_head(size) + prefix));
    reply.write_to(stream);
    if (call.last && call.unanswered.empty()) {
        front.reply(stream, *call.last);
    } else {
        end_stream(stream, call);
    }
}

void Front::Client::sent(Stream& stream, std::size_t bytes) {
    auto* call = dynamic_cast<StreamCall*>(stream.role.get());
    if (call == nullptr) {
        Socket::sent(stream, bytes);
        return;
    }
    while (!call->unsent.empty() && bytes > 0) {
        auto& [handle, left] = call->unsent.front();
        const std::size_t part = std::min(left, bytes);
        left -= part;
        bytes -= part;
        call->progress_ns = Connection::now_ns();
        if (left == 0) {
            front.end_request(handle);
            call->unsent.pop_front();
        }
    }
    if (!call->over && !call->unread.empty()) {
        // Not here, where frames are being written.
        front.resumable_.emplace(call->key, &stream);
    }
}

void Front::Client::closed_stream(StreamCall& call) {
    front.streams_.erase(call.key);
    front.resumable_.erase(call.key);
    if (front.options_.asks) {
        front.end_request(call.key);
    } else {
        front.calls_.erase(call.key);
    }
    for (const std::uint64_t handle : call.unanswered) {
        end_call(handle);
    }
    for (const auto& one : call.unsent) {
        front.end_request(one.handle);
    }
}

// Makes room for the events of a call, and of its end, which must not fail.
void Front::expect_end() {
    const std::size_t needed = ends_.size() + calls_.size() + 2;
    if (ends_.capacity() < needed) {
        ends_.reserve(2 * needed);
    }
}

void Front::end_request(std::uint64_t handle) noexcept {
    calls_.erase(handle);
    ends_.push_back({Event::Kind::kEnded, handle, nullptr, nullptr});
}

// Ends the stream that has been idle for the longest; false when all are in use.
bool Front::make_stream_room() {
    const std::int64_t now_ns = Connection::now_ns();
    Stream* idle = nullptr;
    std::int64_t since_ns = 0;
    for (const auto& [key, stream] : streams_) {
        const auto& call = static_cast<const StreamCall&>(*stream->role);
        if (call.is_idle(now_ns) && (idle == nullptr || call.progress_ns < since_ns)) {
            idle = stream;
            since_ns = call.progress_ns;
        }
    }
    if (idle == nullptr) {
        return false;
    }
    counts_.idle_stream += 1;
    auto& call = static_cast<StreamCall&>(*idle->role);
    if (call.unsent.empty()) {
        call.client.end_stream(
            *idle, call,
            {static_cast<int>(GrpcCode::kResourceExhausted),
             "the stream was idle, and its place was needed; open another one", kRetryAfter_ms});
    } else {  // its client would not read that
        call.client.stop_receiving(*idle, call);
        idle->discard();
        idle->connection().reset(*idle, kEnhanceYourCalm);
    }
    return true;
}

// Ends streams whose own time is over.
void Front::end_late_streams(std::int64_t now_ns) {
    std::vector<Stream*> late;
    for (const auto& [key, stream] : streams_) {
        const auto& call = static_cast<const StreamCall&>(*stream->role);
        if (call.timeout_ns >= 0 && now_ns - call.began_ns >= call.timeout_ns) {
            late.push_back(stream);
        }
    }
    for (Stream* stream : late) {
        auto& call = static_cast<StreamCall&>(*stream->role);
        call.client.end_stream(
            *stream, call, {static_cast<int>(GrpcCode::kDeadlineExceeded), "Deadline Exceeded"});
    }
}

// Goes on with calls whose bytes had to wait, as far as others can wait meanwhile; true when it is
// to be called again soon.
bool Front::resume_some() {
    std::size_t bytes = 0;
    const std::int64_t end_ns = Connection::now_ns() + kTurn_ns;
    while (!resumable_.empty() && bytes < kTurnBytes && Connection::now_ns() < end_ns) {
        Stream& stream = *resumable_.begin()->second;
        resumable_.erase(resumable_.begin());
        auto& call = static_cast<StreamCall&>(*stream.role);
        bytes += call.unread.size();
        call.client.resume(stream);
    }
    return retry_waiting(kTurnBytes) || !resumable_.empty();
}

}  // namespace gnnserve::front
