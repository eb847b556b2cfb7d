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

// Number of elements of a shape; -1 for one beyond what a message can hold, or with a negative
// size.
std::int64_t count_of(const std::vector<std::int64_t>& shape) {
    std::int64_t count = 1;
    for (const std::int64_t size : shape) {
        if (size < 0 || __builtin_mul_overflow(count, size, &count) || count > INT64_MAX / 16) {
            return -1;
        }
    }
    return count;
}

std::span<const std::byte> bytes_of(std::string_view text) {
    return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

IndexWidth width_of(const Element& element) {
    return element.bytes == 4 ? IndexWidth::k32 : IndexWidth::k64;
}

// Copies elements that no check is for, or that were checked.
void copy_elements(const PlainRequest::Tensor& tensor, std::span<const std::byte> source,
                   std::span<std::byte> target) {
    if (tensor.sent == tensor.element) {
        std::copy(source.begin(), source.end(), target.begin());
    } else {
        copy_indices(source, width_of(*tensor.sent), target, width_of(*tensor.element));
    }
}

template <typename Index>
std::int64_t largest_of(std::span<const std::byte> staged) {
    std::int64_t largest = -1;
    for (std::size_t at = 0; at < staged.size(); at += sizeof(Index)) {
        Index one = 0;
        std::memcpy(&one, staged.data() + at, sizeof one);
        largest = std::max(largest, std::int64_t{one});
    }
    return largest;
}

// Counts the things of each of the graphs `staged`, and the pairs that they make with those before
// them, and themselves.
template <typename Index>
void count_graphs(PlainRequest::Tensor& tensor, std::span<const std::byte> staged) {
    for (std::size_t at = 0; at < staged.size(); at += sizeof(Index)) {
        Index graph = 0;
        std::memcpy(&graph, staged.data() + at, sizeof graph);
        const auto place = static_cast<std::size_t>(graph);
        if (place >= tensor.things.size()) {
            tensor.things.resize(std::max(place + 1, 2 * tensor.things.size()));
        }
        // (n + 1)² - n².
        tensor.pairs += 2 * tensor.things[place]++ + 1;
        tensor.most = std::max(tensor.most, tensor.things[place]);
    }
}

// True when no element from `from` to `to` is less than the one before it.
template <typename Index>
bool is_ascending(const std::byte* staged, std::int64_t from, std::int64_t to) {
    const auto* values = reinterpret_cast<const Index*>(staged);
    return std::is_sorted(values + std::max<std::int64_t>(from - 1, 0), values + to);
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

// Mixes words of 32 bits, the last one maybe in part, into `before`: sums, and sums of the sums,
// which tell their order. The lanes are independent, so that compilers vectorise the loop.
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
        std::memcpy(&word, bytes + at, static_cast<std::size_t>(std::min(kWord, size - at)));
        mix(word);
    }
    return before;
}

}  // namespace

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
    const auto& outputs = model_->outputs;
    const auto is_ordinary = [&outputs](const InferTensor& wanted) {
        return wanted.parameters.empty() &&
               std::any_of(outputs.begin(), outputs.end(),
                           [&wanted](const PlainOutput& one) { return one.name == wanted.name; });
    };
    if (!parsed_.raws.empty() || parsed_.id.size() > kMostIdBytes || !is_ascii(parsed_.id) ||
        !are_ascii(parsed_.parameters) ||
        !std::all_of(parsed_.requested.begin(), parsed_.requested.end(), is_ordinary)) {
        return false;
    }
    tensors_.resize(model_->inputs.size());
    counts_.assign(model_->counts, -1);
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
    const auto known = [](std::int64_t count) { return count >= 0; };
    return left == 0 && std::all_of(counts_.begin(), counts_.end(), known) && has_things();
}

// True for a request with nodes, and with other things where the model takes any. Some models take
// requests without them.
bool PlainRequest::has_things() const {
    const auto none = [](std::int64_t count) { return count == 0; };
    const auto nodes_end = counts_.begin() + static_cast<std::ptrdiff_t>(model_->node_counts);
    return !std::all_of(counts_.begin(), nodes_end, none) &&
           (nodes_end == counts_.end() || !std::all_of(nodes_end, counts_.end(), none));
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
    taken.sent = taken.element = at->element;
    if (at->also_int32 && tensor.datatype == "INT32") {
        taken.sent = find_element("INT32");
    } else if (tensor.datatype != at->element->datatype) {
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
        std::int64_t& size = counts_[count_of_size(wanted)];
        if (size >= 0 && size != given) {
            return false;
        }
        size = given;
    }
    const std::int64_t count = count_of(tensor.shape);
    if (count < 0) {
        return false;
    }
    if (taken.sent != taken.element && model_->narrow_edges && at->is_edges()) {
        taken.element = taken.sent;
        narrow_ = true;
    }
    taken.shape = tensor.shape;
    taken.position = position;
    taken.input = &*at;
    taken.raw_size = count * taken.sent->bytes;
    taken.size = count * taken.element->bytes;
    return true;
}

