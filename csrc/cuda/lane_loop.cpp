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
    LaneLoop(int channel, Pool pool, RunTimes times, ReplayTask replay, const void* route,
             bool has_bounded)
        : channel_(channel),
          pool_(pool),
          times_(times),
          replay_(replay),
          route_(route),
          has_bounded_(has_bounded),
          packet_(kMostBytes) {}

    CapturedRun* add() { return runs_.emplace_back(std::make_unique<CapturedRun>()).get(); }

    void drop(const CapturedRun* run) {
        std::erase_if(runs_, [run](const auto& each) { return each.get() == run; });
    }

    // Answers packets until one comes that is not served here: returns kPacket, also when the
    // server is gone. With `until_idle`, returns kIdle when no packet waits. Returns the device's
    // error when a run fails; `failed` is that run then, and its packet waits.
    int serve(bool until_idle) {
        for (;;) {
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
                return kPacket;
            }
            const auto began = std::chrono::steady_clock::now();
            const int error = replayed(*run);
            if (error != 0) {
                failed = run;
                return error;
            }
            if (!run->all_finite(plan_) || !answered(*run, began)) {
                return kPacket;
            }
        }
    }

    const CapturedRun* failed = nullptr;

private:
    CapturedRun* find() {
        const bool bounded = task_.bounded && has_bounded_;
        const int kind = bounded ? kBounded : times_.urgent(task_.run_ns) ? kUrgent : kOrdinary;
        for (const auto& run : runs_) {
            if (run->kind == kind && run->key == task_.key && run->plan(task_, pool_, plan_)) {
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

    // Sends the answer, then takes the packet out. Where sending fails, Python runs into the same.
    bool answered(const CapturedRun& run, std::chrono::steady_clock::time_point began) {
        const auto run_ns = std::chrono::steady_clock::now() - began;
        const CapturedTensor& only = run.outputs.front();
        const std::int64_t columns = run.declared ? 0 : only.shape.sizes[1];
        write_done(task_.task_id, plan_.rows, columns,
                   std::chrono::duration_cast<std::chrono::nanoseconds>(run_ns).count(), answer_);
        ssize_t sent = 0;
        do {
            sent = send(channel_, answer_.data(), answer_.size(), MSG_NOSIGNAL);
        } while (sent < 0 && errno == EINTR);
        if (sent < 0) {
            return false;
        }
        ssize_t taken = 0;
        do {
            taken = recv(channel_, packet_.data(), 1, MSG_DONTWAIT);
        } while (taken < 0 && errno == EINTR);
        return true;
    }

    int channel_;
    Pool pool_;
    RunTimes times_;
    ReplayTask replay_;
    const void* route_;
    bool has_bounded_;
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

// Opens the loop of a lane: the socket of its channel, the shared pool, the times of all lanes of
// the device and which is its own, and what replays a task over a route. Never closed.
GNNSERVE_EXPORT void* gnnserve_lane_open(int channel, std::uint64_t pool, std::uint64_t pool_bytes,
                                         std::int64_t* times_ns, int lanes, int own,
                                         gnnserve::ReplayTask replay, const void* route,
                                         int has_bounded) {
    return new LaneLoop(channel, {pool, pool_bytes}, {times_ns, lanes, own}, replay, route,
                        has_bounded != 0);
}

GNNSERVE_EXPORT void gnnserve_lane_close(void* lane) { delete static_cast<LaneLoop*>(lane); }

// Adds a captured run with the counts that it serves, least and most of each symbol in turn. It
// serves none before it has outputs.
GNNSERVE_EXPORT void* gnnserve_lane_add_run(void* lane, const char* key, int kind, void* stream,
                                            void* graph, std::int64_t most, int any_size,
                                            int declared, int checked, const std::int64_t* counts,
                                            std::int64_t symbols) {
    CapturedRun* run = static_cast<LaneLoop*>(lane)->add();
    run->key = key;
    run->kind = kind;
    run->stream = reinterpret_cast<std::uint64_t>(stream);
    run->graph = reinterpret_cast<std::uint64_t>(graph);
    run->most = most;
    run->any_size = any_size != 0;
    run->declared = declared != 0;
    run->checked = checked != 0;
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
        return gnnserve::kPacket;  // Python needs less, or tells of it
    }
}
