// Gives a process another wall clock, by LD_PRELOAD: the machine's plus a number of seconds that
// another process writes into the file that STEPPED_CLOCK names (`stepped_clock.py`).
//
// The monotonic clock stays. Waits until a moment of the wall clock are given to the kernel in its
// own time; one that has begun does not end earlier or later when the clock is stepped.

#include <dlfcn.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdlib>
#include <ctime>

namespace {

// Beyond any uptime: a moment later than this is the wall clock's.
constexpr time_t kWallSeconds = 1'000'000'000;

const volatile long *offset_seconds = nullptr;

long offset() {
    return offset_seconds == nullptr ? 0 : *offset_seconds;
}

__attribute__((constructor)) void map_offset() {
    const char *path = std::getenv("STEPPED_CLOCK");
    const int fd = path == nullptr ? -1 : open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return;
    }
    void *found = mmap(nullptr, sizeof(long), PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    if (found != MAP_FAILED) {
        offset_seconds = static_cast<const volatile long *>(found);
    }
}

template <typename Function> Function next(const char *name) {
    return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

// The kernel's time of a moment of the wall clock.
timespec in_kernel_time(const timespec &moment) {
    timespec found = moment;
    if (found.tv_sec > kWallSeconds) {
        found.tv_sec -= offset();
    }
    return found;
}

} // namespace

extern "C" {

int clock_gettime(clockid_t clock, timespec *now) noexcept {
    static const auto real = next<int (*)(clockid_t, timespec *)>("clock_gettime");
    const int code = real(clock, now);
    if (code == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        now->tv_sec += offset();
    }
    return code;
}

int gettimeofday(timeval *now, void *zone) noexcept {
    static const auto real = next<int (*)(timeval *, void *)>("gettimeofday");
    const int code = real(now, zone);
    if (code == 0) {
        now->tv_sec += offset();
    }
    return code;
}

time_t time(time_t *where) noexcept {
    timespec now{};
    clock_gettime(CLOCK_REALTIME, &now);
    if (where != nullptr) {
        *where = now.tv_sec;
    }
    return now.tv_sec;
}

int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex,
                           const timespec *until) {
    static const auto real =
        next<int (*)(pthread_cond_t *, pthread_mutex_t *, const timespec *)>(
            "pthread_cond_timedwait");
    const timespec moment = in_kernel_time(*until);
    return real(condition, mutex, &moment);
}

int sem_timedwait(sem_t *semaphore, const timespec *until) {
    static const auto real = next<int (*)(sem_t *, const timespec *)>("sem_timedwait");
    const timespec moment = in_kernel_time(*until);
    return real(semaphore, &moment);
}

long syscall(long number, ...) noexcept {
    static const auto real = next<long (*)(long, ...)>("syscall");
    long values[6];
    va_list more;
    va_start(more, number);
    for (long &value : values) {
        value = va_arg(more, long);
    }
    va_end(more);
    timespec moment;
    if (number == SYS_futex && (values[1] & FUTEX_CLOCK_REALTIME) != 0 && values[3] != 0) {
        moment = in_kernel_time(*reinterpret_cast<const timespec *>(values[3]));
        values[3] = reinterpret_cast<long>(&moment);
    }
    return real(number, values[0], values[1], values[2], values[3], values[4], values[5]);
}

} // extern "C"
