#include "sender.hpp"

#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <memory>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "../front/connection.hpp"

namespace gnnserve::load {
namespace {

using front::Connection;

// Kept of an answer of which only the head is wanted; QoS facts stand at its beginning.
constexpr std::size_t kHeadBytes = 16 << 10;
// Requests sent before answers have their turn.
constexpr int kTurnRequests = 16;
constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();
constexpr int kRawContents = 6;

int checked(int result, const char* what) {
    if (result < 0) {
        throw std::system_error(errno, std::generic_category(), what);
    }
    return result;
}

// A descriptor that wakes the poller, which reads it empty.
class Waker final : public Watched {
public:
    Waker(Poller& poller, int fd) : fd_(fd) { poller.watch(fd, this, false, false); }
    ~Waker() override { close(fd_); }

    int fd() const { return fd_; }
    void ready(std::uint32_t) override {
        std::uint64_t count = 0;
        [[maybe_unused]] const auto read_bytes = read(fd_, &count, sizeof count);
    }

private:
    const int fd_;
};

// Wakes at a time of the monotonic clock; more exactly than epoll's own limit in milliseconds.
class Timer {
public:
    explicit Timer(Poller& poller)
        : waker_(poller, checked(timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC),
                                 "timerfd_create")) {}

    void set(std::int64_t at_ns) {
        if (at_ns == at_ns_ || at_ns == kNever) {
            return;
        }
        at_ns_ = at_ns;
        itimerspec when{};
        when.it_value.tv_sec = at_ns / 1'000'000'000;
        when.it_value.tv_nsec = at_ns % 1'000'000'000;
        checked(timerfd_settime(waker_.fd(), TFD_TIMER_ABSTIME, &when, nullptr), "timerfd_settime");
    }

private:
    Waker waker_;
    std::int64_t at_ns_ = 0;
};

// Reads a number of base 128 from the front of `bytes`; false when it is not whole.
bool varint(std::string_view& bytes, std::uint64_t& into) {
    into = 0;
    for (unsigned shift = 0; shift < 64 && !bytes.empty(); shift += 7) {
        const auto byte = static_cast<unsigned char>(bytes.front());
        bytes.remove_prefix(1);
        into |= static_cast<std::uint64_t>(byte & 127) << shift;
        if (byte < 128) {
            return true;
        }
    }
    return false;
}

}  // namespace

std::size_t head_bytes(std::string_view response) {
    std::string_view rest = response;
    for (;;) {
        const std::size_t whole = response.size() - rest.size();
        std::uint64_t tag = 0, size = 0;
        // All fields of a response are of this wire type: a length and that many bytes.
        if (!varint(rest, tag) || (tag & 7) != 2 || tag >> 3 == kRawContents ||
            !varint(rest, size) || size > rest.size()) {
            return whole;
        }
        rest.remove_prefix(size);
    }
}

// When the next request is due, and which message it carries.
struct Sender::Schedule {
    virtual ~Schedule() = default;
    virtual void start(std::int64_t now_ns) = 0;
    virtual bool over(std::int64_t now_ns) const = 0;
    // kNever: not before another request has ended.
    virtual std::int64_t next_due_ns(std::int64_t now_ns, std::size_t open,
                                     std::int64_t retry_at_ns) const = 0;
    virtual std::string_view message(std::size_t index) const = 0;
};

// Ends a run before its channel and its descriptors do.
struct Sender::Closing {
    ~Closing() {
        sender.closing_ = true;
        const std::lock_guard held(sender.lock_);
        sender.wake_ = -1;
    }
    Sender& sender;
};

struct Sender::OpenLoop final : Schedule {
    OpenLoop(const Sender& sender, const std::vector<std::string_view>& messages,
             const std::vector<std::int64_t>& offsets_ns)
        : sender(sender), messages(messages), offsets_ns(offsets_ns) {}

    void start(std::int64_t now_ns) override { started_ns = now_ns; }
    bool over(std::int64_t) const override { return sender.sent_ == messages.size(); }
    std::int64_t next_due_ns(std::int64_t, std::size_t, std::int64_t) const override {
        return started_ns + offsets_ns[sender.sent_];
    }
    std::string_view message(std::size_t index) const override { return messages[index]; }

    const Sender& sender;
    const std::vector<std::string_view>& messages;
    const std::vector<std::int64_t>& offsets_ns;
    std::int64_t started_ns = 0;
};

struct Sender::ClosedLoop final : Schedule {
    ClosedLoop(const Sender& sender, const std::vector<std::string_view>& messages,
               std::size_t in_flight, std::int64_t duration_ns, std::size_t most)
        : sender(sender),
          messages(messages),
          in_flight(in_flight),
          duration_ns(duration_ns),
          most(most) {}

    void start(std::int64_t now_ns) override { end_ns = now_ns + duration_ns; }
    bool over(std::int64_t now_ns) const override {
        return now_ns >= end_ns || sender.sent_ == most;
    }
    std::int64_t next_due_ns(std::int64_t now_ns, std::size_t open,
                             std::int64_t retry_at_ns) const override {
        if (open >= in_flight) {
            return kNever;
        }
        // Nothing is gained by requests that end at once for want of a connection.
        return std::min(end_ns, std::max(now_ns, retry_at_ns));
    }
    std::string_view message(std::size_t index) const override {
        return messages[index % messages.size()];
    }

