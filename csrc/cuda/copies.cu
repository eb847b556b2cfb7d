// A run's copies between host and device, and the events that order them: one call for all that
// goes up, one for all that comes down. Every function returns a cudaError_t as a number.

#include <cuda_runtime.h>

#include <chrono>
#include <cstddef>
#include <cstdint>

#include "copy.hpp"
#include "errors.cuh"
#include "export.hpp"

// See gather.cuh.
extern "C" int gnnserve_cuda_gather_floats(std::uint64_t table, std::uint64_t ids,
                                           std::int64_t rows, std::int64_t row_bytes,
                                           std::int64_t item_bytes, std::uint64_t hot,
                                           std::uint64_t slot_of, std::uint64_t out,
                                           std::int64_t most_threads, void* stream);

namespace {

using gnnserve::Copy;
using gnnserve::Replay;
using gnnserve::told;

// A lane's way to the device and back: the streams of its copies and the events that order them.
struct Route {
    cudaStream_t up, down;
    // Recorded behind kernels that copies up wait for, behind copies up, behind the answer's
    // kernels, and behind the last copy down.
    cudaEvent_t launched = nullptr, placed = nullptr, computed = nullptr, ended = nullptr;
};

// Copies of so many bytes in all use the run's own stream: to order two streams takes the host as
// long as the copies take the device.
constexpr std::int64_t kSmallBytes = 64 << 10;

// Time for which a thread asks for the end of a run before it sleeps until then. To be woken costs
// tens of microseconds, as much as a small run takes.
constexpr std::chrono::microseconds kSpin{50};

// Makes the route's events. The device becomes the thread's current one.
cudaError_t opened(Route& route, int device) {
    cudaError_t error = cudaSetDevice(device);
    for (cudaEvent_t* event : {&route.launched, &route.placed, &route.computed}) {
        if (error == cudaSuccess) {
            error = cudaEventCreateWithFlags(event, cudaEventDisableTiming);
        }
    }
    if (error == cudaSuccess) {
        error =
            cudaEventCreateWithFlags(&route.ended, cudaEventDisableTiming | cudaEventBlockingSync);
    }
    return error;
}

// Has everything behind on `later` wait for everything so far on `earlier`.
cudaError_t after(cudaStream_t earlier, cudaEvent_t event, cudaStream_t later) {
    const cudaError_t error = cudaEventRecord(event, earlier);
    return error != cudaSuccess ? error : cudaStreamWaitEvent(later, event, 0);
}

cudaError_t started(const Copy* copies, std::int64_t count, cudaMemcpyKind kind,
                    cudaStream_t stream) {
    cudaError_t error = cudaSuccess;
    for (std::int64_t i = 0; i < count && error == cudaSuccess; ++i) {
        error = cudaMemcpyAsync(reinterpret_cast<void*>(copies[i].to),
                                reinterpret_cast<const void*>(copies[i].from),
                                static_cast<std::size_t>(copies[i].bytes), kind, stream);
    }
    return error;
}

bool small(const Copy* copies, std::int64_t count) {
    std::int64_t bytes = 0;
    for (std::int64_t i = 0; i < count; ++i) {
        bytes += copies[i].bytes;
    }
    return bytes <= kSmallBytes;
}

cudaError_t uploaded(const Route& route, cudaStream_t stream, bool behind, const Copy* copies,
                     std::int64_t count) {
    if (small(copies, count)) {
        return started(copies, count, cudaMemcpyHostToDevice, stream);
    }
    cudaError_t error = behind ? after(stream, route.launched, route.up) : cudaSuccess;
    if (error == cudaSuccess) {
        error = started(copies, count, cudaMemcpyHostToDevice, route.up);
    }
    return error != cudaSuccess ? error : after(route.up, route.placed, stream);
}

// Waits for the event: a moment awake, then asleep.
cudaError_t waited(cudaEvent_t event) {
    const auto until = std::chrono::steady_clock::now() + kSpin;
    do {
        const cudaError_t error = cudaEventQuery(event);
        if (error != cudaErrorNotReady) {
            return error;
        }
        (void)cudaGetLastError();  // it is no error
    } while (std::chrono::steady_clock::now() < until);
    return cudaEventSynchronize(event);
}

cudaError_t downloaded(const Route& route, cudaStream_t stream, const Copy* copies,
                       std::int64_t count) {
    const bool apart = !small(copies, count);
    const cudaStream_t down = apart ? route.down : stream;
    cudaError_t error = apart ? after(stream, route.computed, down) : cudaSuccess;
    if (error == cudaSuccess) {
        error = started(copies, count, cudaMemcpyDeviceToHost, down);
    }
    if (error == cudaSuccess) {
        error = cudaEventRecord(route.ended, down);
    }
    return error != cudaSuccess ? error : waited(route.ended);
}

cudaError_t finished(const Route& route, cudaStream_t stream) {
    cudaError_t error = cudaSuccess;
    for (cudaStream_t each : {route.up, stream, route.down}) {
        if (error == cudaSuccess) {
            error = cudaEventRecord(route.ended, each);
        }
        if (error == cudaSuccess) {
            error = waited(route.ended);
        }
    }
    return error;
}

// Fills a captured run's places, launches it and waits for the answer. The run that used these
// places last was waited for, so nothing on the device is older than this.
cudaError_t replayed(const Route& route, const Replay& replay) {
    const auto stream = static_cast<cudaStream_t>(replay.stream);
    cudaError_t error = uploaded(route, stream, false, replay.up, replay.up_count);
    for (std::int64_t i = 0; i < replay.gather_count && error == cudaSuccess; ++i) {
        const gnnserve::Gather& each = replay.gathers[i];
        error = static_cast<cudaError_t>(gnnserve_cuda_gather_floats(
            each.table, each.ids, each.rows, each.row_bytes, each.item_bytes, each.hot,
            each.slot_of, each.out, each.most_threads, replay.stream));
    }
    if (error == cudaSuccess) {
        error = started(replay.patches, replay.patch_count, cudaMemcpyHostToDevice, stream);
    }
    for (std::int64_t i = 0; i < replay.spare_count && error == cudaSuccess; ++i) {
        const gnnserve::Fill& fill = replay.spare[i];
        error = cudaMemsetAsync(reinterpret_cast<void*>(fill.to), static_cast<int>(fill.value),
                                static_cast<std::size_t>(fill.bytes), stream);
    }
    if (error == cudaSuccess) {
        error = cudaGraphLaunch(static_cast<cudaGraphExec_t>(replay.graph), stream);
    }
    if (error == cudaSuccess) {
        error = downloaded(route, stream, replay.down, replay.down_count);
    }
    if (error != cudaSuccess) {
        (void)finished(route, stream);
    }
    return error;
}

}  // namespace

