#include "plain_request.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <span>
#include <utility>

#include "gnnserve/staging.hpp"

namespace gnnserve::front {
namespace {

// Characters of a client's id that are taken; longer ones are refused by Python.
constexpr std::size_t kMostIdBytes = 256;
constexpr std::string_view kOutput = "output";
// Bytes of a tensor that go into its fingerprint together.
constexpr std::int64_t kHashedBytes = 64 << 10;

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

// Columns from `from` to `to` of edges, two rows of `count`, whose ends are the same.
template <typename Index>
std::int64_t loops_of(const std::byte* edges, std::int64_t count, std::int64_t from,
                      std::int64_t to) {
    const auto* source = reinterpret_cast<const Index*>(edges);
    std::int64_t found = 0;
    for (std::int64_t i = from; i < to; ++i) {
        found += source[i] == source[count + i];
    }
    return found;
}

// Mixes whole words of 32 bits into `before`: sums, and sums of the sums, which tell their order.
// The lanes are independent, so that compilers vectorise the loop.
std::uint64_t fingerprint_of(const std::byte* bytes, std::int64_t size, std::uint64_t before) {
    constexpr std::int64_t kLanes = 8, kWord = 4;
    std::array<std::uint32_t, kLanes> sums{}, orders{};
    std::int64_t at = 0;
    for (; at + kLanes * kWord <= size; at += kLanes * kWord) {
        std::array<std::uint32_t, kLanes> words;
        std::memcpy(words.data(), bytes + at, sizeof words);
        for (std::size_t lane = 0; lane < kLanes; ++lane) {
            sums[lane] += words[lane];
            orders[lane] += sums[lane];
        }
    }
    constexpr std::uint64_t kPrime = 0x9e3779b97f4a7c15;
    const auto mix = [&before](std::uint64_t word) {
        before = (before ^ word) * kPrime;
        before ^= before >> 29;
    };
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
        mix(std::uint64_t{sums[lane]} << 32 | orders[lane]);
    }
    for (; at < size; at += kWord) {
        std::uint32_t word = 0;
        std::memcpy(&word, bytes + at, sizeof word);
        mix(word);
    }
    return before;
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

std::shared_ptr<PlainRequest> PlainRequest::plan(const PlainModels& models, std::string_view head,
                                                 std::size_t size, bool check_finite) {
    const std::shared_ptr<PlainRequest> found(new PlainRequest);
    found->head_ = head;
    auto parsed = parse_infer(InferKind::kRequest, found->head_);
    if (!parsed) {
        return nullptr;
    }
    found->model_ = models.find(parsed->model, parsed->version);
    if (found->model_ == nullptr) {
        return nullptr;
    }
    found->parsed_ = std::move(*parsed);
    found->check_finite_ = check_finite;
    if (!found->take_head(size) || !found->plan_places()) {
        return nullptr;
    }
    if (size <= kMostKeptBytes) {
        found->keeps_ = true;
        found->kept_.reserve(size);
        found->kept_ = found->head_;
    }
    found->begin_raw();
    return found;
}

bool PlainRequest::take_head(std::size_t size) {
    const auto& requested = parsed_.requested;
    if (!parsed_.raws.empty() || parsed_.id.size() > kMostIdBytes || !is_ascii(parsed_.id) ||
        !are_ascii(parsed_.parameters) || requested.size() > 1 ||
        (requested.size() == 1 &&
         (requested[0].name != kOutput || !requested[0].parameters.empty()))) {
        return false;
    }
    tensors_.resize(model_->inputs.size());
    for (std::size_t i = 0; i < parsed_.tensors.size(); ++i) {
        if (!take_tensor(parsed_.tensors[i], i)) {
            return false;
        }
    }
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
        if (tensors_[i].input == nullptr && model_->inputs[i].required) {
            return false;
        }
    }
    std::erase_if(tensors_, [](const Tensor& one) { return one.input == nullptr; });
    order_.resize(tensors_.size());
    // The raw contents of all of them, and nothing else, follow.
    std::size_t left = size - head_.size();
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
        order_[tensors_[i].position] = i;
        const auto raw_size = static_cast<std::size_t>(tensors_[i].raw_size);
        const std::size_t whole = raw_prefix(InferKind::kRequest, raw_size).size() + raw_size;
        if (whole > left) {
            return false;
        }
        left -= whole;
    }
    return left == 0 && nodes_ > 0 && edges_ > 0;
}

