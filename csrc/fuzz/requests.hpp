// Requests that fuzzing makes up, for the models of plain_models.hpp.
#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "dice.hpp"

inline std::string field(int number, const std::string& content) {
    std::string size;
    std::size_t left = content.size();
    for (; left >= 128; left >>= 7) {
        size.push_back(static_cast<char>(128 | (left & 127)));
    }
    size.push_back(static_cast<char>(left));
    return static_cast<char>(number << 3 | 2) + size + content;
}

inline std::string tensor(const char* name, const char* type, const std::string& shape) {
    return field(5, field(1, name) + field(2, type) + field(3, shape));
}

// A request for the declared model, of zeros or of anything.
inline std::string declared_request(Dice& dice) {
    const std::size_t authors = dice(100), papers = dice(100), writes = dice(100);
    const auto size = [](std::size_t count) { return std::string(1, static_cast<char>(count)); };
    const bool narrow = dice.one_in(3);
    std::vector<std::pair<std::string, std::size_t>> tensors{
        {tensor("x.author", "FP16", size(authors) + '\3'), authors * 6},
        {tensor("kind", "INT8", size(authors)), authors},
        {tensor("writes", narrow ? "INT32" : "INT64", '\2' + size(writes)),
         writes * 2 * (narrow ? 4 : 8)},
        {tensor("known", "BOOL", size(papers)), papers},
        {tensor("graph", "INT64", size(papers)), papers * 8}};
    if (dice.one_in(2)) {
        tensors.emplace_back(tensor("year", "INT16", size(papers)), papers * 2);
        tensors.emplace_back(tensor("score", "FP64", size(writes)), writes * 8);
        tensors.emplace_back(tensor("level", "UINT8", size(papers)), papers);
        tensors.emplace_back(tensor("number", "INT32", size(papers)), papers * 4);
        tensors.emplace_back(tensor("serial", "INT64", size(papers)), papers * 8);
    }
    std::string found = field(1, "typed");
    for (const auto& [head, bytes] : tensors) {
        found += head;
    }
    for (const auto& [head, bytes] : tensors) {
        std::string raw(bytes, '\0');
        for (std::size_t changes = dice.one_in(4) ? dice(4) : 0; changes > 0 && bytes > 0;
             --changes) {
            raw[dice(bytes)] = static_cast<char>(dice(256));
        }
        found += field(7, raw);
    }
    return found;
}

inline std::string short_request(Dice& dice) {
    const std::size_t nodes = dice(100), edges = dice(120);
    std::string found = field(1, dice.one_in(8) ? dice.bytes(20) : "gcn");
    found += field(3, "r");
    found += tensor("x", "FP32", std::string{static_cast<char>(nodes), 4});
    found += tensor("edge_index", dice.one_in(3) ? "INT32" : "INT64",
                    std::string{2, static_cast<char>(edges)});
    found += field(7, std::string(nodes * 16, '\0'));
    found += field(7, std::string(edges * 2 * (dice.one_in(3) ? 4 : 8), '\0'));
    return found;
}

// A request that is staged, as long as nothing is changed in it.
inline std::string request(Dice& dice) {
    std::string found = dice.one_in(2) ? short_request(dice) : declared_request(dice);
    return dice.one_in(2) ? found : dice.damaged(std::move(found));
}
