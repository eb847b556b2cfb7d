#include "gnnserve/sampling.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

namespace gnnserve {
namespace {

// Prefetch distance in elements. Rows and the table of local ids are scattered in memory, and a
// plain loop would spend most of its time waiting for one element at a time.
constexpr std::size_t kAhead = 12;
// Up to this many draws from one row a linear search finds repeats; beyond it a bit set does.
constexpr std::size_t kLookedThrough = 32;

constexpr std::uint64_t kGolden = 0x9e3779b97f4a7c15;

// SplitMix64's finalizer (Steele, Lea and Flood, 2014): random numbers that depend on a key and not
// on earlier draws.
std::uint64_t mix(std::uint64_t value) {
    value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
    value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
    return value ^ (value >> 31);
}

// Uniform in [0, count), with a bias below count / 2^32.
std::uint64_t below(std::uint64_t random, std::uint64_t count) {
    return count >> 32 ? random % count : ((random >> 32) * count) >> 32;
}

struct Row {
    NodeIds ids;
    std::size_t start = 0;
    std::size_t size = 0;
};

Row row_of(const Topology& topology, std::int64_t node) {
    if (!topology.patched.empty()) {
        const auto found = std::lower_bound(topology.patched.begin(), topology.patched.end(), node);
        if (found != topology.patched.end() && *found == node) {
            const auto at = static_cast<std::size_t>(found - topology.patched.begin());
            const auto start = static_cast<std::size_t>(topology.patched_indptr[at]);
            const auto end = static_cast<std::size_t>(topology.patched_indptr[at + 1]);
            const auto* data = reinterpret_cast<const std::byte*>(topology.patched_indices.data());
            return {{data, IndexWidth::k64}, start, end - start};
        }
    }
    const auto at = static_cast<std::size_t>(node);
    if (at + 1 >= topology.indptr.size()) {
        return {};
    }
    const auto start = static_cast<std::size_t>(topology.indptr[at]);
    const auto end = static_cast<std::size_t>(topology.indptr[at + 1]);
    return {topology.indices, start, end - start};
}

// Map of nodes to local ids: open addressing, linear probing, at most half full.
class LocalIds {
public:
    explicit LocalIds(std::size_t expected) { resize(expected); }

    void fetch(std::int64_t node) const { __builtin_prefetch(&slots_[slot_of(node)]); }

    // Returns the local id of `node`; a new node gets the next id and is appended to `nodes`.
    std::int32_t of(std::int64_t node, std::vector<std::int64_t>& nodes) {
        for (std::size_t slot = slot_of(node);; slot = (slot + 1) & mask_) {
            if (slots_[slot].node == node) {
                return slots_[slot].local;
            }
            if (slots_[slot].node < 0) {
                return add(slot, node, nodes);
            }
        }
    }

    void make_room(std::size_t more, const std::vector<std::int64_t>& nodes) {
        if (2 * (nodes.size() + more) <= slots_.size()) {
            return;
        }
        resize(nodes.size() + more);
        for (std::size_t local = 0; local < nodes.size(); ++local) {
            std::size_t slot = slot_of(nodes[local]);
            while (slots_[slot].node >= 0) {
                slot = (slot + 1) & mask_;
            }
            slots_[slot] = {nodes[local], static_cast<std::int32_t>(local)};
        }
    }

private:
    struct Slot {
        std::int64_t node;
        std::int32_t local;
    };

    std::size_t slot_of(std::int64_t node) const {
        return static_cast<std::size_t>((static_cast<std::uint64_t>(node) * kGolden) >> shift_);
    }

    std::int32_t add(std::size_t slot, std::int64_t node, std::vector<std::int64_t>& nodes) {
        if (nodes.size() >= static_cast<std::size_t>(std::numeric_limits<std::int32_t>::max())) {
            throw std::length_error("a sample has at most 2^31 - 1 nodes");
        }
        const auto local = static_cast<std::int32_t>(nodes.size());
        nodes.push_back(node);
        slots_[slot] = {node, local};
        return local;
    }

    void resize(std::size_t nodes) {
        unsigned bits = 6;
        while ((std::size_t{1} << bits) < 2 * nodes) {
            ++bits;
        }
        slots_.assign(std::size_t{1} << bits, Slot{-1, 0});
        mask_ = slots_.size() - 1;
        shift_ = 64 - bits;
    }

