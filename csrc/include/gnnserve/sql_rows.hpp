// Rows of an SQLite query as columns of numbers, without an object for each value.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <variant>
#include <vector>

namespace gnnserve {

// Version of the SQLite that this process has loaded, as 3.40.1; empty where it has none as a
// shared library. Another copy must not be loaded: the two would not know of each other's locks.
std::string sqlite_version();

// A query's rows, read from a connection of its own. Not thread-safe.
class SqlRows {
public:
    using Value = std::variant<std::int64_t, std::string>;

    // The first `texts` columns hold texts, the others integers; `values` take the places of the
    // query's question marks. Throws std::runtime_error.
    SqlRows(const std::string& path, const std::string& query, const std::vector<Value>& values,
            std::size_t texts);
    ~SqlRows();
    SqlRows(const SqlRows&) = delete;
    SqlRows& operator=(const SqlRows&) = delete;

    std::size_t columns() const { return columns_; }

    // Reads the next rows into `target`, column after column, and returns how many there were;
    // fewer than fit only at the end. A text becomes its position in `names`, and NULL -1. Throws
    // std::runtime_error.
    std::size_t read(std::span<std::int64_t> target);

    // Texts of a column so far, in the order of their appearance.
    const std::vector<std::string>& names(std::size_t column) const {
        return texts_.at(column).names;
    }

private:
    struct Hash : std::hash<std::string_view> {
        using is_transparent = void;
    };
    struct Texts {
        std::unordered_map<std::string, std::int64_t, Hash, std::equal_to<>> codes;
        std::vector<std::string> names;
    };

    std::int64_t code_of(std::size_t column);

    void* db_ = nullptr;
    void* statement_ = nullptr;
    std::size_t columns_ = 0;
    bool ended_ = false;
    std::vector<Texts> texts_;
};

}  // namespace gnnserve
