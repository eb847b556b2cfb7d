#include "run_packet.hpp"

#include <cstring>
#include <limits>

namespace gnnserve {
namespace {

constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();

// Reads values one after another. After one that is not as expected it `failed`, and all that
// follow are empty.
class Reader {
public:
    explicit Reader(std::span<const unsigned char> bytes) : bytes_(bytes) {}

    bool failed() const { return failed_; }
    bool at_end() const { return bytes_.empty(); }

    std::size_t array() {
        const unsigned head = byte();
        if ((head & 0xf0) == 0x90) {
            return head & 0x0f;
        }
        return head == 0xdc ? number(2) : head == 0xdd ? number(4) : fail();
    }

    std::string_view text() {
        const unsigned head = byte();
        const std::size_t length = (head & 0xe0) == 0xa0 ? head & 0x1f
                                   : head == 0xd9        ? number(1)
                                   : head == 0xda        ? number(2)
                                   : head == 0xdb        ? number(4)
                                                         : fail();
        const auto found = take(length);
        return {reinterpret_cast<const char*>(found.data()), found.size()};
    }

    // A number that is not negative.
    std::uint64_t count() {
        const unsigned head = byte();
        if (head < 0x80) {
            return head;
        }
        return head >= 0xcc && head <= 0xcf ? number(std::size_t{1} << (head - 0xcc)) : fail();
    }

    std::int64_t signed_count() {
        const std::uint64_t found = count();
        return found > static_cast<std::uint64_t>(kMost) ? static_cast<std::int64_t>(fail())
                                                         : static_cast<std::int64_t>(found);
    }

    bool truth() {
        const unsigned head = byte();
        return head == 0xc3 || (head != 0xc2 && fail() != 0);
    }

    // Takes a nil out, if that is next.
    bool nil() {
        const bool found = !bytes_.empty() && bytes_[0] == 0xc0;
        bytes_ = bytes_.subspan(found ? 1 : 0);
        return found;
    }

    // Fails unless `holds`.
    void expect(bool holds) {
        if (!holds) {
            fail();
        }
    }

private:
    std::span<const unsigned char> take(std::size_t length) {
        if (length > bytes_.size()) {
            fail();
            return {};
        }
        const auto found = bytes_.first(length);
        bytes_ = bytes_.subspan(length);
        return found;
    }

    unsigned byte() {
        const auto found = take(1);
        return found.empty() ? 0 : found[0];
    }

    // A number of so many bytes, the highest first.
    std::uint64_t number(std::size_t length) {
        std::uint64_t found = 0;
        for (const unsigned char each : take(length)) {
            found = found << 8 | each;
        }
        return found;
    }

    std::uint64_t fail() {
        failed_ = true;
        bytes_ = {};
        return 0;
    }

