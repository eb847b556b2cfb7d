// Plain requests: messages of a known model with nothing unusual in them. They are checked and
// staged here. Everything else, and everything invalid, is left to Python, which has the rules in
// full and words the refusal.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "gnnserve/block_pool.hpp"
#include "gnnserve/infer_message.hpp"

namespace gnnserve::front {

// Sizes of a shape that the request determines; all others are fixed, and positive.
inline constexpr std::int64_t kNodes = -1, kEdges = -2;
// Every tensor is staged at a multiple of this.
inline constexpr std::int64_t kTensorAlignment = 64;

// What a model takes under one name.
struct PlainInput {
    std::string name;
    // Indices of nodes, INT64, and not features, FP32.
    bool indices = false;
    // Indices may come as INT32.
    bool also_int32 = false;
    bool required = true;
    std::vector<std::int64_t> shape;

    bool is_edges() const { return indices && shape.size() == 2 && shape[1] == kEdges; }
};

// What the front must know of a model to stage its plain requests.
struct PlainModel {
    // Names it in what comes out of the front.
    std::uint64_t token = 0;
    // In the order in which they are staged.
    std::vector<PlainInput> inputs;
    // INT32 edges stay INT32.
    bool narrow_edges = false;
    bool counts_loops = false;
    // Upper bound of the output's bytes: constant + nodes · N + edges · E.
    double output_nodes = 0, output_edges = 0, output_constant = 0;
};

// Models by name and version; the default version also under the empty one.
class PlainModels {
public:
    void add(const std::string& name, const std::string& version,
             std::shared_ptr<const PlainModel> model);
    // Returns null for an unknown one.
    std::shared_ptr<const PlainModel> find(std::string_view name, std::string_view version) const;

private:
    std::unordered_map<std::string, std::shared_ptr<const PlainModel>> models_;
};

// A request whose tensors are in the pool.
class PlainRequest {
public:
    struct Tensor {
        const PlainInput* input = nullptr;
        std::vector<std::int64_t> shape;
        bool is_int32 = false;
        // Of the region, where it is staged, and as what.
        std::int64_t offset = 0;
        std::int64_t size = 0;
        bool stays_int32 = false;
        std::string_view raw;
    };

    // Returns null for a message that is not plain, has a value that the model cannot take, or for
    // which the pool has no room.
    static std::shared_ptr<PlainRequest> of(const PlainModels& models, BlockPool& pool,
                                            std::shared_ptr<const std::string> message,
                                            bool check_finite);

    // Copies the tensors to their places again: a model may have worked in place.
    void stage();
    // Gives the block up; it is freed when nothing sends from it either.
    void release() { block_.reset(); }

    const PlainModel& model() const { return *model_; }
    const InferMessage& message() const { return parsed_; }
    std::shared_ptr<const std::string> bytes() const { return bytes_; }
    const std::vector<Tensor>& tensors() const { return tensors_; }
    std::int64_t nodes() const { return nodes_; }
    std::int64_t edges() const { return edges_; }
    // Self-loops among the edges; -1 where the model's are not counted.
    std::int64_t loops() const { return loops_; }
    bool narrow() const { return narrow_; }
    // Null once it is given up.
    std::shared_ptr<BlockPool::Block> block() const { return block_; }
    std::int64_t block_size() const { return block_size_; }
    // The output's place is the last of the block.
    std::int64_t output_offset() const { return output_offset_; }
    std::int64_t output_capacity() const { return output_capacity_; }

private:
    PlainRequest() = default;
    bool take(const PlainModel& model);
    bool take_tensor(const InferTensor& tensor, std::string_view raw);
    bool take_place(BlockPool& pool);
    bool stage_all(bool check_finite);
    void count_loops();

    std::shared_ptr<const PlainModel> model_;
    std::shared_ptr<const std::string> bytes_;
    InferMessage parsed_;
    // In the model's order.
    std::vector<Tensor> tensors_;
    std::int64_t nodes_ = -1, edges_ = -1, loops_ = -1;
    bool narrow_ = false;
    std::shared_ptr<BlockPool::Block> block_;
    std::int64_t block_size_ = 0, output_offset_ = 0, output_capacity_ = 0;
};

}  // namespace gnnserve::front
