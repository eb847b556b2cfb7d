// The loop of a lane on a device, without Python: it answers the tasks that a captured run serves.
// Through ctypes, for serve.lane.cuda.packet_loop.
//
// Everything else is Python's. A packet is looked at where it lies in the socket and taken out only
// when it was answered, so that whatever is not served here Python finds untouched.

#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "captured_run.hpp"
#include "copy.hpp"
#include "export.hpp"
#include "run_packet.hpp"

namespace gnnserve {
namespace {

// What `serve` returns; above are errors of the device.
constexpr int kPacket = 0, kIdle = -1;
// Kinds of streams, as serve.lane.cuda.packet_loop numbers them.
constexpr int kOrdinary = 0, kUrgent = 1, kBounded = 2;
// See serve.lane.cuda.device.Urgency.
constexpr std::int64_t kShortFactor = 2;
// Blocks are placed in multiples of this, and a run tells of memory that it does not need when that
// is such a part of the slab; see serve.lane.cuda.task_memory.
constexpr std::int64_t kAlignmentBytes = 512, kMuch = 64;
// The longest RunTask that is looked at; longer ones are Python's.
constexpr std::size_t kMostBytes = 16 << 10;

// Expected times of what runs on the device now, one of each lane, 0 for none.
class RunTimes {
public:
    RunTimes(std::int64_t* times_ns, int count, int own)
        : times_ns_(times_ns), count_(count), own_(own) {}

    bool urgent(std::int64_t run_ns) const {
        std::int64_t longest_ns = 0;
        for (int lane = 0; lane < count_; ++lane) {
            if (lane != own_) {
                longest_ns = std::max(longest_ns, of(lane).load(std::memory_order_relaxed));
            }
        }
        return run_ns > 0 && run_ns <= longest_ns / kShortFactor;
    }
    void note(std::int64_t run_ns) const { of(own_).store(run_ns, std::memory_order_relaxed); }

private:
    std::atomic_ref<std::int64_t> of(int lane) const {
        return std::atomic_ref<std::int64_t>(times_ns_[lane]);
    }

    std::int64_t* times_ns_;
    int count_, own_;
};

class LaneLoop {
public:
    LaneLoop(int channel, Surroundings around, RunTimes times, ReplayTask replay, const void* route,
             bool has_bounded, std::int64_t slab_bytes)
        : channel_(channel),
          around_(around),
          times_(times),
          replay_(replay),
          route_(route),
          has_bounded_(has_bounded),
          slab_bytes_(slab_bytes),
          packet_(kMostBytes) {}

    void use_scratch(std::uint64_t address, std::int64_t bytes) {
        around_.scratch = address;
        around_.scratch_bytes = bytes;
    }

    CapturedRun* add() { return runs_.emplace_back(std::make_unique<CapturedRun>()).get(); }

    void drop(const CapturedRun* run) {
        std::erase_if(runs_, [run](const auto& each) { return each.get() == run; });
    }

    // Answers packets until one comes that is not served here: returns kPacket, also when the
    // server is gone. With `until_idle`, returns kIdle when no packet waits. Returns the device's
    // error when a run fails; `failed` is that run then. Its packet waits, unless the run gave
    // memory back that it would need now: it is answered as one that is to be run again then.
    int serve(bool until_idle) {
        for (;;) {
            plan_.tables.clear();
            const int flags = MSG_PEEK | MSG_TRUNC | (until_idle ? MSG_DONTWAIT : 0);
            const ssize_t bytes = recv(channel_, packet_.data(), packet_.size(), flags);
            if (bytes < 0 && until_idle && (errno == EAGAIN || errno == EWOULDBLOCK)) {
                return kIdle;
            }
            if (bytes <= 0 || static_cast<std::size_t>(bytes) > packet_.size() ||
                !read_run({packet_.data(), static_cast<std::size_t>(bytes)}, task_)) {
                return kPacket;
            }
            CapturedRun* run = find();
            if (run == nullptr) {
                return left();
            }
            const auto began = std::chrono::steady_clock::now();
            const bool gives_back = takes_less();
            if (gives_back) {
                write_less(task_.task_id, 0, answer_);
                if (!sent()) {
                    return left();
                }
            }
            const int error = replayed(*run);
            plan_.tables.clear();
            if (error != 0) {
                failed = run;
                if (gives_back) {
                    write_overrun(task_.task_id, "its captured run cannot be replayed", answer_);
                    (void)answered();
                }
                return error;
            }
            if (!run->all_finite(plan_)) {
                return kPacket;
            }
            write_answer(*run, began);
            if (!answered()) {
                return kPacket;
            }
        }
    }

