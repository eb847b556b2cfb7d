// C functions over the kernels along edges, for torch/device_operators.cpp. All pointers are to
// device memory and may be null where aggregate.hpp allows it. Every function returns a cudaError_t
// as a number. None allocates memory or waits.
#pragma once

#include <cstdint>
#include <limits>

#include "aggregate.cuh"
#include "attend.cuh"
#include "csr.cuh"
#include "sort.cuh"

namespace gnnserve {

inline unsigned blocks_for(std::int64_t threads) {
    return static_cast<unsigned>((threads + kBlockThreads - 1) / kBlockThreads);
}

// Layout of a tile over columns, and the number of tiles.
struct Layout {
    Tile tile;
    bool wide;  // units of four floats
    bool two;   // two units a lane
    unsigned tiles;
};

inline Layout layout_for(std::int64_t columns, std::uint64_t addresses) {
    Layout layout{};
    layout.wide = columns % 4 == 0 && addresses % 16 == 0;
    layout.tile.units = layout.wide ? columns / 4 : columns;
    layout.tile.team = 1;
    while (layout.tile.team < kWarp && layout.tile.team < layout.tile.units) {
        layout.tile.team *= 2;
    }
    layout.two = layout.tile.units > layout.tile.team;
    const std::int64_t units = layout.tile.team * (layout.two ? 2 : 1);
    layout.tiles = static_cast<unsigned>((layout.tile.units + units - 1) / units);
    return layout;
}

inline std::uint64_t bits(const void* pointer) { return reinterpret_cast<std::uint64_t>(pointer); }

// Calls work(floats, units) with the layout's values as compile-time constants.
template <typename Work>
int with_layout(const Layout& layout, Work work) {
    if (layout.wide) {
        return layout.two ? work(Constant<4>{}, Constant<2>{}) : work(Constant<4>{}, Constant<1>{});
    }
    return layout.two ? work(Constant<1>{}, Constant<2>{}) : work(Constant<1>{}, Constant<1>{});
}

// Calls work(ahead, shuffled) with the variant's values as compile-time constants.
template <typename Work>
int with_variant(const Variant& variant, const Layout& layout, Work work) {
    if (variant.units_ahead == 4) {
        return work(Constant<4>{}, Constant<false>{});
    }
    // A group of slots must be in the lanes of one team.
    return variant.shuffled && layout.tile.team >= kUnitsAhead
               ? work(Constant<kUnitsAhead>{}, Constant<true>{})
               : work(Constant<kUnitsAhead>{}, Constant<false>{});
}

// Returns the most slots of a row that one team reduces, in a graph of so many.
inline std::int32_t most_slots_of_row(const Variant& variant, std::int64_t slots) {
    return slots > kSlotsWithoutPieces ? variant.heavy_slots()
                                       : std::numeric_limits<std::int32_t>::max();
}

template <Reduce kReduce>
int run_aggregate(const Aggregation& call, std::int64_t slots, const Variant& variant,
                  float* partial, void* stream) {
    const Layout layout =
        layout_for(call.width, bits(call.x) | bits(call.out) | bits(partial) |
                                   bits(call.finish.skip) | bits(call.finish.bias));
    return with_layout(layout, [&](auto floats, auto units) {
        constexpr int kFloats = decltype(floats)::value;
        constexpr int kUnits = decltype(units)::value;
        const Tile tile = layout.tile;
        const auto grid = [&](std::int64_t teams) {
            return dim3(blocks_for(teams * tile.team), layout.tiles);
        };
        const std::int32_t chunk_slots = variant.chunk_slots;
        const std::int64_t chunks = variant.chunks_of(slots);
        const bool in_pieces = slots > kSlotsWithoutPieces;
        const int error = with_variant(variant, layout, [&](auto ahead, auto shuffled) {
            constexpr int kAhead = decltype(ahead)::value;
            constexpr bool kShuffled = decltype(shuffled)::value;
            const int rows = launch(&aggregate_rows<kFloats, kUnits, kReduce, kAhead, kShuffled>,
                                    grid(call.graph.rows), kBlockThreads, stream, call, tile,
                                    most_slots_of_row(variant, slots));
            return rows != kSuccess || !in_pieces
                       ? rows
                       : launch(&aggregate_pieces<kFloats, kUnits, kReduce, kAhead, kShuffled>,
                                grid(kPieces * chunks), kBlockThreads, stream, call, tile,
                                chunk_slots, kPieces * chunks, partial);
        });
        return error != kSuccess || !in_pieces
                   ? error
                   : launch(&aggregate_heavy<kFloats, kUnits, kReduce>, grid(chunks), kBlockThreads,
                            stream, call, tile, chunk_slots, chunks,
                            static_cast<const float*>(partial));
    });
}

template <Score kScore>
int run_attend(const Attention& call, std::int64_t slots, const Variant& variant, float* partial,
               void* stream) {
    const std::uint64_t wide =
        kScore == Score::kAdditive ? 0 : bits(call.left) | bits(call.right) | bits(call.att);
    const Layout layout =
        layout_for(call.channels, wide | bits(call.value) | bits(call.out) | bits(partial) |
                                      bits(call.finish.skip) | bits(call.finish.bias));
    return with_layout(layout, [&](auto floats, auto units) {
        constexpr int kFloats = decltype(floats)::value;
        constexpr int kUnits = decltype(units)::value;
        const Tile tile = layout.tile;
        const auto grid = [&](std::int64_t teams) {
            return dim3(blocks_for(teams * tile.team), layout.tiles);
        };
        const std::int64_t row_teams = call.average ? 1 : call.heads;
        const bool in_pieces = slots > kSlotsWithoutPieces;
        int error = launch(&attend_rows<kScore, kFloats, kUnits>, grid(call.graph.rows * row_teams),
                           kBlockThreads, stream, call, tile, most_slots_of_row(variant, slots));
        if (error != kSuccess || !in_pieces) {
            return error;
        }
        const std::int32_t chunk_slots = variant.chunk_slots;
        const std::int64_t chunks = variant.chunks_of(slots);
        const std::int64_t pieces = kPieces * chunks;
        const PieceSoftmax kept{partial, partial + pieces * call.heads * call.channels};
        error = launch(&attend_pieces<kScore, kFloats, kUnits>, grid(pieces * call.heads),
                       kBlockThreads, stream, call, tile, chunk_slots, pieces, kept);
        return error != kSuccess
                   ? error
                   : launch(&attend_heavy<kFloats, kUnits>, grid(chunks * row_teams), kBlockThreads,
                            stream, call, tile, chunk_slots, chunks, kept);
    });
}

}  // namespace gnnserve

