// Inputs for fuzzing that lie in a folder, each in a file of its own, and which of them reach code
// that no other reaches.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <string>
#include <vector>

// What the code compiled with -fsanitize=coverage runs through: pairs of blocks that follow each
// other, and how often each pair does, to a power of two.
class Reached {
public:
    void begin() {
        for (; size_ > 0; --size_) {
            counts_[touched_[size_ - 1]] = 0;
        }
        before_ = 0;
    }

    // Call it at each block.
    void block(std::uintptr_t here) {
        const std::size_t pair = (here ^ before_ * 31) * 0x9e3779b97f4a7c15 >> (64 - kBits);
        before_ = here;
        if (counts_[pair] == 0) {
            touched_[size_++] = static_cast<std::uint16_t>(pair);
        }
        counts_[pair] += counts_[pair] < 255;
    }

    // Adds what was reached since `begin`; returns true when some of it is new to `known`.
    bool add_to(std::set<std::uint32_t>& known) const {
        bool fresh = false;
        for (std::size_t i = 0; i < size_; ++i) {
            std::uint32_t power = 0;
            for (unsigned count = counts_[touched_[i]]; count > 1; count >>= 1) {
                ++power;
            }
            fresh |= known.insert(touched_[i] << 3 | power).second;
        }
        return fresh;
    }

private:
    static constexpr std::size_t kBits = 14;
    std::array<std::uint8_t, 1 << kBits> counts_{};
    std::array<std::uint16_t, 1 << kBits> touched_{};
    std::size_t size_ = 0;
    std::uintptr_t before_ = 0;
};

// All files of a folder, in the order of their names.
inline std::vector<std::string> read_corpus(const std::string& folder) {
    std::set<std::filesystem::path> paths;
    for (const auto& entry : std::filesystem::directory_iterator(folder)) {
        paths.insert(entry.path());
    }
    std::vector<std::string> found;
    for (const auto& path : paths) {
        std::ifstream file(path, std::ios::binary);
        found.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    }
    return found;
}

// Writes an input under the name of its hash (FNV-1a).
inline void write_input(const std::string& folder, const std::string& input) {
    std::uint64_t hash = 0xcbf29ce484222325;
    for (const char one : input) {
        hash = (hash ^ static_cast<unsigned char>(one)) * 0x100000001b3;
    }
    std::array<char, 17> name{};
    std::snprintf(name.data(), name.size(), "%016llx", static_cast<unsigned long long>(hash));
    std::ofstream(folder + '/' + name.data(), std::ios::binary) << input;
}