    // Leaves the packet to Python, which could not unmap a table that this still reads.
    int left() {
        plan_.tables.clear();
        return kPacket;
    }

    const CapturedRun* failed = nullptr;

private:
    CapturedRun* find() {
        const bool bounded = task_.bounded && has_bounded_;
        const int kind = bounded ? kBounded : times_.urgent(task_.run_ns) ? kUrgent : kOrdinary;
        for (const auto& run : runs_) {
            if (run->kind == kind && run->key == task_.key && run->plan(task_, around_, plan_)) {
                return run.get();
            }
        }
        return nullptr;
    }

    int replayed(CapturedRun& run) {
        const auto count = [](const auto& list) { return static_cast<std::int64_t>(list.size()); };
        const Replay replay{
            reinterpret_cast<void*>(run.stream),
            reinterpret_cast<void*>(run.graph),
            plan_.up.data(),
            count(plan_.up),
            plan_.gathers.data(),
            count(plan_.gathers),
            plan_.patches.data(),
            count(plan_.patches),
            plan_.spare.data(),
            count(plan_.spare),
            plan_.down.data(),
            count(plan_.down),
        };
        times_.note(task_.run_ns);
        const int error = replay_(route_, &replay);
        times_.note(0);
        run.used = ++replays_;
        return error;
    }

    // Returns true when others could do much with the memory that was reserved for the task.
    bool takes_less() const {
        std::int64_t bytes = task_.limit_bytes + plan_.gathered_bytes;
        for (const Copy& copy : plan_.up) {
            bytes += (copy.bytes + kAlignmentBytes - 1) / kAlignmentBytes * kAlignmentBytes;
        }
        return slab_bytes_ > 0 && bytes >= slab_bytes_ / kMuch;
    }

    void write_answer(const CapturedRun& run, std::chrono::steady_clock::time_point began) {
        const auto run_ns = std::chrono::steady_clock::now() - began;
        const CapturedTensor& only = run.outputs.front();
        const std::int64_t columns = run.declared ? 0 : only.shape.sizes[1];
        write_done(task_.task_id, plan_.rows, columns,
                   std::chrono::duration_cast<std::chrono::nanoseconds>(run_ns).count(), answer_);
    }

    bool sent() const {
        ssize_t bytes = 0;
        do {
            bytes = send(channel_, answer_.data(), answer_.size(), MSG_NOSIGNAL);
        } while (bytes < 0 && errno == EINTR);
        return bytes >= 0;
    }

    // Sends the answer, then takes the packet out. Where sending fails, Python runs into the same.
    bool answered() {
        if (!sent()) {
            return false;
        }
        ssize_t taken = 0;
        do {
            taken = recv(channel_, packet_.data(), 1, MSG_DONTWAIT);
        } while (taken < 0 && errno == EINTR);
        return true;
    }

    int channel_;
    Surroundings around_;
    RunTimes times_;
    ReplayTask replay_;
    const void* route_;
    bool has_bounded_;
    std::int64_t slab_bytes_;
    std::vector<std::unique_ptr<CapturedRun>> runs_;
    std::uint64_t replays_ = 0;
    // Kept for the room that they have.
    std::vector<unsigned char> packet_;
    RunPacket task_;
    Plan plan_;
    std::string answer_;
};

// Tensors as Python gives them: sizes first, then the symbols that an index points to.
CapturedTensor tensor_of(const char* name, const char* dtype, const std::int64_t* numbers) {
    CapturedTensor made;
    made.name = name;
    made.dtype = dtype;
    made.address = static_cast<std::uint64_t>(numbers[0]);
    made.item_bytes = numbers[1];
    made.axis = static_cast<int>(numbers[2]);
    made.symbol = static_cast<int>(numbers[3]);
    made.spare = static_cast<int>(numbers[4]);
    made.shape.axes = static_cast<int>(numbers[5]);
    const std::int64_t* sizes = numbers + 7;
    std::copy_n(sizes, numbers[5], made.shape.sizes.begin());
    for (std::int64_t i = 0; i < numbers[6]; ++i) {
        made.points.push_back(static_cast<int>(sizes[numbers[5] + i]));
    }
    return made;
}

}  // namespace
}  // namespace gnnserve

using gnnserve::CapturedRun;
using gnnserve::LaneLoop;
using gnnserve::ResidentTables;