    const Sender& sender;
    const std::vector<std::string_view>& messages;
    const std::size_t in_flight;
    const std::int64_t duration_ns;
    const std::size_t most;
    std::int64_t end_ns = 0;
};

void Sender::send_at(const std::vector<std::string_view>& messages,
                     const std::vector<std::int64_t>& offsets_ns) {
    if (messages.size() != offsets_ns.size() ||
        !std::is_sorted(offsets_ns.begin(), offsets_ns.end())) {
        throw std::invalid_argument("each message needs an offset, and offsets ascend");
    }
    OpenLoop schedule(*this, messages, offsets_ns);
    run(schedule);
}

void Sender::keep_in_flight(const std::vector<std::string_view>& messages, std::size_t in_flight,
                            std::int64_t duration_ns, std::size_t most) {
    if (messages.empty() || in_flight == 0) {
        throw std::invalid_argument("a closed loop needs a message and at least one in flight");
    }
    ClosedLoop schedule(*this, messages, in_flight, duration_ns, most);
    run(schedule);
}

void Sender::run(Schedule& schedule) {
    Poller poller;
    Waker bell(poller, checked(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC), "eventfd"));
    Timer timer(poller);
    flights_.clear();
    open_ = 0;
    sent_ = 0;
    closing_ = false;
    const auto ended = [this](Flight& flight, int code, std::string text) {
        finish(flight, code, std::move(text));
    };
    ChannelOptions options = options_.channel;
    options.kept_bytes =
        options_.whole_answers ? std::numeric_limits<std::size_t>::max() : kHeadBytes;
    const auto make = options_.protocol == Protocol::kGrpc ? grpc_channel : http_channel;
    const std::unique_ptr<Channel> channel = make(poller, std::move(options), ended);
    {
        const std::lock_guard held(lock_);
        wake_ = bell.fd();
    }
    const Closing closing{*this};
    std::int64_t now_ns = Connection::now_ns();
    started_ns_ = now_ns;
    schedule.start(now_ns);
    while (!stopping_) {
        for (int i = 0; i < kTurnRequests && !schedule.over(now_ns); ++i) {
            const std::int64_t due_ns = schedule.next_due_ns(now_ns, open_, channel->retry_at_ns());
            if (due_ns > now_ns) {
                break;
            }
            send(schedule, *channel, due_ns);
            channel->flush();
            now_ns = Connection::now_ns();
        }
        expire(*channel, now_ns);
        channel->flush();
        const bool over = schedule.over(now_ns);
        if (over && open_ == 0) {
            break;
        }
        std::int64_t due_ns =
            over ? kNever : schedule.next_due_ns(now_ns, open_, channel->retry_at_ns());
        int wait_ms = 0;
        if (due_ns > now_ns) {
            timer.set(due_ns);
            const std::int64_t left_ns =
                flights_.empty() ? kNever : flights_.front().deadline_ns - now_ns;
            wait_ms =
                left_ns == kNever
                    ? -1
                    : static_cast<int>(std::min<std::int64_t>(left_ns / 1'000'000 + 1, 1'000'000));
        }
        poller.wait(wait_ms);
        now_ns = Connection::now_ns();
    }
}

void Sender::send(Schedule& schedule, Channel& channel, std::int64_t due_ns) {
    Flight& flight = flights_.emplace_back();
    flight.index = sent_;
    flight.message = schedule.message(flight.index);
    flight.due_ns = due_ns;
    flight.sent_ns = Connection::now_ns();
    flight.deadline_ns = due_ns + options_.timeout_ns;
    sent_ += 1;
    open_ += 1;
    channel.begin(flight, flight.sent_ns);
}

// Ends requests whose time is over, and forgets those that have ended.
void Sender::expire(Channel& channel, std::int64_t now_ns) {
    while (!flights_.empty() &&
           (flights_.front().ended || flights_.front().deadline_ns <= now_ns)) {
        Flight& flight = flights_.front();
        if (!flight.ended) {
            channel.give_up(flight);
            finish(flight, kDeadlineExceeded, "no answer within the time limit");
        }
        flights_.pop_front();
    }
}

void Sender::finish(Flight& flight, int code, std::string text) {
    if (closing_) {
        return;
    }
    flight.ended = true;
    open_ -= 1;
    Result result{flight.index,
                  flight.due_ns,
                  flight.sent_ns,
                  Connection::now_ns(),
                  code,
                  flight.answer.size_bytes,
                  std::move(flight.answer.kept),
                  std::move(text)};
    if (!options_.whole_answers) {
        result.answer.resize(head_bytes(result.answer));
    }
    const std::lock_guard held(lock_);
    results_.push_back(std::move(result));
}

void Sender::stop() {
    const std::lock_guard held(lock_);
    stopping_ = true;
    if (wake_ >= 0) {
        eventfd_write(wake_, 1);
    }
}

std::vector<Result> Sender::take() {
    const std::lock_guard held(lock_);
    return std::exchange(results_, {});
}

}  // namespace gnnserve::load
