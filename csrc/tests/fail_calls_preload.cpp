// libfail_calls.so. Preloaded into a server by tests/e2e/test_failing_calls.py, it fails the n-th
// call of a kind in that process, as a system that is short of something does. The test says which
// in a file that both map. Processes that the server starts are spared, but for forks: programs
// that it starts count and fail theirs, too, as its fork server does.

#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdlib>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

enum Kind : std::size_t { kThread, kOpen, kDescriptor, kMemory, kSend, kFork, kHeap, kKinds };

// All of one kind: calls so far, the number of the call to fail (0: none), and calls failed.
struct Counts {
    std::atomic<std::uint64_t> calls;
    std::atomic<std::uint64_t> fail_at;
    std::atomic<std::uint64_t> failed;
};

constexpr const char* kPath = "GNNSERVE_FAIL_CALLS";
constexpr const char* kPathForForks = "GNNSERVE_FAIL_FORKS";

Counts* counts = nullptr;
pid_t server = 0;
bool only_forks = false;

__attribute__((constructor)) void begin() {
    const char* path = std::getenv(kPath);
    only_forks = path == nullptr;
    if (only_forks) {
        path = std::getenv(kPathForForks);
    }
    if (path == nullptr) {
        return;
    }
    const long fd = syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC);
    if (!only_forks) {  // for programs that it starts
        setenv(kPathForForks, path, 1);
        unsetenv(kPath);
    }
    if (fd < 0) {
        return;
    }
    const long at = syscall(SYS_mmap, nullptr, sizeof(Counts) * kKinds, PROT_READ | PROT_WRITE,
                            MAP_SHARED, fd, 0);
    syscall(SYS_close, fd);
    if (at != -1) {
        server = getpid();
        counts = reinterpret_cast<Counts*>(at);
    }
}

// Returns true when this call is the one to fail.
bool fails(Kind kind) {
    if (counts == nullptr || getpid() != server || (only_forks && kind != kFork)) {
        return false;
    }
    Counts& one = counts[kind];
    if (one.calls.fetch_add(1) + 1 != one.fail_at.load()) {
        return false;
    }
    one.failed.fetch_add(1);
    return true;
}

template <typename Function>
Function* next(const char* name) {
    return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

int refused(int error) {
    errno = error;
    return -1;
}

void* no_memory() {
    errno = ENOMEM;
    return nullptr;
}

mode_t mode_of(int flags, std::va_list arguments) {
    const bool makes = (flags & O_CREAT) != 0 || (flags & O_TMPFILE) == O_TMPFILE;
    return makes ? static_cast<mode_t>(va_arg(arguments, unsigned)) : 0;
}

}  // namespace

EXPORT int pthread_create(pthread_t* thread, const pthread_attr_t* attributes,
                          void* (*begin_with)(void*), void* argument) {
    static auto* real = next<decltype(pthread_create)>("pthread_create");
    return fails(kThread) ? EAGAIN : real(thread, attributes, begin_with, argument);
}

#define OPEN(name)                                                       \
    EXPORT int name(const char* path, int flags, ...) {                  \
        static auto* real = next<int(const char*, int, ...)>(#name);     \
        std::va_list arguments;                                          \
        va_start(arguments, flags);                                      \
        const mode_t mode = mode_of(flags, arguments);                   \
        va_end(arguments);                                               \
        return fails(kOpen) ? refused(EMFILE) : real(path, flags, mode); \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                             \
    EXPORT int name(int folder, const char* path, int flags, ...) {              \
        static auto* real = next<int(int, const char*, int, ...)>(#name);        \
        std::va_list arguments;                                                  \
        va_start(arguments, flags);                                              \
        const mode_t mode = mode_of(flags, arguments);                           \
        va_end(arguments);                                                       \
        return fails(kOpen) ? refused(EMFILE) : real(folder, path, flags, mode); \
    }
OPENAT(openat)
OPENAT(openat64)

EXPORT int accept4(int fd, sockaddr* address, socklen_t* size, int flags) {
    static auto* real = next<int(int, sockaddr*, socklen_t*, int)>("accept4");
    return fails(kDescriptor) ? refused(EMFILE) : real(fd, address, size, flags);
}

EXPORT int socket(int domain, int type, int protocol) noexcept {
    static auto* real = next<int(int, int, int)>("socket");
    return fails(kDescriptor) ? refused(EMFILE) : real(domain, type, protocol);
}

EXPORT int socketpair(int domain, int type, int protocol, int* pair) noexcept {
    static auto* real = next<int(int, int, int, int*)>("socketpair");
    return fails(kDescriptor) ? refused(EMFILE) : real(domain, type, protocol, pair);
}

EXPORT int dup(int fd) noexcept {
    static auto* real = next<int(int)>("dup");
    return fails(kDescriptor) ? refused(EMFILE) : real(fd);
}

#define MMAP(name)                                                                   \
    EXPORT void* name(void* at, size_t size, int access, int flags, int fd,          \
                      off_t offset) noexcept {                                       \
        static auto* real = next<void*(void*, size_t, int, int, int, off_t)>(#name); \
        return fails(kMemory) ? (errno = ENOMEM, MAP_FAILED)                         \
                              : real(at, size, access, flags, fd, offset);           \
    }
MMAP(mmap)
MMAP(mmap64)

// What the C library calls its own, which a library that wraps them can call before it can ask for
// any other.
extern "C" {
void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);
}

EXPORT void* malloc(size_t size) noexcept {
    return fails(kHeap) ? no_memory() : __libc_malloc(size);
}
EXPORT void* calloc(size_t count, size_t size) noexcept {
    return fails(kHeap) ? no_memory() : __libc_calloc(count, size);
}
EXPORT void* realloc(void* one, size_t size) noexcept {
    return fails(kHeap) ? no_memory() : __libc_realloc(one, size);
}
EXPORT void* aligned_alloc(size_t alignment, size_t size) noexcept {
    return fails(kHeap) ? no_memory() : __libc_memalign(alignment, size);
}
EXPORT int posix_memalign(void** found, size_t alignment, size_t size) noexcept {
    if (fails(kHeap)) {
        return ENOMEM;
    }
    *found = __libc_memalign(alignment, size);
    return *found == nullptr ? ENOMEM : 0;
}

EXPORT pid_t fork() noexcept {
    static auto* real = next<pid_t()>("fork");
    return fails(kFork) ? refused(EAGAIN) : real();
}

// A function that returns to its caller cannot wrap vfork, of which fork does all that is promised.
EXPORT pid_t vfork() noexcept { return fork(); }

EXPORT ssize_t send(int fd, const void* bytes, size_t size, int flags) {
    static auto* real = next<ssize_t(int, const void*, size_t, int)>("send");
    return fails(kSend) ? refused(ENOBUFS) : real(fd, bytes, size, flags);
}

EXPORT ssize_t sendmsg(int fd, const msghdr* message, int flags) {
    static auto* real = next<ssize_t(int, const msghdr*, int)>("sendmsg");
    return fails(kSend) ? refused(ENOBUFS) : real(fd, message, flags);
}
