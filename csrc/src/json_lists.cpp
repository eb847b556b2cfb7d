#include "gnnserve/json_lists.hpp"

#include <charconv>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <thread>
#include <type_traits>

namespace gnnserve {
namespace {

bool is_space(char letter) {
    return letter == ' ' || letter == '\n' || letter == '\t' || letter == '\r';
}

bool is_digit(char letter) { return letter >= '0' && letter <= '9'; }

// Position behind the string whose opening quote is at `at`; the end when it does not close.
std::size_t behind_string(std::string_view text, std::size_t at) {
    for (++at; at < text.size(); ++at) {
        if (text[at] == '\\') {
            ++at;
        } else if (text[at] == '"') {
            return at + 1;
        }
    }
    return text.size();
}

std::size_t behind_space(std::string_view text, std::size_t at) {
    while (at < text.size() && is_space(text[at])) {
        ++at;
    }
    return at;
}

// Position behind the list that opens at `at`; npos when it does not close.
std::size_t behind_list(std::string_view text, std::size_t at) {
    std::size_t open = 0;
    while (at < text.size()) {
        switch (text[at]) {
            case '"':
                at = behind_string(text, at);
                continue;
            case '[':
                ++open;
                break;
            case ']':
                if (--open == 0) {
                    return at + 1;
                }
                break;
            default:
                break;
        }
        ++at;
    }
    return std::string_view::npos;
}

bool holds_object(std::string_view text, std::size_t at) {
    do {
        at = behind_space(text, at + 1);
    } while (at < text.size() && text[at] == '[');
    return at < text.size() && text[at] == '{';
}

// Elements that are read in about 0.2 ms. Threads of the kernel's idle class do not take the core
// from each other when they wake, so a long list offers it to others of its class so often.
constexpr std::size_t kElementsBetweenYields = 16 * 1024;

// Calls `act` with a value of the element's type.
template <typename Act>
auto with_type(NumberKind kind, Act act) {
    switch (kind) {
        case NumberKind::kBool:
            return act(bool{});
        case NumberKind::kU8:
            return act(std::uint8_t{});
        case NumberKind::kU16:
            return act(std::uint16_t{});
        case NumberKind::kU32:
            return act(std::uint32_t{});
        case NumberKind::kU64:
            return act(std::uint64_t{});
        case NumberKind::kI8:
            return act(std::int8_t{});
        case NumberKind::kI16:
            return act(std::int16_t{});
        case NumberKind::kI32:
            return act(std::int32_t{});
        case NumberKind::kI64:
            return act(std::int64_t{});
        case NumberKind::kF32:
            return act(float{});
        case NumberKind::kF64:
            break;
    }
    return act(double{});
}

template <typename T>
class Reader {
public:
    Reader(std::string_view text, std::byte* target) : text_(text), target_(target) {}

    void read(std::span<const std::int64_t> shape) {
        std::int64_t count = 1;
        std::vector<std::int64_t> nested;
        for (const std::int64_t size : shape) {
            // Lists within an empty one cannot be seen.
            if (count != 0) {
                nested.push_back(size);
            }
            count *= size;
        }
        std::size_t levels = 0;
        for (std::size_t at = behind_space(text_, 0); at < text_.size() && text_[at] == '[';
             at = behind_space(text_, at + 1)) {
            ++levels;
        }
        if (levels == 0) {
            fail("a list is expected");
        } else if (levels == nested.size()) {
            sizes_ = nested;
        } else if (levels == 1) {
            sizes_ = {count};
        } else {
            fail("lists are nested " + std::to_string(levels) + " deep, but shape needs 1 or " +
                 std::to_string(nested.size()));
        }
        list(0);
        skip_space();
        if (at_ != text_.size()) {
            fail("more follows the list");
        }
    }

private:
    [[noreturn]] void fail(const std::string& what) const {
        throw JsonListError(what + " (byte " + std::to_string(at_) + " of the list)");
    }

    void skip_space() { at_ = behind_space(text_, at_); }

    char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }

