#include "plain_model.hpp"

#include <algorithm>
#include <array>
#include <utility>

namespace gnnserve::front {
namespace {

using Kind = Element::Kind;

// As serve/interface.py has them.
constexpr std::array<Element, 9> kElements{{
    {"FP32", "float32", 4, Kind::kFloat},
    {"FP64", "float64", 8, Kind::kFloat},
    {"FP16", "float16", 2, Kind::kFloat},
    {"INT64", "int64", 8, Kind::kSigned},
    {"INT32", "int32", 4, Kind::kSigned},
    {"INT16", "int16", 2, Kind::kSigned},
    {"INT8", "int8", 1, Kind::kSigned},
    {"UINT8", "uint8", 1, Kind::kUnsigned},
    {"BOOL", "bool", 1, Kind::kUnsigned},
}};

std::string key_of(std::string_view name, std::string_view version) {
    std::string key(name);
    key.push_back('\0');
    key.append(version);
    return key;
}

}  // namespace

const Element* find_element(std::string_view datatype) {
    const auto* at =
        std::find_if(kElements.begin(), kElements.end(),
                     [datatype](const Element& one) { return one.datatype == datatype; });
    return at == kElements.end() ? nullptr : at;
}

void PlainModels::add(const std::string& name, const std::string& version,
                      std::shared_ptr<const PlainModel> model) {
    models_[key_of(name, version)] = std::move(model);
}

std::shared_ptr<const PlainModel> PlainModels::find(std::string_view name,
                                                    std::string_view version) const {
    const auto at = models_.find(key_of(name, version));
    return at == models_.end() ? nullptr : at->second;
}

}  // namespace gnnserve::front
