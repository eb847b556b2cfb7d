// Streams of requests: framing, the window, ends of every kind, and who gives way to whom.

#include <algorithm>
#include <set>

#include "caller.hpp"
#include "check.hpp"
#include "front.hpp"

using namespace gnnserve::front;

namespace {

constexpr int kSkipped = 77;
constexpr char kMethod[] = "/test.Service/Infer", kStreamMethod[] = "/test.Service/Stream";
constexpr std::size_t kWindow = 4;

std::string message(const std::string& content) { return message_head(content.size()) + content; }

std::string answered(const std::string& content) {
    return message(stream_answer_prefix(content.size()) + content);
}

struct Server {
    explicit Server(std::size_t max_open_streams = 64, bool asks = false)
        : front(options(max_open_streams, asks)) {}

    static FrontOptions options(std::size_t max_open_streams, bool asks) {
        FrontOptions found;
        found.host = "127.0.0.1";
        found.backend = "gnnserve-test-nobody-listens-here";
        found.method = kMethod;
        found.stream_method = kStreamMethod;
        found.max_open_streams = max_open_streams;
        found.stream_window = kWindow;
        found.unread_timeout_ns = 0;
        found.asks = asks;
        found.max_message_bytes = 8 << 20;
        return found;
    }

    template <class Done>
    void until(Caller& caller, Done done) {
        while (!done()) {
            caller.look();
            take();
        }
    }
    void take() {
        for (Event& event : front.poll(Connection::now_ns() + 1'000'000).events) {
            if (event.kind == Event::Kind::kEnded) {
                ended.insert(event.handle);
            } else if (event.kind == Event::Kind::kAsked) {
                asked.push_back(std::move(event));
            } else {
                events.push_back(std::move(event));
            }
        }
    }
    void settle(Caller& caller) {
        int left = 100;
        until(caller, [&left] { return --left == 0; });
    }
    void answer(std::size_t i, const std::string& content) {
        front.answer(events[i].handle, {Piece::of(content)});
    }

