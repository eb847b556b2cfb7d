// Codec for ModelInferRequest and ModelInferResponse of the Open Inference Protocol. It reads and
// writes protocol buffers without their library, in one pass and without a copy of any tensor.
//
// It reads plain messages only: every field is known, has the right wire type, and occurs once
// unless it repeats; all tensors are in raw form. Other valid messages (fields in several parts,
// unknown fields, numbers one by one in `contents`) are left to the library. Texts are not checked
// for UTF-8.
//
// A message beyond the limits below is also left to the library, as soon as more than
// kMostHeadBytes of it lie outside raw contents. The cost of such a message thus does not grow with
// its size.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace gnnserve {

// Limits of a message, as in serve/wire/protobuf.py, which refuses larger ones with an error text.
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
    // 0 or 1 for a bool, two's complement for an integer, the bits for a double.
    std::uint64_t bits = 0;
    std::string_view text;
};

// An input or output; a requested output has only a name and parameters.
struct InferTensor {
    std::string_view name;
    std::string_view datatype;
    std::vector<std::int64_t> shape;
    std::vector<InferParameter> parameters;
};

// A message. Its texts point into the bytes that were parsed, or to the writer's own.
struct InferMessage {
    std::string_view model;
    std::string_view version;
    std::string_view id;
    std::vector<InferParameter> parameters;
    std::vector<InferTensor> tensors;
    // Set in requests only.
    std::vector<InferTensor> requested;
    std::vector<std::string_view> raws;
};

// Returns nullopt for bytes that are no plain message, or one beyond the limits.
std::optional<InferMessage> parse_infer(InferKind kind, std::string_view message);

// Returns the message, of either kind, without `requested` and without its raw contents, which may
// follow.
std::string write_infer(const InferMessage& message);

// Returns the bytes that precede raw contents of that many bytes.
std::string raw_prefix(InferKind kind, std::size_t size);

}  // namespace gnnserve
