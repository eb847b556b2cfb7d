// Plain requests: what is staged, where, and what is left to Python.

#include "plain_request.hpp"

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <thread>

#include "check.hpp"

using namespace gnnserve;
using namespace gnnserve::front;

namespace {

constexpr std::int64_t kPoolBytes = 1 << 16;
constexpr std::int64_t kFeatures = 3;

// A pool over memory of its own.
struct Memory {
    std::shared_ptr<std::vector<std::byte>> bytes =
        std::make_shared<std::vector<std::byte>>(static_cast<std::size_t>(kPoolBytes));
    std::shared_ptr<BlockPool> pool =
        std::make_shared<BlockPool>(bytes->data(), kPoolBytes, kTensorAlignment, bytes);
};

PlainModels models(bool narrow = true, bool counts_loops = true) {
    auto model = std::make_shared<PlainModel>();
    model->token = 7;
    model->narrow_edges = narrow;
    model->counts_loops = counts_loops;
    model->output_nodes = 8;
    model->output_constant = 1.5;
    model->inputs = {{"x", false, false, true, {kNodes, kFeatures}},
                     {"edge_index", true, true, true, {2, kEdges}},
                     {"edge_weight", false, false, false, {kEdges}},
                     {"batch", true, false, false, {kNodes}}};
    PlainModels found;
    found.add("gcn", "", model);
    found.add("gcn", "1", model);
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

std::shared_ptr<PlainRequest> take(const Memory& memory, const Sent& sent, bool narrow = true) {
    return PlainRequest::of(models(narrow), *memory.pool, sent.message(), true);
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
    CHECK(request->nodes() == 2 && request->edges() == 3 && request->loops() == 1);
    CHECK(request->narrow());
    CHECK(staged<float>(*request, 0) == kX);
    CHECK(staged<std::int32_t>(*request, 1) == kEdges32);
    // Two lines of 64 bytes for the inputs, one for the output of 17.5.
    CHECK(request->output_offset() == request->block()->offset() + 128);
    CHECK(request->output_capacity() == 64 && request->block_size() == 192);
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
    CHECK(request->message().parameters.size() == 1);
}

void test_a_model_that_worked_in_place_is_undone() {
    const Memory memory;
    const auto request = take(memory, good());
    std::memset(request->block()->at(request->block()->offset()), 0x55, 128);
    request->stage();
    CHECK(staged<float>(*request, 0) == kX);
    CHECK(staged<std::int32_t>(*request, 1) == kEdges32);
    CHECK(request->loops() == 1);
}

void test_what_is_odd_or_wrong_is_left_alone() {
    const std::vector<std::function<void(Sent&)>> bends{
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
    const Memory memory;
    for (std::size_t i = 0; i < bends.size(); ++i) {
        Sent sent = good();
        bends[i](sent);
        if (take(memory, sent) != nullptr) {
            std::fprintf(stderr, "bend %zu was taken\n", i);
        }
        CHECK(take(memory, sent) == nullptr);
        CHECK(memory.pool->used() == 0);
    }
    // Every part of a message is none.
    const auto whole = good().message();
    for (std::size_t size = 0; size < whole->size(); ++size) {
        const auto part = std::make_shared<const std::string>(whole->substr(0, size));
        CHECK(PlainRequest::of(models(), *memory.pool, part, true) == nullptr);
    }
    // Only with the check are features looked at.
    Sent sent = good();
    const float infinite = std::numeric_limits<float>::infinity();
    std::memcpy(sent.raws[0].data(), &infinite, sizeof infinite);
    CHECK(PlainRequest::of(models(), *memory.pool, sent.message(), false) != nullptr);
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
    test_a_model_that_worked_in_place_is_undone();
    test_what_is_odd_or_wrong_is_left_alone();
    test_a_block_stays_while_anybody_holds_it();
    test_threads_share_a_pool();
    return 0;
}
