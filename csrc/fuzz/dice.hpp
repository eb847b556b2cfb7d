// What fuzzing makes up, repeatable by its seed.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <random>
#include <string>

class Dice {
public:
    explicit Dice(std::uint64_t seed) : random_(seed) {}

    // From 0 to `sides` - 1.
    std::size_t operator()(std::size_t sides) {
        return std::uniform_int_distribution<std::size_t>(0, sides - 1)(random_);
    }
    bool one_in(std::size_t sides) { return (*this)(sides) == 0; }
    template <class List>
    const auto& pick(const List& list) {
        return list[(*this)(std::size(list))];
    }
    std::string bytes(std::size_t most) {
        std::string found((*this)(most + 1), '\0');
        for (char& one : found) {
            one = static_cast<char>((*this)(256));
        }
        return found;
    }
    // Changes, drops, repeats or inserts some bytes.
    std::string damaged(std::string text) {
        for (std::size_t left = 1 + (*this)(4); left > 0 && !text.empty(); --left) {
            const std::size_t at = (*this)(text.size());
            const std::size_t size = 1 + (*this)(std::min<std::size_t>(text.size() - at, 16));
            switch ((*this)(4)) {
                case 0:
                    text[at] = static_cast<char>((*this)(256));
                    break;
                case 1:
                    text.erase(at, size);
                    break;
                case 2:
                    text.insert(at, text.substr(at, size));
                    break;
                default:
                    text.insert(at, bytes(16));
            }
        }
        return text;
    }

private:
    std::mt19937_64 random_;
};
