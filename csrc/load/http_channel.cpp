// POST requests over HTTP/1.1: one request at a time on a connection, many connections.

#include <sys/epoll.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <deque>
#include <utility>

#include "../front/connection.hpp"
#include "channel.hpp"
#include "http_response.hpp"

namespace gnnserve::load {
namespace {

constexpr std::size_t kReadBytes = 256 << 10;
// Opened before the first request; the others when they are needed.
constexpr std::size_t kFirstConnections = 4;

class HttpChannel final : public Channel {
public:
    HttpChannel(Poller& poller, ChannelOptions options, Ended ended)
        : Channel(poller, std::move(options), std::move(ended)), buffer_(kReadBytes) {
        const std::string host = options_.host.find(':') == std::string::npos
                                     ? options_.host
                                     : '[' + options_.host + ']';
        head_ = "POST " + options_.path + " HTTP/1.1\r\nHost: " + host + ':' +
                std::to_string(options_.port) +
                "\r\nUser-Agent: gnnserve-load\r\nContent-Type: application/octet-stream\r\n"
                "Content-Length: ";
        const std::size_t first = std::min(kFirstConnections, most());
        for (std::size_t i = 0; i < first; ++i) {
            idle_.push_back(add(connect_first()));
        }
    }

    ~HttpChannel() override {
        for (const auto& peer : peers_) {
            peer->end();
        }
    }

    void begin(Flight& flight, std::int64_t) override {
        waiting_.push_back(&flight);
        assign();
    }

    void give_up(Flight& flight) override {
        if (auto* peer = static_cast<Peer*>(std::exchange(flight.place, nullptr))) {
            peer->flight = nullptr;
            peer->end();
        } else {
            std::erase(waiting_, &flight);
        }
    }

    void flush() override {
        std::erase_if(peers_, [](const auto& peer) { return peer->fd < 0; });
        assign();
    }

private:
    struct Peer final : Watched {
        Peer(HttpChannel& channel, int fd) : channel(channel), fd(fd) {
            channel.poller_.watch(fd, this, false, false);
        }

        void send(Flight& next) {
            flight = &next;
            next.place = this;
            next.answer = {};
            response = {};
            head = channel.head_ + std::to_string(next.message.size()) + "\r\n\r\n";
            offset = 0;
            write();
        }

        void ready(std::uint32_t events) override {
            if (fd >= 0 && (events & (EPOLLIN | EPOLLHUP | EPOLLERR))) {
                read();
            }
            if (fd >= 0 && flight != nullptr && (events & EPOLLOUT)) {
                write();
            }
        }

        void write() {
            const std::size_t whole = head.size() + flight->message.size();
            while (offset < whole) {
                const std::size_t in_head = std::min(offset, head.size());
                const std::string_view body = flight->message.substr(offset - in_head);
                std::array<iovec, 2> parts{{{head.data() + in_head, head.size() - in_head},
                                            {const_cast<char*>(body.data()), body.size()}}};
                msghdr message{};
                message.msg_iov = parts.data();
                message.msg_iovlen = parts.size();
                const ssize_t written = sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
                if (written < 0 && errno == EINTR) {
                    continue;
                }
                if (written < 0) {
                    if (errno == EAGAIN || errno == EWOULDBLOCK) {
                        wants(true);
                    } else {
                        lose(errno);
                    }
                    return;
                }
                offset += static_cast<std::size_t>(written);
            }
            wants(false);
        }

        void read() {
            for (;;) {
                const ssize_t got =
                    recv(fd, channel.buffer_.data(), channel.buffer_.size(), MSG_DONTWAIT);
                if (got < 0 && errno == EINTR) {
                    continue;
                }
                if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
                    return;
                }
                if (got <= 0 || flight == nullptr) {
                    lose(got < 0 ? errno : 0);
                    return;
                }
                heard = true;
                const auto size = static_cast<std::size_t>(got);
                const auto state = response.take({channel.buffer_.data(), size}, flight->answer,
                                                 channel.options_.kept_bytes);
                if (state != HttpResponse::State::kReading) {
                    finish(state);
                    return;
                }
                if (size < channel.buffer_.size()) {
                    return;
                }
            }
        }

