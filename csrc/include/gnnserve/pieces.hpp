// Pieces that heavy rows are reduced in on a device. Slots are cut into chunks, wherever rows
// begin; a row longer than two chunks is heavy. A chunk therefore has pieces of at most two heavy
// rows: of its first row and of its last.
#pragma once

#include <cstdint>

namespace gnnserve {

// One of the ways in which the kernels go over slots; which is fastest depends on the model and the
// device. Another chunk sums heavy rows in another order; the rest changes no bit.
struct Variant {
    // A team reduces as many slots in about the time that a graph of some hundred thousand edges
    // takes.
    std::int32_t chunk_slots;
    // Units of a lane that sums read before they use the first.
    int units_ahead;
    // Where teams are wide enough, each lane reads the source of one slot, and the others get it
    // from there.
    bool shuffled;

    constexpr std::int32_t heavy_slots() const { return 2 * chunk_slots; }
    constexpr std::int64_t chunks_of(std::int64_t slots) const {
        return (slots + chunk_slots - 1) / chunk_slots;
    }
};

// serve/lane/executors/kernels.py has their names.
inline constexpr Variant kVariants[] = {
    {256, 8, false}, {128, 8, false}, {256, 4, false}, {256, 8, true}};
inline constexpr int kPieces = 2;

// In a graph of no more slots than this no row is reduced in pieces: two kernels more would cost
// more than they save.
inline constexpr std::int64_t kSlotsWithoutPieces = 1024;

}  // namespace gnnserve