    std::span<const unsigned char> bytes_;
    bool failed_ = false;
};

void read_shape(Reader& reader, Shape& shape) {
    const std::size_t axes = reader.array();
    reader.expect(axes <= Shape::kMostAxes);
    shape = {};
    for (std::size_t axis = 0; axis < axes && !reader.failed(); ++axis) {
        shape.sizes[axis] = reader.signed_count();
    }
    shape.axes = reader.failed() ? 0 : static_cast<int>(axes);
}

void read_tensor(Reader& reader, PacketTensor& tensor) {
    reader.expect(reader.array() == 4);
    tensor.name = reader.text();
    tensor.dtype = reader.text();
    read_shape(reader, tensor.shape);
    tensor.offset = reader.count();
}

void read_tensors(Reader& reader, std::vector<PacketTensor>& tensors) {
    tensors.clear();
    for (std::size_t left = reader.array(); left > 0 && !reader.failed(); --left) {
        read_tensor(reader, tensors.emplace_back());
    }
}

void read_gather(Reader& reader, PacketPart& part) {
    PacketGather& gather = part.gather;
    reader.expect(reader.array() == 4);
    reader.expect(reader.array() == 5);
    reader.text();  // the graph's name
    gather.table = reader.count();
    reader.text();  // its path
    gather.dtype = reader.text();
    read_shape(reader, gather.table_shape);
    read_tensor(reader, gather.ids);
    read_tensor(reader, gather.at);
    read_tensor(reader, gather.rows);
    reader.expect(gather.table_shape.axes == 2 && gather.ids.shape.axes == 1 &&
                  gather.at.shape.axes == 1);
    const Shape replaced{{gather.at.shape.sizes[0], gather.table_shape.sizes[1]}, 2};
    reader.expect(gather.rows.shape == replaced && gather.rows.dtype == "float32" &&
                  gather.ids.dtype == "int64" && gather.at.dtype == "int64");
    PacketTensor features{.name = "x", .dtype = "float32", .shape = {}};
    features.shape = {{gather.ids.shape.sizes[0], gather.table_shape.sizes[1]}, 2};
    part.inputs.insert(part.inputs.begin(), features);
}

void read_part(Reader& reader, PacketPart& part) {
    reader.expect(reader.array() == 6);
    read_tensors(reader, part.inputs);
    part.output_offset = reader.count();
    part.output_capacity = reader.count();
    part.gathers = !reader.nil();
    if (part.gathers) {
        read_gather(reader, part);
    }
    read_tensors(reader, part.outputs);
    reader.truth();
}

void write_number(std::uint64_t value, std::string& packet) {
    if (value < 0x80) {
        packet.push_back(static_cast<char>(value));
        return;
    }
    packet.push_back(static_cast<char>(0xcf));
    for (int shift = 56; shift >= 0; shift -= 8) {
        packet.push_back(static_cast<char>(value >> shift & 0xff));
    }
}

void write_number(std::int64_t value, std::string& packet) {
    write_number(static_cast<std::uint64_t>(value), packet);
}

void write_text(std::string_view value, std::string& packet) {
    packet.push_back(static_cast<char>(0xda));
    packet.push_back(static_cast<char>(value.size() >> 8 & 0xff));
    packet.push_back(static_cast<char>(value.size() & 0xff));
    packet.append(value);
}

}  // namespace

std::int64_t Shape::product(int first, int last) const {
    std::int64_t found = 1;
    for (int axis = first; axis < last; ++axis) {
        found *= sizes[static_cast<std::size_t>(axis)];
    }
    return found;
}

bool read_run(std::span<const unsigned char> packet, RunPacket& run) {
    Reader reader(packet);
    reader.expect(reader.array() == 7);
    reader.expect(reader.text() == "RunTask");
    run.task_id = reader.count();
    run.key = reader.text();
    const std::size_t parts = reader.array();
    // Each takes several bytes: a number that lies is found out before room is made for it.
    reader.expect(parts > 0 && parts <= packet.size());
    run.parts.resize(reader.failed() ? 0 : parts);
    for (PacketPart& part : run.parts) {
        read_part(reader, part);
        if (reader.failed()) {
            return false;
        }
    }
    run.limit_bytes = reader.signed_count();
    run.run_ns = reader.signed_count();
    run.bounded = reader.truth();
    return !reader.failed() && reader.at_end();
}

void write_done(std::uint64_t task_id, std::span<const std::int64_t> rows, std::int64_t columns,
                std::int64_t run_ns, std::string& packet) {
    packet.assign("\x99\xa8TaskDone");
    write_number(task_id, packet);
    packet.push_back(static_cast<char>(0xdd));
    for (int shift = 24; shift >= 0; shift -= 8) {
        packet.push_back(static_cast<char>(rows.size() >> shift & 0xff));
    }
    for (const std::int64_t each : rows) {
        write_number(each, packet);
    }
    write_number(columns, packet);
    write_number(run_ns, packet);
    // No peaks, nor when it began; no values that are not finite.
    packet.append("\xc0\xc0\x00\x90", 4);
}

void write_less(std::uint64_t task_id, std::int64_t memory_bytes, std::string& packet) {
    packet.assign("\x93\xa9TakesLess");
    write_number(task_id, packet);
    write_number(memory_bytes, packet);
}

void write_overrun(std::uint64_t task_id, std::string_view message, std::string& packet) {
    packet.assign("\x94\xa9TaskError");
    write_number(task_id, packet);
    write_text("out_of_memory", packet);
    write_text(message, packet);
}

}  // namespace gnnserve
