// Bytes between a connection and its socket, encrypted or not.
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <utility>

#include "connection.hpp"

namespace gnnserve::front {
namespace {

// Pieces of one `sendmsg`, and bytes of frames other than bodies; frames beyond wait in the
// session, which ends the connection when a thousand of them are answers to pings and settings.
constexpr std::size_t kMostPieces = 64;
constexpr std::size_t kMostSmallBytes = 64 << 10;
// Most bytes of a TLS record, and encrypted bytes that wait for the socket.
constexpr std::size_t kRecordBytes = 16 << 10;
constexpr std::size_t kMostEncryptedBytes = 256 << 10;
// Sent at once before other connections have their turn.
constexpr std::size_t kTurnBytes = 4 << 20;
// For which a connection is read before others have their turn, and for what is read at once.
constexpr std::int64_t kTurn_ns = 1'000'000, kRead_ns = 300'000;

}  // namespace

bool Connection::receive(char* buffer, std::size_t size, std::size_t most) {
    const std::int64_t began_ns = now_ns();
    std::int64_t at_ns = began_ns;
    for (std::size_t total = 0;
         total < most && at_ns - began_ns < kTurn_ns && events_.takes_more();) {
        const std::size_t part = std::min(size, read_bytes_);
        const ssize_t got = recv(fd_, buffer, part, MSG_DONTWAIT);
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            return true;
        }
        if (got <= 0) {
            return false;
        }
        const auto count = static_cast<std::size_t>(got);
        if (!(tls_ == nullptr ? take(buffer, count) : decrypt(buffer, count))) {
            flush();  // what it has to say of it
            return false;
        }
        total += count;
        const std::int64_t read_ns = now_ns(), took_ns = read_ns - std::exchange(at_ns, read_ns);
        if (took_ns > kRead_ns || !events_.takes_more()) {
            read_bytes_ = kLeastReadBytes;
        } else if (count == part) {
            read_bytes_ = std::min(2 * read_bytes_, size);
        }
        if (count < part) {
            return true;
        }
    }
    return true;
}

bool Connection::take(const char* bytes, std::size_t size) {
    return api_.session_mem_recv(session_, reinterpret_cast<const std::uint8_t*>(bytes), size) >= 0;
}

bool Connection::decrypt(const char* bytes, std::size_t size) {
    std::array<char, kRecordBytes> plain;
    // A part at a time, as of the protocol's own messages all that are there are dealt with at
    // once.
    for (std::size_t part; size > 0; bytes += part, size -= part) {
        part = std::min(size, plain.size());
        tls_->put(bytes, part);
        for (ssize_t got = 1; got > 0;) {
            got = tls_->read(plain.data(), plain.size());
            for (std::size_t told = tls_->take_told(); told > 0; --told) {
                count(control_, &ConnectionEvents::control_flood);
            }
            if (got < 0 || flooded_ ||
                (got > 0 && !take(plain.data(), static_cast<std::size_t>(got)))) {
                return false;
            }
        }
    }
    return true;
}

bool Connection::flush() {
    yields_ = false;
    if (abandoned_) {
        return false;
    }
    if (shakes_hands()) {
        tls_->collect(encrypted_);
        return send_encrypted();
    }
    for (std::size_t most = side_ == Side::kServer ? kTurnBytes : SIZE_MAX;;) {
        if (api_.session_send(session_) != 0) {
            return false;
        }
        const bool more = full();
        if (!write_out(most)) {
            return false;
        }
        yields_ = most == 0;
        if (yields_ || blocked()) {
            return !flooded_;
        }
        progress_ns_ = now_ns();
        if (!more) {
            return api_.session_want_read(session_) || api_.session_want_write(session_);
        }
    }
}

void Connection::keep_lent() {
    if (lending_.empty()) {
        return;
    }
    const auto keep = [](Piece& piece) {
        if (piece.lent) {
            piece = Piece::of(std::string(piece.data, piece.size));
        }
    };
    for (std::size_t i = first_; i < pieces_.size(); ++i) {
        Out& out = pieces_[i];
        if (out.piece.lent) {
            out.piece.data += std::exchange(out.offset, 0);
            keep(out.piece);
        }
    }
    for (const std::int32_t id : std::exchange(lending_, {})) {
        if (Stream* stream = find(id)) {
            std::for_each(stream->body_.begin(), stream->body_.end(), keep);
        }
    }
}

std::size_t Connection::blocked_bytes() const {
    std::size_t bytes = encrypted_.size();
    for (std::size_t i = first_; i < pieces_.size(); ++i) {
        bytes += pieces_[i].piece.size;
    }
    return bytes;
}

