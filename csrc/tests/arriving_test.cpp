#include "gnnserve/arriving.hpp"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <span>
#include <system_error>
#include <thread>
#include <vector>

#include "check.hpp"

using gnnserve::Arrived;
using gnnserve::read_arriving;

namespace {

// Two ends of a connection; the first does not block.
struct Pair {
    int near = -1;
    int far = -1;

    Pair() {
        int ends[2];
        CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
        near = ends[0];
        far = ends[1];
        CHECK(fcntl(near, F_SETFL, O_NONBLOCK) == 0);
    }
    ~Pair() {
        close(near);
        if (far >= 0) {
            close(far);
        }
    }
    Pair(const Pair&) = delete;
    Pair& operator=(const Pair&) = delete;
};

std::vector<std::byte> some(std::size_t size_bytes) {
    std::vector<std::byte> bytes(size_bytes);
    for (std::size_t at = 0; at < size_bytes; ++at) {
        bytes[at] = static_cast<std::byte>(at * 7 % 251);
    }
    return bytes;
}

void send_all(int socket, const std::vector<std::byte>& bytes) {
    for (std::size_t at = 0; at < bytes.size();) {
        const ssize_t sent = send(socket, bytes.data() + at, bytes.size() - at, 0);
        CHECK(sent > 0);
        at += static_cast<std::size_t>(sent);
    }
}

void test_bytes_are_read_in_order_and_never_beyond_the_target() {
    const Pair pair;
    const std::vector<std::byte> sent = some(3'000'001);
    std::thread sender([&] { send_all(pair.far, sent); });
    std::vector<std::byte> read(2'500'000);
    std::size_t filled = 0;
    while (filled < read.size()) {
        const Arrived arrived = read_arriving(pair.near, std::span(read).subspan(filled));
        CHECK(!arrived.ended);
        filled += arrived.size_bytes;
    }
    CHECK(filled == read.size());
    CHECK(std::equal(read.begin(), read.end(), sent.begin()));
    std::vector<std::byte> rest(sent.size() - read.size());
    for (filled = 0; filled < rest.size();) {
        filled += read_arriving(pair.near, std::span(rest).subspan(filled)).size_bytes;
    }
    CHECK(std::equal(rest.begin(), rest.end(), sent.begin() + 2'500'000));
    sender.join();
}

void test_nothing_to_read_and_no_room_are_no_end() {
    const Pair pair;
    std::vector<std::byte> target(10);
    const Arrived none = read_arriving(pair.near, target);
    CHECK(none.size_bytes == 0 && !none.ended);
    const Arrived no_room = read_arriving(pair.near, {});
    CHECK(no_room.size_bytes == 0 && !no_room.ended);
}

void test_the_end_is_told_with_what_came_before() {
    Pair pair;
    send_all(pair.far, some(100'000));
    close(pair.far);
    pair.far = -1;
    std::vector<std::byte> target(200'000);
    const Arrived arrived = read_arriving(pair.near, target);
    CHECK(arrived.size_bytes == 100'000 && arrived.ended);
}

void test_a_peer_that_drips_is_left() {
    const Pair pair;
    std::atomic<bool> left{false};
    std::thread sender([&] {
        const std::vector<std::byte> drop = some(100);
        while (!left) {
            send_all(pair.far, drop);
            std::this_thread::sleep_for(std::chrono::microseconds(200));
        }
    });
    std::vector<std::byte> target(1 << 28);
    const Arrived arrived = read_arriving(pair.near, target);
    left = true;
    CHECK(arrived.size_bytes < target.size() && !arrived.ended);
    sender.join();
}

void test_a_socket_that_fails_throws() {
    std::vector<std::byte> target(10);
    int code = 0;
    try {
        read_arriving(-1, target);
    } catch (const std::system_error& error) {
        code = error.code().value();
    }
    CHECK(code == EBADF);
}

}  // namespace

int main() {
    test_bytes_are_read_in_order_and_never_beyond_the_target();
    test_nothing_to_read_and_no_room_are_no_end();
    test_the_end_is_told_with_what_came_before();
    test_a_peer_that_drips_is_left();
    test_a_socket_that_fails_throws();
}
