#include "captured_run.hpp"

#include <cstring>
#include <numeric>
#include <utility>

namespace gnnserve {
namespace {

// The most pieces of features newer than their table: each is a copy of its own.
constexpr std::int64_t kMostPatches = 64;

std::uint64_t unsigned_of(std::int64_t bytes) { return static_cast<std::uint64_t>(bytes); }

// Where the entries of one axis lie: `outer` times, `inner` bytes each.
struct Entries {
    std::int64_t outer = 1, inner = 0;

    explicit Entries(const CapturedTensor& tensor)
        : outer(tensor.axis < 0 ? 1 : tensor.shape.product(0, tensor.axis)),
          inner(tensor.item_bytes *
                tensor.shape.product(tensor.axis < 0 ? 0 : tensor.axis + 1, tensor.shape.axes)) {}
};

// The number of entries that the captured run has room for.
std::int64_t room_of(const CapturedTensor& tensor) {
    return tensor.axis < 0 ? 1 : tensor.shape.sizes[static_cast<std::size_t>(tensor.axis)];
}

// Those of one part of a task: so many, behind those of the parts before it.
struct PartEntries : Entries {
    std::int64_t count = 1, first = 0, bytes;

    PartEntries(const CapturedTensor& tensor, const Plan& made)
        : Entries(tensor), tensor_(tensor), room_(room_of(tensor)) {
        if (tensor.symbol >= 0) {
            const auto symbol = static_cast<std::size_t>(tensor.symbol);
            count = made.counts[symbol];
            first = made.firsts[symbol];
        }
        bytes = count * inner;
    }

