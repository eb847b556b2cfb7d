// gRPC calls over as many HTTP/2 connections as were asked for.

#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <stdexcept>
#include <utility>

#include "../front/connection.hpp"
#include "../front/grpc_head.hpp"
#include "channel.hpp"

namespace gnnserve::load {
namespace {

using front::Connection;
using front::Headers;
using front::Piece;
using front::Stream;

constexpr std::size_t kReadBytes = 256 << 10;
// Of one connection before the others, and sending, have their turn.
constexpr std::size_t kTurnBytes = 1 << 20;
// Codes of RFC 9113 that a stream may be reset with.
constexpr std::uint32_t kRefusedStream = 7;

// What is known of a call's answer beside its bytes.
struct Call : front::StreamRole {
    explicit Call(Flight& flight) : flight(&flight) {}

    Flight* flight;
    std::string prefix;
    // Of the message, once its prefix is there.
    std::size_t size_bytes = 0;
    bool compressed = false;
    int http_status = 0;
    int code = -1;
    std::string text;
};

std::string percent_decoded(std::string_view text) {
    std::string out;
    for (std::size_t i = 0; i < text.size(); ++i) {
        unsigned byte = 0;
        if (text[i] == '%' && i + 2 < text.size() &&
            std::from_chars(text.data() + i + 1, text.data() + i + 3, byte, 16).ptr ==
                text.data() + i + 3) {
            out.push_back(static_cast<char>(byte));
            i += 2;
        } else {
            out.push_back(text[i]);
        }
    }
    return out;
}

int number(const std::string& text) {
    int found = -1;
    std::from_chars(text.data(), text.data() + text.size(), found);
    return found;
}

class GrpcChannel final : public Channel {
public:
    GrpcChannel(Poller& poller, ChannelOptions options, Ended ended)
        : Channel(poller, std::move(options), std::move(ended)), buffer_(kReadBytes) {
        std::string why;
        api_ = front::h2_api(why);
        if (api_ == nullptr) {
            throw std::runtime_error(why);
        }
        const std::string authority = options_.host.find(':') == std::string::npos
                                          ? options_.host
                                          : '[' + options_.host + ']';
        headers_ = {{":method", "POST"},
                    {":scheme", "http"},
                    {":path", options_.path},
                    {":authority", authority + ':' + std::to_string(options_.port)},
                    {"te", "trailers"},
                    {"content-type", "application/grpc"},
                    {"user-agent", "gnnserve-load"},
                    {"grpc-timeout", ""}};
        for (std::size_t i = 0; i < std::max<std::size_t>(1, options_.connections); ++i) {
            peers_.push_back(std::make_unique<Peer>(*this, connect_first()));
            peers_.back()->touched();
        }
        flush();
    }

