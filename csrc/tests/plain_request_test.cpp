// Plain requests: what is staged, where, and what is left to Python.

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <thread>

#include "check.hpp"
#include "incoming.hpp"
#include "plain_models.hpp"

using namespace gnnserve;
using namespace gnnserve::front;

namespace {

constexpr std::int64_t kPoolBytes = 1 << 16;
constexpr std::int64_t kFeatures = 3;

// A pool over memory of its own.
struct Memory {
    explicit Memory(std::int64_t size = kPoolBytes)
        : bytes(std::make_shared<std::vector<std::byte>>(static_cast<std::size_t>(size))),
          pool(std::make_shared<BlockPool>(bytes->data(), size, kTensorAlignment, bytes)) {}

    std::shared_ptr<std::vector<std::byte>> bytes;
    std::shared_ptr<BlockPool> pool;
};

PlainModels models(bool narrow = true, bool counts_loops = true) {
    PlainModel model = short_form(kFeatures, 8, 1.5);
    model.token = 7;
    model.narrow_edges = narrow;
    model.counts_loops = counts_loops;
    model.inputs.push_back(optional(elements_of("edge_weight", "FP32", {kEdges})));
    model.inputs.push_back(optional(indices_of("batch", {kNodes}, {0}, false)));
    model.inputs.back().ascends = true;
    PlainModels found = *served(model);
    found.add("gcn", "1", std::make_shared<PlainModel>(model));
    return found;
}

template <typename Number>
std::string raw(const std::vector<Number>& numbers) {
    return {reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(Number)};
}

// A request that tests bend; texts that it points to are literals or belong to it.
struct Sent {
    InferMessage head;
    std::vector<std::string> raws;