// Lays the tensors and the outputs out, relative to a block.
bool PlainRequest::plan_places() {
    for (const PlainOutput& one : model_->outputs) {
        double size = one.constant;
        for (std::size_t i = 0; i < counts_.size(); ++i) {
            size += one.per[i] * static_cast<double>(counts_[i]);
        }
        constexpr double kMost = 1LL << 50;
        if (!(size >= 0 && size <= kMost)) {
            return false;
        }
        output_capacity_ += aligned(static_cast<std::int64_t>(std::ceil(size)));
    }
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
    const auto item = static_cast<std::size_t>(tensor.sent->bytes);
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
    const std::int64_t item = tensor.element->bytes;
    const std::int64_t count = static_cast<std::int64_t>(bytes.size()) / tensor.sent->bytes;
    const std::span<std::byte> target(block_->at(tensor.offset + tensor.staged),
                                      static_cast<std::size_t>(count * item));
    valid_ = valid_ && stage_valid(tensor, source, target);
    if (!valid_) {
        copy_elements(tensor, source, target);
    }
    const std::int64_t before = tensor.staged / item;
    tensor.staged += count * item;
    if (tensor.input->ascends && valid_) {
        const std::byte* staged = block_->at(tensor.offset);
        valid_ = item == 4 ? is_ascending<std::int32_t>(staged, before, before + count)
                           : is_ascending<std::int64_t>(staged, before, before + count);
    }
    if (tensor.input->numbers_graphs || tensor.input->counts_graphs) {
        tensor.largest = std::max(tensor.largest, item == 4 ? largest_of<std::int32_t>(target)
                                                            : largest_of<std::int64_t>(target));
    }
    // Values that are staged as they are may point anywhere.
    if (tensor.input->counts_graphs && valid_) {
        item == 4 ? count_graphs<std::int32_t>(tensor, target)
                  : count_graphs<std::int64_t>(tensor, target);
        if (tensor.staged == tensor.size) {
            tensor.things = {};
        }
    }
    if (loops_ >= 0 && tensor.input->is_edges()) {
        count_loops(tensor, before, before + count);
    }
    if (!keeps_) {
        hash(tensor);
    }
}

// Stages elements as far as the model can take them; false when it cannot take all.
bool PlainRequest::stage_valid(const Tensor& tensor, std::span<const std::byte> source,
                               std::span<std::byte> target) const {
    const PlainInput& input = *tensor.input;
    const auto bytes = static_cast<std::size_t>(tensor.element->bytes);
    if (input.is_index()) {
        return stage_rows(tensor, source, target);
    }
    if (tensor.element->kind == Element::Kind::kFloat) {
        return stage_features(source, target, check_finite_, bytes) == kAllGood;
    }
    const bool is_signed = tensor.element->kind == Element::Kind::kSigned;
    return stage_integers(source, bytes, is_signed, input.low, input.high, target) == kAllGood;
}

// Stages indices, of which each row may point to other things.
bool PlainRequest::stage_rows(const Tensor& tensor, std::span<const std::byte> source,
                              std::span<std::byte> target) const {
    const std::vector<std::size_t>& below = tensor.input->below;
    const IndexWidth from = width_of(*tensor.sent), to = width_of(*tensor.element);
    const auto from_bytes = static_cast<std::size_t>(from), to_bytes = static_cast<std::size_t>(to);
    // A tensor with elements has rows.
    const std::size_t row =
        static_cast<std::size_t>(tensor.size) / to_bytes / (below.size() > 1 ? below.size() : 1);
    std::size_t at = static_cast<std::size_t>(tensor.staged) / to_bytes;
    while (!source.empty()) {
        const std::size_t part = std::min(source.size() / from_bytes, row - at % row);
        const std::int64_t bound = counts_[below[below.size() > 1 ? at / row : 0]];
        if (stage_indices(source.first(part * from_bytes), from, bound,
                          target.first(part * to_bytes), to) != kAllGood) {
            return false;
        }
        source = source.subspan(part * from_bytes);
        target = target.subspan(part * to_bytes);
        at += part;
    }
    return true;
}

// Counts the self-loops whose ends are both staged with the elements from `from` to `to`.
void PlainRequest::count_loops(const Tensor& tensor, std::int64_t from, std::int64_t to) {
    const std::int64_t edges = counts_[count_of_size(kEdges)];
    from = std::max(from, edges) - edges;
    to -= edges;
    const std::byte* staged = block_->at(tensor.offset);
    loops_ += tensor.element->bytes == 4 ? loops_of<std::int32_t>(staged, edges, from, to)
                                         : loops_of<std::int64_t>(staged, edges, from, to);
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
        copy_elements(tensor, source, target);
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
        if (tensor.element == tensor.sent) {
            found.append(reinterpret_cast<const char*>(staged), size);
            continue;
        }
        // It was INT32.
        for (std::int64_t at = 0; at < tensor.size; at += tensor.element->bytes) {
            std::int64_t wide = 0;
            std::memcpy(&wide, staged + at, sizeof wide);
            const auto narrow = static_cast<std::int32_t>(wide);
            found.append(reinterpret_cast<const char*>(&narrow), sizeof narrow);
        }
    }
    return found + prefix_.substr(0, prefix_taken_);
}

}  // namespace gnnserve::front