bool PlainRequest::take_tensor(const InferTensor& tensor, std::size_t position) {
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
    if (count < 0) {
        return false;
    }
    taken.stays_int32 = taken.is_int32 && model_->narrow_edges && at->is_edges();
    narrow_ = narrow_ || taken.stays_int32;
    taken.shape = tensor.shape;
    taken.position = position;
    taken.input = &*at;
    taken.raw_size = count * taken.raw_item();
    taken.size = count * taken.item();
    return true;
}

// Lays the tensors and the output out, relative to a block.
bool PlainRequest::plan_places() {
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
    return true;
}

void PlainRequest::place(std::shared_ptr<BlockPool::Block> block) {
    for (Tensor& tensor : tensors_) {
        tensor.offset += block->offset();
    }
    output_offset_ += block->offset();
    block_ = std::move(block);
    if (model_->counts_loops) {
        loops_ = 0;
    }
}

// Expects the next raw contents.
void PlainRequest::begin_raw() {
    if (!complete()) {
        const auto size = static_cast<std::size_t>(tensors_[order_[next_]].raw_size);
        prefix_ = raw_prefix(InferKind::kRequest, size);
    }
    prefix_taken_ = 0;
    raw_taken_ = 0;
}

bool PlainRequest::take(std::string_view& bytes) {
    while (!bytes.empty() && !complete()) {
        std::size_t part = std::min(bytes.size(), prefix_.size() - prefix_taken_);
        if (part > 0) {
            if (bytes.substr(0, part) != std::string_view(prefix_).substr(prefix_taken_, part)) {
                return false;
            }
            prefix_taken_ += part;
        } else {
            Tensor& tensor = tensors_[order_[next_]];
            part = std::min(bytes.size(), static_cast<std::size_t>(tensor.raw_size - raw_taken_));
            stage_bytes(tensor, bytes.substr(0, part));
            raw_taken_ += static_cast<std::int64_t>(part);
        }
        if (keeps_) {
            kept_.append(bytes.substr(0, part));
        }
        bytes.remove_prefix(part);
        if (prefix_taken_ == prefix_.size() && raw_taken_ == tensors_[order_[next_]].raw_size) {
            ++next_;
            begin_raw();
        }
    }
    return true;
}

// Stages bytes that may begin and end within an element.
void PlainRequest::stage_bytes(Tensor& tensor, std::string_view bytes) {
    const auto item = static_cast<std::size_t>(tensor.raw_item());
    const auto cut = [&](std::size_t size) {
        std::copy_n(bytes.data(), size, cut_.data() + cut_size_);
        cut_size_ += size;
        bytes.remove_prefix(size);
    };
    if (cut_size_ > 0) {
        cut(std::min(bytes.size(), item - cut_size_));
        if (cut_size_ < item) {
            return;
        }
        stage_items(tensor, {cut_.data(), item});
        cut_size_ = 0;
    }
    const std::size_t whole = bytes.size() / item * item;
    stage_items(tensor, bytes.substr(0, whole));
    bytes.remove_prefix(whole);
    cut(bytes.size());
}

