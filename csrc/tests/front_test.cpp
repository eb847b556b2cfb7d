// The front over real sockets: messages in and answers out, refusals, floods, and two threads.

#include "front.hpp"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <thread>

#include "caller.hpp"
#include "check.hpp"
#include "plain_models.hpp"

#if __has_include(<nghttp2/nghttp2.h>)
#include <nghttp2/nghttp2.h>
#define GNNSERVE_HAS_NGHTTP2_HEADER
#endif

using namespace gnnserve::front;

namespace {

constexpr int kSkipped = 77;
constexpr char kMethod[] = "/test.Service/Infer";

#ifdef GNNSERVE_HAS_NGHTTP2_HEADER
// Our declarations are those of the library.
static_assert(sizeof(H2Field) == sizeof(nghttp2_nv));
static_assert(offsetof(H2Field, value_size) == offsetof(nghttp2_nv, valuelen));
static_assert(offsetof(H2Field, flags) == offsetof(nghttp2_nv, flags));
static_assert(sizeof(H2FrameHead) == sizeof(nghttp2_frame_hd));
static_assert(offsetof(H2FrameHead, stream_id) == offsetof(nghttp2_frame_hd, stream_id));
static_assert(offsetof(H2FrameHead, type) == offsetof(nghttp2_frame_hd, type));
static_assert(offsetof(H2Headers, category) == offsetof(nghttp2_headers, cat));
static_assert(sizeof(H2Provider) == sizeof(nghttp2_data_provider));
static_assert(sizeof(H2Setting) == sizeof(nghttp2_settings_entry));
static_assert(kDeferred == NGHTTP2_ERR_DEFERRED && kWouldBlock == NGHTTP2_ERR_WOULDBLOCK);
static_assert(kStreamFails == NGHTTP2_ERR_TEMPORAL_CALLBACK_FAILURE);
static_assert(kSessionFails == NGHTTP2_ERR_CALLBACK_FAILURE);
static_assert(kDataEnds == NGHTTP2_DATA_FLAG_EOF && kNoCopy == NGHTTP2_DATA_FLAG_NO_COPY);
static_assert(kNoEndStream == NGHTTP2_DATA_FLAG_NO_END_STREAM);
static_assert(kInitialWindowSize == NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE);
static_assert(kMaxHeaderListSize == NGHTTP2_SETTINGS_MAX_HEADER_LIST_SIZE);
#endif

FrontOptions options() {
    FrontOptions found;
    found.host = "127.0.0.1";
    found.backend = "gnnserve-test-nobody-listens-here";
    found.method = kMethod;
    found.max_message_bytes = 8 << 20;
    found.receive_timeout_ns = 600'000'000'000;
    return found;
}

// A front whose thread has every message answered, reversed, by another thread.
class Echo {
public:
    explicit Echo(const FrontOptions& options) : front(options), thread_([this] { run(); }) {}
    ~Echo() {
        stopping_ = true;
        front.wake();
        thread_.join();
        for (auto& one : helpers_) {
            one.join();
        }
    }

    Front front;
    std::atomic<int> ended{0};

private:
    void run() {
        while (!stopping_) {
            for (const Event& event : front.poll(-1).events) {
                if (event.kind == Event::Kind::kEnded) {
                    ended += 1;
                } else if (*event.message != "hold") {
                    helpers_.emplace_back([this, event] { reply(event); });
                }
            }
        }
    }

    void reply(const Event& event) {
        if (*event.message == "fail") {
            front.fail(event.handle, {8, "full: 100 %", 25});
        } else {
            front.answer(event.handle,
                         {Piece::of({event.message->rbegin(), event.message->rend()})});
        }
    }

