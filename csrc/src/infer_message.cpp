#include "gnnserve/infer_message.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace gnnserve {
namespace {

// Field numbers, as in protos/inference/grpc_service.proto.
enum Message : std::uint32_t { kModel = 1, kVersion, kId, kParameters, kTensors, kRequested };
enum Tensor : std::uint32_t { kName = 1, kDatatype, kShape, kTensorParameters };
enum Requested : std::uint32_t { kRequestedName = 1, kRequestedParameters };
enum Entry : std::uint32_t { kKey = 1, kValue };
// Only requests have requested outputs; raw contents follow these.
constexpr std::uint32_t kRequestRaws = 7, kResponseRaws = 6;

enum class Wire : std::uint8_t { kVarint = 0, kFixed64 = 1, kBytes = 2 };

std::uint32_t raws_field(InferKind kind) {
    return kind == InferKind::kRequest ? kRequestRaws : kResponseRaws;
}

// Reads fields from the front of a message; `ok` is false from the first field on that is not
// plain.
class Reader {
public:
    explicit Reader(std::string_view rest) : rest_(rest) {}

    bool ok() const { return ok_; }
    bool done() const { return !ok_ || rest_.empty(); }
    std::uint32_t field() const { return field_; }
    std::size_t left() const { return rest_.size(); }

    // The next field's number and wire type.
    void tag() {
        const std::size_t before = rest_.size();
        const std::uint64_t tag = varint();
        wire_ = static_cast<Wire>(tag & 7);
        field_ = static_cast<std::uint32_t>(tag >> 3);
        require(tag >> 32 == 0 && before - rest_.size() <= 5);
    }

    std::uint64_t varint() {
        std::uint64_t value = 0;
        for (std::size_t i = 0; i < rest_.size() && i < 10; ++i) {
            const auto byte = static_cast<unsigned char>(rest_[i]);
            value |= static_cast<std::uint64_t>(byte & 0x7f) << (7 * i);
            if (byte < 0x80) {
                rest_.remove_prefix(i + 1);
                require(i < 9 || byte < 2);
                return value;
            }
        }
        ok_ = false;
        return 0;
    }

    std::uint64_t number() {
        require(wire_ == Wire::kVarint);
        return ok_ ? varint() : 0;
    }

    std::uint64_t fixed64() {
        std::uint64_t value = 0;
        require(wire_ == Wire::kFixed64 && rest_.size() >= sizeof value);
        if (ok_) {
            std::memcpy(&value, rest_.data(), sizeof value);
            rest_.remove_prefix(sizeof value);
        }
        return value;
    }

    std::string_view bytes() {
        require(wire_ == Wire::kBytes);
        const std::uint64_t size = ok_ ? varint() : 0;
        require(size <= rest_.size());
        if (!ok_) {
            return {};
        }
        const std::string_view found = rest_.substr(0, size);
        rest_.remove_prefix(size);
        return found;
    }

    bool is_bytes() const { return wire_ == Wire::kBytes; }

    // Call it for a field that does not repeat; `seen` has one bit per field already read.
    void once(std::uint32_t& seen) {
        const std::uint32_t bit = 1U << field_;
        require((seen & bit) == 0);
        seen |= bit;
    }