    std::shared_ptr<const std::string> message() const {
        std::string out = write_infer(head);
        for (const std::string& one : raws) {
            out += raw_prefix(InferKind::kRequest, one.size()) + one;
        }
        return std::make_shared<const std::string>(std::move(out));
    }
};

const std::vector<float> kX{1, 2, 3, 4, 5, 6};
const std::vector<std::int32_t> kEdges32{0, 1, 1, 1, 0, 1};

Sent good() {
    Sent sent;
    sent.head.model = "gcn";
    sent.head.id = "me";
    sent.head.tensors = {{"x", "FP32", {2, kFeatures}, {}}, {"edge_index", "INT32", {2, 3}, {}}};
    sent.raws = {raw(kX), raw(kEdges32)};
    return sent;
}

// The message as the front receives it, in pieces that end at `ends`.
Incoming receive(const Memory& memory, const std::string& message,
                 const std::vector<std::size_t>& ends = {}, bool narrow = true,
                 bool check_finite = true) {
    Incoming incoming(message.size(), std::make_shared<const PlainModels>(models(narrow)),
                      check_finite);
    std::size_t from = 0;
    const auto take = [&](std::size_t to) {
        std::string_view bytes = std::string_view(message).substr(from, to - from);
        incoming.take(bytes);
        if (incoming.wanted_block() > 0) {
            if (auto block = memory.pool->block(incoming.wanted_block())) {
                incoming.place(std::move(block));
            } else {
                incoming.keep_bytes();
            }
            incoming.take(bytes);
        }
        CHECK(bytes.empty());
        CHECK(incoming.left() == message.size() - to);
        from = to;
    };
    for (const std::size_t end : ends) {
        take(end);
    }
    take(message.size());
    CHECK(incoming.complete());
    CHECK((incoming.plain() == nullptr) != (incoming.bytes() == nullptr));
    return incoming;
}

// The message that Python would be given.
std::string given(const Incoming& incoming) {
    return incoming.plain() != nullptr ? incoming.plain()->message() : *incoming.bytes();
}

std::shared_ptr<PlainRequest> take(const Memory& memory, const Sent& sent, bool narrow = true,
                                   bool check_finite = true) {
    auto plain = receive(memory, *sent.message(), {}, narrow, check_finite).plain();
    return plain != nullptr && plain->valid() ? plain : nullptr;
}

template <typename Number>
std::vector<Number> staged(const PlainRequest& request, std::size_t tensor) {
    const auto& found = request.tensors()[tensor];
    std::vector<Number> numbers(static_cast<std::size_t>(found.size) / sizeof(Number));
    std::memcpy(numbers.data(), request.block()->at(found.offset),
                static_cast<std::size_t>(found.size));
    return numbers;
}

void test_a_plain_request_is_staged() {
    const Memory memory;
    const auto request = take(memory, good());
    CHECK(request != nullptr);
    CHECK(request->model().token == 7);
    CHECK((request->counts() == std::vector<std::int64_t>{2, 3}) && request->loops() == 1);
    CHECK(request->narrow());
    CHECK(staged<float>(*request, 0) == kX);
    CHECK(staged<std::int32_t>(*request, 1) == kEdges32);
    // Two lines of 64 bytes for the inputs, one for the output of 17.5.
    CHECK(request->output_offset() == request->block()->offset() + 128);
    CHECK(request->output_capacity() == 64 && request->block_size() == 192);
    CHECK(request->valid() && request->message() == *good().message());
    CHECK(memory.pool->used() == 192);
}

void test_edges_are_widened_where_the_model_wants_them_wide() {
    const Memory memory;
    const auto request = take(memory, good(), false);
    CHECK(request != nullptr && !request->narrow() && request->loops() == 1);
    CHECK((staged<std::int64_t>(*request, 1) == std::vector<std::int64_t>{0, 1, 1, 1, 0, 1}));
}

void test_order_optional_inputs_and_options_do_not_matter() {
    const Memory memory;
    Sent sent = good();
    sent.head.version = "1";
    sent.head.tensors = {{"batch", "INT64", {2}, {}},
                         {"edge_index", "INT64", {2, 3}, {}},
                         {"edge_weight", "FP32", {3}, {}},
                         {"x", "FP32", {2, kFeatures}, {}}};
    const std::vector<std::int64_t> edges{0, 1, 1, 1, 0, 1}, batch{0, 1};
    const std::vector<float> weights{1, 2, 3};
    sent.raws = {raw(batch), raw(edges), raw(weights), raw(kX)};
    sent.head.parameters = {{"tenant", Choice::kString, 0, "a"}};
    const auto request = take(memory, sent);
    CHECK(request != nullptr && !request->narrow());
    CHECK(request->tensors().size() == 4);
    CHECK(request->tensors()[0].input->name == "x");
    CHECK(staged<std::int64_t>(*request, 3) == batch);
    CHECK(request->head().parameters.size() == 1);
}

void test_values_that_must_ascend_do_so_wherever_the_message_is_cut() {
    const Memory memory;
    Sent sent = good();
    sent.head.tensors.push_back({"batch", "INT64", {2}, {}});
    for (const std::vector<std::int64_t>& batch :
         {std::vector<std::int64_t>{0, 1}, {1, 1}, {1, 0}}) {
        sent.raws.resize(2);
        sent.raws.push_back(raw(batch));
        const auto message = sent.message();
        for (std::size_t end = message->size() - 20; end < message->size(); ++end) {
            const auto plain = receive(memory, *message, {end}).plain();
            CHECK(plain != nullptr && plain->valid() == (batch[0] <= batch[1]));
            CHECK(plain->message() == *message);
        }
    }
}

void test_a_model_that_worked_in_place_is_undone() {
    const Memory memory;
    const auto request = take(memory, good());
    std::memset(request->block()->at(request->block()->offset()), 0x55, 128);
    CHECK(request->stage());
    CHECK(staged<float>(*request, 0) == kX);
    CHECK(staged<std::int32_t>(*request, 1) == kEdges32);
    CHECK(request->loops() == 1);
}

// Two authors, three papers and four edges between them.
Sent typed() {
    Sent sent;
    sent.head.model = "typed";
    sent.head.tensors = {{"writes", "INT32", {2, 4}, {}}, {"x.author", "FP16", {2, 3}, {}},
                         {"known", "BOOL", {3}, {}},      {"kind", "INT8", {2}, {}},
                         {"graph", "INT64", {3}, {}},     {"year", "INT16", {3}, {}},
                         {"score", "FP64", {4}, {}},      {"level", "UINT8", {3}, {}},
                         {"number", "INT32", {3}, {}},    {"serial", "INT64", {3}, {}}};
    sent.raws = {raw<std::int32_t>({0, 1, 1, 0, 2, 2, 0, 1}),
                 raw<std::uint16_t>({0, 0x3c00, 0x7bff, 0x8001, 0xfbff, 1}),
                 raw<std::uint8_t>({1, 0, 1}),
                 raw<std::int8_t>({-5, 90}),
                 raw<std::int64_t>({0, 2, 1}),
                 raw<std::int16_t>({1900, 2000, 2100}),
                 raw<double>({-1e300, 0, 1e300, 1}),
                 raw<std::uint8_t>({3, 200, 130}),
                 raw<std::int32_t>({-100, 0, 1 << 30}),
                 raw<std::int64_t>({INT64_MIN, 0, 1 << 30})};
    return sent;
}

void test_a_declared_request_is_staged() {
    const Memory memory;
    const auto request = take(memory, typed());
    CHECK(request != nullptr);
    CHECK((request->counts() == std::vector<std::int64_t>{2, 3, 4}));
    CHECK(request->loops() == -1 && !request->narrow());
    const auto& tensors = request->tensors();
    CHECK(tensors.size() == 10 && tensors[2].input->name == "writes");
    CHECK((staged<std::int64_t>(*request, 2) == std::vector<std::int64_t>{0, 1, 1, 0, 2, 2, 0, 1}));
    CHECK(tensors[1].element->dtype == "int8" && tensors[3].element->dtype == "bool");
    CHECK((staged<std::int8_t>(*request, 1) == std::vector<std::int8_t>{-5, 90}));
    CHECK(tensors[4].largest == 2 && tensors[4].pairs == 3 && tensors[4].most == 1);
    Sent paired = typed();
    paired.raws[4] = raw<std::int64_t>({2, 0, 2});
    CHECK(take(memory, paired)->tensors()[4].pairs == 5);
    CHECK(take(memory, paired)->tensors()[4].most == 2);
    CHECK(request->message() == *typed().message());
    // A line of 64 bytes for each tensor and each output.
    CHECK(request->output_capacity() == 128 && request->block_size() == 12 * 64);
    // Without what may be left out.
    Sent few = typed();
    few.head.tensors.resize(5), few.raws.resize(5);
    CHECK(take(memory, few) != nullptr && take(memory, few)->tensors().size() == 5);
    // Some counts may be 0, as long as there are nodes and other things.
    Sent sparse = typed();
    sparse.head.tensors = {{"x.author", "FP16", {0, 3}, {}},
                           {"kind", "INT8", {0}, {}},
                           {"writes", "INT64", {2, 0}, {}},
                           {"known", "BOOL", {3}, {}},
                           {"graph", "INT64", {3}, {}}};
    sparse.raws = {"", "", "", raw<std::uint8_t>({1, 0, 1}), raw<std::int64_t>({0, 2, 1})};
    CHECK(take(memory, sparse) == nullptr);
    sparse.head.tensors[2].shape = {2, 1};
    sparse.raws[2] = raw<std::int64_t>({0, 0});
    const auto whole = receive(memory, *sparse.message());
    CHECK(whole.plain() != nullptr && !whole.plain()->valid());  // there is no author 0
    CHECK(given(whole) == *sparse.message());
    CHECK(take(memory, good()) != nullptr);
}

template <typename Number>
std::function<void(Sent&)> last(std::size_t raw, Number value) {
    return [raw, value](Sent& sent) {
        std::string& found = sent.raws[raw];
        std::memcpy(found.data() + found.size() - sizeof value, &value, sizeof value);
    };
}

// What a model cannot take, as a change of `typed`.
const std::vector<std::function<void(Sent&)>>& typed_bends() {
    static const std::vector<std::function<void(Sent&)>> found{
        // The first row points to authors, the second to papers.
        [](Sent& s) { s.raws[0][0] = 2; },
        [](Sent& s) { s.raws[0][12] = 2; },
        last<std::int32_t>(0, 3),
        last<std::int32_t>(0, -1),
        last<std::uint16_t>(1, 0x7c00),
        last<std::uint16_t>(1, 0xfe01),
        last<std::uint8_t>(2, 2),
        last<std::uint8_t>(2, 255),
        last<std::int8_t>(3, -6),
        last<std::int8_t>(3, 91),
        last<std::int64_t>(4, 3),
        last<std::int64_t>(4, -1),
        last<std::int16_t>(5, 1899),
        last<std::int16_t>(5, 2101),
        last<double>(6, std::numeric_limits<double>::infinity()),
        last<double>(6, std::numeric_limits<double>::quiet_NaN()),
        last<std::uint8_t>(7, 2),
        last<std::uint8_t>(7, 201),
        last<std::int32_t>(8, -101),
        last<std::int32_t>(8, (1 << 30) + 1),
        last<std::int64_t>(9, (1 << 30) + 1),
        last<std::int64_t>(9, INT64_MAX),
    };
    return found;
}

void test_values_that_a_declared_model_cannot_take_are_left_alone() {
    const Memory memory;
    for (std::size_t i = 0; i < typed_bends().size(); ++i) {
        Sent sent = typed();
        typed_bends()[i](sent);
        const auto plain = receive(memory, *sent.message()).plain();
        if (plain == nullptr || plain->valid()) {
            std::fprintf(stderr, "bend %zu was taken\n", i);
        }
        CHECK(plain != nullptr && !plain->valid() && plain->message() == *sent.message());
    }
    const std::vector<std::function<void(Sent&)>> odd{
        [](Sent& s) { s.head.tensors[3].datatype = "UINT8"; },
        [](Sent& s) { s.head.tensors[8].datatype = "INT64"; },
        [](Sent& s) { s.head.tensors[3].shape = {3}, s.raws[3] += '\0'; },
        [](Sent& s) { s.head.tensors[5].name = "years"; },
        [](Sent& s) { s.head.tensors[0].shape = {4, 2}; },
        [](Sent& s) { s.head.tensors.erase(s.head.tensors.begin()), s.raws.erase(s.raws.begin()); },
    };
    for (const auto& bend : odd) {
        Sent sent = typed();
        bend(sent);
        CHECK(receive(memory, *sent.message()).plain() == nullptr);
    }
    CHECK(memory.pool->used() == 0);
}

const std::vector<std::function<void(Sent&)>>& bends() {
    static const std::vector<std::function<void(Sent&)>> found{
        [](Sent& s) { s.head.model = "other"; },
        [](Sent& s) { s.head.version = "2"; },
        [](Sent& s) { s.head.id = "caf\xc3\xa9"; },
        [](Sent& s) { s.head.parameters = {{"tenant", Choice::kString, 0, "\xff"}}; },
        [](Sent& s) { s.head.tensors[0].name = "y"; },
        [](Sent& s) { s.head.tensors[0].datatype = "FP64"; },
        [](Sent& s) { s.head.tensors[0].parameters = {{"a", Choice::kBool, 1, ""}}; },
        [](Sent& s) { s.head.tensors[0].shape = {2, 4}; },
        [](Sent& s) { s.head.tensors[0].shape = {6}; },
        [](Sent& s) { s.head.tensors[0].shape = {-2, kFeatures}; },
        [](Sent& s) { s.head.tensors[0].shape = {INT64_MAX / 2, kFeatures}; },
        [](Sent& s) { s.head.tensors[1].shape = {2, 4}; },
        [](Sent& s) { s.head.tensors[1].shape = {3, 2}; },
        [](Sent& s) { s.head.tensors[1].name = "x"; },
        [](Sent& s) { s.head.tensors.pop_back(), s.raws.pop_back(); },
        [](Sent& s) { s.raws.pop_back(); },
        [](Sent& s) { s.raws.emplace_back(); },
        [](Sent& s) { s.raws[0].pop_back(); },
        // As many bytes as expected, divided in another way.
        [](Sent& s) { s.raws[1] += s.raws[0].back(), s.raws[0].pop_back(); },
        [](Sent& s) { s.raws[1][0] = 2; },
        [](Sent& s) { s.raws[1][3] = '\xff'; },
        [](Sent& s) {
            const float bad = std::numeric_limits<float>::quiet_NaN();
            std::memcpy(s.raws[0].data() + 8, &bad, sizeof bad);
        },
        // Empty graphs: some models take them.
        [](Sent& s) { s.head.tensors[0].shape = {0, kFeatures}, s.raws[0].clear(); },
        [](Sent& s) { s.head.tensors[1].shape = {2, 0}, s.raws[1].clear(); },
        // More than the pool has.
        [](Sent& s) {
            s.head.tensors[0].shape = {6000, kFeatures};
            s.raws[0].assign(6000 * kFeatures * 4, '\0');
        },
    };
    return found;
}

void test_what_is_odd_or_wrong_is_left_alone() {
    const Memory memory;
    for (std::size_t i = 0; i < bends().size(); ++i) {
        Sent sent = good();
        bends()[i](sent);
        if (take(memory, sent) != nullptr) {
            std::fprintf(stderr, "bend %zu was taken\n", i);
        }
        CHECK(take(memory, sent) == nullptr);
        CHECK(memory.pool->used() == 0);
    }
    // Every part of a message is none.
    const auto whole = good().message();
    for (std::size_t size = 0; size < whole->size(); ++size) {
        const auto incoming = receive(memory, whole->substr(0, size));
        CHECK(incoming.plain() == nullptr && given(incoming) == whole->substr(0, size));
    }
    // Only with the check are features looked at.
    Sent sent = good();
    const float infinite = std::numeric_limits<float>::infinity();
    std::memcpy(sent.raws[0].data(), &infinite, sizeof infinite);
    CHECK(take(memory, sent, true, false) != nullptr);
}

// However a message is cut in pieces, it is staged alike, and can be written again byte by byte.
void test_every_cut_of_a_message() {
    const Memory memory;
    std::vector<Sent> all{good()};
    for (const auto& bend : bends()) {
        bend(all.emplace_back(good()));
    }
    all.push_back(typed());
    for (const auto& bend : typed_bends()) {
        bend(all.emplace_back(typed()));
    }
    for (const bool narrow : {true, false}) {
        for (const Sent& sent : all) {
            const std::string message = *sent.message();
            const auto whole = receive(memory, message, {}, narrow);
            if (message.size() > 1000) {
                continue;
            }
            std::vector<std::vector<std::size_t>> cuts(1);
            for (std::size_t at = 1; at < message.size(); ++at) {
                cuts[0].push_back(at);
                cuts.push_back({at});
                cuts.push_back({at, at});
            }
            for (const auto& ends : cuts) {
                const auto incoming = receive(memory, message, ends, narrow);
                CHECK(given(incoming) == message);
                CHECK((incoming.plain() == nullptr) == (whole.plain() == nullptr));
                if (const auto plain = incoming.plain()) {
                    CHECK(plain->valid() == whole.plain()->valid());
                    CHECK(plain->loops() == whole.plain()->loops());
                    for (std::size_t i = 0; i < plain->tensors().size(); ++i) {
                        CHECK(staged<char>(*plain, i) == staged<char>(*whole.plain(), i));
                        CHECK(plain->tensors()[i].largest == whole.plain()->tensors()[i].largest);
                        CHECK(!plain->valid() ||
                              plain->tensors()[i].pairs == whole.plain()->tensors()[i].pairs);
                    }
                }
            }
        }
    }
    CHECK(memory.pool->used() == 0);
}

// A graph whose message is too large to be kept.
Sent large(std::mt19937& random, std::int64_t nodes) {
    Sent sent = good();
    std::vector<float> x(static_cast<std::size_t>(nodes * kFeatures));
    std::vector<std::int32_t> edges(static_cast<std::size_t>(4 * nodes));
    for (float& one : x) {
        one = static_cast<float>(random() % 1000);
    }
    for (std::int32_t& one : edges) {
        one = static_cast<std::int32_t>(random() % static_cast<std::uint32_t>(nodes));
    }
    sent.head.tensors = {{"edge_index", "INT32", {2, 2 * nodes}, {}},
                         {"x", "FP32", {nodes, kFeatures}, {}}};
    sent.raws = {raw(edges), raw(x)};
    return sent;
}

void test_large_messages_are_not_kept() {
    const Memory memory(8 << 20);
    std::mt19937 random(1);
    for (int round = 0; round < 20; ++round) {
        Sent sent = large(random, 15'000 + static_cast<std::int64_t>(random() % 3000));
        const bool narrow = round % 2 == 0, wrong = round % 3 == 0;
        if (wrong) {
            std::memset(sent.raws[0].data() + random() % 1000 * 4, 0xff, 4);
        }
        const std::string message = *sent.message();
        CHECK(message.size() > kMostKeptBytes);
        std::vector<std::size_t> ends;
        for (std::size_t at = random() % 30'000; at < message.size(); at += random() % 30'000) {
            ends.push_back(at);
        }
        const auto incoming = receive(memory, message, ends, narrow);
        const auto whole = receive(memory, message, {}, narrow);
        const auto plain = incoming.plain();
        CHECK(plain != nullptr && plain->valid() == !wrong && given(incoming) == message);
        CHECK(plain->loops() == whole.plain()->loops());
        CHECK(incoming.held_bytes() < 1000);
        for (std::size_t i = 0; i < plain->tensors().size(); ++i) {
            CHECK(staged<char>(*plain, i) == staged<char>(*whole.plain(), i));
        }
        // One bit that a model changed is noticed, wherever it is.
        CHECK(plain->stage() && plain->stage());
        const auto& changed = plain->tensors()[random() % 2];
        const auto at =
            static_cast<std::int64_t>(random() % static_cast<std::uint32_t>(changed.size));
        *plain->block()->at(changed.offset + at) ^= std::byte{1};
        CHECK(!plain->stage());
        *plain->block()->at(changed.offset + at) ^= std::byte{1};
        CHECK(plain->stage());
        // So are two elements that changed places.
        const auto x = staged<std::uint32_t>(*plain, 0);
        std::size_t other = 1;
        while (x[other] == x[0]) {
            ++other;
        }
        auto* words =
            reinterpret_cast<std::uint32_t*>(plain->block()->at(plain->tensors()[0].offset));
        std::swap(words[0], words[other]);
        CHECK(!plain->stage());
    }
    CHECK(memory.pool->used() == 0);
}

// Tensors of bytes, whose last word of the fingerprint is not whole.
void test_large_declared_messages_are_not_kept() {
    const Memory memory(8 << 20);
    for (const std::int64_t papers : {30'001, 30'002, 30'003}) {
        Sent sent = typed();
        const auto count = static_cast<std::size_t>(papers);
        sent.head.tensors.resize(5), sent.raws.resize(5);
        sent.head.tensors[2].shape = sent.head.tensors[4].shape = {papers};
        sent.raws[2].assign(count, '\1');
        sent.raws[4].assign(8 * count, '\0');
        const std::string message = *sent.message();
        const auto plain = receive(memory, message, {100'000, 200'003}).plain();
        CHECK(message.size() > kMostKeptBytes && plain->valid() && plain->message() == message);
        CHECK(plain->held_bytes() < 1000 && plain->stage());
        const auto& known = plain->tensors()[3];
        CHECK(known.input->name == "known");
        for (const std::int64_t at : {std::int64_t{0}, papers - 1, papers - 2, papers - 3}) {
            std::byte& one = *plain->block()->at(known.offset + at);
            one ^= std::byte{1};
            CHECK(!plain->stage());
            one ^= std::byte{1};
            CHECK(plain->stage());
        }
    }
}

void test_a_block_stays_while_anybody_holds_it() {
    Memory memory;
    auto request = take(memory, good());
    auto sending = request->block();
    request->release();
    CHECK(request->block() == nullptr);
    CHECK(memory.pool->used() == 192);
    sending.reset();
    CHECK(memory.pool->used() == 0);
    // The pool outlives its maker while a block of it is held.
    request = take(memory, good());
    memory = Memory();
    CHECK(staged<float>(*request, 0) == kX);
}

void test_threads_share_a_pool() {
    const Memory memory;
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
        threads.emplace_back([&memory] {
            for (int k = 0; k < 500; ++k) {
                const auto request = take(memory, good());
                CHECK(request != nullptr && staged<float>(*request, 0) == kX);
            }
        });
    }
    for (auto& one : threads) {
        one.join();
    }
    CHECK(memory.pool->used() == 0);
}

}  // namespace

int main() {
    test_a_plain_request_is_staged();
    test_edges_are_widened_where_the_model_wants_them_wide();
    test_order_optional_inputs_and_options_do_not_matter();
    test_values_that_must_ascend_do_so_wherever_the_message_is_cut();
    test_a_model_that_worked_in_place_is_undone();
    test_a_declared_request_is_staged();
    test_what_is_odd_or_wrong_is_left_alone();
    test_values_that_a_declared_model_cannot_take_are_left_alone();
    test_every_cut_of_a_message();
    test_large_messages_are_not_kept();
    test_large_declared_messages_are_not_kept();
    test_a_block_stays_while_anybody_holds_it();
    test_threads_share_a_pool();
    return 0;
}