    std::atomic<bool> stopping_{false};
    std::vector<std::thread> helpers_;
    std::thread thread_;
};

// A graph of a node with one feature and a loop, for a model whose output is 4 MB.
constexpr std::size_t kOutputBytes = 4 << 20;

std::string plain_message() {
    gnnserve::InferMessage head;
    head.model = "m";
    head.tensors = {{"x", "FP32", {1, 1}, {}}, {"edge_index", "INT64", {2, 1}, {}}};
    const auto raw = [](std::size_t size) {
        return gnnserve::raw_prefix(gnnserve::InferKind::kRequest, size) + std::string(size, '\0');
    };
    return gnnserve::write_infer(head) + raw(4) + raw(16);
}

void set_model(Front& front) {
    auto models = std::make_shared<PlainModels>();
    models->add("m", "", std::make_shared<PlainModel>(short_form(1, 0, kOutputBytes)));
    front.set_models(std::move(models));
}

// The next call of the front.
Event next_call(Front& front) {
    for (;;) {
        for (Event& event : front.poll(-1).events) {
            if (event.kind == Event::Kind::kCall) {
                return std::move(event);
            }
        }
    }
}

void test_staged_calls_are_answered_from_the_pool(const H2Api& api) {
    const auto memory = std::make_shared<std::vector<std::byte>>(2 * kOutputBytes);
    FrontOptions staging = options();
    staging.pool = std::make_shared<gnnserve::BlockPool>(
        memory->data(), static_cast<std::int64_t>(memory->size()), kTensorAlignment, memory);
    Front front(staging);
    set_model(front);
    Caller caller(api, front.port());
    const auto id = caller.send(kMethod, plain_message());
    CHECK(caller.connection().flush());
    Event event = next_call(front);
    CHECK(event.plain != nullptr && event.message == nullptr && event.arrived_ns >= event.began_ns);
    const std::int64_t at = event.plain->output_offset();
    std::memset(event.plain->block()->at(at), 'o', kOutputBytes);
    const char* output = reinterpret_cast<const char*>(event.plain->block()->at(at));
    // Two outputs, with something before each.
    constexpr std::size_t kPart = kOutputBytes / 2;
    auto block = event.plain->block();
    front.answer(event.handle, {Piece::of("head"),
                                {output, kPart, block, true},
                                Piece::of("next"),
                                {output + kPart, kPart, block, true}});
    event.plain->release();
    block.reset();
    // The client has read nothing yet, and the block is free all the same.
    front.flush();
    CHECK(staging.pool->used() == 0);
    std::memset(memory->data(), 'x', memory->size());
    std::thread reader([&] { CHECK(caller.wait(id)); });
    while (front.counts().open_calls > 0) {
        front.poll(Connection::now_ns() + 10'000'000);
    }
    reader.join();
    CHECK(caller.replies[id].body == message_head(8 + kOutputBytes) + "head" +
                                         std::string(kOutputBytes / 2, 'o') + "next" +
                                         std::string(kOutputBytes / 2, 'o'));
    CHECK(front.counts().plain == 1 && front.counts().called == 1);
    // Not plain, and a plain one for which there is no room.
    caller.send(kMethod, "odd");
    CHECK(caller.connection().flush());
    CHECK(*next_call(front).message == "odd");
    const auto taken = staging.pool->block(static_cast<std::int64_t>(memory->size()));
    caller.send(kMethod, plain_message());
    CHECK(caller.connection().flush());
    CHECK(*next_call(front).message == plain_message());
}

void test_packets_are_read_one_at_a_time(const H2Api& api) {
    Front front(options());
    int ends[2];
    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends) == 0);
    front.watch_packets(ends[0]);
    CHECK(front.poll(0).packets.empty());
    const std::string large(100'000, 'x');
    for (const std::string& one : {std::string("one"), large}) {
        CHECK(write(ends[1], one.data(), one.size()) == static_cast<ssize_t>(one.size()));
    }
    // Calls that wait to be told do not hide them.
    Caller caller(api, front.port());
    for (int i = 0; i < 20; ++i) {
        caller.send(kMethod, "hold");
    }
    CHECK(caller.connection().flush());
    for (const std::string& one : {std::string("one"), large}) {
        const Polled polled = front.poll(-1);
        CHECK(!polled.other && polled.packets.size() == 1);
        CHECK(polled.packets[0].first == ends[0] && polled.packets[0].second == one);
    }
    close(ends[1]);
    CHECK(front.poll(-1).packets[0].second.empty());
    front.unwatch_packets(ends[0]);
    while (!front.poll(0).events.empty()) {
    }
    CHECK(front.poll(0).packets.empty());
    close(ends[0]);
}