void PlainRequest::stage_items(Tensor& tensor, std::string_view bytes) {
    const auto source = bytes_of(bytes);
    const std::int64_t count = static_cast<std::int64_t>(bytes.size()) / tensor.raw_item();
    const std::span<std::byte> target(block_->at(tensor.offset + tensor.staged),
                                      static_cast<std::size_t>(count * tensor.item()));
    const IndexWidth from = tensor.is_int32 ? IndexWidth::k32 : IndexWidth::k64;
    const IndexWidth to = tensor.stays_int32 ? IndexWidth::k32 : IndexWidth::k64;
    if (valid_) {
        const std::ptrdiff_t bad = tensor.input->indices
                                       ? stage_indices(source, from, nodes_, target, to)
                                       : stage_features(source, target, check_finite_);
        valid_ = bad == kAllGood;
    }
    if (!valid_) {
        if (tensor.input->indices) {
            copy_indices(source, from, target, to);
        } else {
            stage_features(source, target, false);
        }
    }
    const std::int64_t before = tensor.staged / tensor.item();
    tensor.staged += count * tensor.item();
    if (loops_ >= 0 && tensor.input->is_edges()) {
        count_loops(tensor, before, before + count);
    }
    if (!keeps_) {
        hash(tensor);
    }
}

// Counts the self-loops whose ends are both staged with the elements from `from` to `to`.
void PlainRequest::count_loops(const Tensor& tensor, std::int64_t from, std::int64_t to) {
    from = std::max(from, edges_) - edges_;
    to -= edges_;
    const std::byte* staged = block_->at(tensor.offset);
    loops_ += tensor.stays_int32 ? loops_of<std::int32_t>(staged, edges_, from, to)
                                 : loops_of<std::int64_t>(staged, edges_, from, to);
}

// Brings the fingerprint up to what is staged, in steps that do not depend on how it came.
void PlainRequest::hash(Tensor& tensor) const {
    for (;;) {
        const std::int64_t step = std::min(kHashedBytes, tensor.size - tensor.hashed);
        if (step == 0 || tensor.hashed + step > tensor.staged) {
            return;
        }
        tensor.fingerprint =
            fingerprint_of(block_->at(tensor.offset + tensor.hashed), step, tensor.fingerprint);
        tensor.hashed += step;
    }
}

bool PlainRequest::is_intact(const Tensor& tensor) const {
    Tensor again = tensor;
    again.hashed = 0;
    again.fingerprint = 0;
    hash(again);
    return again.fingerprint == tensor.fingerprint;
}

bool PlainRequest::stage() {
    if (block_ == nullptr) {
        return false;
    }
    if (!keeps_) {
        return std::all_of(tensors_.begin(), tensors_.end(),
                           [this](const Tensor& one) { return is_intact(one); });
    }
    // Its values were checked when they came.
    std::size_t at = head_.size();
    for (const std::size_t i : order_) {
        Tensor& tensor = tensors_[i];
        const auto size = static_cast<std::size_t>(tensor.raw_size);
        at += raw_prefix(InferKind::kRequest, size).size();
        const auto source = bytes_of(std::string_view(kept_).substr(at, size));
        const std::span<std::byte> target(block_->at(tensor.offset),
                                          static_cast<std::size_t>(tensor.size));
        if (tensor.input->indices) {
            copy_indices(source, tensor.is_int32 ? IndexWidth::k32 : IndexWidth::k64, target,
                         tensor.stays_int32 ? IndexWidth::k32 : IndexWidth::k64);
        } else {
            stage_features(source, target, false);
        }
        at += size;
    }
    return true;
}

std::string PlainRequest::message() const {
    if (keeps_) {
        return kept_;
    }
    std::string found = head_;
    for (std::size_t i = 0; i < next_; ++i) {
        const Tensor& tensor = tensors_[order_[i]];
        const auto size = static_cast<std::size_t>(tensor.raw_size);
        found += raw_prefix(InferKind::kRequest, size);
        const std::byte* staged = block_->at(tensor.offset);
        if (tensor.item() == tensor.raw_item()) {
            found.append(reinterpret_cast<const char*>(staged), size);
            continue;
        }
        // It was INT32.
        for (std::int64_t at = 0; at < tensor.size; at += tensor.item()) {
            std::int64_t wide = 0;
            std::memcpy(&wide, staged + at, sizeof wide);
            const auto narrow = static_cast<std::int32_t>(wide);
            found.append(reinterpret_cast<const char*>(&narrow), sizeof narrow);
        }
    }
    return found + prefix_.substr(0, prefix_taken_);
}

}  // namespace gnnserve::front