    Front front;
    std::vector<Event> events, asked;
    std::set<std::uint64_t> ended;
};

void test_requests_are_answered_as_they_are_done(const H2Api& api) {
    Server server;
    Caller caller(api, server.front.port());
    Stream* stream = caller.begin(kStreamMethod);
    const auto id = stream->id();
    // Cut in pieces that have nothing to do with messages.
    const std::string large(300'000, 'l'), sent = message("a") + message("") + message(large);
    stream->write(Piece::of(sent.substr(0, 3)));
    server.settle(caller);
    stream->write(Piece::of(sent.substr(3, 9)));
    server.settle(caller);
    stream->write(Piece::of(sent.substr(12)));
    server.until(caller, [&] { return server.events.size() == 3; });
    for (const Event& event : server.events) {
        CHECK(event.stream != 0 && !event.raises);
    }
    CHECK(*server.events[0].message == "a" && server.events[1].message->empty());
    CHECK(*server.events[2].message == large);
    server.answer(2, "third");
    server.front.tell(server.events[0].handle, Piece::of("as it is"));
    server.until(caller, [&] { return server.ended.size() == 2; });
    stream->finish({});
    server.settle(caller);
    CHECK(!caller.replies[id].over);
    const std::string wide(500, 'w');
    server.answer(1, wide);
    server.answer(1, "once more");
    server.until(caller, [&] { return caller.replies[id].over; });
    CHECK(caller.replies[id].body == answered("third") + message("as it is") + answered(wide));
    CHECK(caller.replies[id].fields.at("grpc-status") == "0");
    CHECK(server.ended.size() == 3 && server.front.counts().open_calls == 0);
    CHECK(server.front.counts().streams == 1 && server.front.counts().called == 3);
    // Nothing asked, nothing answered.
    Stream* empty = caller.begin(kStreamMethod);
    empty->finish({});
    const auto empty_id = empty->id();
    server.until(caller, [&] { return caller.replies[empty_id].over; });
    CHECK(caller.replies[empty_id].fields.at("grpc-status") == "0");
}

void test_no_more_than_the_window_is_read(const H2Api& api) {
    Server server;
    Caller caller(api, server.front.port());
    Stream* stream = caller.begin(kStreamMethod);
    const auto id = stream->id();
    constexpr std::size_t kMany = 40;
    const std::string content(100'000, 'x');
    for (std::size_t i = 0; i < kMany; ++i) {
        stream->write(Piece::of(message(content)));
    }
    stream->finish({});
    server.settle(caller);
    CHECK(server.events.size() == kWindow);
    // What is not read stays with the client, but for the stream's window.
    CHECK(stream->waiting_bytes() > (kMany - kWindow - 12) * content.size());
    // Other calls of the connection go on.
    caller.send(kMethod, "unary");
    server.until(caller, [&] { return server.events.size() == kWindow + 1; });
    CHECK(*server.events.back().message == "unary" && server.events.back().stream == 0);
    std::size_t next = 0;
    server.until(caller, [&] {
        for (; next < server.events.size(); ++next) {
            CHECK(server.events.size() - server.ended.size() <= kWindow + 1);
            server.answer(next, "y");
        }
        return caller.replies[id].over;
    });
    CHECK(server.events.size() == kMany + 1 && server.ended.size() == kMany + 1);
}

void test_ends_of_streams(const H2Api& api) {
    Server server;
    auto caller = std::make_unique<Caller>(api, server.front.port());
    // The client cancels: all that is in flight ends.
    Stream* cancelled = caller->begin(kStreamMethod);
    cancelled->write(Piece::of(message("a") + message("b")));
    server.until(*caller, [&] { return server.events.size() == 2; });
    caller->connection().reset(*cancelled, kCancel);
    server.until(*caller, [&] { return server.ended.size() == 2; });
    // A failure ends a stream that raises, and what else is in flight with it.
    Stream* raising = caller->begin(kStreamMethod, {{"triton_grpc_error", "True"}});
    raising->write(Piece::of(message("c") + message("d")));
    server.until(*caller, [&] { return server.events.size() == 4; });
    CHECK(server.events[3].raises);
    server.front.fail(server.events[3].handle, {5, "not found", -1});
    auto id = raising->id();
    server.until(*caller, [&] { return server.ended.size() == 4; });
    server.until(*caller, [&] { return caller->replies[id].over; });
    CHECK(caller->replies[id].fields.at("grpc-status") == "5");
    // A message that is too large, and one that is not whole.
    Stream* large = caller->begin(kStreamMethod);
    large->write(Piece::of(message_head((8u << 20) + 1)));
    id = large->id();
    server.until(*caller, [&] { return caller->replies[id].over; });
    CHECK(caller->replies[id].fields.at("grpc-status") == "8");
    for (const std::size_t size : {2u, 7u}) {
        Stream* half = caller->begin(kStreamMethod);
        half->write(Piece::of(message("abc").substr(0, size)));
        half->finish({});
        id = half->id();
        server.until(*caller, [&] { return caller->replies[id].over; });
        CHECK(caller->replies[id].fields.at("grpc-status") == "13");
    }
    // Its own time is over, with nothing in flight.
    Stream* late = caller->begin(kStreamMethod, {{"grpc-timeout", "300m"}});
    late->write(Piece::of(message("e")));
    id = late->id();
    server.until(*caller, [&] { return server.events.size() == 5; });
    CHECK(server.events[4].timeout_ns == 300'000'000);
    server.answer(4, "e");
    server.until(*caller, [&] { return caller->replies[id].over; });
    CHECK(caller->replies[id].fields.at("grpc-status") == "4");
    // The client is gone.
    caller->begin(kStreamMethod)->write(Piece::of(message("f") + message("g")));
    server.until(*caller, [&] { return server.events.size() == 7; });
    caller.reset();
    while (server.front.counts().open_calls > 0) {
        server.take();
    }
    server.take();
    CHECK(server.ended.size() == 7);
}

void test_idle_streams_give_way(const H2Api& api) {
    Server server(3);
    Caller caller(api, server.front.port());
    const auto ask = [&](const char* content, Headers more = {}) {
        Stream* stream = caller.begin(kStreamMethod, std::move(more));
        stream->write(Piece::of(message(content)));
        return stream->id();
    };
    const auto busy = ask("busy"), first = ask("first"), second = ask("second");
    server.until(caller, [&] { return server.events.size() == 3; });
    const auto refused = ask("more");
    server.until(caller, [&] { return caller.replies[refused].over; });
    CHECK(caller.replies[refused].fields.at("grpc-message").starts_with("3 streams are open"));
    CHECK(caller.replies[refused].fields.at("grpc-retry-pushback-ms") == "1000");
    server.answer(1, "1");
    server.until(caller, [&] { return server.ended.size() == 1; });
    server.answer(2, "2");
    server.until(caller, [&] { return server.ended.size() == 2; });
    const auto taken = ask("taken");
    server.until(caller, [&] { return caller.replies[first].over; });
    CHECK(caller.replies[first].fields.at("grpc-status") == "8");
    CHECK(caller.replies[first].fields.at("grpc-message").starts_with("the stream was idle"));
    server.until(caller, [&] { return server.events.size() == 4; });
    CHECK(*server.events[3].message == "taken");
    for (const auto id : {busy, second, taken}) {
        CHECK(!caller.replies[id].over);
    }
    CHECK(server.front.counts().idle_stream == 1);
    CHECK(server.front.counts().open_calls_refused == 1);
}

void test_calls_wait_to_be_admitted(const H2Api& api) {
    Server server(64, true);
    Caller caller(api, server.front.port());
    const Headers token{{"authorization", "Bearer one"}};
    // The whole message is there before the answer, and counts once it is.
    const auto id = caller.send(kMethod, "first", token);
    server.until(caller, [&] { return server.asked.size() == 1; });
    server.settle(caller);
    CHECK(server.events.empty() && server.asked[0].path == kMethod);
    CHECK(server.asked[0].credentials == token && server.asked[0].stream == 0);
    server.front.admit(server.asked[0].handle);
    server.until(caller, [&] { return server.events.size() == 1; });
    CHECK(*server.events[0].message == "first" && server.events[0].credentials == token);
    CHECK(server.events[0].began_ns == server.asked[0].began_ns);
    server.answer(0, "done");
    server.until(caller, [&] { return caller.replies[id].over; });
    CHECK(caller.replies[id].fields.at("grpc-status") == "0");
    // The same again does not wait; anything else does, as does the same after a change.
    caller.send(kMethod, "second", token);
    server.until(caller, [&] { return server.events.size() == 2; });
    CHECK(server.asked.size() == 1);
    // When a proxy got it makes no difference.
    caller.send(kMethod, "stamped", {token[0], {"gnnserve-arrived", "key 5"}});
    server.until(caller, [&] { return server.events.size() == 3; });
    CHECK(server.asked.size() == 1 && server.events[2].credentials.size() == 2);
    caller.send(kMethod, "other token", {{"authorization", "Bearer two"}});
    server.until(caller, [&] { return server.asked.size() == 2; });
    caller.send("/test.Service/Other", "other method", token);
    server.until(caller, [&] { return server.asked.size() == 3; });
    CHECK(server.asked[2].path == "/test.Service/Other");
    server.front.forget_admitted();
    caller.send(kMethod, "after a change", token);
    server.until(caller, [&] { return server.asked.size() == 4; });
    // One that is gone meanwhile is not missed.
    Caller gone(api, server.front.port());
    Stream* stream = gone.begin(kMethod);
    stream->write(Piece::of(message("gone")));
    server.until(gone, [&] { return server.asked.size() == 5; });
    gone.connection().reset(*stream, kCancel);
    server.settle(gone);
    for (const Event& event : server.asked) {
        server.front.admit(event.handle);
    }
    server.until(caller, [&] { return server.events.size() == 5; });
    server.settle(caller);
    CHECK(server.events.size() == 5);
}

// What is asked of one call is said of all that wait with it.
void test_calls_that_ask_the_same_are_asked_for_once(const H2Api& api) {
    Server server(64, true);
    Caller caller(api, server.front.port());
    const Headers token{{"authorization", "Bearer one"}};
    const auto send = [&](std::size_t count) {
        std::vector<std::int32_t> ids;
        for (std::size_t i = 0; i < count; ++i) {
            ids.push_back(caller.send(kMethod, "message " + std::to_string(i), token));
        }
        return ids;
    };
    const auto next = [&](std::size_t calls) {
        server.until(caller, [&] { return server.asked.size() == 1; });
        const Event event = std::move(server.asked[0]);
        server.asked.clear();
        CHECK(event.calls == calls && event.path == kMethod && event.credentials == token);
        return event.handle;
    };
    const auto reset = [&](std::int32_t id) {
        caller.connection().reset(*caller.connection().open_streams().at(id), kCancel);
    };
    // The one that is asked for is gone before that, and another one of them; others ask by
    // themselves.
    auto ids = send(10);
    caller.send(kMethod, "two", {{"authorization", "Bearer two"}});
    CHECK(caller.connection().flush());
    reset(ids[0]);
    reset(ids[5]);
    server.until(caller, [&] { return server.asked.size() == 2; });
    CHECK(server.asked[1].calls == 1);
    server.front.fail(server.asked[1].handle, {16, "who are you", -1});
    server.asked.pop_back();
    const auto refused = next(8);
    // One that is gone between the question and the answer.
    reset(ids[1]);
    server.settle(caller);
    server.front.fail(refused, {16, "who are you", -1});
    const auto over = [&] {
        return std::all_of(ids.begin(), ids.end(),
                           [&](auto id) { return caller.replies[id].over; });
    };
    server.until(caller, over);
    for (const std::size_t i : {2, 3, 4, 6, 7, 8, 9}) {
        CHECK(caller.replies[ids[i]].fields.at("grpc-status") == "16");
    }
    CHECK(server.events.empty());
    // Admitted ones come in their order.
    ids = send(5);
    server.front.admit(next(5));
    server.until(caller, [&] { return server.events.size() == 5; });
    for (std::size_t i = 0; i < 5; ++i) {
        CHECK(*server.events[i].message == "message " + std::to_string(i));
    }
    CHECK(server.asked.empty() && server.ended.empty());
}

void test_who_is_refused_sends_no_body(const H2Api& api) {
    Server server(64, true);
    Caller caller(api, server.front.port());
    const std::string large(7 << 20, 'x');
    for (const char* path : {kMethod, kStreamMethod, "/test.Service/Other"}) {
        Stream* stream = caller.begin(path);
        stream->write(Piece::of(message(large)));
        const auto id = stream->id();
        server.until(caller, [&] { return !server.asked.empty(); });
        server.settle(caller);
        CHECK(stream->waiting_bytes() >= large.size() - (1 << 20));
        server.front.fail(server.asked[0].handle, {16, "who are you", -1});
        server.until(caller, [&] { return caller.replies[id].over; });
        CHECK(caller.replies[id].fields.at("grpc-status") == "16");
        CHECK(caller.replies[id].fields.at("grpc-message") == "who are you");
        server.asked.clear();
    }
    CHECK(server.events.empty() && server.front.counts().called == 0);
    CHECK(server.front.counts().forwarded == 0);
    // What they sent is forgotten: the connection's window is open for whoever may call.
    for (int i = 0; i < 4; ++i) {
        caller.send(kMethod, large);
        server.until(caller, [&] { return server.asked.size() == (i == 0 ? 1 : 0); });
        for (const Event& event : server.asked) {
            server.front.admit(event.handle);
        }
        server.asked.clear();
        server.until(caller, [&] { return server.events.size() == 1; });
        CHECK(server.events[0].message->size() == large.size());
        server.events.clear();
    }
}

void test_a_stream_ends_after_its_answers(const H2Api& api) {
    Server server(64, true);
    Caller caller(api, server.front.port());
    const auto ask = [&](bool all) {
        Stream* stream = caller.begin(kStreamMethod);
        stream->write(Piece::of(message("a") + message("b")));
        if (all) {
            stream->finish({});
        }
        server.until(caller, [&] { return server.asked.size() == 1; });
        server.front.admit(server.asked[0].handle);
        server.until(caller, [&] { return server.events.size() == 2; });
        CHECK(server.events[0].stream == server.asked[0].handle);
        server.front.finish(server.asked[0].handle, {16, "revoked"});
        server.settle(caller);
        CHECK(!caller.replies[stream->id()].over);
        if (!all) {  // is not read any more
            stream->write(Piece::of(message("c")));
        }
        server.answer(0, "A");
        server.answer(1, "B");
        const auto id = stream->id();
        server.until(caller, [&] { return caller.replies[id].over; });
        CHECK(caller.replies[id].body == answered("A") + answered("B"));
        // A client that has sent all gets the end that it expects.
        CHECK(caller.replies[id].fields.at("grpc-status") == (all ? "0" : "16"));
        server.until(caller, [&] { return server.ended.size() == 3; });
        CHECK(server.ended.contains(server.asked[0].handle) && server.events.size() == 2);
        server.events.clear();
        server.asked.clear();
        server.ended.clear();
    };
    ask(false);
    ask(true);
    // Of an idle one at once.
    const auto id = caller.begin(kStreamMethod)->id();
    server.until(caller, [&] { return server.asked.size() == 1; });
    server.front.admit(server.asked[0].handle);
    server.settle(caller);
    server.front.finish(server.asked[0].handle, {16, "revoked"});
    server.until(caller, [&] { return caller.replies[id].over; });
    CHECK(caller.replies[id].fields.at("grpc-status") == "16");
    server.until(caller, [&] { return server.ended.size() == 1; });
    CHECK(server.front.counts().open_calls == 0);
}

}  // namespace

int main() {
    std::string why;
    const H2Api* api = h2_api(why);
    if (api == nullptr) {
        std::fprintf(stderr, "skipped: %s\n", why.c_str());
        return kSkipped;
    }
    CHECK(stream_answer_prefix(5) == "\x12\x05");
    CHECK(stream_answer_prefix(300) == "\x12\xac\x02");
    test_requests_are_answered_as_they_are_done(*api);
    test_no_more_than_the_window_is_read(*api);
    test_ends_of_streams(*api);
    test_idle_streams_give_way(*api);
    test_calls_wait_to_be_admitted(*api);
    test_calls_that_ask_the_same_are_asked_for_once(*api);
    test_who_is_refused_sends_no_body(*api);
    test_a_stream_ends_after_its_answers(*api);
    return 0;
}