void test_another_descriptor_is_watched(const H2Api& api) {
    Front front(options());
    int ends[2];
    CHECK(pipe(ends) == 0);
    front.watch_also(ends[0]);
    CHECK(!front.poll(0).other);
    CHECK(write(ends[1], "x", 1) == 1);
    CHECK(front.poll(-1).other);
    // Calls that wait to be told do not hide it.
    Caller caller(api, front.port());
    for (int i = 0; i < 20; ++i) {
        caller.send(kMethod, "hold");
    }
    CHECK(caller.connection().flush());
    std::size_t told = 0;
    while (told < 20) {
        const Polled polled = front.poll(-1);
        CHECK(polled.other && polled.events.size() <= 4);
        told += polled.events.size();
    }
    front.watch_also(-1);
    CHECK(!front.poll(0).other);
    close(ends[0]);
    close(ends[1]);
}

// Ends of another client's calls keep no call waiting.
void test_ends_keep_no_call_waiting(const H2Api& api) {
    Front front(options());
    auto greedy = std::make_unique<Caller>(api, front.port());
    Caller modest(api, front.port());
    modest.look();
    constexpr std::size_t kCalls = 100;
    for (std::size_t i = 0; i < kCalls; ++i) {
        greedy->send(kMethod, "hold");
    }
    CHECK(greedy->connection().flush());
    for (std::size_t told = 0; told < kCalls;) {
        told += front.poll(-1).events.size();
    }
    modest.send(kMethod, "modest");
    CHECK(modest.connection().flush());
    greedy.reset();
    std::size_t before = 0, ends = 0;
    for (bool found = false; ends < kCalls || !found;) {
        for (const Event& event : front.poll(-1).events) {
            const bool is_end = event.kind == Event::Kind::kEnded;
            ends += is_end;
            before += is_end && !found;
            found = found || !is_end;
        }
    }
    CHECK(before <= 8);
}

void test_heads() {
    CHECK(parse_timeout("5m") == 5'000'000);
    CHECK(parse_timeout("99999999H") == std::numeric_limits<std::int64_t>::max());
    CHECK(parse_timeout("1n") == 1);
    for (const char* bad : {"", "S", "5", "-1S", "123456789S", "1x", "1 S"}) {
        CHECK(!parse_timeout(bad).has_value());
    }
    CHECK(percent_encoded("a b%\xc3\xa9\n") == "a b%25%C3%A9%0A");
    CHECK(message_head(0x01020304) == std::string("\0\1\2\3\4", 5));
    const Headers web{{":method", "POST"}, {"content-type", "application/grpc-web"}};
    CHECK(!read_head(web).plain);
    const Headers packed{
        {":method", "POST"}, {"content-type", "application/grpc+proto"}, {"grpc-encoding", "gzip"}};
    CHECK(!read_head(packed).plain);
}

