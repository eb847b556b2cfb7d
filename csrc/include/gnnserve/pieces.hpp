// Pieces that heavy rows are reduced in on a device. Slots are cut into chunks, wherever rows
// begin; a row longer than two chunks is heavy. A chunk therefore has pieces of at most two heavy
// rows: of its first row and of its last.
#pragma once

#include <cstdint>

namespace gnnserve {

// A team reduces a chunk in about the time that a graph of some hundred thousand edges takes.
inline constexpr std::int32_t kChunkSlots = 256;
inline constexpr std::int32_t kHeavySlots = 2 * kChunkSlots;
inline constexpr int kPieces = 2;

// In a graph of no more slots than this no row is reduced in pieces: two kernels more would cost
// more than they save.
inline constexpr std::int64_t kSlotsWithoutPieces = 1024;

constexpr std::int64_t chunks_of(std::int64_t slots) {
    return (slots + kChunkSlots - 1) / kChunkSlots;
}

}  // namespace gnnserve
