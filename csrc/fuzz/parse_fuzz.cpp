// Made-up bytes for the parser of inference messages, with what each may cost.
//
//   parse_fuzz SECONDS [SEED [CORPUS]]          inputs of the folder, then requests and inputs that
//                                               are damaged and changed byte by byte
//   parse_fuzz --grow SECONDS SEED CORPUS       the same; what reaches code that no input of the
//                                               folder reaches is added to it
//
// An input is a byte, odd for a request and even for a response, and a message. Built with clang's
// -fsanitize=fuzzer and GNNSERVE_LIBFUZZER, libFuzzer makes up the inputs. All that is read lies
// within the message, and is the same when it is written and read again. The memory is bounded by
// what the limits of a message allow and 8 bytes for each byte; the processor time, in builds
// without sanitizers, by 50 ns for each byte.

#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <new>

#include "check.hpp"
#include "corpus.hpp"
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

// Inlined, gcc takes their malloc and free for a mismatch.
#define OUT_OF_LINE __attribute__((noinline))
OUT_OF_LINE void* operator new(std::size_t size) {
    allocated_bytes += size;
    if (void* const found = std::malloc(size)) {
        return found;
    }
    throw std::bad_alloc();
}
OUT_OF_LINE void operator delete(void* one) noexcept { std::free(one); }
OUT_OF_LINE void operator delete(void* one, std::size_t) noexcept { std::free(one); }

namespace {

InferKind kind_of(char byte) { return byte & 1 ? InferKind::kRequest : InferKind::kResponse; }

}  // namespace

#ifdef GNNSERVE_LIBFUZZER

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    if (size > 0) {
        const std::string_view input(reinterpret_cast<const char*>(data), size);
        try_message(kind_of(input[0]), input.substr(1));
    }
    return 0;
}

#else

namespace {

// Changes of one message, each on top of some of those before.
constexpr int kChanges = 1000;
// One in so many is timed, as a look at the clock takes longer than most messages.
constexpr std::size_t kTimedOneIn = 64;
// The most bytes of an input that is added to the corpus.
constexpr std::size_t kMostAdded = 2048;

Reached reached;

}  // namespace

// Called by the parser at each block, as it is compiled with -fsanitize-coverage=trace-pc.
extern "C" void __sanitizer_cov_trace_pc() {
    reached.block(reinterpret_cast<std::uintptr_t>(__builtin_return_address(0)) -
                  reinterpret_cast<std::uintptr_t>(&parse_infer));
}

namespace {

void check_time(InferKind kind, std::string_view message) {
    const double limit = kBaseSeconds + kSecondsPerByte * static_cast<double>(message.size());
    double took = parse_seconds(kind, message);
    // What interrupts the processor counts too.
    for (int tries = 0; took > limit && tries < 10; ++tries) {
        took = std::min(took, parse_seconds(kind, message));
    }
    CHECK(took <= limit);
}

struct Options {
    double seconds = 5;
    std::uint64_t seed = 1;
    std::string folder;  // empty: none
    bool grow = false;
};

class Fuzz {
public:
    explicit Fuzz(Options options) : options_(std::move(options)) {}

    int run() {
        if (!options_.folder.empty()) {
            inputs_ = read_corpus(options_.folder);
        }
        const std::size_t given = inputs_.size();
        for (const std::string& input : inputs_) {
            if (!input.empty()) {
                try_one(input);
                reached.add_to(known_);
            }
        }
        const std::set<std::uint32_t> before = known_;
        const auto until =
            std::chrono::steady_clock::now() + std::chrono::duration<double>(options_.seconds);
        for (std::uint64_t one = options_.seed; std::chrono::steady_clock::now() < until; ++one) {
            change_one(one);
        }
        std::fprintf(stderr, "%llu messages, %llu of them plain\n",
                     static_cast<unsigned long long>(messages_),
                     static_cast<unsigned long long>(plain_));
        CHECK(plain_ > 0 && plain_ < messages_);
        if (options_.grow) {
            add(given, before);
        }
        return 0;
    }

private:
    void try_one(const std::string& input) {
        const auto kind = kind_of(input[0]);
        const auto message = std::string_view(input).substr(1);
        reached.begin();
        plain_ += try_message(kind, message);
        messages_ += 1;
        if (kTimed && messages_ % kTimedOneIn == 0) {
            check_time(kind, message);
        }
    }

    std::string made_up(Dice& dice) {
        if (!inputs_.empty() && dice.one_in(2)) {
            return dice.pick(inputs_);
        }
        return (dice.one_in(4) ? '\0' : '\1') + request(dice);
    }

    void change_one(std::uint64_t seed) {
        // A failed check ends the program.
        static std::uint64_t last;
        [[maybe_unused]] static const int told = std::atexit([] {
            std::fprintf(stderr, "last seed %llu\n", static_cast<unsigned long long>(last));
        });
        last = seed;
        Dice dice(seed);
        std::string input = made_up(dice);
        if (dice.one_in(4)) {
            input = dice.damaged(std::move(input));
        }
        const std::string before = input;
        for (int i = 0; i < kChanges && !input.empty(); ++i) {
            if (dice.one_in(4)) {
                input = before;
            }
            if (options_.grow && dice.one_in(16)) {
                input = dice.damaged(std::move(input));
            }
            if (input.empty()) {
                break;
            }
            input[dice(std::min<std::size_t>(input.size(), 400))] =
                static_cast<char>(dice.one_in(3) ? dice(16) * 8 + 2 : dice(256));
            try_one(input);
            if (options_.grow && input.size() <= kMostAdded && reached.add_to(known_)) {
                inputs_.push_back(input);
            }
        }
    }

    // Writes the shortest of the inputs from `first` on that together reach all that they reach.
    void add(std::size_t first, std::set<std::uint32_t> known) {
        std::vector<std::string> added(inputs_.begin() + static_cast<std::ptrdiff_t>(first),
                                       inputs_.end());
        std::ranges::stable_sort(added, {}, &std::string::size);
        for (const std::string& input : added) {
            try_one(input);
            if (reached.add_to(known)) {
                write_input(options_.folder, input);
            }
        }
    }

    Options options_;
    std::vector<std::string> inputs_;
    std::set<std::uint32_t> known_;
    std::uint64_t messages_ = 0, plain_ = 0;
};

}  // namespace

int main(int count, char** arguments) {
    Options options;
    options.grow = count == 5 && std::string_view(arguments[1]) == "--grow";
    char** given = arguments + options.grow;
    count -= options.grow;
    if (count > 1) {
        options.seconds = std::strtod(given[1], nullptr);
    }
    if (count > 2) {
        options.seed = std::strtoull(given[2], nullptr, 10);
    }
    if (count > 3) {
        options.folder = given[3];
    }
    return Fuzz(options).run();
}

#endif