    void expect(char letter, const char* what) {
        skip_space();
        if (peek() != letter) {
            fail(what);
        }
        ++at_;
    }

    void list(std::size_t level) {
        expect('[', "a list is expected");
        const std::int64_t size = sizes_[level];
        const std::string wanted = "a list of " + std::to_string(size) + " is expected";
        for (std::int64_t position = 0; position < size; ++position) {
            if (position > 0) {
                expect(',', wanted.c_str());
            }
            if (level + 1 < sizes_.size()) {
                list(level + 1);
            } else {
                skip_space();
                const T value = number();
                std::memcpy(target_, &value, sizeof value);
                target_ += sizeof value;
                if (++read_ % kElementsBetweenYields == 0) {
                    std::this_thread::yield();
                }
            }
        }
        expect(']', wanted.c_str());
    }

    // End of the number at the position, by JSON's grammar; `whole` tells that it is an integer.
    std::size_t end_of_number(bool& whole) const {
        std::size_t at = at_;
        const auto digits = [&] {
            const std::size_t from = at;
            while (at < text_.size() && is_digit(text_[at])) {
                ++at;
            }
            if (at == from) {
                fail("a number is expected");
            }
            return from;
        };
        if (at < text_.size() && text_[at] == '-') {
            ++at;
        }
        if (const std::size_t from = digits(); text_[from] == '0' && at - from > 1) {
            fail("a number begins with 0");
        }
        whole = true;
        if (at < text_.size() && text_[at] == '.') {
            whole = false;
            ++at;
            digits();
        }
        if (at < text_.size() && (text_[at] == 'e' || text_[at] == 'E')) {
            whole = false;
            ++at;
            if (at < text_.size() && (text_[at] == '+' || text_[at] == '-')) {
                ++at;
            }
            digits();
        }
        return at;
    }

    T number() {
        if constexpr (std::is_same_v<T, bool>) {
            for (const auto& [word, value] : {std::pair{std::string_view("true"), true},
                                              {"false", false},
                                              {"1", true},
                                              {"0", false}}) {
                if (text_.substr(at_, word.size()) == word) {
                    at_ += word.size();
                    return value;
                }
            }
            fail("true or false is expected");
        } else {
            bool whole = false;
            const std::size_t end = end_of_number(whole);
            const char* const from = text_.data() + at_;
            const char* const to = text_.data() + end;
            T value{};
            if constexpr (std::is_integral_v<T>) {
                if (!whole) {
                    fail("a whole number is expected");
                }
                // "-0" is a number of every type.
                const bool is_zero = end - at_ == 2 && from[0] == '-' && from[1] == '0';
                if (!is_zero && std::from_chars(from, to, value).ec != std::errc()) {
                    fail("the number does not fit the datatype");
                }
            } else if (std::from_chars(from, to, value).ec != std::errc()) {
                value = extreme(std::string(from, to));
            }
            at_ = end;
            return value;
        }
    }

    // Reads a float that is too large, which fails, or too small, which is rounded.
    T extreme(const std::string& digits) const {
        if constexpr (std::is_floating_point_v<T>) {
            T value{};
            if constexpr (std::is_same_v<T, float>) {
                value = std::strtof(digits.c_str(), nullptr);
            } else {
                value = std::strtod(digits.c_str(), nullptr);
            }
            if (!std::isfinite(value)) {
                fail("the number does not fit the datatype");
            }
            return value;
        }
        return T{};
    }

    std::string_view text_;
    std::byte* target_;
    std::size_t read_ = 0;
    std::size_t at_ = 0;
    std::vector<std::int64_t> sizes_;
};

template <typename T>
class Writer {
public:
    Writer(const std::byte* source, std::span<const std::int64_t> shape)
        : source_(source), sizes_(shape) {}

    std::string write() {
        list(0);
        return std::move(text_);
    }

private:
    void list(std::size_t level) {
        text_ += '[';
        for (std::int64_t position = 0; position < sizes_[level]; ++position) {
            if (position > 0) {
                text_ += ',';
            }
            if (level + 1 < sizes_.size()) {
                list(level + 1);
            } else {
                number();
            }
        }
        text_ += ']';
    }

