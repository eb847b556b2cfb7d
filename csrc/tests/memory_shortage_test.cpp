// A front without memory: each allocation of a session, and of all that the front's thread does,
// fails once. The connection ends, and nothing that was told is lost.

#include <sys/socket.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <new>

#include "caller.hpp"
#include "check.hpp"
#include "connection.hpp"
#include "front.hpp"

namespace {

// Allocations until one fails; negative: none does.
long left = -1;

}  // namespace

// Not inlined, or gcc takes `free` for the wrong end of what `new` returned.
[[gnu::noinline]] void* operator new(std::size_t size) {
    if (left >= 0 && left-- == 0) {
        throw std::bad_alloc();
    }
    if (void* found = std::malloc(size)) {
        return found;
    }
    throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* at) noexcept { std::free(at); }
[[gnu::noinline]] void operator delete(void* at, std::size_t) noexcept { std::free(at); }

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
    void touched() noexcept override {}
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

constexpr char kMethod[] = "/test.Service/Infer", kStreamMethod[] = "/test.Service/Stream";

FrontOptions front_options() {
    FrontOptions found;
    found.host = "127.0.0.1";
    found.backend = "gnnserve-test-nobody-listens-here";
    found.method = kMethod;
    found.stream_method = kStreamMethod;
    found.stream_window = 2;
    found.asks = true;
    return found;
}

// A client's calls, a stream of messages and a call for the server behind, during which allocation
// number `at` of `poll` fails (negative: none does). Returns false when there were fewer.
bool serve(Front& front, const H2Api& api, long at) {
    std::map<std::uint64_t, int> told, ended;
    bool failed = false;
    const auto turn = [&](long& unused) {
        left = unused;
        // No exception comes out of it.
        const Polled polled = front.poll(Connection::now_ns() + 200'000);
        unused = left;
        left = -1;
        for (const Event& event : polled.events) {
            if (event.kind == Event::Kind::kEnded) {
                ended[event.handle] += 1;
            } else if (event.kind == Event::Kind::kAsked) {
                front.admit(event.handle);
            } else {
                told[event.handle] += 1;
                front.answer(event.handle, {Piece::of(std::string(kBody))});
            }
        }
    };
    long unused = at;
    {
        Caller caller(api, front.port());
        const std::string message = message_head(kBody.size()) + kBody;
        std::vector<std::int32_t> ids;
        for (int i = 0; i < 2; ++i) {
            ids.push_back(caller.send(kMethod, kBody));
        }
        ids.push_back(caller.send("/test.Service/Other", kBody));
        Stream* stream = caller.begin(kStreamMethod);
        ids.push_back(stream->id());
        for (int i = 0; i < kCalls; ++i) {
            stream->write(Piece::of(std::string(message)));
        }
        stream->finish({});
        const auto over = [&] {
            return std::all_of(ids.begin(), ids.end(),
                               [&](auto id) { return caller.replies[id].over; });
        };
        while (!over()) {
            if (!caller.connection().flush()) {
                break;
            }
            turn(unused);
            if (!caller.connection().receive(caller.buffer(), 1 << 16, 1 << 16)) {
                break;
            }
        }
        failed = at >= 0 && unused < 0;
        CHECK(over() || failed);
        if (!failed) {
            CHECK(told.size() == 2 + kCalls);
        }
    }
    long none = -1;
    while (front.counts().open_connections > 0) {
        turn(none);
    }
    turn(none);
    turn(none);
    // Whatever was told has ended, once.
    CHECK(front.counts().open_calls == 0);
    for (const auto& [handle, count] : told) {
        CHECK(count == 1 && ended[handle] == 1);
    }
    return failed;
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
    Front front(front_options());
    CHECK(!serve(front, *api, -1));
    for (failed = 0; serve(front, *api, failed); ++failed) {
        CHECK(!serve(front, *api, -1));
    }
    CHECK(failed > 100);
    return 0;
}
