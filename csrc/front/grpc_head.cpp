#include "grpc_head.hpp"

#include <array>
#include <limits>

namespace gnnserve::front {
namespace {

constexpr std::string_view kContentType = "application/grpc";
// Digits of a timeout, by the protocol.
constexpr std::size_t kMostDigits = 8;
// Longest `traceparent`: this version's has 55 characters, and later ones may add to it.
constexpr std::size_t kMostTraceParent = 128;

}  // namespace

std::optional<std::int64_t> parse_timeout(std::string_view text) {
    if (text.size() < 2 || text.size() > kMostDigits + 1) {
        return std::nullopt;
    }
    std::int64_t count = 0;
    for (const char digit : text.substr(0, text.size() - 1)) {
        if (digit < '0' || digit > '9') {
            return std::nullopt;
        }
        count = 10 * count + (digit - '0');
    }
    std::int64_t unit_ns = 0;
    switch (text.back()) {
        case 'H':
            unit_ns = 3'600'000'000'000;
            break;
        case 'M':
            unit_ns = 60'000'000'000;
            break;
        case 'S':
            unit_ns = 1'000'000'000;
            break;
        case 'm':
            unit_ns = 1'000'000;
            break;
        case 'u':
            unit_ns = 1'000;
            break;
        case 'n':
            unit_ns = 1;
            break;
        default:
            return std::nullopt;
    }
    constexpr auto kLongest = std::numeric_limits<std::int64_t>::max();
    return count > kLongest / unit_ns ? kLongest : count * unit_ns;
}

CallHead read_head(const Headers& headers) {
    CallHead head;
    bool post = false, protobuf = false, identity = true;
    for (const auto& [name, value] : headers) {
        if (name == ":path") {
            head.path = value;
        } else if (name == ":method") {
            post = value == "POST";
        } else if (name == "content-type") {
            // `application/grpc+proto` is the same; `application/grpc-web` is not gRPC.
            const std::string_view rest =
                value.starts_with(kContentType) ? std::string_view(value).substr(16) : "?";
            protobuf = rest.empty() || rest[0] == ';' || rest == "+proto";
            head.grpc = protobuf || rest[0] == '+';
        } else if (name == "grpc-encoding") {
            identity = value == "identity";
        } else if (name == "triton_grpc_error") {
            head.raises = value.size() == 4 && (value[0] | 0x20) == 't' &&
                          (value[1] | 0x20) == 'r' && (value[2] | 0x20) == 'u' &&
                          (value[3] | 0x20) == 'e';
        } else if (name == "grpc-timeout") {
            head.timeout_ns = parse_timeout(value);
            identity = identity && head.timeout_ns.has_value();
        } else if (name == "traceparent") {
            if (value.size() <= kMostTraceParent) {
                head.trace_parent = value;
            }
        } else if (name == "authorization" || name.starts_with("gnnserve-")) {
            head.credentials.emplace_back(name, value);
        }
    }
    head.plain = post && protobuf && identity;
    return head;
}

std::string percent_encoded(std::string_view text) {
    constexpr std::array<char, 16> kHex{'0', '1', '2', '3', '4', '5', '6', '7',
                                        '8', '9', 'A', 'B', 'C', 'D', 'E', 'F'};
    std::string out;
    out.reserve(text.size());
    for (const char one : text) {
        const auto byte = static_cast<unsigned char>(one);
        if (byte >= 0x20 && byte <= 0x7e && byte != '%') {
            out.push_back(one);
        } else {
            out.push_back('%');
            out.push_back(kHex[byte >> 4]);
            out.push_back(kHex[byte & 15]);
        }
    }
    return out;
}

Headers response_headers() {
    return {{":status", "200"}, {"content-type", std::string(kContentType)}};
}

Headers trailers_of(const GrpcStatus& status) {
    Headers found{{"grpc-status", std::to_string(status.code)}};
    if (!status.text.empty()) {
        found.emplace_back("grpc-message", percent_encoded(status.text));
    }
    if (status.retry_after_ms >= 0) {
        found.emplace_back("grpc-retry-pushback-ms", std::to_string(status.retry_after_ms));
    }
    return found;
}

Headers error_headers(const GrpcStatus& status) {
    Headers found = response_headers();
    for (auto& one : trailers_of(status)) {
        found.push_back(std::move(one));
    }
    return found;
}

std::string stream_answer_prefix(std::size_t size) {
    constexpr char kInferResponse = 2 << 3 | 2;
    std::string found(1, kInferResponse);
    for (; size >= 0x80; size >>= 7) {
        found.push_back(static_cast<char>(size | 0x80));
    }
    found.push_back(static_cast<char>(size));
    return found;
}

std::string message_head(std::size_t size) {
    return {0, static_cast<char>(size >> 24 & 255), static_cast<char>(size >> 16 & 255),
            static_cast<char>(size >> 8 & 255), static_cast<char>(size & 255)};
}

}  // namespace gnnserve::front