bool Connection::full() const {
    return pieces_.size() - first_ + 8 > kMostPieces || small_.size() > kMostSmallBytes;
}

// Makes `pieces_` and `small_` no longer than what waits, for a peer that never catches up.
void Connection::forget_sent() {
    if (first_ < kMostPieces) {
        return;
    }
    pieces_.erase(pieces_.begin(), pieces_.begin() + static_cast<std::ptrdiff_t>(first_));
    first_ = 0;
    const auto is_small = [](const Out& out) { return out.piece.data == nullptr; };
    const auto at = std::find_if(pieces_.begin(), pieces_.end(), is_small);
    const std::size_t gone = at == pieces_.end() ? small_.size() : at->offset;
    small_.erase(0, gone);
    for (Out& out : pieces_) {
        out.offset -= is_small(out) ? gone : 0;
    }
}

// Hands pieces to the socket; false when the connection is over. Goes on until about `most` bytes
// are sent, and takes those off it.
bool Connection::write_out(std::size_t& most) {
    if (tls_ != nullptr) {
        return encrypt_out(most);
    }
    while (blocked()) {
        if (most == 0) {
            forget_sent();
            return true;
        }
        std::array<iovec, kMostPieces> list;
        std::size_t count = 0;
        for (std::size_t i = first_; i < pieces_.size() && count < list.size(); ++i, ++count) {
            const Out& out = pieces_[i];
            const char* base = out.piece.data ? out.piece.data : small_.data();
            list[count] = {const_cast<char*>(base + out.offset), out.piece.size};
        }
        msghdr message{};
        message.msg_iov = list.data();
        message.msg_iovlen = count;
        ssize_t written = sendmsg(fd_, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (written < 0) {
            if (errno == EINTR) {
                continue;
            }
            forget_sent();
            return errno == EAGAIN || errno == EWOULDBLOCK;
        }
        progress_ns_ = now_ns();
        this->written(static_cast<std::size_t>(written));
        most -= std::min(most, static_cast<std::size_t>(written));
    }
    pieces_.clear();
    small_.clear();
    first_ = 0;
    return true;
}

// Goes past that many bytes of the pieces.
void Connection::written(std::size_t left) {
    while (left > 0) {
        Out& out = pieces_[first_];
        const std::size_t part = std::min(left, out.piece.size);
        out.offset += part;
        out.piece.size -= part;
        left -= part;
        if (out.piece.size == 0) {
            out.piece.owner.reset();
            ++first_;
        }
    }
}

// The same as `write_out`, encrypted: a record's bytes are put together, as each costs.
bool Connection::encrypt_out(std::size_t& most) {
    std::array<char, kRecordBytes> plain;
    tls_->collect(encrypted_);
    while (first_ < pieces_.size() && encrypted_.size() < kMostEncryptedBytes && most > 0) {
        std::size_t size = 0;
        for (std::size_t i = first_; i < pieces_.size() && size < plain.size(); ++i) {
            const Out& out = pieces_[i];
            const char* base = out.piece.data ? out.piece.data : small_.data();
            const std::size_t part = std::min(out.piece.size, plain.size() - size);
            std::memcpy(plain.data() + size, base + out.offset, part);
            size += part;
        }
        if (!tls_->write(plain.data(), size)) {
            return false;
        }
        written(size);
        most -= std::min(most, size);
        tls_->collect(encrypted_);
        const bool last = first_ == pieces_.size();
        if ((last || encrypted_.size() >= kMostEncryptedBytes) && !send_encrypted()) {
            return false;
        }
    }
    if (!send_encrypted()) {
        return false;
    }
    if (first_ < pieces_.size()) {
        forget_sent();
        return true;
    }
    pieces_.clear();
    small_.clear();
    first_ = 0;
    return true;
}

// Hands encrypted bytes to the socket; false when the connection is over.
bool Connection::send_encrypted() {
    std::size_t sent = 0;
    while (sent < encrypted_.size()) {
        const ssize_t count = send(fd_, encrypted_.data() + sent, encrypted_.size() - sent,
                                   MSG_NOSIGNAL | MSG_DONTWAIT);
        if (count < 0 && errno == EINTR) {
            continue;
        }
        if (count < 0) {
            encrypted_.erase(0, sent);
            return errno == EAGAIN || errno == EWOULDBLOCK;
        }
        progress_ns_ = now_ns();
        sent += static_cast<std::size_t>(count);
    }
    encrypted_.clear();
    return true;
}

}  // namespace gnnserve::front