    void require(bool right) { ok_ = ok_ && right; }

private:
    std::string_view rest_;
    std::uint32_t field_ = 0;
    Wire wire_ = Wire::kVarint;
    bool ok_ = true;
};

bool parse_value(std::string_view bytes, InferParameter& parameter) {
    Reader value(bytes);
    value.tag();
    switch (value.field()) {
        case static_cast<std::uint32_t>(Choice::kBool):
            parameter.bits = value.number() != 0;
            break;
        case static_cast<std::uint32_t>(Choice::kInt64):
            parameter.bits = value.number();
            break;
        case static_cast<std::uint32_t>(Choice::kString):
            parameter.text = value.bytes();
            break;
        case static_cast<std::uint32_t>(Choice::kDouble):
            parameter.bits = value.fixed64();
            break;
        default:
            return false;
    }
    parameter.choice = static_cast<Choice>(value.field());
    return value.ok() && value.done();
}

bool parse_entry(std::string_view bytes, std::vector<InferParameter>& parameters) {
    Reader entry(bytes);
    InferParameter& parameter = parameters.emplace_back();
    std::uint32_t seen = 0;
    while (!entry.done()) {
        entry.tag();
        if (entry.field() == kKey) {
            entry.once(seen);
            parameter.name = entry.bytes();
        } else if (entry.field() == kValue) {
            entry.once(seen);
            entry.require(parse_value(entry.bytes(), parameter));
        } else {
            return false;
        }
    }
    return entry.ok() && seen == (1U << kKey | 1U << kValue);
}

void parse_shape(Reader& tensor, std::vector<std::int64_t>& shape) {
    if (!tensor.is_bytes()) {
        shape.push_back(static_cast<std::int64_t>(tensor.number()));
        return;
    }
    Reader packed(tensor.bytes());
    while (!packed.done()) {
        shape.push_back(static_cast<std::int64_t>(packed.varint()));
    }
    tensor.require(packed.ok());
}

bool parse_tensor(std::string_view bytes, InferTensor& into) {
    Reader tensor(bytes);
    std::uint32_t seen = 0;
    while (!tensor.done()) {
        tensor.tag();
        switch (tensor.field()) {
            case kName:
                tensor.once(seen);
                into.name = tensor.bytes();
                break;
            case kDatatype:
                tensor.once(seen);
                into.datatype = tensor.bytes();
                break;
            case kShape:
                parse_shape(tensor, into.shape);
                break;
            case kTensorParameters:
                tensor.require(parse_entry(tensor.bytes(), into.parameters));
                break;
            default:
                return false;
        }
    }
    return tensor.ok();
}

bool parse_requested(std::string_view bytes, InferTensor& into) {
    Reader output(bytes);
    std::uint32_t seen = 0;
    while (!output.done()) {
        output.tag();
        if (output.field() == kRequestedName) {
            output.once(seen);
            into.name = output.bytes();
        } else if (output.field() == kRequestedParameters) {
            output.require(parse_entry(output.bytes(), into.parameters));
        } else {
            return false;
        }
    }
    return output.ok();
}

bool are_named_briefly(const std::vector<InferParameter>& parameters) {
    return std::all_of(parameters.begin(), parameters.end(), [](const InferParameter& parameter) {
        return parameter.name.size() <= kMostNameBytes;
    });
}

bool are_within_limits(const std::vector<InferTensor>& tensors, std::size_t& parameters) {
    const auto is_within = [&parameters](const InferTensor& tensor) {
        parameters += tensor.parameters.size();
        return tensor.name.size() <= kMostNameBytes && tensor.datatype.size() <= kMostNameBytes &&
               tensor.shape.size() <= kMostDimensions && are_named_briefly(tensor.parameters);
    };
    return tensors.size() <= kMostTensors && std::all_of(tensors.begin(), tensors.end(), is_within);
}

bool is_within_limits(const InferMessage& message) {
    std::size_t parameters = message.parameters.size();
    return message.raws.size() <= kMostTensors && message.model.size() <= kMostNameBytes &&
           message.version.size() <= kMostNameBytes && are_named_briefly(message.parameters) &&
           are_within_limits(message.tensors, parameters) &&
           are_within_limits(message.requested, parameters) && parameters <= kMostParameters;
}

void put_varint(std::string& out, std::uint64_t value) {
    while (value >= 0x80) {
        out.push_back(static_cast<char>(value | 0x80));
        value >>= 7;
    }
    out.push_back(static_cast<char>(value));
}

void put_tag(std::string& out, std::uint32_t field, Wire wire) {
    put_varint(out, field << 3 | static_cast<std::uint32_t>(wire));
}

void put_bytes(std::string& out, std::uint32_t field, std::string_view bytes) {
    put_tag(out, field, Wire::kBytes);
    put_varint(out, bytes.size());
    out.append(bytes);
}

// Empty texts are not sent.
void put_text(std::string& out, std::uint32_t field, std::string_view text) {
    if (!text.empty()) {
        put_bytes(out, field, text);
    }
}

void put_parameters(std::string& out, std::uint32_t field,
                    const std::vector<InferParameter>& parameters) {
    std::string value;
    std::string entry;
    for (const InferParameter& parameter : parameters) {
        const auto member = static_cast<std::uint32_t>(parameter.choice);
        value.clear();
        if (parameter.choice == Choice::kString) {
            put_bytes(value, member, parameter.text);
        } else if (parameter.choice == Choice::kDouble) {
            put_tag(value, member, Wire::kFixed64);
            value.append(reinterpret_cast<const char*>(&parameter.bits), sizeof parameter.bits);
        } else {
            put_tag(value, member, Wire::kVarint);
            put_varint(value, parameter.bits);
        }
        entry.clear();
        put_bytes(entry, kKey, parameter.name);
        put_bytes(entry, kValue, value);
        put_bytes(out, field, entry);
    }
}

}  // namespace

std::optional<InferMessage> parse_infer(InferKind kind, std::string_view message) {
    InferMessage found;
    Reader reader(message);
    std::uint32_t seen = 0;
    const bool is_request = kind == InferKind::kRequest;
    const std::uint32_t raws = raws_field(kind);
    std::size_t head_bytes = 0;
    while (!reader.done()) {
        const std::size_t before = reader.left();
        reader.tag();
        const std::uint32_t field = reader.field();
        const std::string_view content = reader.bytes();
        head_bytes += before - reader.left() - (field == raws ? content.size() : 0);
        reader.require(head_bytes <= kMostHeadBytes);
        if (!reader.ok()) {
            return std::nullopt;
        }
        if (field == raws) {
            found.raws.push_back(content);
        } else if (field == kTensors) {
            reader.require(parse_tensor(content, found.tensors.emplace_back()));
        } else if (field == kParameters) {
            reader.require(parse_entry(content, found.parameters));
        } else if (field == kRequested && is_request) {
            reader.require(parse_requested(content, found.requested.emplace_back()));
        } else if (field >= kModel && field <= kId) {
            reader.once(seen);
            (field == kModel     ? found.model
             : field == kVersion ? found.version
                                 : found.id) = content;
        } else {
            return std::nullopt;
        }
    }
    if (!reader.ok() || !is_within_limits(found)) {
        return std::nullopt;
    }
    return found;
}

std::string write_infer(const InferMessage& message) {
    std::string out;
    out.reserve(1024);
    put_text(out, kModel, message.model);
    put_text(out, kVersion, message.version);
    put_text(out, kId, message.id);
    put_parameters(out, kParameters, message.parameters);
    std::string body;
    std::string shape;
    for (const InferTensor& tensor : message.tensors) {
        body.clear();
        shape.clear();
        put_text(body, kName, tensor.name);
        put_text(body, kDatatype, tensor.datatype);
        for (const std::int64_t size : tensor.shape) {
            put_varint(shape, static_cast<std::uint64_t>(size));
        }
        put_text(body, kShape, shape);
        put_parameters(body, kTensorParameters, tensor.parameters);
        put_bytes(out, kTensors, body);
    }
    return out;
}

std::string raw_prefix(InferKind kind, std::size_t size) {
    std::string out;
    put_tag(out, raws_field(kind), Wire::kBytes);
    put_varint(out, size);
    return out;
}

}  // namespace gnnserve
