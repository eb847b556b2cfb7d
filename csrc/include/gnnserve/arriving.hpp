// Bytes of a large message, read from a socket while they keep coming.
#pragma once

#include <cstddef>
#include <span>

namespace gnnserve {

struct Arrived {
    std::size_t size_bytes = 0;
    // True when the peer sends no more.
    bool ended = false;
};

// Reads from a socket that does not block into the begin of `target`, until that is full, nothing
// has come for a while, or too little has: a slow peer must be waited for elsewhere. Between short
// pieces other threads may have the core, as the kernel itself may not be interrupted for them
// while it copies. Throws std::system_error when the socket fails.
Arrived read_arriving(int socket, std::span<std::byte> target);

}  // namespace gnnserve
