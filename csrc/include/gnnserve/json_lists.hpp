// Lists of numbers in JSON text: found in a document, read into arrays, and written. No object is
// made per number, so memory stays in proportion to the text, however many numbers it holds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace gnnserve {

enum class NumberKind : std::uint8_t {
    kBool,
    kU8,
    kU16,
    kU32,
    kU64,
    kI8,
    kI16,
    kI32,
    kI64,
    kF32,
    kF64
};

// Text that is no list of the expected form; what() says what is wrong, and at which byte.
class JsonListError : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

// A document whose long lists were cut out.
struct CutDocument {
    // The document with `[k]` in place of the k-th list.
    std::string rest;
    // Begin and end of each list in the document.
    std::vector<std::pair<std::size_t, std::size_t>> lists;
};

// Cuts out every list that is the value of a key `key` (any key when empty) of an object at nesting
// `depth` (1: the document itself), unless its first element is an object. A document that is not
// JSON is cut at most in part, and its rest is not JSON either.
CutDocument cut_lists(std::string_view document, int depth, std::string_view key);

// Bytes of an element.
std::size_t size_of(NumberKind kind);

// Returns the sizes of a nested list, as the first list of each depth shows them; of at most `most`
// depths. Reading with this shape finds out whether all lists are alike. Throws JsonListError for
// deeper nesting.
std::vector<std::int64_t> shape_of_list(std::string_view text, std::size_t most);

// Reads a list of numbers (of true, false, 0 and 1 for kBool) into `target`, row-major. The list is
// flat or nested by `shape`; `target` has exactly the size that `shape` needs. Throws JsonListError
// for other nesting, another count, text that is not JSON, or a value that `kind` cannot hold.
void read_list(std::string_view text, NumberKind kind, std::span<const std::int64_t> shape,
               std::span<std::byte> target);

// Writes elements as a list, nested by `shape` (flat when it has one dimension). Floats have the
// fewest digits that read back to the same value. Throws JsonListError for NaN and infinity, which
// JSON cannot hold.
std::string write_list(std::span<const std::byte> source, NumberKind kind,
                       std::span<const std::int64_t> shape);

}  // namespace gnnserve
