// How connections come in: where the front listens, and how many it takes of whom.
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <exception>
#include <iterator>

#include "peers.hpp"
#include "system_calls.hpp"

namespace gnnserve::front {
namespace {

constexpr int kTurnAccepts = 64;
constexpr int kBacklog = 1024;
// Descriptors left to the rest of the process, which needs some to start a lane again.
constexpr rlim_t kKeptDescriptors = 64;
// A connection that got an answer is in use for so long.
constexpr std::int64_t kActive_ns = 1'000'000'000;

// Whom connections from an address count for: an IPv4 address, or a network of IPv6, of which a
// single client usually has all addresses.
std::string peer_of(const sockaddr_storage& address) {
    const auto bytes = [](const void* from, std::size_t size) {
        return std::string(static_cast<const char*>(from), size);
    };
    if (address.ss_family == AF_INET) {
        return bytes(&reinterpret_cast<const sockaddr_in&>(address).sin_addr, 4);
    }
    if (address.ss_family == AF_INET6) {
        const in6_addr& six = reinterpret_cast<const sockaddr_in6&>(address).sin6_addr;
        return IN6_IS_ADDR_V4MAPPED(&six) ? bytes(&six.s6_addr[12], 4) : bytes(&six, 8);
    }
    return {};
}

// The process at the other end of a Unix socket is of this user; any process can read its name.
bool is_ours(int fd) {
    ucred peer{};
    socklen_t size = sizeof peer;
    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.uid == geteuid();
}

}  // namespace

bool is_one_of_the_last(int fd) {
    rlimit limit{};
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) {
        return false;
    }
    // Numbers are given from the lowest: as many are taken.
    return static_cast<rlim_t>(fd) + std::min(limit.rlim_cur / 2, kKeptDescriptors) >=
           limit.rlim_cur;
}

void Front::listen() {
    addrinfo hints{};
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
    addrinfo* found = nullptr;
    const std::string port = std::to_string(options_.port);
    const char* host = options_.host.empty() ? nullptr : options_.host.c_str();
    if (const int code = getaddrinfo(host, port.c_str(), &hints, &found); code != 0) {
        throw std::system_error(EADDRNOTAVAIL, std::generic_category(), gai_strerror(code));
    }
    const std::unique_ptr<addrinfo, void (*)(addrinfo*)> addresses(found, freeaddrinfo);
    port_ = options_.port;
    for (const addrinfo* one = found; one != nullptr; one = one->ai_next) {
        const int fd = socket(one->ai_family, one->ai_socktype | SOCK_NONBLOCK | SOCK_CLOEXEC,
                              one->ai_protocol);
        if (fd < 0) {
            if (errno == EAFNOSUPPORT && one->ai_next != nullptr) {
                continue;
            }
            fail_with("socket");
        }
        listeners_.push_back(fd);
        const int yes = 1;
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
        sockaddr_storage address{};
        std::memcpy(&address, one->ai_addr, one->ai_addrlen);
        // A host of several addresses has the same port on each.
        auto& number = one->ai_family == AF_INET6
                           ? reinterpret_cast<sockaddr_in6&>(address).sin6_port
                           : reinterpret_cast<sockaddr_in&>(address).sin_port;
        number = htons(static_cast<std::uint16_t>(port_));
        checked(bind(fd, reinterpret_cast<const sockaddr*>(&address), one->ai_addrlen), "bind");
        checked(::listen(fd, kBacklog), "listen");
        socklen_t size = sizeof address;
        checked(getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size), "getsockname");
        port_ = ntohs(number);
        watch_as(Watched::kListener, fd);
    }
    if (!options_.inside.empty()) {
        listen_inside();
    }
}

// Listens for processes of this user, without encryption.
void Front::listen_inside() {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    if (options_.inside.size() + 1 > sizeof address.sun_path) {
        errno = ENAMETOOLONG;
        fail_with(options_.inside);
    }
    std::memcpy(address.sun_path + 1, options_.inside.data(), options_.inside.size());
    const auto size =
        static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + options_.inside.size());
    const int fd =
        checked(socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), "socket");
    listeners_.push_back(fd);
    checked(bind(fd, reinterpret_cast<const sockaddr*>(&address), size), "bind");
    checked(::listen(fd, kBacklog), "listen");
    watch_as(Watched::kListener, fd);
}

