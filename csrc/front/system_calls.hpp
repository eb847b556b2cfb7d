// Results of system calls as exceptions.
#pragma once

#include <cerrno>
#include <string>
#include <system_error>

namespace gnnserve::front {

[[noreturn]] inline void fail_with(const std::string& what) {
    throw std::system_error(errno, std::generic_category(), what);
}

inline int checked(int result, const char* what) {
    if (result < 0) {
        fail_with(what);
    }
    return result;
}

}  // namespace gnnserve::front
