// A response of HTTP/1.1 as it arrives (RFC 9112): its status, and its body without the framing.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "channel.hpp"

namespace gnnserve::load {

class HttpResponse {
public:
    enum class State { kReading, kComplete, kMalformed };

    // Takes what came; bytes after the end of the response are malformed.
    State take(std::string_view bytes, Answer& body, std::size_t kept_bytes);
    // The peer sends no more.
    State closed();

    bool begun() const { return begun_; }
    int status() const { return status_; }
    // The connection may carry another request.
    bool keeps_open() const { return keeps_open_; }

private:
    enum class Part { kHead, kBody, kRest, kChunkSize, kChunk, kChunkEnd, kTrailers, kDone, kBad };

    bool line(std::string_view& bytes, std::size_t most);
    void head_line();
    void head_ended();
    void field(std::string_view name, std::string_view value);
    void chunk_size();

    Part part_ = Part::kHead;
    std::string line_;
    bool line_ended_ = false;
    bool begun_ = false;
    int status_ = 0;
    bool keeps_open_ = true;
    bool chunked_ = false;
    bool has_length_ = false;
    std::size_t length_ = 0;
    std::size_t head_bytes_ = 0;
};

}  // namespace gnnserve::load
