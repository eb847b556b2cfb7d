#include "gnnserve/arriving.hpp"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <system_error>
#include <thread>

namespace gnnserve {
namespace {

// What the kernel copies in about 20 us.
constexpr std::size_t kPieceBytes = 64 * 1024;
// How long a pause between bytes may be.
constexpr int kPauseMs = 2;
// A peer is slow when fewer bytes come in the time.
constexpr std::size_t kLeastBytes = 1 << 20;
constexpr std::chrono::milliseconds kLeastEvery{20};

}  // namespace

Arrived read_arriving(int socket, std::span<std::byte> target) {
    using Clock = std::chrono::steady_clock;
    Arrived arrived;
    std::size_t checked_bytes = 0;
    Clock::time_point checked = Clock::now();
    while (arrived.size_bytes < target.size()) {
        const std::size_t wanted = std::min(kPieceBytes, target.size() - arrived.size_bytes);
        const ssize_t got = recv(socket, target.data() + arrived.size_bytes, wanted, 0);
        if (got > 0) {
            arrived.size_bytes += static_cast<std::size_t>(got);
            std::this_thread::yield();
            continue;
        }
        if (got == 0) {
            arrived.ended = true;
            break;
        }
        if (errno == EINTR) {
            continue;
        }
        if (errno != EAGAIN && errno != EWOULDBLOCK) {
            throw std::system_error(errno, std::generic_category(), "recv");
        }
        if (const Clock::time_point now = Clock::now(); now - checked > kLeastEvery) {
            if (arrived.size_bytes - checked_bytes < kLeastBytes) {
                break;
            }
            checked = now;
            checked_bytes = arrived.size_bytes;
        }
        pollfd waiting{socket, POLLIN, 0};
        if (poll(&waiting, 1, kPauseMs) == 0) {
            break;
        }
    }
    return arrived;
}

}  // namespace gnnserve
