#include "incoming.hpp"

#include <algorithm>
#include <utility>

namespace gnnserve::front {
namespace {

// A message's buffer begins with at most this much of the size that its head claims.
constexpr std::size_t kFirstBytes = 1 << 20;
// First byte of raw contents.
constexpr char kRawTag = 7 << 3 | 2;

}  // namespace

Incoming::Incoming(std::size_t size, std::shared_ptr<const PlainModels> models, bool check_finite)
    : size_(size), check_finite_(check_finite), models_(std::move(models)) {
    if (models_ == nullptr || size == 0) {
        keep({});
    }
}

void Incoming::take(std::string_view& bytes) {
    while (!bytes.empty() && !complete() && wanted_block() == 0) {
        if (models_ != nullptr) {
            take_head(bytes);
            continue;
        }
        std::string_view part = bytes.substr(0, left());
        if (plain_ != nullptr) {
            const std::size_t before = part.size();
            const bool expected = plain_->take(part);
            bytes.remove_prefix(before - part.size());
            taken_ += before - part.size();
            if (!expected) {
                keep(plain_->message());
                plain_.reset();
            }
            continue;
        }
        bytes_->append(part);
        taken_ += part.size();
        bytes.remove_prefix(part.size());
    }
}

// Takes bytes up to the first raw contents, or to the end of what a head may be.
void Incoming::take_head(std::string_view& bytes) {
    const std::size_t before = head_.size();
    head_.append(bytes.substr(0, std::min(left(), kMostHeadBytes + 1 - before)));
    const bool ordinary = scan();
    if (ordinary && next_field_ < head_.size() && head_[next_field_] == kRawTag) {
        head_.resize(next_field_);
        const auto models = std::exchange(models_, nullptr);
        plain_ = PlainRequest::plan(*models, head_, size_, check_finite_);
    }
    bytes.remove_prefix(head_.size() - before);
    taken_ = head_.size();
    if (plain_ != nullptr) {
        head_.clear();
    } else if (models_ == nullptr || !ordinary || complete() || taken_ > kMostHeadBytes) {
        keep(std::exchange(head_, {}));
    }
}

// Goes on to the field that is not complete, or is the first raw contents; false when a field is
// none of those that stand before these.
bool Incoming::scan() {
    while (next_field_ < head_.size() && head_[next_field_] != kRawTag) {
        const auto tag = static_cast<unsigned char>(head_[next_field_]);
        if ((tag & 0x80) != 0 || (tag & 7) != 2) {
            return false;
        }
        std::size_t size = 0, at = next_field_ + 1;
        for (unsigned shift = 0;; shift += 7, ++at) {
            if (shift > 14) {
                return false;
            }
            if (at == head_.size()) {
                return true;
            }
            const auto byte = static_cast<unsigned char>(head_[at]);
            size |= static_cast<std::size_t>(byte & 0x7f) << shift;
            if (byte < 0x80) {
                break;
            }
        }
        next_field_ = at + 1 + size;
    }
    return true;
}

std::int64_t Incoming::wanted_block() const {
    return plain_ != nullptr && plain_->block() == nullptr ? plain_->block_size() : 0;
}

void Incoming::place(std::shared_ptr<BlockPool::Block> block) { plain_->place(std::move(block)); }

void Incoming::keep_bytes() {
    if (plain_ != nullptr) {
        keep(plain_->message());
        plain_.reset();
    }
}

void Incoming::keep(std::string bytes) {
    models_ = nullptr;
    bytes_ = std::make_shared<std::string>(std::move(bytes));
    bytes_->reserve(std::max(bytes_->size(), std::min(size_, kFirstBytes)));
}

std::size_t Incoming::held_bytes() const {
    return plain_ != nullptr ? plain_->held_bytes()
                             : (bytes_ != nullptr ? bytes_->size() : head_.size());
}

}  // namespace gnnserve::front