// Returns the upper bound of pieces for a graph of that many slots: the size of `partial` below.
// `variant` is a place in kVariants, here and below.
GNNSERVE_EXPORT std::int64_t gnnserve_graph_pieces(std::int64_t slots, int variant) {
    return gnnserve::kPieces * gnnserve::kVariants[variant].chunks_of(slots);
}

// Returns the scratch bytes of gnnserve_graph_csr.
GNNSERVE_EXPORT std::int64_t gnnserve_graph_csr_scratch(std::int64_t edges) {
    return gnnserve::sort_scratch_bytes(edges);
}

// build_csr of csr.hpp; slots behind those of the last row are unused.
GNNSERVE_EXPORT int gnnserve_graph_csr(const void* source, const void* target, int is_int32,
                                       std::int64_t edges, std::int64_t rows, int replace_loops,
                                       std::int32_t* begin, std::int32_t* slot_source,
                                       std::int32_t* slot_edge, void* scratch, void* stream) {
    using namespace gnnserve;
    const CsrBuild build{source, target,      is_int32 != 0, edges, rows, replace_loops != 0,
                         begin,  slot_source, slot_edge};
    SortedPairs pairs(scratch, edges);
    int error = kSuccess;
    if (edges > 0) {
        error = launch(&csr_keys, dim3(blocks_for(edges)), kBlockThreads, stream, build, pairs.key,
                       pairs.value);
        if (error == kSuccess) {
            error = pairs.sort(rows, stream);
        }
    }
    if (error == kSuccess) {
        error = launch(&csr_rows, dim3(blocks_for(rows + 1)), kBlockThreads, stream, build,
                       static_cast<const std::uint32_t*>(pairs.key));
    }
    if (error == kSuccess && edges > 0) {
        error = launch(&csr_slots, dim3(blocks_for(edges)), kBlockThreads, stream, build,
                       static_cast<const std::uint32_t*>(pairs.key),
                       static_cast<const std::uint32_t*>(pairs.value));
    }
    return error;
}

