// Messages that are staged as they come: what is held of them meanwhile, and who gives way to whom.

#include <cstring>
#include <random>
#include <set>

#include "caller.hpp"
#include "check.hpp"
#include "front.hpp"
#include "plain_models.hpp"

using namespace gnnserve;
using namespace gnnserve::front;

namespace {

constexpr int kSkipped = 77;
constexpr char kMethod[] = "/test.Service/Infer";
constexpr std::int64_t kPoolBytes = 16 << 20;
constexpr std::int64_t kFeatures = 64;

// A front with one model, in whose pool messages are staged.
struct Staging {
    explicit Staging(std::int64_t pool_bytes = kPoolBytes,
                     std::int64_t receive_timeout_ns = 600'000'000'000,
                     std::size_t connection_bytes = 128 << 20)
        : memory(std::make_shared<std::vector<std::byte>>(static_cast<std::size_t>(pool_bytes))),
          pool(std::make_shared<BlockPool>(memory->data(), pool_bytes, kTensorAlignment, memory)),
          front(options(receive_timeout_ns, connection_bytes)) {
        auto models = std::make_shared<PlainModels>();
        models->add("m", "", std::make_shared<PlainModel>(short_form(kFeatures)));
        front.set_models(std::move(models));
    }

    FrontOptions options(std::int64_t receive_timeout_ns, std::size_t connection_bytes) const {
        FrontOptions found;
        found.host = "127.0.0.1";
        found.backend = "gnnserve-test-nobody-listens-here";
        found.method = kMethod;
        found.max_message_bytes = 32 << 20;
        found.receive_timeout_ns = receive_timeout_ns;
        found.max_receiving_bytes_of_connection = connection_bytes;
        found.pool = pool;
        return found;
    }

    // Has both sides go on until `done`.
    template <class Done>
    void until(Caller& caller, Done done) {
        const std::int64_t end_ns = Connection::now_ns() + 60'000'000'000;
        while (!done()) {
            CHECK(Connection::now_ns() < end_ns);
            caller.look();
            for (Event& event : front.poll(Connection::now_ns() + 1'000'000).events) {
                events.push_back(std::move(event));
            }
        }
    }

    // Until nothing moves any more.
    void settle(Caller& caller) {
        int left = 300;
        until(caller, [&left] { return --left == 0; });
    }

