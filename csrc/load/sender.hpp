// Sends requests to one server and notes when each was answered: at given times, whatever the
// server does (open loop), or a number of them at a time (closed loop). One thread, one epoll set.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "channel.hpp"

namespace gnnserve::load {

enum class Protocol { kGrpc, kHttp };

struct SenderOptions {
    Protocol protocol = Protocol::kGrpc;
    ChannelOptions channel;
    // From when a request was due, or in a closed loop from when it was sent.
    std::int64_t timeout_ns = 30'000'000'000;
    // Keep answers, not only their fields before the raw contents.
    bool whole_answers = false;
};

// How a request ended. Times are of the monotonic clock.
struct Result {
    // Number of the request, in the order of sending.
    std::size_t index = 0;
    std::int64_t due_ns = 0;
    std::int64_t sent_ns = 0;
    std::int64_t ended_ns = 0;
    // Status code of gRPC.
    int code = 0;
    std::size_t answer_bytes = 0;
    std::string answer;
    std::string text;
};

class Sender {
public:
    explicit Sender(SenderOptions options) : options_(std::move(options)) {}

    // Both return when every request has ended or `stop` was called; requests that had not ended
    // then have no result. Messages must stay where they are meanwhile. They throw
    // std::system_error when nobody takes a connection, and std::runtime_error without libnghttp2.
    // One thread at a time.

    // Sends each message so long after the start; offsets ascend.
    void send_at(const std::vector<std::string_view>& messages,
                 const std::vector<std::int64_t>& offsets_ns);
    // Keeps so many requests in flight, messages in turn, for a time or until `most` were sent.
    void keep_in_flight(const std::vector<std::string_view>& messages, std::size_t in_flight,
                        std::int64_t duration_ns, std::size_t most);

    // Any thread.
    void stop();
    // Results since the last call.
    std::vector<Result> take();
    // When the current or last run began, 0 before the first; requests sent in it.
    std::int64_t started_ns() const { return started_ns_; }
    std::size_t sent() const { return sent_; }

private:
    struct Schedule;
    struct OpenLoop;
    struct ClosedLoop;
    struct Closing;

    void run(Schedule& schedule);
    void send(Schedule& schedule, Channel& channel, std::int64_t due_ns);
    void expire(Channel& channel, std::int64_t now_ns);
    void finish(Flight& flight, int code, std::string text);

    const SenderOptions options_;
    // Sent in this order; those at the front have not ended.
    std::deque<Flight> flights_;
    std::size_t open_ = 0;
    bool closing_ = false;

    std::atomic<bool> stopping_{false};
    std::atomic<std::int64_t> started_ns_{0};
    std::atomic<std::size_t> sent_{0};
    std::mutex lock_;
    // Of the run's eventfd; -1 when there is none.
    int wake_ = -1;
    std::vector<Result> results_;
};

// How many bytes of an encoded response are whole fields before its raw contents.
std::size_t head_bytes(std::string_view response);

}  // namespace gnnserve::load
