// Connections without memory: each allocation of a session fails once, and the connection ends.

#include <sys/socket.h>

#include <cstdlib>
#include <new>

#include "check.hpp"
#include "connection.hpp"

namespace {

// Allocations until one fails; negative: none does.
long left = -1;

}  // namespace

void* operator new(std::size_t size) {
    if (left >= 0 && left-- == 0) {
        throw std::bad_alloc();
    }
    if (void* found = std::malloc(size)) {
        return found;
    }
    throw std::bad_alloc();
}
void operator delete(void* at) noexcept { std::free(at); }
void operator delete(void* at, std::size_t) noexcept { std::free(at); }

using namespace gnnserve::front;

namespace {

constexpr int kSkipped = 77;
constexpr int kCalls = 5;
const std::string kBody(40'000, 'b');

// One end of a connection, which answers each request with its body, and counts whole answers.
struct End : ConnectionEvents {
    End(const H2Api& api, int fd, Connection::Side side)
        : connection(api, fd, side, limits(), *this), serves(side == Connection::Side::kServer) {}

    static ConnectionLimits limits() {
        ConnectionLimits found;
        found.streams = 100;
        return found;
    }

    void headers(Stream& stream, bool) override {
        if (serves) {
            connection.respond(stream, {{":status", "200"}, {"content-type", "text/plain"}}, true);
        }
    }
    void data(Stream& stream, std::string_view bytes) override {
        received += bytes.size();
        connection.consumed(stream, bytes.size());
        if (serves) {
            stream.write_copy(bytes);
        }
    }
    void ended(Stream& stream) override {
        if (serves) {
            stream.finish({{"status", "0"}});
        }
    }
    void closed(Stream&, std::uint32_t) override { over += 1; }
    void sent(Stream&, std::size_t) override {}
    void touched() override {}
    void out_of_memory() noexcept override { short_of_memory += 1; }

    Connection connection;
    const bool serves;
    std::size_t received = 0;
    int over = 0, short_of_memory = 0;
};

// Has the server lack memory for its allocation number `at` (negative: for none) of a session of
// calls. Returns false when there were fewer.
bool converse(const H2Api& api, long at) {
    int pair[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
    End client(api, pair[0], Connection::Side::kClient);
    End server(api, pair[1], Connection::Side::kServer);
    for (int i = 0; i < kCalls; ++i) {
        Stream* stream = client.connection.request(
            {{":method", "POST"}, {":scheme", "http"}, {":path", "/"}, {":authority", "t"}}, true);
        CHECK(stream != nullptr);
        stream->write_copy(kBody);
        stream->finish({});
    }
    std::string buffer(1 << 16, '\0');
    long unused = at;
    while (client.over < kCalls) {
        CHECK(client.connection.flush());
        left = unused;
        // No exception comes out of either.
        const bool goes_on =
            server.connection.receive(buffer.data(), buffer.size(), buffer.size()) &&
            server.connection.flush();
        unused = left;
        left = -1;
        CHECK(goes_on == (server.short_of_memory == 0));
        if (!goes_on) {
            CHECK(server.short_of_memory == 1);
            return true;
        }
        CHECK(client.connection.receive(buffer.data(), buffer.size(), buffer.size()));
    }
    CHECK(client.received == kCalls * kBody.size() && client.short_of_memory == 0);
    return false;
}

}  // namespace

int main() {
    std::string why;
    const H2Api* api = h2_api(why);
    if (api == nullptr) {
        std::fprintf(stderr, "skipped: %s\n", why.c_str());
        return kSkipped;
    }
    CHECK(!converse(*api, -1));
    long failed = 0;
    while (converse(*api, failed)) {
        ++failed;
        // Who comes next is served.
        CHECK(!converse(*api, -1));
    }
    CHECK(failed > 50);
    return 0;
}
