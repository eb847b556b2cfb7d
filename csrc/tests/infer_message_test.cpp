#include "gnnserve/infer_message.hpp"

#include <random>
#include <vector>

#include "check.hpp"

using gnnserve::Choice;
using gnnserve::InferKind;
using gnnserve::InferMessage;
using gnnserve::InferParameter;
using gnnserve::parse_infer;
using gnnserve::raw_prefix;
using gnnserve::write_infer;

namespace {

InferMessage sample() {
    InferMessage message;
    message.model = "gcn";
    message.id = "r";
    const InferParameter negative{"n", Choice::kInt64, static_cast<std::uint64_t>(-1), {}};
    message.parameters = {{"b", Choice::kBool, 1, {}}, negative, {"s", Choice::kString, 0, "text"}};
    message.tensors = {{"x", "FP32", {3, 400}, {{"d", Choice::kDouble, 1ULL << 62, {}}}},
                       {"edge_index", "INT32", {}, {}}};
    return message;
}

void test_what_is_written_is_read() {
    const std::string raw(300, 'r');
    for (const InferKind kind : {InferKind::kRequest, InferKind::kResponse}) {
        const std::string text =
            write_infer(sample()) + raw_prefix(kind, raw.size()) + raw + raw_prefix(kind, 0);
        const auto found = parse_infer(kind, text);
        CHECK(found);
        CHECK(found->model == "gcn" && found->version.empty() && found->id == "r");
        CHECK(found->parameters.size() == 3);
        CHECK(found->parameters[1].bits == static_cast<std::uint64_t>(-1));
        CHECK(found->parameters[2].name == "s" && found->parameters[2].text == "text");
        CHECK(found->tensors.size() == 2);
        CHECK(found->tensors[0].shape == std::vector<std::int64_t>({3, 400}));
        CHECK(found->tensors[0].parameters[0].bits == 1ULL << 62);
        CHECK(found->tensors[1].shape.empty());
        CHECK(found->raws.size() == 2 && found->raws[0] == raw && found->raws[1].empty());
    }
}

// Under AddressSanitizer: nothing is read beyond the end of the input.
void test_no_byte_beyond_the_end_is_read() {
    const std::string text = write_infer(sample()) + raw_prefix(InferKind::kRequest, 4) + "1234";
    std::mt19937 random(1);
    for (std::size_t end = 0; end <= text.size(); ++end) {
        for (int i = 0; i < 50; ++i) {
            std::vector<char> exact(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(end));
            if (i > 0 && !exact.empty()) {
                exact[random() % exact.size()] = static_cast<char>(random());
            }
            const auto found = parse_infer(InferKind::kRequest, {exact.data(), exact.size()});
            CHECK(i > 0 || end < text.size() || found);
        }
    }
}

// A message at its limits is read; one beyond any of them is not.
void test_limits() {
    const auto is_read = [](const InferMessage& message, std::size_t raws = 0) {
        std::string text = write_infer(message);
        for (std::size_t i = 0; i < raws; ++i) {
            text += raw_prefix(InferKind::kRequest, 0);
        }
        return parse_infer(InferKind::kRequest, text).has_value();
    };
    const std::string name(256, 'n');
    const std::string long_name(257, 'n');
    const InferParameter one{"p", Choice::kBool, 1, {}};
    InferMessage message;
    message.model = message.version = name;
    message.tensors.resize(16);
    message.tensors[0] = {name, name, {1, 2, 3, 4, 5, 6, 7, 8}, {}};
    message.tensors[1].parameters.resize(30, one);
    message.parameters.resize(34, one);
    message.parameters[0].name = name;
    CHECK(is_read(message, 16));
    CHECK(!is_read(message, 17));

    const auto is_read_with = [&](auto change) {
        InferMessage changed = message;
        change(changed);
        return is_read(changed);
    };
    CHECK(!is_read_with([&](InferMessage& m) { m.model = long_name; }));
    CHECK(!is_read_with([&](InferMessage& m) { m.version = long_name; }));
    CHECK(!is_read_with([&](InferMessage& m) { m.parameters[0].name = long_name; }));
    CHECK(!is_read_with([&](InferMessage& m) { m.tensors[0].name = long_name; }));
    CHECK(!is_read_with([&](InferMessage& m) { m.tensors[0].datatype = long_name; }));
    CHECK(!is_read_with([&](InferMessage& m) { m.tensors[1].parameters[0].name = long_name; }));
    CHECK(!is_read_with([](InferMessage& m) { m.tensors[0].shape.push_back(9); }));
    CHECK(!is_read_with([&](InferMessage& m) { m.tensors[2].parameters.push_back(one); }));
    CHECK(!is_read_with([](InferMessage& m) { m.tensors.emplace_back(); }));

    // All but raw contents together.
    message = {};
    const std::string head(16 * 1024 - 4, 'h');
    message.id = head;
    CHECK(is_read(message));
    CHECK(!is_read(message, 1));
}

// As in the library, a field's tag has at most 5 bytes and 32 bits.
void test_long_tags() {
    using namespace std::string_literals;
    const auto is_read = [](const std::string& text) {
        return parse_infer(InferKind::kRequest, text).has_value();
    };
    CHECK(is_read("\x0a\x01m"s));
    CHECK(is_read("\x8a\x80\x80\x80\x00\x01m"s));
    CHECK(!is_read("\x8a\x80\x80\x80\x80\x00\x01m"s));
    CHECK(!is_read("\x8a\x80\x80\x80\x10\x01m"s));
}

}  // namespace

int main() {
    test_what_is_written_is_read();
    test_no_byte_beyond_the_end_is_read();
    test_limits();
    test_long_tags();
}
