// Made-up bytes for the front: as a client, as the server behind it, and as a gRPC head and
// message.
//
//   front_fuzz SECONDS [SEED]      connections and messages, until the time is over
//   front_fuzz --threads EVENTS    answers, failures and wake-ups by threads beside polling
//
// Frames come from a grammar and are then damaged. After each case everything the front holds for
// it must be gone, the memory meanwhile and the processor time must be bounded by the bytes sent,
// and now and then a call of a good client is answered. A failure names its seed, which repeats it.

#include <arpa/inet.h>
#include <malloc.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <random>
#include <thread>

#include "check.hpp"
#include "dice.hpp"
#include "front.hpp"
#include "incoming.hpp"
#include "plain_models.hpp"
#include "requests.hpp"

#if defined(__SANITIZE_ADDRESS__)
// Its header is not installed with every compiler.
extern "C" std::size_t __sanitizer_get_current_allocated_bytes();
#endif

using namespace gnnserve::front;
using gnnserve::BlockPool;

namespace {

constexpr int kSkipped = 77;
constexpr char kMethod[] = "/test.Service/Infer", kStreamMethod[] = "/test.Service/Stream";
constexpr char kBackend[] = "gnnserve-fuzz-";
constexpr std::int64_t kPoolBytes = 1 << 20;
// What a case may cost: constants for its connections, and for each byte that was sent.
constexpr std::size_t kCaseBytes = 8 << 20, kBytesPerByte = 64;
constexpr double kCaseSeconds = 0.5, kSecondsPerByte = 20e-6;

std::size_t allocated_bytes() {
#if defined(__SANITIZE_ADDRESS__)
    return __sanitizer_get_current_allocated_bytes();
#else
    return mallinfo2().uordblks;
#endif
}

double processor_seconds() {
    timespec now{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) / 1e9;
}

std::string big_endian(std::uint64_t value, int bytes) {
    std::string found;
    for (int i = bytes - 1; i >= 0; --i) {
        found.push_back(static_cast<char>(value >> (8 * i) & 255));
    }
    return found;
}

std::string frame(std::size_t type, std::size_t flags, std::uint64_t stream,
                  const std::string& content) {
    return big_endian(content.size(), 3) + big_endian(type, 1) + big_endian(flags, 1) +
           big_endian(stream, 4) + content;
}

std::string literal(const std::string& name, const std::string& value) {
    const auto text = [](const std::string& one) {
        return big_endian(std::min<std::size_t>(one.size(), 126), 1) + one.substr(0, 126);
    };
    return std::string(1, '\0') + text(name) + text(value);
}

std::string grpc_message(Dice& dice) {
    const std::string content = request(dice);
    std::string head = message_head(content.size());
    if (dice.one_in(8)) {
        head = dice.bytes(5);
    }
    return head + content;
}

std::string request_head(Dice& dice) {
    static const char* const kPaths[] = {
        kMethod, kMethod, kStreamMethod, kStreamMethod, "/test.Service/Other", "", "*"};
    static const char* const kTypes[] = {"application/grpc", "application/grpc+proto",
                                         "application/grpc-web", "text/html"};
    static const char* const kTimeouts[] = {"1S", "10m", "99999999H", "0n", "-1S", "x", ""};
    std::string block = literal(":method", dice.one_in(10) ? "GET" : "POST") +
                        literal(":scheme", "http") + literal(":path", dice.pick(kPaths)) +
                        literal(":authority", "x") + literal("content-type", dice.pick(kTypes)) +
                        literal("te", "trailers");
    if (dice.one_in(3)) {
        block += literal("grpc-timeout", dice.pick(kTimeouts));
    }
    if (dice.one_in(6)) {
        block += literal("grpc-encoding", dice.one_in(2) ? "gzip" : "identity");
    }
    for (std::size_t more = dice.one_in(10) ? dice(300) : 0; more > 0; --more) {
        block += literal("x-many", std::string(100, 'y'));
    }
    return dice.one_in(6) ? dice.damaged(std::move(block)) : block;
}

std::string response_head(Dice& dice) {
    std::string block = literal(":status", dice.one_in(8) ? "100" : "200") +
                        literal("content-type", "application/grpc");
    if (dice.one_in(3)) {
        block += literal("grpc-status", dice.one_in(2) ? "0" : "14") +
                 literal("grpc-message", "%C3%A9 %zz");
    }
    return dice.one_in(6) ? dice.damaged(std::move(block)) : block;
}

// Frames of one connection, by a client or by the server behind.
std::string conversation(Dice& dice, bool client) {
    static const std::uint64_t kStreams[] = {1, 3, 5, 7, 9, 11, 0, 2, 1ull << 31, 0x7fffffff};
    std::string found;
    if (client && !dice.one_in(20)) {
        found = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    }
    found += frame(4, 0, 0, dice.one_in(3) ? big_endian(4, 2) + big_endian(dice(70'000), 4) : "");
    std::uint64_t next = 1;
    for (std::size_t left = 1 + dice(30); left > 0; --left) {
        const std::size_t flags = dice.one_in(4) ? dice(256) : (dice.one_in(2) ? 4 : 5);
        std::uint64_t stream =
            dice.one_in(3) ? dice.pick(kStreams) : std::max<std::uint64_t>(next, 3) - 2;
        std::string one;
        if (client && dice.one_in(3)) {  // a whole call, all of it as it should be
            const bool streams = dice.one_in(3);
            std::string content = grpc_message(dice);
            for (std::size_t more = streams ? dice(12) : 0; more > 0; --more) {
                content += grpc_message(dice);
            }
            found +=
                frame(1, 4, next,
                      literal(":method", "POST") + literal(":scheme", "http") +
                          literal(":path", streams ? kStreamMethod : kMethod) +
                          literal(":authority", "x") + literal("content-type", "application/grpc"));
            for (std::size_t at = 0; at < content.size();) {
                const std::size_t part =
                    std::min<std::size_t>(1 + dice(16'384), content.size() - at);
                found += frame(0, at + part == content.size(), next, content.substr(at, part));
                at += part;
            }
            next += 2;
            continue;
        }
        switch (dice(12)) {
            case 0:
            case 1:
            case 2:
            case 3:
                if (client && !dice.one_in(8)) {
                    stream = next;
                    next += 2;
                }
                one = frame(1, flags, stream, client ? request_head(dice) : response_head(dice));
                break;
            case 4:
            case 5:
            case 6:
                one = frame(0, flags & 9, stream, grpc_message(dice));
                if (dice.one_in(10)) {
                    for (int i = 0; i < 1000; ++i) {
                        one += frame(0, 0, stream, "x");
                    }
                }
                break;
            case 7:
                one = frame(3, 0, stream, big_endian(dice(14), 4));
                break;
            case 8:
                one = frame(4, dice(2), 0, big_endian(dice(8), 2) + big_endian(dice(1u << 31), 4));
                break;
            case 9:
                one = frame(8, 0, dice.one_in(2) ? 0 : stream, big_endian(dice(1u << 31), 4));
                break;
            case 10:
                one = frame(6, dice(2), 0, dice.one_in(5) ? dice.bytes(9) : std::string(8, 'p'));
                break;
            default:
                one = frame(dice(14), dice(256), stream, dice.bytes(40));
        }
        found += dice.one_in(12) ? dice.damaged(std::move(one)) : one;
    }
    return found;
}

int connect_to(int port) {
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<std::uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    CHECK(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
    return fd;
}

int listen_behind(const std::string& name) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path + 1, name.data(), name.size());
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
    CHECK(bind(fd, reinterpret_cast<sockaddr*>(&address), size) == 0 && listen(fd, 64) == 0);
    return fd;
}

std::shared_ptr<const PlainModels> plain_models() { return served(short_form(4, 16)); }

// The front and both of its sides, all on this thread.
class Fuzz {
public:
    explicit Fuzz(const FrontOptions& options)
        : front_(options), behind_(listen_behind(options.backend)) {
        front_.set_models(plain_models());
    }
    ~Fuzz() { close(behind_); }

    void run(Dice& dice) {
        if (base_bytes_ == 0 || cases_ % 100 == 0) {
            expect_answer();
            base_bytes_ = allocated_bytes();
        }
        ++cases_;
        sent_bytes_ = 0;
        peak_bytes_ = 0;
        const double began = processor_seconds();
        front_seconds_ = 0;
        const int client = connect_to(front_.port());
        const std::string text = conversation(dice, true);
        for (std::size_t at = 0; at < text.size();) {
            const std::size_t part = std::min(text.size() - at, 1 + dice(text.size()));
            if (!send_all(client, text.substr(at, part))) {
                break;
            }
            at += part;
            step(dice);
            if (!dice.one_in(4)) {
                drop_input(client);
            }
        }
        for (int i = 0; i < 3; ++i) {
            step(dice);
        }
        close(client);
        for (int tries = 0; front_.counts().open_connections > 0; ++tries) {
            CHECK(tries < 10'000);
            step(dice);
        }
        for (const int fd : accepted_) {
            close(fd);
        }
        accepted_.clear();
        calls_.clear();
        step(dice);
        CHECK(front_.counts().open_calls == 0);
        CHECK(peak_bytes_ < base_bytes_ + kCaseBytes + kBytesPerByte * sent_bytes_);
        CHECK(allocated_bytes() < base_bytes_ + (1 << 20));
        CHECK(front_seconds_ < kCaseSeconds + kSecondsPerByte * static_cast<double>(sent_bytes_));
        CHECK(processor_seconds() - began < 60);
    }

    std::size_t cases() const { return cases_; }
    const FrontCounts& counts() const { return front_.counts(); }

private:
    // The client's and the server's turn, with calls answered, failed and kept.
    void step(Dice& dice) {
        const double began = processor_seconds();
        const Polled polled = front_.poll(Connection::now_ns() + 100'000);
        front_seconds_ += processor_seconds() - began;
        peak_bytes_ = std::max(peak_bytes_, allocated_bytes());
        for (const Event& event : polled.events) {
            if (event.kind == Event::Kind::kCall) {
                calls_.push_back(event);
            } else if (event.kind == Event::Kind::kAsked && !dice.one_in(8)) {
                if (dice.one_in(4)) {
                    front_.fail(event.handle, {16, dice.bytes(40), -1});
                } else {
                    front_.admit(event.handle);
                }
                if (dice.one_in(6)) {
                    front_.finish(event.handle, {16, dice.bytes(40), -1});
                }
            }
        }
        while (!calls_.empty() && !dice.one_in(3)) {
            const Event event = std::move(calls_.back());
            calls_.pop_back();
            if (event.stream != 0 && dice.one_in(4)) {
                front_.tell(event.handle, Piece::of(dice.bytes(100)));
            } else if (dice.one_in(4)) {
                front_.fail(event.handle, {static_cast<int>(dice(17)), dice.bytes(40), -1});
            } else {
                front_.answer(event.handle, {Piece::of(dice.bytes(100)),
                                             Piece::of(std::string(dice(100'000), 'a'))});
            }
        }
        for (int fd = accept(behind_, nullptr, nullptr); fd >= 0;
             fd = accept(behind_, nullptr, nullptr)) {
            accepted_.push_back(fd);
        }
        for (const int fd : accepted_) {
            drop_input(fd);
            if (dice.one_in(3)) {
                send_all(fd, conversation(dice, false));
            }
            if (dice.one_in(30)) {
                shutdown(fd, SHUT_RDWR);
            }
        }
    }

    bool send_all(int fd, const std::string& text) {
        const ssize_t sent = send(fd, text.data(), text.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
        sent_bytes_ += sent > 0 ? static_cast<std::size_t>(sent) : 0;
        return sent == static_cast<ssize_t>(text.size());
    }

    void drop_input(int fd) {
        while (recv(fd, buffer_, sizeof buffer_, MSG_DONTWAIT) > 0) {
        }
    }

    // A call of a client that does all as it should.
    void expect_answer() {
        const int client = connect_to(front_.port());
        Dice dice(1);
        const std::string block = literal(":method", "POST") + literal(":scheme", "http") +
                                  literal(":path", kMethod) + literal(":authority", "x") +
                                  literal("content-type", "application/grpc");
        send_all(client, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, "") +
                             frame(1, 4, 1, block) + frame(0, 1, 1, message_head(4) + "good"));
        bool answered = false;
        for (int tries = 0; !answered; ++tries) {
            CHECK(tries < 10'000);
            for (const Event& event : front_.poll(Connection::now_ns() + 1'000'000).events) {
                if (event.kind == Event::Kind::kAsked) {
                    front_.admit(event.handle);
                } else if (event.kind == Event::Kind::kCall) {
                    CHECK(event.message != nullptr && *event.message == "good");
                    front_.answer(event.handle, {Piece::of("the answer")});
                }
            }
            std::string came(1 << 16, '\0');
            const ssize_t size = recv(client, came.data(), came.size(), MSG_DONTWAIT);
            CHECK(size != 0);
            answered = size > 0 && came.find("the answer") != std::string::npos;
        }
        close(client);
        while (front_.counts().open_connections > 0) {
            front_.poll(Connection::now_ns() + 1'000'000);
        }
    }

    Front front_;
    const int behind_;
    std::vector<int> accepted_;
    std::vector<Event> calls_;
    std::size_t cases_ = 0, sent_bytes_ = 0, base_bytes_ = 0, peak_bytes_ = 0;
    double front_seconds_ = 0;
    char buffer_[1 << 16];
};

void fuzz_heads_and_messages(Dice& dice, BlockPool& pool,
                             const std::shared_ptr<const PlainModels>& models) {
    static const char* const kNames[] = {":path",         ":method",      "content-type",
                                         "grpc-encoding", "grpc-timeout", "x"};
    Headers headers;
    for (std::size_t left = dice(8); left > 0; --left) {
        headers.emplace_back(dice.pick(kNames), dice.bytes(20));
    }
    read_head(headers);
    const std::string text = dice.bytes(60);
    for (const char one : percent_encoded(text)) {
        CHECK(one >= 0x20 && one <= 0x7e);
    }
    const auto timeout = parse_timeout(text);
    CHECK(!timeout || *timeout >= 0);
    const std::size_t before = allocated_bytes();
    const std::string message = request(dice);
    Incoming incoming(message.size(), models, true);
    for (std::size_t at = 0; at < message.size();) {
        std::string_view part = std::string_view(message).substr(at, 1 + dice(message.size()));
        at += part.size();
        incoming.take(part);
        if (incoming.wanted_block() > 0) {
            if (auto block = pool.block(incoming.wanted_block()); block && !dice.one_in(8)) {
                incoming.place(std::move(block));
            } else {
                incoming.keep_bytes();
            }
            incoming.take(part);
        }
        CHECK(part.empty());
    }
    CHECK(incoming.complete());
    if (const auto plain = incoming.plain()) {
        const auto& counts = plain->counts();
        CHECK(counts.size() == plain->model().counts);
        CHECK(std::any_of(counts.begin(), counts.end(), [](std::int64_t one) { return one > 0; }));
        CHECK(plain->message() == message && plain->stage());
    } else {
        CHECK(*incoming.bytes() == message);
    }
    CHECK(allocated_bytes() < before + (1 << 20));
}

FrontOptions options(std::uint64_t seed) {
    FrontOptions found;
    found.host = "127.0.0.1";
    found.backend = kBackend + std::to_string(getpid()) + "-" + std::to_string(seed);
    found.method = kMethod;
    found.stream_method = kStreamMethod;
    found.max_open_streams = 4;
    found.stream_window = 8;
    found.max_message_bytes = 1 << 20;
    found.max_receiving_bytes = 4 << 20;
    found.max_streams = 16;
    const auto bytes = std::make_shared<std::vector<std::byte>>(kPoolBytes + kTensorAlignment);
    std::byte* first = bytes->data();
    first += (kTensorAlignment - reinterpret_cast<std::uintptr_t>(first) % kTensorAlignment) %
             kTensorAlignment;
    found.pool = std::make_shared<BlockPool>(first, kPoolBytes, kTensorAlignment, bytes);
    return found;
}

int fuzz(double seconds, std::uint64_t seed) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    const FrontOptions chosen = options(seed);
    FrontOptions guarded = options(seed + 1);
    guarded.asks = true;
    const auto models = plain_models();
    Fuzz target(chosen), asking(guarded);
    std::uint64_t one = seed;
    for (; std::chrono::steady_clock::now() < until; ++one) {
        std::fprintf(stderr, "\rseed %llu", static_cast<unsigned long long>(one));
        Dice dice(one);
        (one % 2 == 0 ? target : asking).run(dice);
        for (int i = 0; i < 20; ++i) {
            fuzz_heads_and_messages(dice, *chosen.pool, models);
        }
    }
    const FrontCounts& counts = target.counts();
    std::fprintf(stderr,
                 "\r%zu conversations; calls %llu, staged %llu, streams %llu, forwarded %llu\n",
                 target.cases(), static_cast<unsigned long long>(counts.called),
                 static_cast<unsigned long long>(counts.plain),
                 static_cast<unsigned long long>(counts.streams),
                 static_cast<unsigned long long>(counts.forwarded));
    CHECK(asking.cases() < 200 || (asking.counts().called > 0 && asking.counts().streams > 0));
    CHECK(target.cases() < 200 ||
          (counts.called > 0 && counts.plain > 0 && counts.streams > 0 && counts.forwarded > 0));
    return 0;
}

// What other threads may call, all at once, beside a thread that polls.
int threads(std::uint64_t events) {
    constexpr std::uint64_t kThreads = 4;
    FrontOptions chosen = options(0);
    chosen.asks = true;
    Front front(chosen);
    std::atomic<bool> stopping{false};
    std::atomic<std::uint64_t> polls{0};
    std::thread poller([&] {
        while (!stopping) {
            front.poll(-1);
            polls += 1;
        }
    });
    std::vector<std::thread> callers;
    for (std::uint64_t t = 0; t < kThreads; ++t) {
        callers.emplace_back([&front, t, events] {
            Dice dice(t);
            const auto models = plain_models();
            for (std::uint64_t i = 0; i < events / kThreads; ++i) {
                switch (dice(11)) {
                    case 0:
                        front.wake();
                        break;
                    case 1:
                        front.announce_end();
                        break;
                    case 2:
                        front.set_models(models);
                        break;
                    case 3:
                        front.fail(1 + dice(1000), {14, "gone", 5});
                        break;
                    case 4:
                        front.admit(1 + dice(1000));
                        break;
                    case 5:
                        front.finish(1 + dice(1000), {16, "revoked"});
                        break;
                    case 6:
                        front.forget_admitted();
                        break;
                    case 7:
                        (void)front.counts().called.load();
                        break;
                    default:
                        front.answer(1 + dice(1000), {Piece::of("an answer")});
                }
            }
        });
    }
    callers.emplace_back([&front] {
        Dice dice(99);
        for (int i = 0; i < 50; ++i) {
            const int client = connect_to(front.port());
            const std::string text = conversation(dice, true);
            (void)!send(client, text.data(), text.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
            close(client);
        }
    });
    for (auto& one : callers) {
        one.join();
    }
    stopping = true;
    front.wake();
    poller.join();
    CHECK(polls > 0);
    return 0;
}

}  // namespace

int main(int count, char** arguments) {
    std::string why;
    if (h2_api(why) == nullptr) {
        std::fprintf(stderr, "skipped: %s\n", why.c_str());
        return kSkipped;
    }
    const std::string first = count > 1 ? arguments[1] : "5";
    if (first == "--threads") {
        return threads(count > 2 ? std::strtoull(arguments[2], nullptr, 10) : 20'000);
    }
    return fuzz(std::strtod(first.c_str(), nullptr),
                count > 2 ? std::strtoull(arguments[2], nullptr, 10) : 1);
}