// Opens a lane's way to the device and back over these two streams; it is never closed.
GNNSERVE_EXPORT int gnnserve_cuda_route(int device, void* up, void* down, std::uint64_t* made) {
    auto* route = new Route{static_cast<cudaStream_t>(up), static_cast<cudaStream_t>(down)};
    const int error = told(opened(*route, device));
    if (error != cudaSuccess) {
        delete route;
        route = nullptr;
    }
    *made = reinterpret_cast<std::uint64_t>(route);
    return error;
}

// Starts copies to the device; what is launched on the stream afterwards waits for them. They wait
// for what was launched on it before if `behind` is set.
GNNSERVE_EXPORT int gnnserve_cuda_upload(const void* route, void* stream, int behind,
                                         const void* copies, std::int64_t count) {
    return told(uploaded(*static_cast<const Route*>(route), static_cast<cudaStream_t>(stream),
                         behind != 0, static_cast<const Copy*>(copies), count));
}

// Copies to the host what was computed on the stream; returns when all of it is there.
GNNSERVE_EXPORT int gnnserve_cuda_download(const void* route, void* stream, const void* copies,
                                           std::int64_t count) {
    return told(downloaded(*static_cast<const Route*>(route), static_cast<cudaStream_t>(stream),
                           static_cast<const Copy*>(copies), count));
}

// Waits for everything on the stream and on those of the route.
GNNSERVE_EXPORT int gnnserve_cuda_finish(const void* route, void* stream) {
    return told(finished(*static_cast<const Route*>(route), static_cast<cudaStream_t>(stream)));
}

// Does all that a task of a captured run needs of its device; see gnnserve::ReplayTask.
GNNSERVE_EXPORT int gnnserve_cuda_replay_task(const void* route, const Replay* replay) {
    return told(replayed(*static_cast<const Route*>(route), *replay));
}