    std::vector<Slot> slots_;
    std::size_t mask_ = 0;
    unsigned shift_ = 0;
};

// Draws `count` positions of a row without replacement in `count` steps, whatever the row's size
// (Floyd, in Bentley 1987).
class Draw {
public:
    template <typename Take>
    void positions(std::uint64_t key, std::size_t size, std::size_t count, Take take) {
        chosen_.clear();
        const bool by_bits = count > kLookedThrough;
        if (by_bits) {
            bits_.assign((size + 63) / 64, 0);
        }
        for (std::size_t last = size - count; last < size; ++last) {
            key += kGolden;
            auto position = static_cast<std::size_t>(below(mix(key), last + 1));
            if (taken(position, by_bits)) {
                position = last;
            }
            if (by_bits) {
                bits_[position / 64] |= std::uint64_t{1} << (position % 64);
            } else {
                chosen_.push_back(position);
            }
            take(position);
        }
    }

private:
    bool taken(std::size_t position, bool by_bits) const {
        return by_bits ? (bits_[position / 64] >> (position % 64) & 1) != 0
                       : std::find(chosen_.begin(), chosen_.end(), position) != chosen_.end();
    }

    std::vector<std::size_t> chosen_;
    std::vector<std::uint64_t> bits_;
};

std::size_t drawn_of(std::size_t size, std::int64_t fanout) {
    return fanout == kAllNeighbours ? size : std::min(size, static_cast<std::size_t>(fanout));
}

void check(const Topology& topology, std::span<const std::int64_t> ids,
           std::span<const std::int64_t> fanouts) {
    for (const std::int64_t id : ids) {
        if (id < 0 || id >= topology.num_nodes) {
            throw std::invalid_argument("id " + std::to_string(id) + " is not in [0, " +
                                        std::to_string(topology.num_nodes) + ")");
        }
    }
    for (const std::int64_t fanout : fanouts) {
        if (fanout < 1 && fanout != kAllNeighbours) {
            throw std::invalid_argument("fan-out " + std::to_string(fanout) +
                                        " is neither positive nor -1");
        }
    }
}

}  // namespace

Sample sample_neighbours(const Topology& topology, std::span<const std::int64_t> ids,
                         std::span<const std::int64_t> fanouts, std::uint64_t seed) {
    check(topology, ids, fanouts);
    Sample sample;
    LocalIds locals(2 * ids.size());
    sample.positions.reserve(ids.size());
    for (const std::int64_t id : ids) {
        sample.positions.push_back(locals.of(id, sample.nodes));
    }
    sample.num_seeds = sample.nodes.size();
    Draw draw;
    std::vector<Row> rows;
    std::vector<std::int64_t> met;
    std::size_t begin = 0;
    for (std::size_t hop = 0; hop < fanouts.size() && begin < sample.nodes.size(); ++hop) {
        const std::size_t end = sample.nodes.size();
        rows.clear();
        std::size_t most = 0;
        for (std::size_t local = begin; local < end; ++local) {
            if (local + kAhead < end) {
                const auto ahead = static_cast<std::size_t>(sample.nodes[local + kAhead]);
                if (ahead < topology.indptr.size()) {
                    __builtin_prefetch(&topology.indptr[ahead]);
                }
            }
            rows.push_back(row_of(topology, sample.nodes[local]));
            most += drawn_of(rows.back().size, fanouts[hop]);
        }
        met.clear();
        met.reserve(most);
        sample.destinations.reserve(sample.destinations.size() + most);
        const std::uint64_t hop_key = mix(seed + (hop + 1) * kGolden);
        for (std::size_t i = 0; i < rows.size(); ++i) {
            if (i + kAhead < rows.size()) {
                const Row& ahead = rows[i + kAhead];
                const auto width = static_cast<std::size_t>(ahead.ids.width);
                __builtin_prefetch(ahead.ids.data + ahead.start * width);
            }
            const Row& row = rows[i];
            const std::size_t count = drawn_of(row.size, fanouts[hop]);
            const std::size_t local = begin + i;
            if (count == row.size) {
                for (std::size_t k = 0; k < count; ++k) {
                    met.push_back(row.ids[row.start + k]);
                }
            } else {
                const auto node = static_cast<std::uint64_t>(sample.nodes[local]);
                draw.positions(mix(hop_key ^ node), row.size, count, [&](std::size_t position) {
                    met.push_back(row.ids[row.start + position]);
                });
            }
            sample.destinations.insert(sample.destinations.end(), count,
                                       static_cast<std::int32_t>(local));
        }
        sample.sources.reserve(sample.sources.size() + met.size());
        // In parts, so that the table grows with the new nodes and not with the edges.
        constexpr std::size_t kPart = 4096;
        for (std::size_t start = 0; start < met.size(); start += kPart) {
            const std::size_t stop = std::min(start + kPart, met.size());
            locals.make_room(stop - start, sample.nodes);
            for (std::size_t i = start; i < stop; ++i) {
                if (i + kAhead < stop) {
                    locals.fetch(met[i + kAhead]);
                }
                sample.sources.push_back(locals.of(met[i], sample.nodes));
            }
        }
        begin = end;
    }
    return sample;
}

}  // namespace gnnserve