    // Where `row` of the outer ones begins in the captured tensor.
    std::uint64_t address(std::int64_t row) const {
        return tensor_.address + unsigned_of((row * room_ + first) * inner);
    }

private:
    const CapturedTensor& tensor_;
    std::int64_t room_;
};

// Returns the entries of a tensor that is like the captured one but for their number; -1 otherwise.
std::int64_t entries_of(const CapturedTensor& tensor, const Shape& shape) {
    if (tensor.axis < 0) {
        return shape == tensor.shape ? 1 : -1;
    }
    Shape alike = shape;
    if (alike.axes <= tensor.axis) {
        return -1;
    }
    const auto axis = static_cast<std::size_t>(tensor.axis);
    alike.sizes[axis] = tensor.shape.sizes[axis];
    return alike == tensor.shape ? shape.sizes[axis] : -1;
}

template <typename Index>
void add(unsigned char* rows, std::int64_t bytes, std::int64_t shift) {
    constexpr auto kBytes = static_cast<std::int64_t>(sizeof(Index));
    for (unsigned char* at = rows; at < rows + bytes; at += kBytes) {
        Index index;
        std::memcpy(&index, at, sizeof(Index));
        index = static_cast<Index>(index + shift);
        std::memcpy(at, &index, sizeof(Index));
    }
}

// Returns true when no value has all bits of `exponent` set.
template <typename Bits>
bool finite(const void* values, std::int64_t bytes, Bits exponent) {
    const auto* bits = static_cast<const Bits*>(values);
    const std::int64_t count = bytes / static_cast<std::int64_t>(sizeof(Bits));
    Bits found = 0;
    for (std::int64_t i = 0; i < count; ++i) {
        found |= static_cast<Bits>((bits[i] & exponent) == exponent);
    }
    return found == 0;
}

bool finite_of(std::string_view dtype, const void* values, std::int64_t bytes) {
    if (dtype == "float32") {
        return finite<std::uint32_t>(values, bytes, 0x7f800000U);
    }
    if (dtype == "float64") {
        return finite<std::uint64_t>(values, bytes, 0x7ff0000000000000U);
    }
    return dtype != "float16" || finite<std::uint16_t>(values, bytes, 0x7c00U);
}

void push(std::vector<Copy>& copies, std::uint64_t to, std::uint64_t from, std::int64_t bytes) {
    if (bytes > 0) {
        copies.push_back({to, from, bytes});
    }
}

}  // namespace

std::uint64_t Pool::at(std::uint64_t offset, std::int64_t length) const {
    return offset > bytes || unsigned_of(length) > bytes - offset ? 0 : address + offset;
}

bool CapturedRun::plan(const RunPacket& task, const Surroundings& around, Plan& made) const {
    if ((task.parts.size() > 1 || task.parts[0].gathers) && !any_size) {
        return false;
    }
    const Pool& pool = around.pool;
    made.up.clear();
    made.down.clear();
    made.spare.clear();
    made.patches.clear();
    made.gathers.clear();
    made.tables.clear();
    made.gathered_bytes = 0;
    made.rows.clear();
    made.firsts.assign(symbols.size(), 0);
    std::int64_t indices_bytes = 0;
    for (const CapturedTensor& input : inputs) {
        indices_bytes += input.points.empty() ? 0 : input.bytes();
    }
    made.shifted.resize(task.parts.size() > 1 ? static_cast<std::size_t>(indices_bytes) : 0);
    made.shifted_bytes = 0;
    for (const PacketPart& part : task.parts) {
        if (!count(part, made)) {
            return false;
        }
        for (std::size_t i = 0; i < inputs.size(); ++i) {
            const bool placed = part.gathers && i == 0
                                    ? place_gather(part.gather, around, made)
                                    : place_input(inputs[i], part.inputs[i], pool, made);
            if (!placed) {
                return false;
            }
        }
        if (!place_outputs(part, pool, made)) {
            return false;
        }
        for (std::size_t symbol = 0; symbol < symbols.size(); ++symbol) {
            made.firsts[symbol] += made.counts[symbol];
        }
    }
    for (std::size_t symbol = 0; symbol < symbols.size(); ++symbol) {
        const std::int64_t whole = made.firsts[symbol];
        if (whole < symbols[symbol].least || whole > symbols[symbol].most) {
            return false;
        }
    }
    if (std::accumulate(made.firsts.begin(), made.firsts.end(), std::int64_t{0}) > most) {
        return false;
    }
    fill_spare(made);
    return true;
}

// Finds the part's entries for each symbol, so that all of it has room behind the parts before.
bool CapturedRun::count(const PacketPart& part, Plan& made) const {
    if (part.inputs.size() != inputs.size()) {
        return false;
    }
    const bool any_earlier = !made.rows.empty();
    made.counts.assign(symbols.size(), -1);
    for (std::size_t i = 0; i < inputs.size(); ++i) {
        const CapturedTensor& input = inputs[i];
        const PacketTensor& given = part.inputs[i];
        const std::int64_t entries = entries_of(input, given.shape);
        if (given.name != input.name || given.dtype != input.dtype || entries < 0) {
            return false;
        }
        if (input.symbol < 0 && any_earlier) {
            return false;  // one place for what each part has
        }
        if (input.symbol >= 0) {
            std::int64_t& known = made.counts[static_cast<std::size_t>(input.symbol)];
            if (known >= 0 && known != entries) {
                return false;
            }
            known = entries;
        }
    }
    for (std::size_t symbol = 0; symbol < symbols.size(); ++symbol) {
        std::int64_t& known = made.counts[symbol];
        known = known < 0 ? 0 : known;
        if (known > symbols[symbol].most - made.firsts[symbol]) {
            return false;
        }
    }
    return true;
}

bool CapturedRun::place_input(const CapturedTensor& input, const PacketTensor& given,
                              const Pool& pool, Plan& made) const {
    const PartEntries each(input, made);
    const std::int64_t bytes = each.bytes;
    const std::uint64_t from = pool.at(given.offset, each.outer * bytes);
    if (from == 0) {
        return false;
    }
    for (std::int64_t row = 0; row < each.outer && bytes > 0; ++row) {
        std::uint64_t source = from + unsigned_of(row * bytes);
        if (!input.points.empty()) {
            const int target = input.points[input.points.size() == 1 ? 0 : unsigned_of(row)];
            const std::int64_t shift = made.firsts[static_cast<std::size_t>(target)];
            if (shift != 0) {
                unsigned char* place = made.shifted.data() + made.shifted_bytes;
                std::memcpy(place, reinterpret_cast<const void*>(source), unsigned_of(bytes));
                input.item_bytes == 8 ? add<std::int64_t>(place, bytes, shift)
                                      : add<std::int32_t>(place, bytes, shift);
                source = reinterpret_cast<std::uint64_t>(place);
                made.shifted_bytes += unsigned_of(bytes);
            }
        }
        push(made.up, each.address(row), source, bytes);
    }
    return true;
}

// Features are gathered to their place among those of the other parts. Only the ids of the rows go
// up, to a place of their own.
bool CapturedRun::place_gather(const PacketGather& gather, const Surroundings& around,
                               Plan& made) const {
    const CapturedTensor& input = inputs.front();
    const PartEntries each(input, made);
    if (input.axis != 0 || around.tables == nullptr) {
        return false;
    }
    const std::int64_t replaced = gather.at.shape.sizes[0];
    auto reading = around.tables->read(gather.table);
    if (reading == nullptr || replaced > kMostPatches) {
        return false;  // Python maps it, or puts them all there at once
    }
    const ResidentTable& table = reading->table();
    const Shape shape{{table.rows, table.columns}, 2};
    const std::int64_t ids_bytes = 8 * each.count, row_bytes = each.inner;
    const std::uint64_t ids = around.pool.at(gather.ids.offset, ids_bytes);
    const std::uint64_t at = around.pool.at(gather.at.offset, 8 * replaced);
    const std::uint64_t rows = around.pool.at(gather.rows.offset, row_bytes * replaced);
    const std::int64_t scratch_used = 8 * each.first;
    if (gather.dtype != table.dtype || gather.table_shape != shape || ids == 0 || at == 0 ||
        rows == 0 || ids_bytes > around.scratch_bytes - scratch_used) {
        return false;
    }
    const std::uint64_t ids_at = around.scratch + unsigned_of(scratch_used);
    push(made.up, ids_at, ids, ids_bytes);
    const HotCopy hot = reading->hot();
    if (each.count > 0) {
        made.gathers.push_back({table.address, ids_at, hot.rows, hot.slot_of, each.address(0),
                                each.count, table.row_bytes(), table.item_bytes, gather_threads});
    }
    for (std::int64_t i = 0; i < replaced; ++i) {
        std::int64_t position = 0;
        std::memcpy(&position, reinterpret_cast<const void*>(at + unsigned_of(8 * i)), 8);
        if (position < 0 || position >= each.count) {
            return false;
        }
        push(made.patches, each.address(0) + unsigned_of(position * row_bytes),
             rows + unsigned_of(i * row_bytes), row_bytes);
    }
    made.gathered_bytes += each.bytes;
    made.tables.push_back(std::move(reading));
    return true;
}

bool CapturedRun::place_outputs(const PacketPart& part, const Pool& pool, Plan& made) const {
    if (declared ? part.outputs.size() != outputs.size() : !part.outputs.empty()) {
        return false;
    }
    for (std::size_t i = 0; i < outputs.size(); ++i) {
        const CapturedTensor& output = outputs[i];
        const PartEntries each(output, made);
        std::uint64_t offset = part.output_offset;
        if (declared) {
            const PacketTensor& place = part.outputs[i];
            if (place.dtype != output.dtype || entries_of(output, place.shape) != each.count) {
                return false;
            }
            offset = place.offset;
        } else if (unsigned_of(each.outer * each.bytes) > part.output_capacity) {
            return false;
        }
        const std::uint64_t to = pool.at(offset, each.outer * each.bytes);
        if (to == 0) {
            return false;
        }
        for (std::int64_t row = 0; row < each.outer; ++row) {
            push(made.down, to + unsigned_of(row * each.bytes), each.address(row), each.bytes);
        }
    }
    const CapturedTensor& only = outputs.front();
    made.rows.push_back(declared ? 0 : made.counts[static_cast<std::size_t>(only.symbol)]);
    return true;
}

// Nothing of an earlier request stays behind what this one has.
void CapturedRun::fill_spare(Plan& made) const {
    for (const CapturedTensor& input : inputs) {
        if (input.symbol < 0) {
            continue;
        }
        const Entries each(input);
        const std::int64_t room = room_of(input);
        const std::int64_t whole = made.firsts[static_cast<std::size_t>(input.symbol)];
        for (std::int64_t row = 0; row < each.outer && whole < room; ++row) {
            const std::int64_t bytes = (room - whole) * each.inner;
            if (bytes > 0) {
                const std::int64_t before = row * room + whole;
                made.spare.push_back(
                    {input.address + unsigned_of(before * each.inner), bytes, input.spare});
            }
        }
    }
}

bool CapturedRun::all_finite(const Plan& made) const {
    if (!checked) {
        return true;
    }
    for (const CapturedTensor& output : outputs) {
        for (const Copy& copy : made.down) {
            if (copy.from >= output.address &&
                copy.from - output.address < unsigned_of(output.bytes()) &&
                !finite_of(output.dtype, reinterpret_cast<const void*>(copy.to), copy.bytes)) {
                return false;
            }
        }
    }
    return true;
}

}  // namespace gnnserve