    std::shared_ptr<std::vector<std::byte>> memory;
    std::shared_ptr<BlockPool> pool;
    Front front;
    std::vector<Event> events;
};

// A graph of that many nodes and half as many edges, of which the last is `last`.
std::string message(std::int64_t nodes, std::int64_t last = 0) {
    InferMessage head;
    head.model = "m";
    head.tensors = {{"x", "FP32", {nodes, kFeatures}, {}},
                    {"edge_index", "INT64", {2, nodes / 2}, {}}};
    std::string x(static_cast<std::size_t>(nodes * kFeatures * 4), '\0');
    std::mt19937 random(static_cast<std::uint32_t>(nodes));
    for (std::size_t at = 0; at < x.size(); at += 4) {
        const float one = static_cast<float>(random() % 1000);
        std::memcpy(x.data() + at, &one, sizeof one);
    }
    std::string edges(static_cast<std::size_t>(nodes / 2 * 16), '\0');
    std::memcpy(edges.data() + edges.size() - sizeof last, &last, sizeof last);
    return write_infer(head) + raw_prefix(InferKind::kRequest, x.size()) + x +
           raw_prefix(InferKind::kRequest, edges.size()) + edges;
}

// Bytes of a message whose block is taken by them.
constexpr std::size_t kHeadBytes = 500;

void test_large_messages_are_staged_without_a_buffer(const H2Api& api) {
    Staging server;
    Caller caller(api, server.front.port());
    for (const bool wrong : {false, true}) {
        const std::string sent = message(30'000, wrong ? 30'000 : 0);
        CHECK(sent.size() > 7 << 20);
        caller.send(kMethod, sent);
        server.until(caller, [&] { return !server.events.empty(); });
        const auto plain = server.events[0].plain;
        CHECK(plain != nullptr && server.events[0].message == nullptr);
        CHECK(plain->valid() != wrong && plain->message() == sent && plain->held_bytes() < 1000);
        server.events.clear();
    }
    CHECK(server.front.counts().plain == 1 && server.front.counts().called == 2);
    CHECK(server.pool->used() == 0);
}

void test_a_call_that_ends_gives_its_block_back(const H2Api& api) {
    Staging server;
    const std::string sent = message(20'000);
    auto caller = std::make_unique<Caller>(api, server.front.port());
    const auto begin = [&](std::size_t size) {
        Stream* stream = caller->begin(kMethod);
        stream->write(Piece::of(message_head(sent.size()) + sent.substr(0, size)));
        return stream;
    };
    for (const std::size_t size : {kHeadBytes, sent.size() / 2, sent.size()}) {
        Stream* stream = begin(size);
        server.until(*caller,
                     [&] { return server.pool->used() > 0 && stream->waiting_bytes() == 0; });
        server.settle(*caller);
        CHECK(server.pool->used() > 5 << 20);
        caller->connection().reset(*stream, kCancel);
        server.until(*caller, [&] { return server.pool->used() == 0; });
    }
    begin(sent.size() / 2);
    server.until(*caller, [&] { return server.pool->used() > 0; });
    caller.reset();
    while (server.pool->used() > 0) {
        server.front.poll(Connection::now_ns() + 1'000'000);
    }
    CHECK(server.events.empty());
}

void test_without_room_a_message_waits_unread(const H2Api& api) {
    Staging server;
    Caller caller(api, server.front.port());
    auto taken = server.pool->block(kPoolBytes);
    const std::string sent = message(30'000);
    Stream* stream = caller.begin(kMethod);
    stream->write(Piece::of(message_head(sent.size()) + sent));
    stream->finish({});
    server.settle(caller);
    // No more than the stream's window has left the client.
    CHECK(stream->waiting_bytes() >= sent.size() - (1 << 20));
    CHECK(server.events.empty());
    // Others are served meanwhile; a message that is all here goes the way of bytes.
    const std::string small = message(100);
    caller.send(kMethod, small);
    server.until(caller, [&] { return !server.events.empty(); });
    CHECK(server.events[0].message != nullptr && *server.events[0].message == small);
    server.events.clear();
    taken.reset();
    server.until(caller, [&] { return !server.events.empty(); });
    CHECK(server.events[0].plain != nullptr && server.events[0].plain->message() == sent);
    // What the pool could never hold is Python's to refuse.
    const std::string huge = message(70'000);
    CHECK(huge.size() > kPoolBytes);
    caller.send(kMethod, huge);
    server.until(caller, [&] { return server.events.size() == 2; });
    CHECK(server.events[1].message != nullptr && *server.events[1].message == huge);
}

void test_who_waits_in_vain_is_told(const H2Api& api) {
    Staging server(kPoolBytes, 600'000'000);
    Caller caller(api, server.front.port());
    const auto taken = server.pool->block(kPoolBytes - (4 << 20));
    const auto id = caller.send(kMethod, message(30'000));
    server.until(caller, [&] { return caller.replies[id].over; });
    const auto& fields = caller.replies[id].fields;
    CHECK(fields.at("grpc-status") == "8");
    CHECK(fields.at("grpc-message").starts_with("staging memory: the request needs 7"));
    CHECK(fields.at("grpc-retry-pushback-ms") == "50");
    CHECK(server.front.counts().receiving_bytes == 1);
}

void test_who_claims_and_does_not_send_gives_way(const H2Api& api) {
    Staging server(kPoolBytes, 60'000'000'000);
    Caller caller(api, server.front.port());
    const std::string sent = message(20'000);
    // Half the pool at most is for messages on their way, one of them however large it is.
    std::vector<std::int32_t> idle;
    for (int i = 0; i < 8; ++i) {
        Stream* stream = caller.begin(kMethod);
        stream->write(Piece::of(message_head(sent.size()) + sent.substr(0, kHeadBytes)));
        idle.push_back(stream->id());
    }
    server.settle(caller);
    CHECK(server.pool->used() > 5 << 20 && server.pool->used() <= kPoolBytes / 2);
    const auto good = caller.send(kMethod, sent);
    server.until(caller, [&] { return !server.events.empty(); });
    CHECK(server.events[0].plain != nullptr && server.events[0].plain->message() == sent);
    CHECK(!caller.replies[good].over);
    std::size_t refused = 0;
    for (const auto id : idle) {
        if (caller.replies[id].over) {
            CHECK(caller.replies[id].fields.at("grpc-status") == "8");
            CHECK(caller.replies[id].fields.at("grpc-message").find("too slowly") !=
                  std::string::npos);
            ++refused;
        }
    }
    CHECK(refused > 0 && server.front.counts().receiving_bytes == refused);
}

// Who waits for the blocks of its own connection keeps nobody else waiting.
void test_a_connection_has_so_much_of_the_pool(const H2Api& api) {
    constexpr std::int64_t kMost = 12 << 20;
    Staging server(64 << 20, 600'000'000'000, kMost);
    Caller greedy(api, server.front.port()), modest(api, server.front.port());
    const std::string sent = message(20'000);
    std::vector<Stream*> begun;
    for (int i = 0; i < 6; ++i) {
        Stream* stream = greedy.begin(kMethod);
        stream->write(Piece::of(message_head(sent.size()) + sent.substr(0, sent.size() - 1)));
        begun.push_back(stream);
    }
    const auto complete = [&](std::size_t first) {
        for (std::size_t i = first; i < first + 2; ++i) {
            CHECK(begun[i]->waiting_bytes() == 0);
            begun[i]->write(Piece::of(sent.substr(sent.size() - 1)));
            begun[i]->finish({});
        }
        server.until(greedy, [&] { return server.events.size() == 2; });
        for (const Event& event : server.events) {
            CHECK(event.plain != nullptr && event.plain->message() == sent);
        }
        server.events.clear();
    };
    server.until(greedy, [&] { return begun[1]->waiting_bytes() == 0; });
    server.settle(greedy);
    CHECK(server.pool->used() > 10 << 20 && server.pool->used() <= kMost);
    modest.send(kMethod, sent);
    server.until(modest, [&] { return !server.events.empty(); });
    CHECK(server.events[0].plain != nullptr && server.events[0].plain->message() == sent);
    server.events.clear();
    for (std::size_t first = 0; first < begun.size(); first += 2) {
        server.until(greedy, [&] { return begun[first + 1]->waiting_bytes() == 0; });
        complete(first);
    }
    CHECK(server.pool->used() == 0 && server.front.counts().receiving_bytes == 0);
}

// Nothing is left of a call that ends while it waits for the blocks of its own connection.
void test_who_ends_waits_no_more(const H2Api& api) {
    constexpr std::int64_t kMost = 12 << 20;
    Staging server(64 << 20, 600'000'000'000, kMost);
    auto caller = std::make_unique<Caller>(api, server.front.port());
    const std::string sent = message(20'000);
    const auto begin = [&] {
        Stream* stream = caller->begin(kMethod);
        stream->write(Piece::of(message_head(sent.size()) + sent.substr(0, sent.size() - 1)));
        return stream;
    };
    Stream* first = begin();
    begin();
    server.until(*caller, [&] { return server.pool->used() > 10 << 20; });
    Stream* waits = begin();
    server.settle(*caller);
    caller->connection().reset(*waits, kCancel);
    server.settle(*caller);
    first->write(Piece::of(sent.substr(sent.size() - 1)));
    first->finish({});
    server.until(*caller, [&] { return server.events.size() == 1; });
    server.events.clear();
    for (int i = 0; i < 3; ++i) {
        begin();
    }
    server.settle(*caller);
    caller = std::make_unique<Caller>(api, server.front.port());
    caller->send(kMethod, sent);
    // The end of the first one, and then this one.
    server.until(*caller, [&] { return server.events.size() == 2; });
    CHECK(server.events[1].plain != nullptr && server.events[1].plain->message() == sent);
}

// Who sends hundreds of calls at once has them read as they are told, each once, and keeps no
// other's call waiting for more than a few.
void test_calls_are_read_as_they_are_told(const H2Api& api) {
    Staging server;
    Front& front = server.front;
    Caller greedy(api, front.port()), modest(api, front.port());
    constexpr std::size_t kCalls = 400;
    for (std::size_t i = 0; i < kCalls; ++i) {
        greedy.send(kMethod, message(2 + static_cast<std::int64_t>(i % 8)));
    }
    greedy.look();
    std::size_t told = 0;
    std::set<std::uint64_t> handles;
    std::int64_t most_bytes = 0, call_bytes = 0;
    const auto take = [&] {
        std::size_t modest_calls = 0;
        for (const Event& event : front.poll(-1).events) {
            const auto nodes = static_cast<std::size_t>(event.plain->counts()[0]);
            if (nodes == 100) {
                ++modest_calls;
                continue;
            }
            CHECK(handles.insert(event.handle).second);
            call_bytes = std::max(call_bytes, event.plain->block_size());
            ++told;
        }
        most_bytes = std::max(most_bytes, server.pool->used());
        return modest_calls;
    };
    take();
    CHECK(told > 0);
    modest.send(kMethod, message(100));
    modest.look();
    const std::size_t before = told;
    while (take() == 0) {
    }
    CHECK(told - before <= 16);
    while (told < kCalls) {
        greedy.look();
        take();
    }
    CHECK(most_bytes <= 64 * call_bytes);
}

}  // namespace

int main() {
    std::string why;
    const H2Api* api = h2_api(why);
    if (api == nullptr) {
        std::fprintf(stderr, "skipped: %s\n", why.c_str());
        return kSkipped;
    }
    test_large_messages_are_staged_without_a_buffer(*api);
    test_a_call_that_ends_gives_its_block_back(*api);
    test_without_room_a_message_waits_unread(*api);
    test_who_waits_in_vain_is_told(*api);
    test_who_claims_and_does_not_send_gives_way(*api);
    test_a_connection_has_so_much_of_the_pool(*api);
    test_who_ends_waits_no_more(*api);
    test_calls_are_read_as_they_are_told(*api);
    return 0;
}