    void number() {
        T value{};
        std::memcpy(&value, source_, sizeof value);
        source_ += sizeof value;
        if constexpr (std::is_same_v<T, bool>) {
            text_ += value ? "true" : "false";
        } else {
            if constexpr (std::is_floating_point_v<T>) {
                if (!std::isfinite(value)) {
                    throw JsonListError("an element is NaN or infinite");
                }
            }
            // The longest is a negative double of 17 digits with an exponent of 3.
            char digits[32];
            const auto end = std::to_chars(digits, digits + sizeof digits, value).ptr;
            text_.append(digits, end);
        }
    }

    const std::byte* source_;
    std::span<const std::int64_t> sizes_;
    std::string text_;
};

}  // namespace

CutDocument cut_lists(std::string_view document, int depth, std::string_view key) {
    CutDocument found;
    std::size_t copied = 0;
    int open = 0;
    std::string_view name;
    std::size_t at = 0;
    while (at < document.size()) {
        switch (document[at]) {
            case '"': {
                const std::size_t end = behind_string(document, at);
                if (open == depth && end - at >= 2) {
                    name = document.substr(at + 1, end - at - 2);
                }
                at = end;
                continue;
            }
            case ':': {
                at = behind_space(document, at + 1);
                const bool wanted = open == depth && (key.empty() || name == key);
                if (wanted && at < document.size() && document[at] == '[' &&
                    !holds_object(document, at)) {
                    const std::size_t end = behind_list(document, at);
                    if (end == std::string_view::npos) {
                        at = document.size();
                        continue;
                    }
                    found.rest += document.substr(copied, at - copied);
                    found.rest += '[' + std::to_string(found.lists.size()) + ']';
                    found.lists.emplace_back(at, end);
                    copied = at = end;
                }
                continue;
            }
            case '{':
            case '[':
                ++open;
                break;
            case '}':
            case ']':
                --open;
                break;
            default:
                break;
        }
        ++at;
    }
    found.rest += document.substr(copied);
    return found;
}

std::vector<std::int64_t> shape_of_list(std::string_view text, std::size_t most) {
    std::vector<std::int64_t> sizes;
    // Depth of lists that are open now, and depths whose first list is still open: those up to it.
    std::size_t depth = 0;
    std::size_t first = 0;
    const auto element = [&] {
        if (depth > 0 && depth <= first && sizes[depth - 1] == 0) {
            sizes[depth - 1] = 1;
        }
    };
    for (std::size_t at = 0; at < text.size(); ++at) {
        switch (text[at]) {
            case '[':
                element();
                ++depth;
                if (depth > sizes.size() && depth == first + 1) {
                    if (depth > most) {
                        throw JsonListError("lists are nested more than " + std::to_string(most) +
                                            " deep");
                    }
                    sizes.push_back(0);
                    first = depth;
                }
                break;
            case ']':
                first = depth == first && first > 0 ? first - 1 : first;
                depth -= depth > 0 ? 1 : 0;
                break;
            case ',':
                if (depth > 0 && depth <= first) {
                    ++sizes[depth - 1];
                }
                break;
            case '"':
                element();
                at = behind_string(text, at) - 1;
                break;
            default:
                if (!is_space(text[at])) {
                    element();
                }
                break;
        }
    }
    return sizes;
}

std::size_t size_of(NumberKind kind) {
    return with_type(kind, [](auto value) { return sizeof value; });
}

void read_list(std::string_view text, NumberKind kind, std::span<const std::int64_t> shape,
               std::span<std::byte> target) {
    with_type(kind, [&](auto value) { Reader<decltype(value)>(text, target.data()).read(shape); });
}

std::string write_list(std::span<const std::byte> source, NumberKind kind,
                       std::span<const std::int64_t> shape) {
    return with_type(
        kind, [&](auto value) { return Writer<decltype(value)>(source.data(), shape).write(); });
}

}  // namespace gnnserve