// spread of csr.hpp.
GNNSERVE_EXPORT int gnnserve_graph_spread(const std::int32_t* slot_edge, std::int64_t slots,
                                          const float* value, float missing, float* out,
                                          void* stream) {
    using namespace gnnserve;
    return slots == 0 ? kSuccess
                      : launch(&csr_spread, dim3(blocks_for(slots)), kBlockThreads, stream,
                               slot_edge, slots, value, missing, out);
}

// normalise of csr.hpp; `weight` must not be `out`.
GNNSERVE_EXPORT int gnnserve_graph_normalise(const std::int32_t* begin, const std::int32_t* source,
                                             std::int64_t rows, const float* weight, float* out,
                                             float* scratch, void* stream) {
    using namespace gnnserve;
    if (rows == 0) {
        return kSuccess;
    }
    const Csr graph{begin, source, rows};
    const dim3 grid(blocks_for(rows * kWarp));
    const int error = launch(&csr_degrees, grid, kBlockThreads, stream, graph, weight, scratch);
    return error != kSuccess ? error
                             : launch(&csr_normalise, grid, kBlockThreads, stream, graph, weight,
                                      static_cast<const float*>(scratch), out);
}

// aggregate of aggregate.hpp; `reduce` is a Reduce. The graph has at most `slots` slots; `partial`
// is [pieces, width].
GNNSERVE_EXPORT int gnnserve_graph_aggregate(const std::int32_t* begin, const std::int32_t* source,
                                             std::int64_t rows, std::int64_t slots, int variant,
                                             float* partial, const float* x, const float* weight,
                                             std::int64_t width, int reduce, const float* skip,
                                             float skip_scale, const float* bias, int relu,
                                             float* out, void* stream) {
    using namespace gnnserve;
    if (rows == 0 || width == 0) {
        return kSuccess;
    }
    const Aggregation call{{begin, source, rows},
                           x,
                           weight,
                           width,
                           static_cast<Reduce>(reduce),
                           {skip, skip_scale, bias, relu != 0},
                           out};
    switch (call.reduce) {
        case Reduce::kMax:
            return run_aggregate<Reduce::kMax>(call, slots, kVariants[variant], partial, stream);
        case Reduce::kMin:
            return run_aggregate<Reduce::kMin>(call, slots, kVariants[variant], partial, stream);
        default:
            return run_aggregate<Reduce::kSum>(call, slots, kVariants[variant], partial, stream);
    }
}

// attend of aggregate.hpp; `score` is a Score. The graph has at most `slots` slots; `partial` is
// [pieces · heads · (channels + 2)].
GNNSERVE_EXPORT int gnnserve_graph_attend(
    const std::int32_t* begin, const std::int32_t* source, std::int64_t rows, std::int64_t slots,
    int variant, float* partial, int score, const float* left, const float* right,
    const float* edge, const std::int32_t* slot_edge, int added_loops, const float* att,
    float scale, const float* value, std::int64_t heads, std::int64_t channels, int average,
    const float* skip, const float* bias, float* out, void* stream) {
    using namespace gnnserve;
    if (rows == 0 || heads * channels == 0) {
        return kSuccess;
    }
    const Attention call{{begin, source, rows},
                         static_cast<Score>(score),
                         left,
                         right,
                         edge,
                         slot_edge,
                         added_loops != 0,
                         att,
                         scale,
                         value,
                         heads,
                         channels,
                         average != 0,
                         {skip, 1, bias},
                         nullptr,
                         out};
    switch (call.score) {
        case Score::kAdditive:
            return run_attend<Score::kAdditive>(call, slots, kVariants[variant], partial, stream);
        case Score::kDynamic:
            return run_attend<Score::kDynamic>(call, slots, kVariants[variant], partial, stream);
        default:
            return run_attend<Score::kDot>(call, slots, kVariants[variant], partial, stream);
    }
}

// head_dots of aggregate.hpp.
GNNSERVE_EXPORT int gnnserve_graph_head_dots(const float* x, const float* att, std::int64_t rows,
                                             std::int64_t heads, std::int64_t channels, float* out,
                                             void* stream) {
    using namespace gnnserve;
    if (rows * heads == 0) {
        return kSuccess;
    }
    int team = 1;
    while (team < kWarp && team < channels) {
        team *= 2;
    }
    return launch(&head_dots_rows, dim3(blocks_for(rows * heads * team)), kBlockThreads, stream,
                  HeadDots{x, att, rows, heads, channels, out}, team);
}
