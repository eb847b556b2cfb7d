// Plain requests: messages of a known model with nothing unusual in them. They are checked and
// staged here, as their bytes come. Everything else, and everything invalid, is left to Python,
// which has the rules in full and words the refusal.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "gnnserve/block_pool.hpp"
#include "gnnserve/infer_message.hpp"
#include "plain_model.hpp"

namespace gnnserve::front {

// Every tensor is staged at a multiple of this.
inline constexpr std::int64_t kTensorAlignment = 64;
// Messages up to this size are kept, and staged again from there. Of larger ones, which would fill
// the memory, only the staged tensors are had, and a fingerprint that tells if they were changed.
inline constexpr std::size_t kMostKeptBytes = 256 << 10;

// A request whose tensors are put in the pool: planned from the message's head, then given a block,
// then the raw contents in pieces of any size.
//
// Staging loses nothing: the message can be written again from what is staged. So a value that the
// model cannot take, which may be the last one, needs no copy of the message kept for it.
class PlainRequest {
public:
    struct Tensor {
        const PlainInput* input = nullptr;
        std::vector<std::int64_t> shape;
        // Of the message, and of the pool.
        const Element* sent = nullptr;
        const Element* element = nullptr;
        // In the message: its size, and which of the raw contents it is.
        std::int64_t raw_size = 0;
        std::size_t position = 0;
        // Where it is staged in the region, and how much of it is.
        std::int64_t offset = 0, size = 0, staged = 0;
        // Of the first `hashed` bytes staged.
        std::uint64_t fingerprint = 0;
        std::int64_t hashed = 0;
        // The largest value of an index that numbers or divides into graphs; -1 without values.
        std::int64_t largest = -1;
        // Where the sizes of graphs are counted and all values are valid: pairs of things in one
        // graph, each with itself among them, and things of the largest graph. How many things each
        // graph has so far.
        std::int64_t pairs = 0, most = 0;
        std::vector<std::int64_t> things;
    };

    // Plans a message of `size` bytes that begins with the fields `head` and goes on with the raw
    // contents. Returns null for one that is not plain.
    static std::shared_ptr<PlainRequest> plan(const PlainModels& models, std::string_view head,
                                              std::size_t size, bool check_finite);
    PlainRequest(const PlainRequest&) = delete;
    PlainRequest& operator=(const PlainRequest&) = delete;

    std::int64_t block_size() const { return block_size_; }
    // Takes a block of that size, once.
    void place(std::shared_ptr<BlockPool::Block> block);
    // Stages from the front of `bytes`, which follow those of the calls before. Returns false at
    // bytes that the plan does not expect: the request is not plain.
    bool take(std::string_view& bytes);
    bool complete() const { return next_ == order_.size(); }
    // Has no value so far that the model cannot take.
    bool valid() const { return valid_; }
    // Bytes in memory beside the block.
    std::size_t held_bytes() const { return head_.size() + kept_.size(); }
    // Returns the message, or what has come of one that `take` has returned false for.
    std::string message() const;

    // Puts the tensors of a complete request in their places again, as a model may have worked in
    // place. Returns false when it has, and the message is not kept.
    bool stage();
    // Gives the block up; it is freed when nothing sends from it either.
    void release() { block_.reset(); }

    const PlainModel& model() const { return *model_; }
    // Without raw contents.
    const InferMessage& head() const { return parsed_; }
    const std::vector<Tensor>& tensors() const { return tensors_; }
    // What its shapes tell, in the model's order.
    const std::vector<std::int64_t>& counts() const { return counts_; }
    // Self-loops among the edges; -1 where the model's are not counted.
    std::int64_t loops() const { return loops_; }
    bool narrow() const { return narrow_; }
    // Null once it is given up.
    std::shared_ptr<BlockPool::Block> block() const { return block_; }
    // The outputs' place is the last of the block.
    std::int64_t output_offset() const { return output_offset_; }
    std::int64_t output_capacity() const { return output_capacity_; }

private:
    PlainRequest() = default;
    bool take_head(std::size_t size);
    bool take_tensor(const InferTensor& tensor, std::size_t position);
    bool has_things() const;
    bool plan_places();
    void begin_raw();
    void stage_bytes(Tensor& tensor, std::string_view bytes);
    void stage_items(Tensor& tensor, std::string_view bytes);
    bool stage_valid(const Tensor& tensor, std::span<const std::byte> source,
                     std::span<std::byte> target) const;
    bool stage_rows(const Tensor& tensor, std::span<const std::byte> source,
                    std::span<std::byte> target) const;
    void count_loops(const Tensor& tensor, std::int64_t from, std::int64_t to);
    void hash(Tensor& tensor) const;
    bool is_intact(const Tensor& tensor) const;

    std::shared_ptr<const PlainModel> model_;
    std::string head_;
    InferMessage parsed_;
    // The message so far, when it is small.
    bool keeps_ = false;
    std::string kept_;
    // In the model's order.
    std::vector<Tensor> tensors_;
    bool check_finite_ = false;
    bool valid_ = true;
    // -1: not known.
    std::vector<std::int64_t> counts_;
    std::int64_t loops_ = -1;
    bool narrow_ = false;
    std::shared_ptr<BlockPool::Block> block_;
    std::int64_t block_size_ = 0, output_offset_ = 0, output_capacity_ = 0;
    // Tensors in the message's order, the one whose raw contents come next, what stands before
    // these, how much of that and of them has come, and the beginning of an element cut in two.
    std::vector<std::size_t> order_;
    std::size_t next_ = 0;
    std::string prefix_;
    std::size_t prefix_taken_ = 0;
    std::int64_t raw_taken_ = 0;
    std::array<char, 8> cut_{};
    std::size_t cut_size_ = 0;
};

}  // namespace gnnserve::front
