#include "plain_request.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <utility>

#include "gnnserve/staging.hpp"

namespace gnnserve::front {
namespace {

// Characters of a client's id that are taken; longer ones are refused by Python.
constexpr std::size_t kMostIdBytes = 256;
constexpr std::string_view kOutput = "output";

bool is_ascii(std::string_view text) {
    return std::all_of(text.begin(), text.end(),
                       [](char one) { return static_cast<unsigned char>(one) < 0x80; });
}

bool are_ascii(const std::vector<InferParameter>& parameters) {
    return std::all_of(parameters.begin(), parameters.end(), [](const InferParameter& one) {
        return is_ascii(one.name) && is_ascii(one.text);
    });
}

std::int64_t aligned(std::int64_t size) {
    return (size + kTensorAlignment - 1) / kTensorAlignment * kTensorAlignment;
}

std::string key_of(std::string_view name, std::string_view version) {
    std::string key(name);
    key.push_back('\0');
    key.append(version);
    return key;
}

// Number of elements of a shape of positive sizes; -1 for one beyond what a message can hold.
std::int64_t count_of(const std::vector<std::int64_t>& shape) {
    std::int64_t count = 1;
    for (const std::int64_t size : shape) {
        if (size <= 0 || __builtin_mul_overflow(count, size, &count) || count > INT64_MAX / 16) {
            return -1;
        }
    }
    return count;
}

std::span<const std::byte> bytes_of(std::string_view text) {
    return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

template <typename Index>
std::int64_t loops_of(const std::byte* edges, std::int64_t count) {
    const auto* source = reinterpret_cast<const Index*>(edges);
    std::int64_t found = 0;
    for (std::int64_t i = 0; i < count; ++i) {
        found += source[i] == source[count + i];
    }
    return found;
}

}  // namespace

void PlainModels::add(const std::string& name, const std::string& version,
                      std::shared_ptr<const PlainModel> model) {
    models_[key_of(name, version)] = std::move(model);
}

std::shared_ptr<const PlainModel> PlainModels::find(std::string_view name,
                                                    std::string_view version) const {
    const auto at = models_.find(key_of(name, version));
    return at == models_.end() ? nullptr : at->second;
}

std::shared_ptr<PlainRequest> PlainRequest::of(const PlainModels& models, BlockPool& pool,
                                               std::shared_ptr<const std::string> message,
                                               bool check_finite) {
    auto parsed = parse_infer(InferKind::kRequest, *message);
    if (!parsed) {
        return nullptr;
    }
    auto model = models.find(parsed->model, parsed->version);
    if (model == nullptr) {
        return nullptr;
    }
    const std::shared_ptr<PlainRequest> found(new PlainRequest);
    found->bytes_ = std::move(message);
    found->parsed_ = std::move(*parsed);
    found->model_ = std::move(model);
    const bool plain =
        found->take(*found->model_) && found->take_place(pool) && found->stage_all(check_finite);
    return plain ? found : nullptr;
}

bool PlainRequest::take(const PlainModel& model) {
    const auto& requested = parsed_.requested;
    if (parsed_.raws.size() != parsed_.tensors.size() || parsed_.id.size() > kMostIdBytes ||
        !is_ascii(parsed_.id) || !are_ascii(parsed_.parameters) || requested.size() > 1 ||
        (requested.size() == 1 &&
         (requested[0].name != kOutput || !requested[0].parameters.empty()))) {
        return false;
    }
    tensors_.resize(model.inputs.size());
    for (std::size_t i = 0; i < parsed_.tensors.size(); ++i) {
        if (!take_tensor(parsed_.tensors[i], parsed_.raws[i])) {
            return false;
        }
    }
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
        if (tensors_[i].input == nullptr && model.inputs[i].required) {
            return false;
        }
    }
    std::erase_if(tensors_, [](const Tensor& one) { return one.input == nullptr; });
    return nodes_ > 0 && edges_ > 0;
}

bool PlainRequest::take_tensor(const InferTensor& tensor, std::string_view raw) {
    const auto& inputs = model_->inputs;
    const auto at = std::find_if(inputs.begin(), inputs.end(), [&tensor](const PlainInput& one) {
        return one.name == tensor.name;
    });
    if (at == inputs.end() || !tensor.parameters.empty() ||
        tensor.shape.size() != at->shape.size()) {
        return false;
    }
    Tensor& taken = tensors_[static_cast<std::size_t>(at - inputs.begin())];
    if (taken.input != nullptr) {
        return false;
    }
    taken.is_int32 = at->also_int32 && tensor.datatype == "INT32";
    if (!taken.is_int32 && tensor.datatype != (at->indices ? "INT64" : "FP32")) {
        return false;
    }
    for (std::size_t axis = 0; axis < at->shape.size(); ++axis) {
        const std::int64_t wanted = at->shape[axis], given = tensor.shape[axis];
        if (wanted >= 0) {
            if (given != wanted) {
                return false;
            }
            continue;
        }
        std::int64_t& size = wanted == kNodes ? nodes_ : edges_;
        if (size >= 0 && size != given) {
            return false;
        }
        size = given;
    }
    const std::int64_t count = count_of(tensor.shape);
    const std::int64_t item = at->indices && !taken.is_int32 ? 8 : 4;
    if (count < 0 || static_cast<std::int64_t>(raw.size()) != count * item) {
        return false;
    }
    taken.stays_int32 = taken.is_int32 && model_->narrow_edges && at->is_edges();
    narrow_ = narrow_ || taken.stays_int32;
    taken.size = count * (at->indices && !taken.stays_int32 ? 8 : 4);
    taken.shape = tensor.shape;
    taken.raw = raw;
    taken.input = &*at;
    return true;
}

bool PlainRequest::take_place(BlockPool& pool) {
    const double output = model_->output_constant +
                          model_->output_nodes * static_cast<double>(nodes_) +
                          model_->output_edges * static_cast<double>(edges_);
    constexpr double kMost = 1LL << 50;
    if (!(output >= 0 && output <= kMost)) {
        return false;
    }
    output_capacity_ = aligned(static_cast<std::int64_t>(std::ceil(output)));
    for (Tensor& tensor : tensors_) {
        tensor.offset = block_size_;
        block_size_ += aligned(tensor.size);
    }
    output_offset_ = block_size_;
    block_size_ += output_capacity_;
    block_ = pool.block(block_size_);
    if (block_ == nullptr) {
        return false;
    }
    for (Tensor& tensor : tensors_) {
        tensor.offset += block_->offset();
    }
    output_offset_ += block_->offset();
    return true;
}

bool PlainRequest::stage_all(bool check_finite) {
    for (const Tensor& tensor : tensors_) {
        const std::span<std::byte> target(block_->at(tensor.offset),
                                          static_cast<std::size_t>(tensor.size));
        const std::ptrdiff_t bad =
            tensor.input->indices
                ? stage_indices(bytes_of(tensor.raw),
                                tensor.is_int32 ? IndexWidth::k32 : IndexWidth::k64, nodes_, target,
                                tensor.stays_int32 ? IndexWidth::k32 : IndexWidth::k64)
                : stage_features(bytes_of(tensor.raw), target, check_finite);
        if (bad != kAllGood) {
            return false;
        }
    }
    if (model_->counts_loops) {
        count_loops();
    }
    return true;
}

void PlainRequest::count_loops() {
    for (const Tensor& tensor : tensors_) {
        if (tensor.input->is_edges()) {
            const std::byte* staged = block_->at(tensor.offset);
            loops_ = tensor.stays_int32 ? loops_of<std::int32_t>(staged, edges_)
                                        : loops_of<std::int64_t>(staged, edges_);
        }
    }
}

// Its values were checked when it was taken, and its bytes are the same.
void PlainRequest::stage() {
    if (block_ != nullptr) {
        stage_all(false);
    }
}

}  // namespace gnnserve::front
