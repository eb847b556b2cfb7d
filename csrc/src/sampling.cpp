#include "gnnserve/sampling.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

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

void check(const Seeds& seeds, std::span<const std::int64_t> fanouts, std::int64_t least) {
    for (const std::int64_t id : seeds.ids) {
        if (id < 0 || id >= seeds.num_nodes) {
            throw std::invalid_argument("id " + std::to_string(id) + " is not in [0, " +
                                        std::to_string(seeds.num_nodes) + ")");
        }
    }
    for (const std::int64_t fanout : fanouts) {
        if (fanout < least && fanout != kAllNeighbours) {
            throw std::invalid_argument("fan-out " + std::to_string(fanout) +
                                        " is neither positive nor -1");
        }
    }
}

void check(std::size_t num_types, std::span<const Relation> relations, const Seeds& seeds,
           std::span<const std::int64_t> fanouts) {
    for (const Relation& relation : relations) {
        if (relation.topology == nullptr || relation.source >= num_types ||
            relation.target >= num_types) {
            throw std::invalid_argument("a relation is of types that are none");
        }
    }
    if (seeds.type >= num_types) {
        throw std::invalid_argument("the ids are of a type that is none");
    }
    if (relations.empty() ? !fanouts.empty() : fanouts.size() % relations.size() != 0) {
        throw std::invalid_argument("fan-outs are not one for each relation and hop");
    }
    check(seeds, fanouts, 0);
}

// Nodes of one type that are in the sample, and those of them that draw at this hop.
struct Reached {
    std::vector<std::int64_t>* nodes;
    LocalIds locals;
    std::size_t begin = 0;
    std::size_t end = 0;
};

// Buffers that are used again at each hop.
struct Buffers {
    Draw draw;
    std::vector<Row> rows;
    std::vector<std::int64_t> met;
};

// Draws from one relation for all nodes of its target type in [begin, end).
void sample_hop(const Relation& relation, std::int64_t fanout, std::uint64_t key,
                const Reached& targets, Reached& sources, TypedSample::Edges& edges,
                Buffers& buffers) {
    if (fanout == 0) {
        return;
    }
    const Topology& topology = *relation.topology;
    const std::vector<std::int64_t>& nodes = *targets.nodes;
    auto& [draw, rows, met] = buffers;
    rows.clear();
    std::size_t most = 0;
    for (std::size_t local = targets.begin; local < targets.end; ++local) {
        if (local + kAhead < targets.end) {
            const auto ahead = static_cast<std::size_t>(nodes[local + kAhead]);
            if (ahead < topology.indptr.size()) {
                __builtin_prefetch(&topology.indptr[ahead]);
            }
        }
        rows.push_back(row_of(topology, nodes[local]));
        most += drawn_of(rows.back().size, fanout);
    }
    met.clear();
    met.reserve(most);
    edges.destinations.reserve(edges.destinations.size() + most);
    for (std::size_t i = 0; i < rows.size(); ++i) {
        if (i + kAhead < rows.size()) {
            const Row& ahead = rows[i + kAhead];
            const auto width = static_cast<std::size_t>(ahead.ids.width);
            __builtin_prefetch(ahead.ids.data + ahead.start * width);
        }
        const Row& row = rows[i];
        const std::size_t count = drawn_of(row.size, fanout);
        const std::size_t local = targets.begin + i;
        if (count == row.size) {
            for (std::size_t k = 0; k < count; ++k) {
                met.push_back(row.ids[row.start + k]);
            }
        } else {
            const auto node = static_cast<std::uint64_t>(nodes[local]);
            draw.positions(mix(key ^ node), row.size, count, [&](std::size_t position) {
                met.push_back(row.ids[row.start + position]);
            });
        }
        edges.destinations.insert(edges.destinations.end(), count,
                                  static_cast<std::int32_t>(local));
    }
    edges.sources.reserve(edges.sources.size() + met.size());
    // In parts, so that the table grows with the new nodes and not with the edges.
    constexpr std::size_t kPart = 4096;
    for (std::size_t start = 0; start < met.size(); start += kPart) {
        const std::size_t stop = std::min(start + kPart, met.size());
        sources.locals.make_room(stop - start, *sources.nodes);
        for (std::size_t i = start; i < stop; ++i) {
            if (i + kAhead < stop) {
                sources.locals.fetch(met[i + kAhead]);
            }
            edges.sources.push_back(sources.locals.of(met[i], *sources.nodes));
        }
    }
}

}  // namespace

TypedSample sample_typed(std::size_t num_types, std::span<const Relation> relations,
                         const Seeds& seeds, std::span<const std::int64_t> fanouts,
                         std::uint64_t seed) {
    check(num_types, relations, seeds, fanouts);
    TypedSample sample;
    sample.nodes.resize(num_types);
    sample.edges.resize(relations.size());
    std::vector<Reached> reached;
    reached.reserve(num_types);
    for (std::size_t type = 0; type < num_types; ++type) {
        reached.push_back(
            {&sample.nodes[type], LocalIds(type == seeds.type ? 2 * seeds.ids.size() : 0)});
    }
    Reached& asked = reached[seeds.type];
    sample.positions.reserve(seeds.ids.size());
    for (const std::int64_t id : seeds.ids) {
        sample.positions.push_back(asked.locals.of(id, *asked.nodes));
    }
    sample.num_seeds = asked.nodes->size();
    Buffers buffers;
    const std::size_t hops = relations.empty() ? 0 : fanouts.size() / relations.size();
    for (std::size_t hop = 0; hop < hops; ++hop) {
        bool any = false;
        for (Reached& type : reached) {
            type.begin = type.end;
            type.end = type.nodes->size();
            any = any || type.begin < type.end;
        }
        if (!any) {
            break;
        }
        const std::uint64_t hop_key = mix(seed + (hop + 1) * kGolden);
        for (std::size_t r = 0; r < relations.size(); ++r) {
            const Relation& relation = relations[r];
            sample_hop(relation, fanouts[hop * relations.size() + r], hop_key ^ mix(relation.key),
                       reached[relation.target], reached[relation.source], sample.edges[r],
                       buffers);
        }
    }
    return sample;
}

Sample sample_neighbours(const Topology& topology, std::span<const std::int64_t> ids,
                         std::span<const std::int64_t> fanouts, std::uint64_t seed) {
    const Seeds seeds{0, topology.num_nodes, ids};
    check(seeds, fanouts, 1);
    const Relation relation{&topology};
    TypedSample found = sample_typed(1, {&relation, 1}, seeds, fanouts, seed);
    return {SeedPlaces{std::move(found.positions), found.num_seeds}, std::move(found.nodes[0]),
            std::move(found.edges[0].sources), std::move(found.edges[0].destinations)};
}

}  // namespace gnnserve