        // The response is whole, or is none.
        void finish(HttpResponse::State state) {
            const bool sent = offset == head.size() + flight->message.size();
            if (state == HttpResponse::State::kComplete && sent && response.keeps_open()) {
                served = true;
                channel.idle_.push_back(this);
            } else {
                end();
            }
            Flight& ended = *std::exchange(flight, nullptr);
            ended.place = nullptr;
            if (state == HttpResponse::State::kMalformed) {
                channel.ended_(ended, kInternal, "the answer is no response of HTTP/1.1");
                return;
            }
            const int code = code_of_http(response.status());
            channel.ended_(ended, code,
                           code == kOk ? "" : "HTTP " + std::to_string(response.status()));
        }

        // The connection is over.
        void lose(int error) {
            if (flight != nullptr && error == 0 && response.begun() &&
                response.closed() == HttpResponse::State::kComplete) {
                finish(HttpResponse::State::kComplete);
                return;
            }
            end();
            if (!heard) {
                channel.down_ = lost_text(error);
                channel.pause(front::Connection::now_ns());
            }
            if (flight == nullptr) {
                return;
            }
            Flight& ended = *std::exchange(flight, nullptr);
            ended.place = nullptr;
            if (served && !response.begun()) {
                // It was closed for being idle just when the request was sent: send it again.
                channel.waiting_.push_front(&ended);
            } else {
                channel.ended_(ended, kUnavailable, lost_text(error));
            }
        }

        void end() {
            if (fd >= 0) {
                channel.poller_.forget(fd);
                std::erase(channel.idle_, this);
                close(std::exchange(fd, -1));
                channel.open_ -= 1;
            }
        }

        void wants(bool room) {
            if (room != wants_room) {
                wants_room = room;
                channel.poller_.watch(fd, this, room, true);
            }
        }

        HttpChannel& channel;
        int fd;
        Flight* flight = nullptr;
        HttpResponse response;
        std::string head;
        // Of head and message together, how much is sent.
        std::size_t offset = 0;
        bool wants_room = false;
        bool heard = false;
        // It has carried a whole exchange.
        bool served = false;
    };

    std::size_t most() const { return std::max<std::size_t>(1, options_.connections); }

    Peer* add(int fd) {
        open_ += 1;
        return peers_.emplace_back(std::make_unique<Peer>(*this, fd)).get();
    }

    // Gives waiting requests to connections: to that which has been idle for the longest, so that
    // servers of several processes get their shares.
    void assign() {
        while (!waiting_.empty()) {
            Peer* peer = nullptr;
            if (!idle_.empty()) {
                peer = idle_.front();
                idle_.pop_front();
            } else if (open_ < most()) {
                std::string why;
                const int fd = connect_again(why);
                if (fd < 0) {
                    Flight& flight = *waiting_.front();
                    waiting_.pop_front();
                    ended_(flight, kUnavailable, why);
                    continue;
                }
                peer = add(fd);
            } else {
                return;
            }
            Flight& flight = *waiting_.front();
            waiting_.pop_front();
            peer->send(flight);
        }
    }

    std::string head_;
    std::vector<char> buffer_;
    std::deque<Flight*> waiting_;
    std::deque<Peer*> idle_;
    std::size_t open_ = 0;
    std::vector<std::unique_ptr<Peer>> peers_;
};

}  // namespace

std::unique_ptr<Channel> http_channel(Poller& poller, ChannelOptions options,
                                      Channel::Ended ended) {
    return std::make_unique<HttpChannel>(poller, std::move(options), std::move(ended));
}

}  // namespace gnnserve::load
