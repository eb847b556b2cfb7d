// Feature tables of resident graphs that a device reads in place, as lanes' loops without Python
// know them. Python maps, pins and copies them (serve.lane.cuda.tables, serve.lane.cuda.hot_rows)
// and takes them back here before it unmaps or overwrites anything.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

namespace gnnserve {

// Rows of a table that have a copy on the device, and where each row's is, -1 for none.
struct HotCopy {
    std::uint64_t rows = 0, slot_of = 0;
};

// [rows, columns] in host memory, at this address for the device.
struct ResidentTable {
    std::uint64_t address = 0;
    std::int64_t rows = 0, columns = 0, item_bytes = 0;
    std::string dtype;

    std::int64_t row_bytes() const { return columns * item_bytes; }
};

// The tables of one process. All methods may be called by any thread.
class ResidentTables {
    struct Hot {
        HotCopy copy;
        int readers = 0;
    };
    struct Entry {
        ResidentTable table;
        std::shared_ptr<Hot> hot;
        int readers = 0;
    };

public:
    // A table while a run reads it, with the copy of its hot rows that there was when it began.
    class Reading {
    public:
        Reading(ResidentTables& tables, std::shared_ptr<Entry> entry)
            : tables_(&tables), entry_(std::move(entry)), hot_(entry_->hot) {}
        Reading(Reading&&) = default;
        Reading& operator=(Reading&&) = delete;
        ~Reading() {
            if (entry_ != nullptr) {
                tables_->end(*entry_, hot_.get());
            }
        }
        const ResidentTable& table() const { return entry_->table; }
        HotCopy hot() const { return hot_ == nullptr ? HotCopy{} : hot_->copy; }

    private:
        ResidentTables* tables_;
        std::shared_ptr<Entry> entry_;
        std::shared_ptr<Hot> hot_;
    };

    void add(std::uint64_t number, ResidentTable table);
    // Forgets the table; returns when no run reads it any more.
    void remove(std::uint64_t number);
    // Has runs that begin now read hot rows there. Nothing happens where the table is not known.
    void set_hot(std::uint64_t number, HotCopy copy);
    // Has runs read the table alone; returns when none reads hot rows any more.
    void clear_hot(std::uint64_t number);

    // Returns null for a table that is not known.
    std::unique_ptr<Reading> read(std::uint64_t number);

private:
    void end(Entry& entry, Hot* hot);

    std::mutex mutex_;
    std::condition_variable ended_;
    std::unordered_map<std::uint64_t, std::shared_ptr<Entry>> tables_;
};

}  // namespace gnnserve
