// Made-up bytes for the parser of inference messages, with what each may cost.
//
//   parse_fuzz SECONDS [SEED]   requests that are damaged, then changed byte by byte
//
// Built with clang's -fsanitize=fuzzer and GNNSERVE_LIBFUZZER, libFuzzer makes up the bytes. All
// that is read lies within the message, and is the same when it is written and read again. The
// memory is bounded by what the limits of a message allow and 8 bytes for each byte; the processor
// time, in builds without sanitizers, by 50 ns for each byte.

#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <new>

#include "check.hpp"
#include "dice.hpp"
#include "gnnserve/infer_message.hpp"
#include "requests.hpp"

using namespace gnnserve;

namespace {

// What a message at all its limits takes, and some turn of the processor.
constexpr std::size_t kBaseBytes = 256 << 10, kBytesPerByte = 8;
constexpr double kBaseSeconds = 100e-6, kSecondsPerByte = 50e-9;
#if defined(GNNSERVE_LIBFUZZER) || defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kTimed = false;
#else
constexpr bool kTimed = true;
#endif

std::size_t allocated_bytes = 0;

double processor_seconds() {
    timespec now{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) / 1e9;
}

double parse_seconds(InferKind kind, std::string_view message) {
    const double began = processor_seconds();
    parse_infer(kind, message);
    return processor_seconds() - began;
}

bool same(const std::vector<InferParameter>& a, const std::vector<InferParameter>& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& x, const auto& y) {
        return x.name == y.name && x.choice == y.choice && x.bits == y.bits && x.text == y.text;
    });
}

bool same(const InferMessage& a, const InferMessage& b) {
    return a.model == b.model && a.version == b.version && a.id == b.id && a.raws == b.raws &&
           same(a.parameters, b.parameters) &&
           std::equal(a.tensors.begin(), a.tensors.end(), b.tensors.begin(), b.tensors.end(),
                      [](const InferTensor& x, const InferTensor& y) {
                          return x.name == y.name && x.datatype == y.datatype &&
                                 x.shape == y.shape && same(x.parameters, y.parameters);
                      });
}

void check_read(InferKind kind, const InferMessage& found, std::string_view message) {
    CHECK(found.tensors.size() <= kMostTensors && found.requested.size() <= kMostTensors);
    CHECK(found.raws.size() <= kMostTensors && found.parameters.size() <= kMostParameters);
    for (const std::string_view raw : found.raws) {
        CHECK(raw.empty() || (raw.data() >= message.data() &&
                              raw.data() + raw.size() <= message.data() + message.size()));
    }
    std::string written = write_infer(found);
    for (const std::string_view raw : found.raws) {
        written.append(raw_prefix(kind, raw.size())).append(raw);
    }
    const auto again = parse_infer(kind, written);
    CHECK(again && same(*again, found));
}

// Returns true for a plain message.
bool try_message(InferKind kind, std::string_view message) {
    allocated_bytes = 0;
    const auto found = parse_infer(kind, message);
    CHECK(allocated_bytes <= kBaseBytes + kBytesPerByte * message.size());
    if (found) {
        check_read(kind, *found, message);
    }
    return found.has_value();
}

}  // namespace

void* operator new(std::size_t size) {
    allocated_bytes += size;
    if (void* const found = std::malloc(size)) {
        return found;
    }
    throw std::bad_alloc();
}
void operator delete(void* one) noexcept { std::free(one); }
void operator delete(void* one, std::size_t) noexcept { std::free(one); }

#ifdef GNNSERVE_LIBFUZZER

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    if (size > 0) {
        const auto kind = data[0] & 1 ? InferKind::kRequest : InferKind::kResponse;
        try_message(kind, {reinterpret_cast<const char*>(data) + 1, size - 1});
    }
    return 0;
}

#else

namespace {

// Changes of one message, each on top of some of those before.
constexpr int kChanges = 1000;
// One in so many is timed, as a look at the clock takes longer than most messages.
constexpr std::size_t kTimedOneIn = 64;

void check_time(InferKind kind, std::string_view message) {
    const double limit = kBaseSeconds + kSecondsPerByte * static_cast<double>(message.size());
    double took = parse_seconds(kind, message);
    // What interrupts the processor counts too.
    for (int tries = 0; took > limit && tries < 10; ++tries) {
        took = std::min(took, parse_seconds(kind, message));
    }
    CHECK(took <= limit);
}

int fuzz(double seconds, std::uint64_t seed) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    std::uint64_t messages = 0, plain = 0, one = seed;
    for (; std::chrono::steady_clock::now() < until; ++one) {
        // A failed check ends the program.
        static std::uint64_t last;
        [[maybe_unused]] static const int told = std::atexit([] {
            std::fprintf(stderr, "last seed %llu\n", static_cast<unsigned long long>(last));
        });
        last = one;
        Dice dice(one);
        std::string message = request(dice);
        if (dice.one_in(4)) {
            message = dice.damaged(std::move(message));
        }
        const std::string before = message;
        for (int i = 0; i < kChanges && !message.empty(); ++i) {
            if (dice.one_in(4)) {
                message = before;
            }
            message[dice(std::min<std::size_t>(message.size(), 400))] =
                static_cast<char>(dice.one_in(3) ? dice(16) * 8 + 2 : dice(256));
            const auto kind = dice.one_in(4) ? InferKind::kResponse : InferKind::kRequest;
            plain += try_message(kind, message);
            messages += 1;
            if (kTimed && messages % kTimedOneIn == 0) {
                check_time(kind, message);
            }
        }
    }
    std::fprintf(stderr, "%llu messages, %llu of them plain\n",
                 static_cast<unsigned long long>(messages), static_cast<unsigned long long>(plain));
    CHECK(plain > 0 && plain < messages);
    return 0;
}

}  // namespace

int main(int count, char** arguments) {
    return fuzz(count > 1 ? std::strtod(arguments[1], nullptr) : 5,
                count > 2 ? std::strtoull(arguments[2], nullptr, 10) : 1);
}

#endif
