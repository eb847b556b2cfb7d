// The load generator's sender against servers that answer, refuse, reset, stall, leave and die.

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <system_error>
#include <thread>

#include "../front/connection.hpp"
#include "../front/grpc_head.hpp"
#include "../load/http_response.hpp"
#include "../load/sender.hpp"
#include "check.hpp"

using namespace gnnserve::load;
using namespace gnnserve::front;

namespace {

constexpr int kSkipped = 77;
constexpr std::int64_t kMs = 1'000'000, kLong_ns = 600'000'000'000;

// A listening socket and a thread that serves its connections, one `Server` each.
class Stub {
public:
    // Serves a connection's socket until false.
    using Serve = std::function<void(Stub& stub, int fd, int number)>;

    explicit Stub(Serve serve) : serve_(std::move(serve)) {
        listener_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        sockaddr_in address{};
        address.sin_family = AF_INET;
        address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        CHECK(::bind(listener_, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
        CHECK(::listen(listener_, 64) == 0);
        socklen_t size = sizeof address;
        CHECK(getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size) == 0);
        port = ntohs(address.sin_port);
        thread_ = std::thread([this] { accept_all(); });
    }

    ~Stub() {
        stopping = true;
        thread_.join();
        stop_listening();
        for (auto& one : threads_) {
            one.join();
        }
    }

    // For the serving threads only.
    void stop_listening() {
        const int listener = listener_.exchange(-1);
        if (listener >= 0) {
            close(listener);
        }
    }

    // Waits until there is something to read, up to a moment.
    static bool readable(int fd) {
        pollfd one{fd, POLLIN, 0};
        return poll(&one, 1, 20) > 0;
    }

    int port = 0;
    std::atomic<bool> stopping{false};
    std::atomic<int> connections{0};
    std::atomic<int> cancelled{0};
    std::atomic<int> most_at_once{0};

private:
    void accept_all() {
        while (!stopping && listener_ >= 0) {
            const int listener = listener_;
            if (listener >= 0 && readable(listener)) {
                const int fd = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
                if (fd >= 0) {
                    const int number = connections++;
                    threads_.emplace_back([this, fd, number] { serve_(*this, fd, number); });
                }
            }
        }
    }

    const Serve serve_;
    std::atomic<int> listener_{-1};
    std::vector<std::thread> threads_;
    std::thread thread_;
};

// A gRPC server on one connection: what to do is the first word of a message.
class GrpcStub : public ConnectionEvents {
public:
    GrpcStub(const H2Api& api, Stub& stub, int fd) : stub_(stub) {
        ConnectionLimits limits;
        limits.streams = 100;
        connection_ =
            std::make_unique<Connection>(api, fd, Connection::Side::kServer, limits, *this);
    }

    void run() {
        bool alive = connection_->flush();
        while (alive && !over_ && !stub_.stopping) {
            if (Stub::readable(connection_->fd())) {
                alive = connection_->receive(buffer_, sizeof buffer_, sizeof buffer_);
            }
            alive = alive && connection_->flush();
        }
    }

    void headers(Stream& stream, bool) override {
        open_ += 1;
        if (open_ > stub_.most_at_once) {
            stub_.most_at_once = open_;
        }
        messages_[stream.id()];
    }
    void data(Stream& stream, std::string_view bytes) override {
        messages_[stream.id()].append(bytes);
        connection_->consumed(stream, bytes.size());
    }
    void ended(Stream& stream) override {
        if (over_) {
            return;
        }
        const std::string message = messages_[stream.id()].substr(kMessageHead);
        const std::string word = message.substr(0, message.find(' '));
        if (word == "die") {
            stub_.stop_listening();
            over_ = true;
        } else if (word == "drop") {
            over_ = true;
        } else if (word == "leave") {
            connection_->announce_end();
            answer(stream, message);
        } else if (word == "fail") {
            connection_->respond(stream, error_headers({8, "full: 100 %\n", 25}), false);
        } else if (word == "calm") {
            connection_->reset(stream, kEnhanceYourCalm);
        } else if (word == "503") {
            connection_->respond(stream, {{":status", "503"}}, false);
        } else if (word == "half") {
            connection_->respond(stream, response_headers(), true);
            stream.write(Piece::of(message_head(100) + "abc"));
            stream.finish({{"grpc-status", "0"}});
        } else if (word == "bare") {
            connection_->respond(stream, response_headers(), true);
            stream.write(Piece::of(message_head(0)));
            stream.finish({});
        } else if (word != "hold") {
            answer(stream, message);
        }
    }
    void closed(Stream& stream, std::uint32_t error_code) override {
        open_ -= 1;
        messages_.erase(stream.id());
        if (error_code == kCancel && !over_ && !stub_.stopping) {
            stub_.cancelled += 1;
        }
    }
    void sent(Stream&, std::size_t) override {}
    void touched() noexcept override {}

private:
    void answer(Stream& stream, const std::string& message) {
        connection_->respond(stream, response_headers(), true);
        stream.write(Piece::of(message_head(message.size())));
        stream.write(Piece::of({message.rbegin(), message.rend()}));
        stream.finish({{"grpc-status", "0"}});
    }

