// ModelInferRequest and ModelInferResponse of the Open Inference Protocol, read and written as
// protocol buffers without their library: one pass, no copy of any tensor.
//
// Reads plain messages only: each field known, of the right wire type, and given once unless it
// repeats, all tensors in raw form. A valid message need not be plain (fields in several parts,
// unknown fields, numbers one by one in `contents`), and whoever reads one that is not leaves it to
// the library. Texts are not checked for UTF-8.
//
// Nor does it read more than it must: a message beyond the limits below is left too, as soon as
// more than kMostHeadBytes of it lie outside raw contents. So what one costs does not grow with its
// size.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace gnnserve {

// Limits of a message, as in serve/wire/protobuf.py, which refuses what is beyond them in words.
inline constexpr std::size_t kMostHeadBytes = 16 * 1024;
inline constexpr std::size_t kMostTensors = 16;
inline constexpr std::size_t kMostParameters = 64;
inline constexpr std::size_t kMostDimensions = 8;
inline constexpr std::size_t kMostNameBytes = 256;

enum class InferKind : std::uint8_t { kRequest, kResponse };

// Members of InferParameter that plain messages hold, by field number.
enum class Choice : std::uint8_t { kBool = 1, kInt64 = 2, kString = 3, kDouble = 4 };

struct InferParameter {
    std::string_view name;
    Choice choice = Choice::kBool;
    // Of a bool 0 or 1, of an integer two's complement, of a double its bits.
    std::uint64_t bits = 0;
    std::string_view text;
};

// An input or output: of a requested output only the name and the parameters.
struct InferTensor {
    std::string_view name;
    std::string_view datatype;
    std::vector<std::int64_t> shape;
    std::vector<InferParameter> parameters;
};

// Texts lie in the message that was parsed, or wherever the writer took them from.
struct InferMessage {
    std::string_view model;
    std::string_view version;
    std::string_view id;
    std::vector<InferParameter> parameters;
    std::vector<InferTensor> tensors;
    // Of requests only.
    std::vector<InferTensor> requested;
    std::vector<std::string_view> raws;
};

// nullopt: not plain, perhaps not even a message, or beyond the limits.
std::optional<InferMessage> parse_infer(InferKind kind, std::string_view message);

// The message, of either kind, without its raw contents, which may follow; `requested` is
// left out.
std::string write_infer(const InferMessage& message);

// What stands before raw contents of that many bytes.
std::string raw_prefix(InferKind kind, std::size_t size);

}  // namespace gnnserve
