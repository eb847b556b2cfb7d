#include "channel.hpp"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "../front/connection.hpp"

namespace gnnserve::load {
namespace {

using front::Connection;

constexpr std::int64_t kPause_ns = 100'000'000;
constexpr std::int64_t kMs = 1'000'000;

[[noreturn]] void fail_with(int error, const std::string& what) {
    throw std::system_error(error, std::generic_category(), what);
}

}  // namespace

void Answer::append(std::string_view bytes, std::size_t kept_bytes) {
    size_bytes += bytes.size();
    if (kept.size() < kept_bytes) {
        kept.append(bytes.substr(0, kept_bytes - kept.size()));
    }
}

Poller::Poller() : epoll_(epoll_create1(EPOLL_CLOEXEC)) {
    if (epoll_ < 0) {
        fail_with(errno, "epoll_create1");
    }
}

Poller::~Poller() { close(epoll_); }

void Poller::watch(int fd, Watched* watched, bool room, bool known) {
    epoll_event event{};
    event.events = EPOLLIN | (room ? static_cast<std::uint32_t>(EPOLLOUT) : 0u);
    event.data.ptr = watched;
    if (epoll_ctl(epoll_, known ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, fd, &event) != 0) {
        fail_with(errno, "epoll_ctl");
    }
}

void Poller::forget(int fd) { epoll_ctl(epoll_, EPOLL_CTL_DEL, fd, nullptr); }

void Poller::wait(int timeout_ms) {
    std::array<epoll_event, 64> ready;
    const int count = epoll_wait(epoll_, ready.data(), ready.size(), timeout_ms);
    if (count < 0 && errno != EINTR) {
        fail_with(errno, "epoll_wait");
    }
    for (int i = 0; i < count; ++i) {
        const epoll_event& event = ready[static_cast<std::size_t>(i)];
        static_cast<Watched*>(event.data.ptr)->ready(event.events);
    }
}

std::vector<Address> resolve(const std::string& host, int port) {
    addrinfo hints{};
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = AI_NUMERICSERV;
    addrinfo* found = nullptr;
    if (const int code = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
        code != 0) {
        fail_with(EADDRNOTAVAIL, host + ": " + gai_strerror(code));
    }
    const std::unique_ptr<addrinfo, void (*)(addrinfo*)> list(found, freeaddrinfo);
    std::vector<Address> addresses;
    for (const addrinfo* one = found; one != nullptr; one = one->ai_next) {
        Address& address = addresses.emplace_back();
        std::memcpy(&address.bytes, one->ai_addr, one->ai_addrlen);
        address.size = one->ai_addrlen;
    }
    return addresses;
}

int begin_connect(const Address& address) {
    const int fd = socket(address.bytes.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) {
        return -1;
    }
    const int yes = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    if (connect(fd, reinterpret_cast<const sockaddr*>(&address.bytes), address.size) != 0 &&
        errno != EINPROGRESS) {
        const int error = errno;
        close(fd);
        errno = error;
        return -1;
    }
    return fd;
}

int finish_connect(int fd, std::int64_t until_ns) {
    for (;;) {
        const std::int64_t left_ns = std::max<std::int64_t>(0, until_ns - Connection::now_ns());
        pollfd one{fd, POLLOUT, 0};
        const int count = poll(&one, 1, static_cast<int>((left_ns + kMs - 1) / kMs));
        if (count < 0 && errno == EINTR) {
            continue;
        }
        if (count == 0) {
            return ETIMEDOUT;
        }
        int error = count < 0 ? errno : 0;
        socklen_t size = sizeof error;
        if (count > 0) {
            getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size);
        }
        return error;
    }
}

Channel::Channel(Poller& poller, ChannelOptions options, Ended ended)
    : poller_(poller),
      options_(std::move(options)),
      ended_(std::move(ended)),
      addresses_(resolve(options_.host, options_.port)) {}

int Channel::connect_first() {
    const std::int64_t until_ns = Connection::now_ns() + options_.connect_timeout_ns;
    int error = EADDRNOTAVAIL;
    for (std::size_t i = 0; i < addresses_.size(); ++i) {
        const int fd = begin_connect(addresses_[i]);
        error = fd < 0 ? errno : finish_connect(fd, until_ns);
        if (error == 0) {
            // The one that answers is used from now on.
            addresses_ = {addresses_[i]};
            return fd;
        }
        if (fd >= 0) {
            close(fd);
        }
    }
    fail_with(error, options_.host + ':' + std::to_string(options_.port));
}

int Channel::connect_again(std::string& why) {
    const std::int64_t now_ns = Connection::now_ns();
    if (now_ns < retry_at_ns_) {
        why = down_;
        return -1;
    }
    const int fd = begin_connect(addresses_.front());
    if (fd < 0) {
        why = down_ = lost_text(errno);
        pause(now_ns);
    }
    return fd;
}

void Channel::pause(std::int64_t now_ns) { retry_at_ns_ = now_ns + kPause_ns; }

int code_of_http(int status) {
    if (status >= 200 && status < 300) {
        return kOk;
    }
    switch (status) {
        case 400:
            return kInternal;
        case 401:
            return kUnauthenticated;
        case 403:
            return kPermissionDenied;
        case 404:
            return kUnimplemented;
        case 429:
        case 502:
        case 503:
        case 504:
            return kUnavailable;
        default:
            return kUnknown;
    }
}

std::string lost_text(int error) {
    return error == 0 ? "the server closed the connection"
                      : "the connection is lost: " + std::generic_category().message(error);
}

}  // namespace gnnserve::load