    Stub& stub_;
    std::map<std::int32_t, std::string> messages_;
    int open_ = 0;
    bool over_ = false;
    char buffer_[1 << 16];
    // Last: its end closes streams.
    std::unique_ptr<Connection> connection_;
};

Stub::Serve grpc(const H2Api& api) {
    return [&api](Stub& stub, int fd, int) { GrpcStub(api, stub, fd).run(); };
}

SenderOptions to(const Stub& stub, std::int64_t timeout_ns = kLong_ns) {
    SenderOptions options;
    options.channel.host = "127.0.0.1";
    options.channel.port = stub.port;
    options.channel.path = "/test.Service/Infer";
    options.timeout_ns = timeout_ns;
    options.whole_answers = true;
    return options;
}

using Words = std::vector<std::string>;

std::vector<std::string_view> views(const Words& words) { return {words.begin(), words.end()}; }

// Sends the words a millisecond apart; results by the number of the request.
std::vector<Result> send(Sender& sender, const Words& words) {
    std::vector<std::int64_t> offsets_ns;
    for (std::size_t i = 0; i < words.size(); ++i) {
        offsets_ns.push_back(static_cast<std::int64_t>(i) * kMs);
    }
    sender.send_at(views(words), offsets_ns);
    std::vector<Result> results(words.size());
    std::set<std::size_t> seen;
    for (Result& one : sender.take()) {
        CHECK(seen.insert(one.index).second);
        results.at(one.index) = std::move(one);
    }
    CHECK(seen.size() == words.size());
    return results;
}

void test_answers(const H2Api& api) {
    for (const std::size_t connections : {1u, 3u}) {
        Stub stub(grpc(api));
        SenderOptions options = to(stub);
        options.channel.connections = connections;
        Sender sender(options);
        const std::vector<std::size_t> sizes{0, 1, 5, 70'000, 3'000'000, 20, 20};
        Words words;
        for (const std::size_t size : sizes) {
            words.push_back(std::string(size, 'x'));
            if (size > 0) {
                words.back().back() = 'z';
            }
        }
        const auto results = send(sender, words);
        for (std::size_t i = 0; i < sizes.size(); ++i) {
            const Result& one = results[i];
            CHECK(one.code == kOk && one.text.empty() && one.answer_bytes == sizes[i]);
            CHECK(one.answer == std::string(words[i].rbegin(), words[i].rend()));
            CHECK(one.due_ns == sender.started_ns() + static_cast<std::int64_t>(i) * kMs);
            CHECK(one.due_ns <= one.sent_ns && one.sent_ns <= one.ended_ns);
        }
        CHECK(static_cast<std::size_t>(stub.connections) == connections);
        CHECK(sender.sent() == sizes.size() && sender.take().empty());
    }
}

void test_what_servers_refuse(const H2Api& api) {
    Stub stub(grpc(api));
    Sender sender(to(stub));
    const auto found = send(sender, {"fail", "calm", "503", "half", "bare", "ab"});
    CHECK(found[0].code == kResourceExhausted && found[0].text == "full: 100 %\n");
    CHECK(found[1].code == kResourceExhausted);
    CHECK(found[2].code == kUnavailable && found[2].text == "HTTP 503");
    CHECK(found[3].code == kInternal && found[3].text.find("whole message") != std::string::npos);
    CHECK(found[4].code == kUnknown);
    CHECK(found[5].code == kOk && found[5].answer == "ba");
}

void test_no_answer_in_time(const H2Api& api) {
    Stub stub(grpc(api));
    Sender sender(to(stub, 200 * kMs));
    for (const Result& one : send(sender, {"hold", "hold", "hold"})) {
        CHECK(one.code == kDeadlineExceeded && one.ended_ns >= one.due_ns + 200 * kMs);
    }
    // More than the server takes at once: those that were never sent end as well.
    for (const Result& one : send(sender, Words(150, "hold"))) {
        CHECK(one.code == kDeadlineExceeded);
    }
    CHECK(stub.cancelled > 0);
}

// Sends the words one after the other, each when the one before has ended.
std::map<std::size_t, int> send_in_turn(Sender& sender, const Words& words) {
    sender.keep_in_flight(views(words), 1, kLong_ns, words.size());
    std::map<std::size_t, int> codes;
    for (const Result& one : sender.take()) {
        codes[one.index] = one.code;
    }
    return codes;
}

void test_a_lost_connection_is_opened_again(const H2Api& api) {
    Stub stub(grpc(api));
    Sender sender(to(stub));
    auto codes = send_in_turn(sender, {"ab", "drop", "cd"});
    CHECK(codes[0] == kOk && codes[1] == kUnavailable && codes[2] == kOk);
    CHECK(stub.connections == 2);
    // All that was in flight there is lost.
    const Words words{"hold", "drop"};
    sender.keep_in_flight(views(words), 2, kLong_ns, 2);
    for (const Result& one : sender.take()) {
        CHECK(one.code == kUnavailable);
    }
}

void test_a_server_that_leaves_is_asked_elsewhere(const H2Api& api) {
    Stub stub(grpc(api));
    Sender sender(to(stub));
    auto codes = send_in_turn(sender, {"leave", "ab"});
    CHECK(codes[0] == kOk && codes[1] == kOk);
    CHECK(stub.connections == 2);
}

void test_a_server_that_dies(const H2Api& api) {
    Stub stub(grpc(api));
    Sender sender(to(stub));
    std::vector<std::int64_t> offsets_ns{0, 0};
    Words words{"hold", "die"};
    for (int i = 0; i < 50; ++i) {
        offsets_ns.push_back((20 + 10 * i) * kMs);
        words.push_back("ab");
    }
    sender.send_at(views(words), offsets_ns);
    const auto results = sender.take();
    CHECK(results.size() == words.size());
    for (const Result& one : results) {
        CHECK(one.code == kUnavailable && !one.text.empty());
    }
    // A closed loop does not spin.
    Stub other(grpc(api));
    Sender closed(to(other));
    const Words die{"die"};
    closed.keep_in_flight(views(die), 4, 500 * kMs, 1'000'000);
    CHECK(closed.take().size() < 100);
}

void test_closed_loop(const H2Api& api) {
    Stub stub(grpc(api));
    Sender sender(to(stub));
    const Words words{"ab", "cd", "fail"};
    sender.keep_in_flight(views(words), 3, kLong_ns, 300);
    const auto results = sender.take();
    CHECK(results.size() == 300 && stub.most_at_once <= 3);
    std::size_t answered = 0;
    for (const Result& one : results) {
        answered += one.code == kOk;
    }
    CHECK(answered == 200);
    // Until the time is over, and what is in flight then is waited for.
    sender.keep_in_flight(views(words), 2, 50 * kMs, 1'000'000);
    CHECK(sender.take().size() == sender.sent() && sender.sent() >= 2);
    sender.keep_in_flight(views(words), 2, 0, 1'000'000);
    CHECK(sender.sent() == 0);
}

void test_stopped(const H2Api& api) {
    Stub stub(grpc(api));
    Sender sender(to(stub));
    const Words words{"ab", "hold", "cd"};
    std::thread other([&] {
        while (sender.sent() < 2) {
            std::this_thread::yield();
        }
        sender.stop();
    });
    sender.send_at(views(words), {0, 0, kLong_ns});
    other.join();
    for (const Result& one : sender.take()) {
        CHECK(one.index == 0);
    }
}

void test_nobody_there() {
    int port = 0;
    {
        Stub stub([](Stub&, int fd, int) { close(fd); });
        port = stub.port;
    }
    for (const Protocol protocol : {Protocol::kGrpc, Protocol::kHttp}) {
        SenderOptions options;
        options.protocol = protocol;
        options.channel.host = "127.0.0.1";
        options.channel.port = port;
        bool refused = false;
        try {
            Sender(options).send_at({"x"}, {0});
        } catch (const std::system_error& error) {
            refused = error.code().value() == ECONNREFUSED;
        }
        CHECK(refused);
    }
    bool invalid = false;
    try {
        Sender(SenderOptions{}).send_at({"x", "y"}, {1, 0});
    } catch (const std::invalid_argument&) {
        invalid = true;
    }
    CHECK(invalid);
}

void test_heads_of_answers() {
    const std::string fields("\x0a\3gcn\x22\4abcd", 11);
    CHECK(head_bytes(fields + std::string("\x32\5hello", 7)) == fields.size());
    CHECK(head_bytes(fields + std::string("\x32\xff\x7fhel", 6)) == fields.size());
    CHECK(head_bytes(fields) == fields.size());
    CHECK(head_bytes(fields + "\x22\x10") == fields.size());
    CHECK(head_bytes("") == 0 && head_bytes("\xff\xff") == 0 && head_bytes("\x08\1") == 0);
    const std::string huge("\x22\xff\xff\xff\xff\xff\xff\xff\xff\xff\1x", 12);
    CHECK(head_bytes(huge) == 0);
}

struct Parsed {
    HttpResponse::State state;
    std::string body;
    int status;
    bool keeps_open;
};

// Parses the text in steps of that many bytes, then the end if it is not complete.
Parsed parse(const std::string& text, std::size_t step) {
    HttpResponse response;
    Answer body;
    auto state = HttpResponse::State::kReading;
    for (std::size_t i = 0; i < text.size() && state == HttpResponse::State::kReading; i += step) {
        state = response.take(std::string_view(text).substr(i, step), body, 1 << 20);
    }
    if (state == HttpResponse::State::kReading) {
        state = response.closed();
    }
    return {state, body.kept, response.status(), response.keeps_open()};
}

void test_responses() {
    const auto complete = HttpResponse::State::kComplete,
               malformed = HttpResponse::State::kMalformed;
    for (const std::size_t step : {1u, 2u, 7u, 1000u}) {
        const auto plain = parse("HTTP/1.1 200 OK\r\nContent-Length: 3\r\nX:  y \r\n\r\nabc", step);
        CHECK(plain.state == complete && plain.body == "abc" && plain.keeps_open);
        const auto chunked = parse(
            "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ntransfer-encoding: Chunked\r\n\r\n"
            "3\r\nabc\r\n0A;x=y\r\n0123456789\r\n0\r\nT: u\r\n\r\n",
            step);
        CHECK(chunked.state == complete && chunked.body == "abc0123456789");
        const auto until_end = parse("HTTP/1.1 500 No\r\n\r\nabc", step);
        CHECK(until_end.state == complete && until_end.status == 500 && !until_end.keeps_open);
        CHECK(parse("HTTP/1.1 204 No\r\n\r\n", step).state == complete);
        CHECK(!parse("HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n", step).keeps_open);
        const auto closing =
            parse("HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n", step);
        CHECK(closing.state == complete && !closing.keeps_open);
        for (const char* bad :
             {"SSH-2.0-x\r\n", "HTTP/2 200\r\n", "HTTP/1.1 200 OK\n\n",
              "HTTP/1.1 200 OK\r\nno colon\r\n\r\n", "HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
              "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
              "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nx",
              "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n",
              "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nabc\r\n",
              "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc", ""}) {
            CHECK(parse(bad, step).state == malformed);
        }
        const std::string endless = "HTTP/1.1 200 OK\r\nA: " + std::string(70'000, 'x');
        CHECK(parse(endless, step).state == malformed);
    }
}

// Serves one connection of HTTP/1.1, by the first word of each body; empty closes it.
void serve_http(Stub& stub, int fd, int) {
    std::string received;
    char buffer[1 << 16];
    while (!stub.stopping) {
        if (!Stub::readable(fd)) {
            continue;
        }
        const ssize_t got = recv(fd, buffer, sizeof buffer, 0);
        if (got <= 0) {
            break;
        }
        received.append(buffer, static_cast<std::size_t>(got));
        const auto end = received.find("\r\n\r\n");
        if (end == std::string::npos) {
            continue;
        }
        CHECK(received.starts_with("POST /test.Service/Infer HTTP/1.1\r\nHost: 127.0.0.1:"));
        const auto length = received.find("Content-Length: ") + 16;
        const auto size = static_cast<std::size_t>(std::stoul(received.substr(length)));
        if (received.size() < end + 4 + size) {
            continue;
        }
        const std::string body = received.substr(end + 4, size);
        received.erase(0, end + 4 + size);
        std::string answer = "HTTP/1.1 200 OK\r\nContent-Length: " + std::to_string(size) +
                             "\r\n\r\n" + std::string(body.rbegin(), body.rend());
        bool close_after = false;
        if (body == "hold") {
            continue;
        }
        if (body == "fail") {
            answer = "HTTP/1.1 503 Busy\r\nContent-Length: 2\r\n\r\nno";
        } else if (body == "junk") {
            answer = "what?\r\n";
        } else if (body == "once") {
            close_after = true;  // without a word of it
        } else if (body == "drop") {
            answer = "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc";
            close_after = true;
        }
        CHECK(::send(fd, answer.data(), answer.size(), MSG_NOSIGNAL) >= 0);
        if (close_after) {
            break;
        }
    }
    close(fd);
}

void test_http() {
    Stub stub(serve_http);
    SenderOptions options = to(stub);
    options.protocol = Protocol::kHttp;
    options.channel.connections = 8;
    Sender sender(options);
    const std::string large(3'000'000, 'l');
    const auto found = send(sender, {"ab", "fail", "junk", "drop", large, ""});
    CHECK(found[0].code == kOk && found[0].answer == "ba");
    CHECK(found[1].code == kUnavailable && found[1].text == "HTTP 503" && found[1].answer == "no");
    CHECK(found[2].code == kInternal);
    CHECK(found[3].code == kUnavailable);
    CHECK(found[4].code == kOk && found[4].answer == large);
    CHECK(found[5].code == kOk && found[5].answer.empty());
    // Eight connections at most, and the others wait; none is answered in time.
    options.timeout_ns = 200 * kMs;
    Sender held(options);
    for (const Result& one : send(held, Words(30, "hold"))) {
        CHECK(one.code == kDeadlineExceeded);
    }
    // A connection that was closed between two requests costs no request.
    Stub closing(serve_http);
    options = to(closing);
    options.protocol = Protocol::kHttp;
    options.channel.connections = 1;
    Sender one_by_one(options);
    for (const Result& one : send(one_by_one, {"once", "ab", "once", "cd"})) {
        CHECK(one.code == kOk);
    }
    CHECK(closing.connections >= 3);
    const Words words{"ab", "cd"};
    one_by_one.keep_in_flight(views(words), 5, kLong_ns, 100);
    CHECK(one_by_one.take().size() == 100);
}

}  // namespace

int main() {
    test_heads_of_answers();
    test_responses();
    test_http();
    std::string why;
    const H2Api* api = h2_api(why);
    if (api == nullptr) {
        std::fprintf(stderr, "skipped: %s\n", why.c_str());
        return kSkipped;
    }
    test_answers(*api);
    test_what_servers_refuse(*api);
    test_no_answer_in_time(*api);
    test_a_lost_connection_is_opened_again(*api);
    test_a_server_that_leaves_is_asked_elsewhere(*api);
    test_a_server_that_dies(*api);
    test_closed_loop(*api);
    test_stopped(*api);
    test_nobody_there();
    return 0;
}
