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

// Under AddressSanitizer: nothing is read beyond the end of what was given.
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

}  // namespace

int main() {
    test_what_is_written_is_read();
    test_no_byte_beyond_the_end_is_read();
}
