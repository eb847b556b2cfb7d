// Calls that wait until Python has looked at whom they come from.

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>

#include "peers.hpp"

namespace gnnserve::front {
namespace {

// Kinds of calls that a connection's client is known to be allowed, and the largest of them that
// is remembered.
constexpr std::size_t kMostAdmitted = 8, kMostBytes = 2048;
// Tells when a proxy got the call, and so differs from call to call; it allows nothing.
constexpr std::string_view kArrived = "gnnserve-arrived";

std::string kind_of(const CallHead& head) {
    std::string kind(head.path);
    for (const auto& [name, value] : head.credentials) {
        if (name != kArrived) {
            kind.append(1, '\n').append(name).append(1, ' ').append(value);
        }
    }
    return kind;
}

}  // namespace

// What is told of a request when it is complete decides about it. This spares others, whose caller
// was allowed the same a moment ago, the question before it is received.
bool Front::Client::is_admitted(const CallHead& head) {
    if (const std::uint64_t now = front.admissions_; now != admissions_) {
        admitted_.clear();
        admissions_ = now;
    }
    if (head.plain && head.path == front.options_.stream_method) {
        return false;
    }
    const std::string kind = kind_of(head);
    return std::find(admitted_.begin(), admitted_.end(), kind) != admitted_.end();
}

void Front::Client::remember(const CallHead& head) {
    std::string kind = kind_of(head);
    if (kind.size() > kMostBytes || is_admitted(head)) {
        return;
    }
    if (admitted_.size() == kMostAdmitted) {
        admitted_.pop_front();
    }
    admitted_.push_back(std::move(kind));
}

void Front::Client::ask(Stream& stream, const CallHead& head) {
    auto call = std::make_unique<Unadmitted>(*this, front.next_handle_++);
    call->began_ns = Connection::now_ns();
    call->streams = head.plain && head.path == front.options_.stream_method;
    Event event{Event::Kind::kAsked, call->handle, nullptr, nullptr, call->began_ns};
    event.path = head.path;
    event.credentials = head.credentials;
    event.stream = call->streams ? call->handle : 0;
    const bool joins = !call->streams && join(stream, call, head);
    call->headers = std::move(stream.received);
    const std::uint64_t handle = call->handle;
    stream.role = std::move(call);
    if (!joins) {
        front.expect_end();
        front.calls_.emplace(handle, &stream);
        tell(std::move(event));
    }
    bound_receiving();
}

// Has the call wait for what is said of one of the same kind that was not told yet; false when
// there is none, and then others may wait with this one.
bool Front::Client::join(Stream& stream, std::unique_ptr<Unadmitted>& call, const CallHead& head) {
    std::string kind = kind_of(head);
    if (kind.size() > kMostBytes) {
        return false;
    }
    const auto [at, is_first] = asked_.try_emplace(kind, &stream);
    if (is_first) {
        call->kind = std::move(kind);
        return false;
    }
    static_cast<Unadmitted&>(*at->second->role).others.emplace(call->handle, &stream);
    call->first = at->second;
    joined_ += 1;
    return true;
}

void Front::Client::stop_joining(const Unadmitted& call) noexcept {
    const auto at = asked_.find(call.kind);
    if (at != asked_.end() && at->second->role.get() == &call) {
        asked_.erase(at);
    }
}

// Forgets a call that ends before it begins. Of others that wait with it, the oldest is asked for
// in its place.
void Front::Client::leave(Stream& stream, Unadmitted& call) noexcept {
    if (call.first != nullptr) {
        joined_ -= static_cast<Unadmitted&>(*call.first->role).others.erase(call.handle);
        return;
    }
    if (call.others.empty()) {
        stop_joining(call);
        if (!forget(call.handle) && call.streams) {
            front.end_request(call.handle);
        } else {
            front.calls_.erase(call.handle);
        }
        return;
    }
    Stream* const next = call.others.begin()->second;
    call.others.erase(call.others.begin());
    joined_ -= 1;
    auto& asked = static_cast<Unadmitted&>(*next->role);
    asked.handle = call.handle;
    asked.first = nullptr;
    asked.others = std::move(call.others);
    for (const auto& [handle, other] : asked.others) {
        static_cast<Unadmitted&>(*other->role).first = next;
    }
    front.calls_.find(call.handle)->second = next;
    if (const auto at = asked_.find(call.kind); at != asked_.end() && at->second == &stream) {
        at->second = next;
    }
    asked.kind = std::move(call.kind);
}

void Front::Client::decided(Stream& stream, Reply reply) {
    auto& asked = static_cast<Unadmitted&>(*stream.role);
    const auto others = std::exchange(asked.others, {});
    joined_ -= others.size();
    for (const auto& [handle, other] : others) {
        static_cast<Unadmitted&>(*other->role).first = nullptr;
    }
    decide(stream, asked, reply);
    for (const auto& [handle, other] : others) {
        decide(*other, static_cast<Unadmitted&>(*other->role), reply);
    }
}

void Front::Client::decide(Stream& stream, Unadmitted& asked, const Reply& reply) {
    if (reply.way != Reply::Way::kAdmit) {
        refuse(stream, asked, reply.status);
        return;
    }
    if (asked.over) {
        return;
    }
    const Headers headers = std::move(asked.headers);
    const std::string unread = std::exchange(asked.unread, {});
    CallHead head = read_head(headers);
    front.calls_.erase(asked.handle);
    remember(head);
    asked.over = true;
    begin(stream, std::move(head), headers, !stream.peer_ended || !unread.empty(), asked.handle,
          asked.began_ns);
    if (!unread.empty()) {
        data(stream, unread);
    }
    if (stream.peer_ended) {
        ended(stream);
    }
}

void Front::Client::refuse(Stream& stream, Unadmitted& call, const GrpcStatus& status) {
    if (call.over) {
        return;
    }
    call.over = true;
    const std::string unread = std::exchange(call.unread, {});
    connection->consumed(stream, unread.size());
    call.hold(0);
    front.reply(stream, status);
}

}  // namespace gnnserve::front
