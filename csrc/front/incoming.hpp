// One message as its bytes come: staged in the pool as far as it is plain, else kept as bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "plain_request.hpp"

namespace gnnserve::front {

class Incoming {
public:
    // A message of `size` bytes. Without models it is kept as bytes.
    Incoming(std::size_t size, std::shared_ptr<const PlainModels> models, bool check_finite);

    // Takes from the front of `bytes`, which follow those of the calls before, until the message is
    // complete or needs a block.
    void take(std::string_view& bytes);
    std::size_t size() const { return size_; }
    // Bytes of the message that were not taken.
    std::size_t left() const { return size_ - taken_; }
    bool complete() const { return left() == 0; }

    // Size of the block without which it takes no more; 0: it needs none.
    std::int64_t wanted_block() const;
    void place(std::shared_ptr<BlockPool::Block> block);
    // Is kept as bytes from now on, instead of being given a block.
    void keep_bytes();
    // Bytes in memory beside a block.
    std::size_t held_bytes() const;

    // One of them, of a complete message. A request may have values that its model cannot take.
    std::shared_ptr<PlainRequest> plain() const { return plain_; }
    std::shared_ptr<const std::string> bytes() const { return bytes_; }

private:
    void take_head(std::string_view& bytes);
    bool scan();
    void keep(std::string bytes);

    const std::size_t size_;
    std::size_t taken_ = 0;
    const bool check_finite_;
    // Null once they are not needed.
    std::shared_ptr<const PlainModels> models_;
    // What came before the first raw contents, and where its next field begins.
    std::string head_;
    std::size_t next_field_ = 0;
    std::shared_ptr<PlainRequest> plain_;
    std::shared_ptr<std::string> bytes_;
};

}  // namespace gnnserve::front
