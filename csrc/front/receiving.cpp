// Calls whose messages are received here: from bytes to events, and what bounds them meanwhile.

#include <algorithm>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "peers.hpp"

namespace gnnserve::front {
namespace {

// How long a message may come slowly although others wait for its block.
constexpr std::int64_t kPatience_ns = 1'000'000'000;
// When a message for which there is no room is worth sending again.
constexpr std::int64_t kRetryAfter_ms = 50;

std::string seconds(std::int64_t ns) {
    std::string text = std::to_string(static_cast<double>(ns) / 1e9);
    text.erase(text.find_last_not_of('0') + 1);
    return text.ends_with('.') ? text.substr(0, text.size() - 1) : text;
}

}  // namespace

Front::Receiving::~Receiving() { received_block(); }

void Front::Receiving::hold_received() {
    hold(kCallBytes + unread.size() + (incoming ? incoming->held_bytes() : 0));
}

std::size_t Front::Receiving::received() const {
    return unread.size() + (incoming ? incoming->size() - incoming->left() : 0);
}

void Front::Receiving::received_block() {
    if (block_bytes > 0) {
        client.front.receiving_blocks_ -= block_bytes;
        client.block_bytes -= std::exchange(block_bytes, 0);
        client.let_on();
    }
}

// Takes in what came, as far as it can be taken now; the rest waits, and the stream's window with
// it.
void Front::Client::receive(Stream& stream, Receiving& call, std::string_view bytes) {
    if (call.over) {
        connection->consumed_stream(stream, bytes.size());
        return;
    }
    const bool joined = !call.unread.empty();
    if (joined) {
        call.unread.append(bytes);
        bytes = call.unread;
    }
    const std::size_t before = bytes.size();
    take(stream, call, bytes);
    if (call.over) {
        bytes = {};
    }
    connection->consumed_stream(stream, before - bytes.size());
    if (call.over) {
        return;
    }
    if (joined) {
        call.unread.erase(0, before - bytes.size());
    } else {
        call.unread = bytes;
    }
    call.hold_received();
    if (auto* streaming = dynamic_cast<StreamCall*>(&call)) {
        end_stream(stream, *streaming);
    }
    bound_receiving();
}

void Front::Client::resume(Stream& stream) {
    try {
        receive(stream, static_cast<Receiving&>(*stream.role), {});
    } catch (const std::bad_alloc&) {
        stop_receiving(stream, static_cast<Receiving&>(*stream.role));
        front.short_of_memory(*connection);
    }
}

// Takes the size that stands before a message; false when it is not complete or the call is over.
bool Front::Client::take_prefix(Stream& stream, Receiving& call, std::string_view& bytes) {
    const std::size_t part = std::min(bytes.size(), kMessageHead - call.head.size());
    call.head.append(bytes.substr(0, part));
    bytes.remove_prefix(part);
    if (call.head.size() < kMessageHead) {
        return false;
    }
    std::size_t size = 0;
    for (const char one : std::string_view(call.head).substr(1)) {
        size = size << 8 | static_cast<unsigned char>(one);
    }
    const std::size_t most = front.options_.max_message_bytes;
    if (size > most) {
        refuse(stream, GrpcCode::kResourceExhausted,
               // gRPC's own words.
               "Received message larger than max (" + std::to_string(size) + " vs. " +
                   std::to_string(most) + ')',
               front.counts_.message_size);
        return false;
    }
    if (call.head[0] != 0) {
        refuse(stream, GrpcCode::kInternal,
               "message: it is compressed, and the call's grpc-encoding names no compression",
               front.counts_.malformed);
        return false;
    }
    call.incoming.emplace(size, front.plain_models(), front.options_.check_finite);
    return true;
}

void Front::Client::take(Stream& stream, Receiving& call, std::string_view& bytes) {
    if (auto* streaming = dynamic_cast<StreamCall*>(&call)) {
        take_messages(stream, *streaming, bytes);
    } else if (take_message(stream, call, bytes) && !bytes.empty()) {
        refuse(stream, GrpcCode::kUnimplemented,
               '"' + front.options_.method + "\" requires exactly one request message.",
               front.counts_.malformed);
    }
}

// Takes messages as long as the stream may have more of them in flight.
void Front::Client::take_messages(Stream& stream, StreamCall& call, std::string_view& bytes) {
    while (!call.over) {
        if (!call.incoming && call.head.empty()) {
            if (bytes.empty() || call.is_full()) {
                return;
            }
            call.since_ns = Connection::now_ns();
            awaited_.emplace(stream.id(), &stream);
        }
        if (!take_message(stream, call, bytes) || !call.incoming->complete()) {
            return;
        }
        hand_over(stream, call);
    }
}

// Takes bytes of the call's message; false when the call is over or waits for a block.
bool Front::Client::take_message(Stream& stream, Receiving& call, std::string_view& bytes) {
    if (!call.incoming && !take_prefix(stream, call, bytes)) {
        return false;
    }
    Incoming& incoming = *call.incoming;
    front.stop_waiting(call);
    incoming.take(bytes);
    if (incoming.wanted_block() > 0) {
        if (!front.find_room(call)) {
            // What is all here takes the way of messages, and a place in the queue. So does what
            // the pool could never hold.
            if (bytes.size() >= incoming.left() ||
                incoming.wanted_block() > front.options_.pool->capacity()) {
                incoming.keep_bytes();
            } else {
                front.wait_for_room(stream, call);
                return false;
            }
        }
        incoming.take(bytes);
    }
    return true;
}

// Makes the complete message's event: staged when it is plain, else as bytes.
Event Front::Client::received(Stream& stream, Receiving& call) {
    awaited_.erase(stream.id());
    Event event{Event::Kind::kCall, call.handle, nullptr, nullptr, call.began_ns, call.timeout_ns};
    event.arrived_ns = Connection::now_ns();
    event.trace_parent = call.trace_parent;
    event.plain = call.incoming->plain();
    event.message = call.incoming->bytes();
    call.incoming.reset();
    call.received_block();
    return event;
}

void Front::Client::tell(Event event) {
    if (untold_.empty()) {
        turn_ = front.telling_.insert(front.telling_.end(), this);
    }
    try {
        untold_.emplace(event.handle, std::move(event));
    } catch (const std::bad_alloc&) {
        if (untold_.empty()) {
            front.telling_.erase(turn_);
        }
        throw;
    }
}

Event Front::Client::told_next() noexcept {
    const auto first = untold_.begin();
    Event event = std::move(first->second);
    if (event.kind == Event::Kind::kAsked) {
        const auto& asked =
            static_cast<const Unadmitted&>(*front.calls_.find(event.handle)->second->role);
        event.calls += asked.others.size();
        stop_joining(asked);
    }
    front.telling_.splice(front.telling_.end(), front.telling_, turn_);
    forget(first->first);
    if (event.kind == Event::Kind::kCall) {
        front.counts_.called += 1;
        if (event.plain != nullptr && event.plain->valid()) {
            front.counts_.plain += 1;
        }
    }
    return event;
}

// Has the call never come out of `poll`; false when it did.
bool Front::Client::forget(std::uint64_t handle) noexcept {
    if (untold_.erase(handle) == 0) {
        return false;
    }
    if (untold_.empty()) {
        front.telling_.erase(turn_);
    }
    return true;
}

// Ends a call whose message is complete.
void Front::Client::end_call(std::uint64_t handle) noexcept {
    if (forget(handle)) {
        front.calls_.erase(handle);
        front.counts_.unread += 1;
    } else {
        front.end_request(handle);
    }
}

void Front::Client::hand_over(Stream& stream, Call& call) {
    Event event = received(stream, call);
    event.credentials = std::move(call.credentials);
    tell(std::move(event));
    call.handed = call.over = true;
    call.hold(0);
}

void Front::Client::hand_over(Stream& stream, StreamCall& call) {
    Event event = received(stream, call);
    event.stream = call.key;
    event.raises = call.raises;
    front.expect_end();
    call.unanswered.insert(call.handle);
    front.calls_.emplace(call.handle, &stream);
    tell(std::move(event));
    call.handle = front.next_handle_++;
    call.head.clear();
}

void Front::Client::refuse_late(std::int64_t now_ns, std::size_t& left) {
    const FrontOptions& options = front.options_;
    const auto bytes_per_s = static_cast<double>(options.receive_bytes_per_s);
    std::vector<Stream*> late;
    for (const auto& [id, stream] : awaited_) {
        if (late.size() == left) {
            break;
        }
        const auto& call = static_cast<const Receiving&>(*stream->role);
        // No bytes are taken of one that waits for room.
        const double more_s =
            front.waits_for_room(call) ? 0 : static_cast<double>(call.received()) / bytes_per_s;
        if (now_ns - call.since_ns - static_cast<std::int64_t>(more_s * 1e9) >=
            options.receive_timeout_ns) {
            late.push_back(stream);
        }
    }
    left -= late.size();
    for (Stream* stream : late) {
        const auto& call = static_cast<const Receiving&>(*stream->role);
        if (front.waits_for_room(call)) {
            const auto& pool = *options.pool;
            std::string text = "staging memory: the request needs " +
                               std::to_string(call.incoming->wanted_block()) + " bytes, ";
            if (held_back.contains(call.handle)) {
                text += "and its connection has " + std::to_string(block_bytes) + " of at most " +
                        std::to_string(max_bytes);
            } else {  // Python's words
                text += std::to_string(pool.capacity() - pool.used()) + " of " +
                        std::to_string(pool.capacity()) + " are free";
            }
            refuse(*stream, GrpcCode::kResourceExhausted, std::move(text),
                   front.counts_.receiving_bytes, kRetryAfter_ms);
            continue;
        }
        std::string text = "message: it was not complete " + seconds(options.receive_timeout_ns) +
                           " s after the call began";
        if (call.received() > 0) {
            text += ", and came with less than " + std::to_string(options.receive_bytes_per_s) +
                    " bytes a second after that";
        }
        refuse(*stream, GrpcCode::kDeadlineExceeded, std::move(text), front.counts_.no_message);
    }
}

void Front::Client::refuse_slow(std::int64_t now_ns) {
    std::vector<Stream*> slow;
    for (const auto& [id, stream] : awaited_) {
        const auto& call = static_cast<const Receiving&>(*stream->role);
        const std::int64_t elapsed_ns = now_ns - call.since_ns;
        if (call.block_bytes == 0 || elapsed_ns < kPatience_ns) {
            continue;
        }
        const double due = static_cast<double>(call.incoming->size()) *
                           static_cast<double>(elapsed_ns) /
                           static_cast<double>(front.options_.receive_timeout_ns);
        if (static_cast<double>(call.incoming->size() - call.incoming->left()) < due) {
            slow.push_back(stream);
        }
    }
    for (Stream* stream : slow) {
        refuse(*stream, GrpcCode::kResourceExhausted,
               "message: it comes too slowly to be complete in " +
                   seconds(front.options_.receive_timeout_ns) +
                   " s, and others need its place in memory",
               front.counts_.receiving_bytes, kRetryAfter_ms);
    }
}

void Front::Client::refuse(Stream& stream, GrpcCode code, std::string text,
                           std::atomic<std::uint64_t>& count, std::int64_t retry_after_ms) {
    count += 1;
    stop_receiving(stream, static_cast<Receiving&>(*stream.role));
    front.reply(stream, {static_cast<int>(code), std::move(text), retry_after_ms});
}

void Front::Client::stop_receiving(Stream& stream, Receiving& call) {
    awaited_.erase(stream.id());
    front.stop_waiting(call);
    if (const auto* streaming = dynamic_cast<StreamCall*>(&call)) {
        front.streams_.erase(streaming->key);
        front.resumable_.erase(streaming->key);
    }
    call.over = true;
    call.incoming.reset();
    call.unread = {};
    call.received_block();
    call.hold(0);
}

std::shared_ptr<const PlainModels> Front::plain_models() {
    if (options_.pool == nullptr) {
        return nullptr;
    }
    const std::lock_guard held(lock_);
    return models_;
}

// Keeps a call until there is room for its block; apart, when others of its connection are in the
// way: nobody waits behind it.
void Front::wait_for_room(Stream& stream, Receiving& call) {
    auto& waiting = call.client.has_room(call) ? waiting_ : call.client.held_back;
    waiting.emplace(call.handle, &stream);
}

void Front::stop_waiting(const Receiving& call) noexcept {
    waiting_.erase(call.handle);
    call.client.held_back.erase(call.handle);
}

bool Front::waits_for_room(const Receiving& call) const {
    return waiting_.contains(call.handle) || call.client.held_back.contains(call.handle);
}

// Its connection may have the call's block. One may be received however large it is.
bool Front::Client::has_room(const Receiving& call) const {
    const auto size = static_cast<std::size_t>(call.incoming->wanted_block());
    return block_bytes == 0 || static_cast<std::size_t>(block_bytes) + size <= max_bytes;
}

void Front::Client::let_on() noexcept {
    if (!held_back.empty()) {
        front.waiting_.insert(held_back.extract(held_back.begin()));
    }
}

// Gives the call's message a block; false when there is none.
bool Front::find_room(Receiving& call) {
    if (!call.client.has_room(call)) {
        return false;
    }
    const std::int64_t size = call.incoming->wanted_block();
    const std::int64_t most = std::min(static_cast<std::int64_t>(options_.max_receiving_bytes),
                                       options_.pool->capacity() / 2);
    // One may be received however large it is.
    if (receiving_blocks_ > 0 && receiving_blocks_ + size > most) {
        return false;
    }
    auto block = options_.pool->block(size);
    if (block == nullptr) {
        return false;
    }
    call.incoming->place(std::move(block));
    call.block_bytes = size;
    call.client.block_bytes += size;
    receiving_blocks_ += size;
    call.client.let_on();
    return true;
}

// Goes on with those that wait for a block, as far as there is room, and until about so many bytes
// were taken; true when there may be room for more.
bool Front::retry_waiting(std::size_t most_bytes) {
    for (std::size_t bytes = 0; !waiting_.empty();) {
        if (bytes >= most_bytes) {
            return true;
        }
        const auto [handle, stream] = *waiting_.begin();
        auto& call = static_cast<Receiving&>(*stream->role);
        bytes += call.unread.size();
        call.client.resume(*stream);
        if (!waiting_.empty() && waiting_.begin()->first == handle) {
            return false;
        }
    }
    return false;
}

// Blocks are for those who send: whoever claims one and sends next to nothing loses it to others.
void Front::end_those_in_the_way(std::int64_t now_ns) {
    for (const auto& client : clients_) {
        if (!waiting_.empty() || !client->held_back.empty()) {
            client->refuse_slow(now_ns);
        }
    }
}

}  // namespace gnnserve::front