// Opens the loop of a lane: the socket of its channel, the shared pool, the times of all lanes of
// the device and which is its own, what replays a task over a route, and the memory that tasks
// share, 0 where nobody is told what they do not need. `tables` are those of gnnserve_tables_open.
GNNSERVE_EXPORT void* gnnserve_lane_open(int channel, std::uint64_t pool, std::uint64_t pool_bytes,
                                         std::int64_t* times_ns, int lanes, int own,
                                         gnnserve::ReplayTask replay, const void* route,
                                         int has_bounded, std::int64_t slab_bytes, void* tables) {
    return new LaneLoop(channel, {{pool, pool_bytes}, static_cast<ResidentTables*>(tables)},
                        {times_ns, lanes, own}, replay, route, has_bounded != 0, slab_bytes);
}

GNNSERVE_EXPORT void gnnserve_lane_close(void* lane) { delete static_cast<LaneLoop*>(lane); }

// Gives the lane memory of the device for ids of rows to gather. No run may be using another one.
GNNSERVE_EXPORT void gnnserve_lane_scratch(void* lane, std::uint64_t address, std::int64_t bytes) {
    static_cast<LaneLoop*>(lane)->use_scratch(address, bytes);
}

// Opens what all lanes of a process know of tables that the device reads in place; never closed.
GNNSERVE_EXPORT void* gnnserve_tables_open() { return new ResidentTables; }

// Adds a table [rows, columns] at that address of the device.
GNNSERVE_EXPORT void gnnserve_tables_add(void* tables, std::uint64_t number, std::uint64_t address,
                                         std::int64_t rows, std::int64_t columns,
                                         std::int64_t item_bytes, const char* dtype) {
    static_cast<ResidentTables*>(tables)->add(number, {address, rows, columns, item_bytes, dtype});
}

// Forgets a table; returns when no run reads it.
GNNSERVE_EXPORT void gnnserve_tables_remove(void* tables, std::uint64_t number) {
    static_cast<ResidentTables*>(tables)->remove(number);
}

// Has runs read the table's hot rows from there; with `rows` of 0 from nowhere, and returns when
// none does any more.
GNNSERVE_EXPORT void gnnserve_tables_hot(void* tables, std::uint64_t number, std::uint64_t rows,
                                         std::uint64_t slot_of) {
    auto* known = static_cast<ResidentTables*>(tables);
    if (rows == 0) {
        known->clear_hot(number);
    } else {
        known->set_hot(number, {rows, slot_of});
    }
}

// Adds a captured run with the counts that it serves, least and most of each symbol in turn. It
// serves none before it has outputs.
GNNSERVE_EXPORT void* gnnserve_lane_add_run(void* lane, const char* key, int kind, void* stream,
                                            void* graph, std::int64_t most, int any_size,
                                            int declared, int checked, std::int64_t gather_threads,
                                            const std::int64_t* counts, std::int64_t symbols) {
    CapturedRun* run = static_cast<LaneLoop*>(lane)->add();
    run->key = key;
    run->kind = kind;
    run->stream = reinterpret_cast<std::uint64_t>(stream);
    run->graph = reinterpret_cast<std::uint64_t>(graph);
    run->most = most;
    run->any_size = any_size != 0;
    run->declared = declared != 0;
    run->checked = checked != 0;
    run->gather_threads = gather_threads;
    for (std::int64_t i = 0; i < symbols; ++i) {
        run->symbols.push_back({counts[2 * i], counts[2 * i + 1]});
    }
    return run;
}

// Adds an input or output; `numbers` are its address, bytes of an element, axis and symbol of its
// entries, byte for spare room, number of axes and of symbols it points to, sizes, these symbols.
GNNSERVE_EXPORT void gnnserve_lane_add_tensor(void* run, int is_output, const char* name,
                                              const char* dtype, const std::int64_t* numbers) {
    auto& tensors = is_output != 0 ? static_cast<CapturedRun*>(run)->outputs
                                   : static_cast<CapturedRun*>(run)->inputs;
    tensors.push_back(gnnserve::tensor_of(name, dtype, numbers));
}

GNNSERVE_EXPORT void gnnserve_lane_drop_run(void* lane, void* run) {
    static_cast<LaneLoop*>(lane)->drop(static_cast<CapturedRun*>(run));
}

// How many replays the lane had made at this run's last one; 0 before the first.
GNNSERVE_EXPORT std::uint64_t gnnserve_lane_used(const void* run) {
    return static_cast<const CapturedRun*>(run)->used;
}

// See LaneLoop::serve. `failed` becomes the run that failed.
GNNSERVE_EXPORT int gnnserve_lane_serve(void* lane, int until_idle, void** failed) {
    auto* loop = static_cast<LaneLoop*>(lane);
    try {
        const int outcome = loop->serve(until_idle != 0);
        *failed = const_cast<CapturedRun*>(loop->failed);
        return outcome;
    } catch (const std::bad_alloc&) {
        return loop->left();  // Python needs less, or tells of it
    }
}