void test_answers(const H2Api& api) {
    Echo echo(options());
    Caller caller(api, echo.front.port());
    std::vector<std::int32_t> ids;
    std::vector<std::string> sent;
    for (const std::size_t size : {0u, 1u, 5u, 70'000u, 3'000'000u, 8u << 20}) {
        std::string message(size, 'x');
        if (size > 0) {
            message.front() = 'a';
            message.back() = 'z';
        }
        ids.push_back(caller.send(kMethod, message));
        sent.push_back(std::move(message));
    }
    for (std::size_t i = 0; i < ids.size(); ++i) {
        CHECK(caller.wait(ids[i]));
        const auto& reply = caller.replies[ids[i]];
        CHECK(reply.fields.at("grpc-status") == "0");
        CHECK(reply.body.substr(0, kMessageHead) == message_head(sent[i].size()));
        CHECK(reply.body.substr(kMessageHead) == std::string(sent[i].rbegin(), sent[i].rend()));
    }
    const auto failed = caller.send(kMethod, "fail");
    CHECK(caller.wait(failed));
    CHECK(caller.replies[failed].fields.at("grpc-status") == "8");
    CHECK(caller.replies[failed].fields.at("grpc-message") == "full: 100 %25");
    CHECK(caller.replies[failed].fields.at("grpc-retry-pushback-ms") == "25");
    CHECK(echo.front.counts().called == ids.size() + 1);
}

void expect(Caller& caller, std::int32_t id, const char* code, const char* text) {
    CHECK(caller.wait(id));
    CHECK(caller.replies[id].fields.at("grpc-status") == code);
    CHECK(caller.replies[id].fields.at("grpc-message").find(text) != std::string::npos);
}

void test_refusals(const H2Api& api) {
    Echo echo(options());
    Caller caller(api, echo.front.port());
    const FrontCounts& counts = echo.front.counts();
    // Nobody is behind.
    expect(caller, caller.send("/test.Service/Other", "x"), "14", "cannot take this call");
    // Too large: refused by its head alone.
    Stream* large = caller.begin(kMethod);
    large->write(Piece::of(message_head((8u << 20) + 1)));
    expect(caller, large->id(), "8", "larger than max (8388609 vs. 8388608)");
    CHECK(counts.message_size == 1);
    // Two messages, none, half of one.
    Stream* two = caller.begin(kMethod);
    two->write(Piece::of(message_head(1) + "a" + message_head(1) + "b"));
    two->finish({});
    expect(caller, two->id(), "12", "exactly one request message");
    Stream* none = caller.begin(kMethod);
    none->finish({});
    expect(caller, none->id(), "12", "exactly one request message");
    Stream* half = caller.begin(kMethod);
    half->write(Piece::of(message_head(10) + "abc"));
    half->finish({});
    expect(caller, half->id(), "12", "exactly one request message");
    // Compressed, and the head of the call does not say so.
    Stream* packed = caller.begin(kMethod);
    packed->write(Piece::of(std::string("\1\0\0\0\1x", 6)));
    expect(caller, packed->id(), "13", "compressed");
    // Not gRPC.
    const auto web = caller.send(kMethod, "x", {{"content-type", "text/html"}});
    CHECK(caller.wait(web));
    CHECK(caller.replies[web].fields.at(":status") == "415");
    CHECK(counts.media_type == 1);
    // Headers beyond all measure end the stream, not the connection.
    const auto huge = caller.send(kMethod, "x", {{"a", std::string(20'000, 'h')}});
    CHECK(caller.wait(huge));
    CHECK(caller.replies[huge].error_code != kNoError);
    CHECK(counts.header_size == 1);
    const auto good = caller.send(kMethod, "ab");
    CHECK(caller.wait(good));
    CHECK(caller.replies[good].body == message_head(2) + "ba");
    CHECK(counts.open_calls == 0);
}

void test_messages_must_come_in_time(const H2Api& api) {
    FrontOptions hasty = options();
    hasty.receive_timeout_ns = 700'000'000;
    Echo echo(hasty);
    Caller caller(api, echo.front.port());
    Stream* late = caller.begin(kMethod);
    late->write(Piece::of(message_head(10) + "abc"));
    expect(caller, late->id(), "4", "not complete 0.7 s after");
    CHECK(echo.front.counts().no_message == 1);
}

void test_receiving_is_bounded(const H2Api& api) {
    FrontOptions small = options();
    small.max_receiving_bytes = 3 << 20;
    Echo echo(small);
    Caller caller(api, echo.front.port());
    const std::string part(900'000, 'x');
    std::vector<Stream*> begun;
    for (int i = 0; i < 5; ++i) {
        begun.push_back(caller.begin(kMethod));
        begun.back()->write(Piece::of(message_head(1 << 20) + part));
    }
    std::int32_t refused = 0;
    while (refused == 0) {
        CHECK(caller.step());
        for (auto& [id, reply] : caller.replies) {
            refused = reply.over ? id : refused;
        }
    }
    CHECK(caller.replies[refused].fields.at("grpc-status") == "8");
    CHECK(echo.front.counts().receiving_bytes >= 1);
}

void test_receiving_is_bounded_for_each_connection(const H2Api& api) {
    FrontOptions small = options();
    small.max_receiving_bytes_of_connection = 3 << 20;
    Echo echo(small);
    Caller greedy(api, echo.front.port()), modest(api, echo.front.port());
    const auto begin = [](Caller& caller) {
        Stream* stream = caller.begin(kMethod);
        stream->write(Piece::of(message_head(900'001) + std::string(900'000, 'x')));
        return stream;
    };
    const auto end = [](Caller& caller, std::int32_t id) {
        Stream* stream = caller.connection().open_streams().at(id).get();
        stream->write(Piece::of("y"));
        stream->finish({});
        CHECK(caller.wait(id));
        return caller.replies[id].fields.at("grpc-status");
    };
    const std::int32_t other = begin(modest)->id();
    modest.look();
    for (int i = 0; i < 5; ++i) {
        begin(greedy);
    }
    const auto refused = [&] {
        return std::count_if(greedy.replies.begin(), greedy.replies.end(),
                             [](const auto& one) { return one.second.over; });
    };
    while (refused() < 2) {
        CHECK(greedy.step());
    }
    for (const auto& [id, reply] : greedy.replies) {
        if (reply.over) {
            const auto& said = reply.fields.at("grpc-message");
            CHECK(said.find("this connection's messages") != std::string::npos);
        } else {
            CHECK(end(greedy, id) == "0");
        }
    }
    CHECK(end(modest, other) == "0");
    CHECK(refused() == 5 && echo.front.counts().receiving_bytes == 2);
}

void test_cancelled_calls_end(const H2Api& api) {
    Echo echo(options());
    {
        Caller caller(api, echo.front.port());
        const auto held = caller.send(kMethod, "hold");
        Stream* cancelled = caller.begin(kMethod);
        cancelled->write(Piece::of(message_head(4) + "hold"));
        cancelled->finish({});
        while (echo.front.counts().called < 2) {
            CHECK(caller.connection().flush());
            std::this_thread::yield();
        }
        caller.connection().reset(*cancelled, kCancel);
        CHECK(caller.connection().flush());
        while (echo.ended < 1) {
            std::this_thread::yield();
        }
        CHECK(!caller.replies[held].over);
    }
    // The client is gone, and with it what was held.
    while (echo.ended < 2 || echo.front.counts().open_connections > 0) {
        std::this_thread::yield();
    }
    CHECK(echo.front.counts().open_calls == 0);
}

void test_a_flood_of_resets_ends_its_connection(const H2Api& api) {
    Echo echo(options());
    Caller flooder(api, echo.front.port()), other(api, echo.front.port());
    bool alive = true;
    for (int i = 0; i < 5000 && alive; ++i) {
        Stream* stream = flooder.begin(kMethod);
        alive = flooder.connection().flush();
        flooder.connection().reset(*stream, kCancel);
        alive = alive && flooder.connection().flush();
    }
    while (echo.front.counts().open_connections > 1) {
        std::this_thread::yield();
    }
    CHECK(echo.front.counts().resets == 1);
    const auto good = other.send(kMethod, "ab");
    CHECK(other.wait(good));
    CHECK(other.replies[good].fields.at("grpc-status") == "0");
}

void test_idle_connections_make_room(const H2Api& api) {
    FrontOptions few = options();
    few.max_connections = 2;
    Echo echo(few);
    Caller busy(api, echo.front.port());
    busy.send(kMethod, "hold");
    while (echo.front.counts().called < 1) {
        CHECK(busy.connection().flush());
        std::this_thread::yield();
    }
    Caller idle(api, echo.front.port()), third(api, echo.front.port());
    const std::int64_t sent_ns = Connection::now_ns();
    CHECK(third.wait(third.send(kMethod, "ab")));
    CHECK(echo.front.counts().open_connections == 2);
    CHECK(echo.front.counts().connections == 1);
    // One that was answered just now keeps its place.
    Caller fourth(api, echo.front.port());
    const bool took = fourth.wait(fourth.send(kMethod, "ab"));
    const bool slow = Connection::now_ns() - sent_ns >= 1'000'000'000;
    CHECK(!took || slow);
    CHECK(took || third.wait(third.send(kMethod, "ab")));
}

void test_a_taken_port_is_an_error() {
    Front first(options());
    FrontOptions second = options();
    second.port = first.port();
    bool failed = false;
    try {
        Front front(second);
    } catch (const std::system_error& error) {
        failed = error.code().value() == EADDRINUSE;
    }
    CHECK(failed);
}

}  // namespace

int main() {
    test_heads();
    std::string why;
    const H2Api* api = h2_api(why);
    if (api == nullptr) {
        std::fprintf(stderr, "skipped: %s\n", why.c_str());
        return kSkipped;
    }
    test_answers(*api);
    test_refusals(*api);
    test_staged_calls_are_answered_from_the_pool(*api);
    test_another_descriptor_is_watched(*api);
    test_packets_are_read_one_at_a_time(*api);
    test_ends_keep_no_call_waiting(*api);
    test_messages_must_come_in_time(*api);
    test_receiving_is_bounded(*api);
    test_receiving_is_bounded_for_each_connection(*api);
    test_cancelled_calls_end(*api);
    test_a_flood_of_resets_ends_its_connection(*api);
    test_idle_connections_make_room(*api);
    test_a_taken_port_is_an_error();
    return 0;
}
