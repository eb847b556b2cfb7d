#include "http_response.hpp"

#include <algorithm>
#include <charconv>

namespace gnnserve::load {
namespace {

constexpr std::size_t kMostHeadBytes = 64 << 10;
constexpr std::size_t kMostBodyBytes = std::size_t{1} << 40;

bool same(std::string_view a, std::string_view lower) {
    const auto equal = [](char one, char other) {
        return (one >= 'A' && one <= 'Z' ? static_cast<char>(one + 32) : one) == other;
    };
    return a.size() == lower.size() && std::equal(a.begin(), a.end(), lower.begin(), equal);
}

std::string_view trimmed(std::string_view text) {
    const auto first = text.find_first_not_of(" \t");
    if (first == std::string_view::npos) {
        return {};
    }
    return text.substr(first, text.find_last_not_of(" \t") - first + 1);
}

// Reads the whole text as a number; false when it is none, or beyond any body.
bool number(std::string_view text, int base, std::size_t& into) {
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), into, base);
    return error == std::errc{} && end == text.data() + text.size() && into <= kMostBodyBytes;
}

}  // namespace

HttpResponse::State HttpResponse::take(std::string_view bytes, Answer& body,
                                       std::size_t kept_bytes) {
    begun_ = begun_ || !bytes.empty();
    while (!bytes.empty()) {
        switch (part_) {
            case Part::kHead:
                if (line(bytes, kMostHeadBytes)) {
                    head_line();
                }
                break;
            case Part::kBody:
            case Part::kRest:
            case Part::kChunk: {
                const std::size_t size =
                    part_ == Part::kRest ? bytes.size() : std::min(bytes.size(), length_);
                body.append(bytes.substr(0, size), kept_bytes);
                bytes.remove_prefix(size);
                if (part_ != Part::kRest && (length_ -= size) == 0) {
                    part_ = part_ == Part::kBody ? Part::kDone : Part::kChunkEnd;
                }
                break;
            }
            case Part::kChunkEnd:
                if (line(bytes, 0)) {
                    part_ = Part::kChunkSize;
                }
                break;
            case Part::kChunkSize:
                if (line(bytes, kMostHeadBytes)) {
                    chunk_size();
                }
                break;
            case Part::kTrailers:
                if (line(bytes, kMostHeadBytes) && line_.empty()) {
                    part_ = Part::kDone;
                }
                break;
            case Part::kDone:
                part_ = Part::kBad;
                break;
            case Part::kBad:
                return State::kMalformed;
        }
    }
    return part_ == Part::kBad    ? State::kMalformed
           : part_ == Part::kDone ? State::kComplete
                                  : State::kReading;
}

HttpResponse::State HttpResponse::closed() {
    keeps_open_ = false;
    if (part_ == Part::kRest) {
        part_ = Part::kDone;
    }
    return part_ == Part::kDone ? State::kComplete : State::kMalformed;
}

// Takes bytes up to the end of a line of at most `most` bytes; true when it is there, in line_.
bool HttpResponse::line(std::string_view& bytes, std::size_t most) {
    if (line_ended_) {
        line_.clear();
        line_ended_ = false;
    }
    const auto end = bytes.find('\n');
    const std::size_t size = end == std::string_view::npos ? bytes.size() : end + 1;
    line_.append(bytes.substr(0, size));
    bytes.remove_prefix(size);
    head_bytes_ += part_ == Part::kChunkSize || part_ == Part::kChunkEnd ? 0 : size;
    if (line_.size() > most + 2 || head_bytes_ > kMostHeadBytes) {
        part_ = Part::kBad;
        return false;
    }
    if (end == std::string_view::npos) {
        return false;
    }
    if (!line_.ends_with("\r\n")) {
        part_ = Part::kBad;
        return false;
    }
    line_.resize(line_.size() - 2);
    line_ended_ = true;
    return true;
}

void HttpResponse::head_line() {
    const std::string_view text = line_;
    if (status_ == 0) {
        std::size_t status = 0;
        const bool known = text.starts_with("HTTP/1.") && text.size() >= 12 && text[8] == ' ' &&
                           number(text.substr(9, 3), 10, status) && status >= 100;
        if (!known) {
            part_ = Part::kBad;
            return;
        }
        status_ = static_cast<int>(status);
        keeps_open_ = text[7] != '0';
    } else if (text.empty()) {
        head_ended();
    } else if (const auto colon = text.find(':'); colon != std::string_view::npos && colon > 0) {
        field(text.substr(0, colon), trimmed(text.substr(colon + 1)));
    } else {
        part_ = Part::kBad;
    }
}

void HttpResponse::field(std::string_view name, std::string_view value) {
    if (same(name, "content-length")) {
        const std::size_t before = length_;
        if (!number(value, 10, length_) || (has_length_ && length_ != before)) {
            part_ = Part::kBad;
        }
        has_length_ = true;
    } else if (same(name, "transfer-encoding")) {
        // Nothing else was said to be understood.
        chunked_ = same(value, "chunked");
        if (!chunked_) {
            part_ = Part::kBad;
        }
    } else if (same(name, "connection")) {
        if (same(value, "close")) {
            keeps_open_ = false;
        } else if (same(value, "keep-alive")) {
            keeps_open_ = true;
        }
    }
}

void HttpResponse::head_ended() {
    if (status_ < 200) {
        // Interim: the response itself follows.
        status_ = 0;
        has_length_ = chunked_ = false;
    } else if (status_ == 204 || status_ == 304) {
        part_ = Part::kDone;
    } else if (chunked_) {
        part_ = Part::kChunkSize;
    } else if (has_length_) {
        part_ = length_ == 0 ? Part::kDone : Part::kBody;
    } else {
        part_ = Part::kRest;
        keeps_open_ = false;
    }
}

void HttpResponse::chunk_size() {
    const std::string_view text = line_;
    if (!number(trimmed(text.substr(0, text.find(';'))), 16, length_)) {
        part_ = Part::kBad;
    } else {
        part_ = length_ == 0 ? Part::kTrailers : Part::kChunk;
    }
}

}  // namespace gnnserve::load
