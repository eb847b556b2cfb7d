#include "gnnserve/sql_rows.hpp"

#include <dlfcn.h>

#include <stdexcept>

namespace gnnserve {
namespace {

constexpr const char* kLibrary = "libsqlite3.so.0";
// From sqlite3.h.
constexpr int kRow = 100;
constexpr int kDone = 101;
constexpr int kReadOnly = 0x1;
constexpr int kNoMutex = 0x8000;
constexpr int kBusyTimeoutMs = 5000;

// The functions of sqlite3.h that are used here.
struct Api {
    const char* (*libversion)();
    int (*open_v2)(const char* path, void** db, int flags, const char* vfs);
    int (*close)(void* db);
    int (*busy_timeout)(void* db, int ms);
    const char* (*errmsg)(void* db);
    int (*prepare_v2)(void* db, const char* query, int bytes, void** statement, const char** tail);
    int (*finalize)(void* statement);
    int (*bind_int64)(void* statement, int place, std::int64_t value);
    int (*bind_text)(void* statement, int place, const char* text, int bytes, void (*)(void*));
    int (*step)(void* statement);
    int (*column_count)(void* statement);
    std::int64_t (*column_int64)(void* statement, int column);
    const unsigned char* (*column_text)(void* statement, int column);
    int (*column_bytes)(void* statement, int column);
};

// Returns the functions of the library that this process has loaded already, or null.
const Api* find_api() {
    static Api api;
    void* library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    if (library == nullptr) {
        return nullptr;
    }
    bool complete = true;
    const auto find = [&]<typename Function>(Function& into, const char* name) {
        into = reinterpret_cast<Function>(dlsym(library, name));
        complete = complete && into != nullptr;
    };
#define GNNSERVE_FIND(name) find(api.name, "sqlite3_" #name)
    GNNSERVE_FIND(libversion);
    GNNSERVE_FIND(open_v2);
    GNNSERVE_FIND(close);
    GNNSERVE_FIND(busy_timeout);
    GNNSERVE_FIND(errmsg);
    GNNSERVE_FIND(prepare_v2);
    GNNSERVE_FIND(finalize);
    GNNSERVE_FIND(bind_int64);
    GNNSERVE_FIND(bind_text);
    GNNSERVE_FIND(step);
    GNNSERVE_FIND(column_count);
    GNNSERVE_FIND(column_int64);
    GNNSERVE_FIND(column_text);
    GNNSERVE_FIND(column_bytes);
#undef GNNSERVE_FIND
    return complete ? &api : nullptr;
}

const Api* loaded() {
    static const Api* const api = find_api();
    return api;
}

const Api& api() {
    if (loaded() == nullptr) {
        throw std::runtime_error(std::string(kLibrary) + " is not loaded");
    }
    return *loaded();
}

}  // namespace

std::string sqlite_version() { return loaded() == nullptr ? "" : loaded()->libversion(); }

SqlRows::SqlRows(const std::string& path, const std::string& query,
                 const std::vector<Value>& values, std::size_t texts)
    : texts_(texts) {
    const Api& sql = api();
    const auto need = [&](int code) {
        if (code != 0) {
            const std::string why = sql.errmsg(db_);
            sql.finalize(statement_);
            sql.close(db_);
            throw std::runtime_error(why);
        }
    };
    need(sql.open_v2(path.c_str(), &db_, kReadOnly | kNoMutex, nullptr));
    need(sql.busy_timeout(db_, kBusyTimeoutMs));
    need(sql.prepare_v2(db_, query.data(), static_cast<int>(query.size()), &statement_, nullptr));
    int place = 0;
    for (const Value& value : values) {
        ++place;
        if (const auto* number = std::get_if<std::int64_t>(&value)) {
            need(sql.bind_int64(statement_, place, *number));
        } else {
            // `value` stays only until this returns, so SQLite copies it.
            const auto copied = reinterpret_cast<void (*)(void*)>(-1);
            const auto& text = std::get<std::string>(value);
            need(sql.bind_text(statement_, place, text.data(), static_cast<int>(text.size()),
                               copied));
        }
    }
    columns_ = static_cast<std::size_t>(sql.column_count(statement_));
}

SqlRows::~SqlRows() {
    api().finalize(statement_);
    api().close(db_);
}

std::size_t SqlRows::read(std::span<std::int64_t> target) {
    const Api& sql = api();
    const std::size_t most = columns_ == 0 ? 0 : target.size() / columns_;
    std::size_t row = 0;
    while (row < most && !ended_) {
        const int code = sql.step(statement_);
        if (code == kDone) {
            ended_ = true;
            break;
        }
        if (code != kRow) {
            ended_ = true;
            throw std::runtime_error(sql.errmsg(db_));
        }
        for (std::size_t column = 0; column < columns_; ++column) {
            target[column * most + row] =
                column < texts_.size() ? code_of(column)
                                       : sql.column_int64(statement_, static_cast<int>(column));
        }
        ++row;
    }
    return row;
}

std::int64_t SqlRows::code_of(std::size_t column) {
    const Api& sql = api();
    const int place = static_cast<int>(column);
    const auto* text = reinterpret_cast<const char*>(sql.column_text(statement_, place));
    if (text == nullptr) {
        return -1;
    }
    const std::string_view name(text,
                                static_cast<std::size_t>(sql.column_bytes(statement_, place)));
    Texts& known = texts_[column];
    if (const auto found = known.codes.find(name); found != known.codes.end()) {
        return found->second;
    }
    const auto code = static_cast<std::int64_t>(known.names.size());
    known.names.emplace_back(name);
    known.codes.emplace(name, code);
    return code;
}

}  // namespace gnnserve
