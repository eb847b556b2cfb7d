#include "resident_tables.hpp"

#include <utility>

namespace gnnserve {

void ResidentTables::add(std::uint64_t number, ResidentTable table) {
    auto entry = std::make_shared<Entry>();
    entry->table = std::move(table);
    const std::lock_guard lock(mutex_);
    tables_[number] = std::move(entry);
}

void ResidentTables::remove(std::uint64_t number) {
    std::unique_lock lock(mutex_);
    const auto found = tables_.find(number);
    if (found == tables_.end()) {
        return;
    }
    const std::shared_ptr<Entry> entry = std::move(found->second);
    tables_.erase(found);
    ended_.wait(lock, [&] { return entry->readers == 0; });
}

void ResidentTables::set_hot(std::uint64_t number, HotCopy copy) {
    auto hot = std::make_shared<Hot>(Hot{copy});
    const std::lock_guard lock(mutex_);
    if (const auto found = tables_.find(number); found != tables_.end()) {
        found->second->hot = std::move(hot);
    }
}

void ResidentTables::clear_hot(std::uint64_t number) {
    std::unique_lock lock(mutex_);
    const auto found = tables_.find(number);
    if (found == tables_.end() || found->second->hot == nullptr) {
        return;
    }
    const std::shared_ptr<Hot> hot = std::move(found->second->hot);
    ended_.wait(lock, [&] { return hot->readers == 0; });
}

std::unique_ptr<ResidentTables::Reading> ResidentTables::read(std::uint64_t number) {
    const std::lock_guard lock(mutex_);
    const auto found = tables_.find(number);
    if (found == tables_.end()) {
        return nullptr;
    }
    auto reading = std::make_unique<Reading>(*this, found->second);
    ++found->second->readers;
    if (found->second->hot != nullptr) {
        ++found->second->hot->readers;
    }
    return reading;
}

void ResidentTables::end(Entry& entry, Hot* hot) {
    const std::lock_guard lock(mutex_);
    --entry.readers;
    if (hot != nullptr) {
        --hot->readers;
    }
    ended_.notify_all();
}

}  // namespace gnnserve
