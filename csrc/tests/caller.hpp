// A client for tests of the front.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/poll.h>
#include <sys/socket.h>

#include <map>
#include <memory>
#include <string>

#include "check.hpp"
#include "connection.hpp"
#include "grpc_head.hpp"

namespace gnnserve::front {

// A client of one thread, on the same connections as the front.
class Caller : public ConnectionEvents {
public:
    struct Reply {
        std::string body;
        std::map<std::string, std::string> fields;
        bool over = false;
        std::uint32_t error_code = 0;
    };

    Caller(const H2Api& api, int port) {
        const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        sockaddr_in address{};
        address.sin_family = AF_INET;
        address.sin_port = htons(static_cast<std::uint16_t>(port));
        address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        CHECK(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
        connection_ = std::make_unique<Connection>(api, fd, Connection::Side::kClient,
                                                   ConnectionLimits{}, *this);
    }

    Stream* begin(const std::string& path, Headers more = {}) {
        Headers headers{{":method", "POST"},
                        {":scheme", "http"},
                        {":path", path},
                        {":authority", "test"},
                        {"content-type", "application/grpc"},
                        {"te", "trailers"}};
        headers.insert(headers.end(), more.begin(), more.end());
        Stream* stream = connection_->request(headers, true);
        CHECK(stream != nullptr);
        replies[stream->id()];
        return stream;
    }

    std::int32_t send(const std::string& path, const std::string& message, Headers more = {}) {
        Stream* stream = begin(path, std::move(more));
        stream->write(Piece::of(message_head(message.size())));
        stream->write(Piece::of(message));
        stream->finish({});
        return stream->id();
    }

    // Serves the connection until the stream is over; false when the connection is.
    bool wait(std::int32_t id) {
        while (!replies[id].over) {
            if (!step()) {
                return false;
            }
        }
        return true;
    }

    bool step() {
        if (!connection_->flush()) {
            return false;
        }
        const short wants = connection_->blocked() ? POLLIN | POLLOUT : POLLIN;
        pollfd one{connection_->fd(), wants, 0};
        CHECK(poll(&one, 1, 60'000) == 1);
        return connection_->receive(buffer_, sizeof buffer_, sizeof buffer_);
    }

    // Sends and takes what can be without waiting.
    void look() {
        CHECK(connection_->flush());
        CHECK(connection_->receive(buffer_, sizeof buffer_, sizeof buffer_));
    }

    Connection& connection() { return *connection_; }
    char* buffer() { return buffer_; }
    std::map<std::int32_t, Reply> replies;

    void headers(Stream& stream, bool) override {
        for (const auto& [name, value] : stream.received) {
            replies[stream.id()].fields[name] = value;
        }
    }
    void data(Stream& stream, std::string_view bytes) override {
        replies[stream.id()].body.append(bytes);
        connection_->consumed(stream, bytes.size());
    }
    void ended(Stream&) override {}
    void closed(Stream& stream, std::uint32_t error_code) override {
        replies[stream.id()].over = true;
        replies[stream.id()].error_code = error_code;
    }
    void sent(Stream&, std::size_t) override {}
    void touched() noexcept override {}

private:
    std::unique_ptr<Connection> connection_;
    char buffer_[1 << 16];
};

}  // namespace gnnserve::front
