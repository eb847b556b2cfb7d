// Loads libgnnserve_cuda.so (first argument) and asks for memory. Without a driver the result must
// be an error code, not a crash; with a driver it must work.

#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>

#include "check.hpp"

int main(int count, char** arguments) {
    CHECK(count == 2);
    void* library = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        std::fprintf(stderr, "%s\n", dlerror());
    }
    CHECK(library != nullptr);
    const auto slab = reinterpret_cast<int (*)(int, std::int64_t, std::uint64_t*)>(
        dlsym(library, "gnnserve_cuda_slab"));
    const auto text = reinterpret_cast<const char* (*)(int)>(dlsym(library, "gnnserve_cuda_error"));
    CHECK(slab != nullptr && text != nullptr);
    for (const char* name : {"gather", "partition", "partition_stream", "route", "upload",
                             "download", "usable", "finish"}) {
        CHECK(dlsym(library, (std::string("gnnserve_cuda_") + name).c_str()) != nullptr);
    }
    for (const char* name : {"csr", "csr_scratch", "spread", "normalise", "aggregate", "attend",
                             "head_dots", "pieces"}) {
        CHECK(dlsym(library, (std::string("gnnserve_graph_") + name).c_str()) != nullptr);
    }
    std::uint64_t address = 1;
    const int code = slab(0, 1 << 20, &address);
    std::printf("cudaMalloc: %d, %s\n", code, text(code));
    CHECK((code == 0) == (address != 0));
    CHECK(std::strlen(text(code)) > 0);
}