// Takes connections, within the limits on their number.
void Front::accept_some() {
    for (const int listener : listeners_) {
        for (int i = 0; i < kTurnAccepts; ++i) {
            sockaddr_storage address{};
            socklen_t size = sizeof address;
            const int fd = accept4(listener, reinterpret_cast<sockaddr*>(&address), &size,
                                   SOCK_NONBLOCK | SOCK_CLOEXEC);
            if (fd < 0 && (errno == EMFILE || errno == ENFILE) && spare_ >= 0) {
                // Refuse one with the descriptor kept for this: it would be asked for for ever.
                close(spare_);
                if (const int refused = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
                    refused >= 0) {
                    close(refused);
                    counts_.connections += 1;
                }
                keep_spare();
                break;
            }
            if (fd < 0) {
                break;
            }
            const bool inside = address.ss_family == AF_UNIX;
            if (inside && !is_ours(fd)) {
                close(fd);
                continue;
            }
            admit(fd, peer_of(address), inside);
        }
    }
}

// Serves a connection, or closes it.
void Front::admit(int fd, std::string peer, bool inside) {
    const bool few_left = is_one_of_the_last(fd);
    const bool many = clients_.size() >= options_.max_connections || few_left;
    const auto at = peers_.find(peer);
    const bool many_of_peer =
        at != peers_.end() && at->second.connections >= options_.max_connections_of_peer;
    auto& count = many_of_peer ? counts_.peer_connections : counts_.connections;
    if (many || many_of_peer) {
        count += 1;
        if (!make_room(many_of_peer ? &peer : nullptr)) {
            close(fd);
            return;
        }
    }
    if (few_left) {
        // The one that was ended has left a lower one.
        const int lower = fcntl(fd, F_DUPFD_CLOEXEC, 0);
        close(fd);
        if (lower < 0) {
            return;
        }
        fd = lower;
    }
    std::shared_ptr<const TlsContext> tls;
    if (!inside) {
        const std::lock_guard held(lock_);
        tls = tls_;
    }
    std::unique_ptr<Client> added;
    try {
        added = std::make_unique<Client>(*this, fd, tls.get(), inside);
        peers_.try_emplace(peer);
        clients_.push_back(std::move(added));
    } catch (const std::exception&) {  // the system, or the library, is short of something
        if (added == nullptr) {
            close(fd);
        }
        if (const auto at = peers_.find(peer); at != peers_.end() && at->second.connections == 0) {
            peers_.erase(at);
        }
        counts_.connections += 1;
        return;
    }
    Client& client = *clients_.back();
    client.place = std::prev(clients_.end());
    peers_.find(peer)->second.connections += 1;
    client.peer = std::move(peer);
    counts_.open_connections += 1;
    try {
        watch(fd, &client, 0, false);
        client.touched();
    } catch (const std::exception&) {
        counts_.connections += 1;
        end(client);
    }
}

// Ends the connection that has been idle for the longest, of that peer or of all (null); false when
// none is. One of this user's processes, which many clients share, never is; nor is one that got an
// answer just now: its client may have sent the next request.
bool Front::make_room(const std::string* peer) {
    Client* idle = nullptr;
    const std::int64_t answered_before_ns = Connection::now_ns() - kActive_ns;
    for (const auto& client : clients_) {
        const Connection& connection = *client->connection;
        if ((peer == nullptr || client->peer == *peer) && !client->inside &&
            connection.streams() == 0 && connection.answered_ns() < answered_before_ns &&
            (idle == nullptr || connection.progress_ns() < idle->connection->progress_ns())) {
            idle = client.get();
        }
    }
    if (idle == nullptr) {
        return false;
    }
    end(*idle);
    return true;
}

// Counts a connection of the peer no more.
void Front::leave(const std::string& peer) {
    const auto at = peers_.find(peer);
    if (at != peers_.end() && --at->second.connections == 0) {
        peers_.erase(at);
    }
}

void Front::keep_spare() { spare_ = open("/dev/null", O_RDONLY | O_CLOEXEC); }

}  // namespace gnnserve::front
