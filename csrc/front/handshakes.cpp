// Turns of TLS handshakes: each costs the server a signature, and its client next to nothing.
//
// A connection whose handshake has something to take waits for its turn. One goes on in each turn
// of the front, so that others wait for one signature at most, and all together take a share of the
// thread's time, so that they leave the processor to requests. Addresses have their turns one after
// the other: who begins hundreds of handshakes makes its own wait.
#include <sys/epoll.h>
#include <time.h>

#include <algorithm>
#include <new>

#include "peers.hpp"

namespace gnnserve::front {
namespace {

constexpr auto kRoom = static_cast<std::uint32_t>(EPOLLOUT);

// Seconds that this thread has run.
double run_s() {
    timespec now{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) / 1e9;
}

}  // namespace

// Gives the client's handshake the next turn of its address that is free. One that has hung up
// needs none.
void Front::wait_for_turn(Client& client, std::uint32_t events) {
    if (events & (EPOLLHUP | EPOLLERR)) {
        end(client);
        return;
    }
    if (client.handshake) {
        return;
    }
    std::uint64_t& round = peers_.find(client.peer)->second.round;
    const Turn turn{std::max(round_, round + 1), next_turn_++};
    handshakes_.emplace(turn, &client);
    client.handshake = turn;
    round = turn.first;
}

void Front::lose_turn(Client& client) noexcept {
    if (client.handshake) {
        handshakes_.erase(*client.handshake);
        client.handshake.reset();
    }
}

// Until a handshake may go on; negative: none waits.
std::int64_t Front::until_handshake_ns() {
    if (handshakes_.empty()) {
        return -1;
    }
    const double left_s = handshake_s_.left(Connection::now_ns());
    return left_s > 0 ? 0 : static_cast<std::int64_t>(-left_s / kHandshakeShare * 1e9) + 1;
}

// Goes on with the handshake whose turn it is, if there is time for one.
void Front::shake_hands() {
    if (until_handshake_ns() != 0) {
        return;
    }
    const auto [turn, client] = *handshakes_.begin();
    round_ = turn.first;
    lose_turn(*client);
    const double began_s = run_s();
    client->touched();
    try {
        // What is left, and whatever comes, is told of again.
        if (client->connection->receive(buffer_.data(), buffer_.size(), 1)) {
            watch(client->connection->fd(), client, client->wants_room ? kRoom : 0u, true);
        } else {
            end(*client);
        }
    } catch (const std::bad_alloc&) {
        short_of_memory(*client->connection);
    }
    handshake_s_.spend(run_s() - began_s);
}

// Ends connections whose client takes its time for the handshake.
void Front::end_slow_handshakes(std::int64_t now_ns) {
    for (auto at = clients_.begin(); at != clients_.end();) {
        Client& client = **at++;
        if (client.connection->shakes_hands() && !client.handshake &&
            now_ns - client.since_ns >= options_.receive_timeout_ns) {
            counts_.handshakes += 1;
            end(client);
        }
    }
}

}  // namespace gnnserve::front