    void begin(Flight& flight, std::int64_t now_ns) override {
        std::unique_ptr<Peer>& slot = peers_[turn_++ % peers_.size()];
        if (slot != nullptr && (slot->leaving || slot->lost)) {
            leaving_.push_back(std::move(slot));
        }
        if (slot == nullptr) {
            std::string why;
            const int fd = connect_again(why);
            if (fd < 0) {
                ended_(flight, kUnavailable, why);
                return;
            }
            slot = std::make_unique<Peer>(*this, fd);
        }
        // In whole milliseconds, so that most requests have the same.
        const std::int64_t left_ns = std::max<std::int64_t>(0, flight.deadline_ns - now_ns);
        headers_.back().second =
            std::to_string(std::min<std::int64_t>((left_ns + 999'999) / 1'000'000, 99'999'999)) +
            'm';
        Stream* stream = slot->connection->request(headers_, true);
        if (stream == nullptr) {
            slot->leaving = true;  // its numbers are used up
            ended_(flight, kUnavailable, "the connection takes no more requests");
            return;
        }
        flight.place = stream;
        stream->role = std::make_unique<Call>(flight);
        stream->write(Piece::of(front::message_head(flight.message.size())));
        stream->write({flight.message.data(), flight.message.size(), nullptr});
        stream->finish({});
    }

    void give_up(Flight& flight) override {
        auto* stream = static_cast<Stream*>(std::exchange(flight.place, nullptr));
        if (stream != nullptr) {
            static_cast<Call&>(*stream->role).flight = nullptr;
            stream->connection().reset(*stream, front::kCancel);
        }
    }

    void flush() override {
        while (!touched_.empty()) {
            for (Peer* peer : std::exchange(touched_, {})) {
                peer->is_touched = false;
                peer->flush();
            }
        }
        const auto over = [](const std::unique_ptr<Peer>& peer) {
            return peer->connection == nullptr;
        };
        std::erase_if(leaving_, over);
        for (auto& peer : peers_) {
            if (peer != nullptr && over(peer)) {
                peer.reset();
            }
        }
    }

private:
    struct Peer final : Watched, front::ConnectionEvents {
        Peer(GrpcChannel& channel, int fd) : channel(channel) {
            front::ConnectionLimits limits;
            limits.header_bytes = 64 << 10;
            connection = std::make_unique<Connection>(*channel.api_, fd, Connection::Side::kClient,
                                                      limits, *this);
            channel.poller_.watch(fd, this, false, false);
        }

        ~Peer() override { lose(ECANCELED); }

        void ready(std::uint32_t events) override {
            if (connection == nullptr) {
                return;
            }
            touched();
            errno = 0;
            if ((events & (EPOLLIN | EPOLLHUP | EPOLLERR)) &&
                !connection->receive(channel.buffer_.data(), channel.buffer_.size(), kTurnBytes)) {
                lose(errno);
            }
        }

        void flush() {
            if (connection == nullptr) {
                return;
            }
            errno = 0;
            if (!connection->flush()) {
                lose(errno);
            } else if (const bool blocked = connection->blocked(); blocked != wants_room) {
                wants_room = blocked;
                channel.poller_.watch(connection->fd(), this, blocked, true);
            }
        }

        // Ends all requests of the connection.
        void lose(int error) {
            if (connection == nullptr) {
                return;
            }
            channel.poller_.forget(connection->fd());
            why = lost_text(error);
            if (!heard) {
                channel.down_ = why;
                channel.pause(Connection::now_ns());
            }
            lost = true;
            connection.reset();
        }

        void headers(Stream& stream, bool) override {
            heard = true;
            auto& call = static_cast<Call&>(*stream.role);
            for (const auto& [name, value] : stream.received) {
                if (name == "grpc-status") {
                    call.code = number(value);
                } else if (name == "grpc-message") {
                    call.text = percent_decoded(value);
                } else if (name == ":status") {
                    call.http_status = number(value);
                }
            }
        }

        void data(Stream& stream, std::string_view bytes) override {
            connection->consumed(stream, bytes.size());
            auto& call = static_cast<Call&>(*stream.role);
            if (call.flight == nullptr) {
                return;
            }
            if (call.prefix.size() < front::kMessageHead) {
                const std::size_t part =
                    std::min(bytes.size(), front::kMessageHead - call.prefix.size());
                call.prefix.append(bytes.substr(0, part));
                bytes.remove_prefix(part);
                if (call.prefix.size() < front::kMessageHead) {
                    return;
                }
                call.compressed = call.prefix[0] != 0;
                for (const char one : std::string_view(call.prefix).substr(1)) {
                    call.size_bytes = call.size_bytes << 8 | static_cast<unsigned char>(one);
                }
            }
            call.flight->answer.append(bytes, channel.options_.kept_bytes);
        }

        void ended(Stream&) override {}
        void sent(Stream&, std::size_t) override {}
        void going_away() override { leaving = true; }

        void closed(Stream& stream, std::uint32_t error_code) override {
            auto* call = static_cast<Call*>(stream.role.get());
            if (call == nullptr || call->flight == nullptr) {
                return;
            }
            Flight& flight = *std::exchange(call->flight, nullptr);
            flight.place = nullptr;
            auto [code, text] = outcome(*call, flight, error_code);
            channel.ended_(flight, code, std::move(text));
        }

        std::pair<int, std::string> outcome(Call& call, const Flight& flight,
                                            std::uint32_t error_code) const {
            if (call.code > kOk) {
                return {call.code, std::move(call.text)};
            }
            if (call.code == kOk) {
                if (call.compressed) {
                    return {kInternal, "the answer is compressed, which was not asked for"};
                }
                if (call.prefix.size() < front::kMessageHead ||
                    flight.answer.size_bytes != call.size_bytes) {
                    return {kInternal, "the answer is not one whole message"};
                }
                return {kOk, ""};
            }
            if (lost) {
                return {kUnavailable, why};
            }
            if (call.http_status != 0 && call.http_status != 200) {
                return {code_of_http(call.http_status), "HTTP " + std::to_string(call.http_status)};
            }
            if (leaving || error_code == kRefusedStream) {
                return {kUnavailable, "the server began no more requests on this connection"};
            }
            switch (error_code) {
                case front::kNoError:
                    return {kUnknown, "the answer has no grpc-status"};
                case front::kCancel:
                    return {kCancelled, "the server cancelled the request"};
                case front::kEnhanceYourCalm:
                    return {kResourceExhausted, "the server asked for less"};
                default:
                    return {kInternal,
                            "the server reset the request: error " + std::to_string(error_code)};
            }
        }

        void touched() noexcept override {
            if (!is_touched && !lost) {
                is_touched = true;
                channel.touched_.push_back(this);
            }
        }

        GrpcChannel& channel;
        std::unique_ptr<Connection> connection;
        std::string why;
        bool is_touched = false;
        bool wants_room = false;
        bool heard = false;
        bool lost = false;
        // The server takes no new requests here.
        bool leaving = false;
    };

    const front::H2Api* api_ = nullptr;
    Headers headers_;
    std::vector<char> buffer_;
    std::vector<Peer*> touched_;
    std::vector<std::unique_ptr<Peer>> peers_;
    std::vector<std::unique_ptr<Peer>> leaving_;
    std::size_t turn_ = 0;
};

}  // namespace

std::unique_ptr<Channel> grpc_channel(Poller& poller, ChannelOptions options,
                                      Channel::Ended ended) {
    return std::make_unique<GrpcChannel>(poller, std::move(options), std::move(ended));
}

}  // namespace gnnserve::load
