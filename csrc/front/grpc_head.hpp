// The head and the end of a gRPC call, after the protocol's description over HTTP/2.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "connection.hpp"

namespace gnnserve::front {

// Status codes of gRPC that the front itself gives.
enum class GrpcCode {
    kOk = 0,
    kDeadlineExceeded = 4,
    kResourceExhausted = 8,
    kUnimplemented = 12,
    kInternal = 13,
    kUnavailable = 14,
};

// How a call that failed ends.
struct GrpcStatus {
    int code = 0;
    std::string text;
    // When the same request may be sent again; negative: no hint.
    std::int64_t retry_after_ms = -1;
};

inline constexpr std::size_t kMessageHead = 5;

// What the front needs of a request's headers.
struct CallHead {
    std::string_view path;
    // Its content-type is gRPC's.
    bool grpc = false;
    // POST of protobuf messages that are not compressed; others are for the server behind.
    bool plain = false;
    std::optional<std::int64_t> timeout_ns;
    // Headers that tell whom the call comes from.
    Headers credentials;
    // Names the client's span, by W3C's Trace Context (`traceparent`); empty without.
    std::string trace_parent;
    // Asks for the first error of a stream as the stream's status (`triton_grpc_error`).
    bool raises = false;
};

CallHead read_head(const Headers& headers);

// Nanoseconds of a `grpc-timeout`; none when it is malformed. What is too long for nanoseconds in
// 63 bits is the longest that is not.
std::optional<std::int64_t> parse_timeout(std::string_view text);

// Text as `grpc-message` carries it: bytes other than printable ASCII, and '%', as %XX.
std::string percent_encoded(std::string_view text);

// Headers of a response with a body, its trailers, and headers of one that is an error alone.
Headers response_headers();
Headers trailers_of(const GrpcStatus& status);
Headers error_headers(const GrpcStatus& status);

// What precedes a serialized response of that size in a ModelStreamInferResponse.
std::string stream_answer_prefix(std::size_t size);

// The five bytes before a message of that size.
std::string message_head(std::size_t size);

}  // namespace gnnserve::front
