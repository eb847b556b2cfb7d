// A lane's loop over a runtime that stands in for CUDA: what it answers, what it leaves to Python.

#include "../cuda/lane_loop.cpp"

#include <unistd.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "../cuda/copies.cu"
#include "check.hpp"
#include "gather_by_hand.hpp"

namespace {

using gnnserve::LaneLoop;
using gnnserve::PacketTensor;

constexpr std::int64_t kNodes = 4, kEdges = 6, kPoolBytes = 1 << 12;
constexpr std::uint64_t kEdgesAt = 1024, kOutputAt = 2048;
// Rows of a table, and where a sample's replaced rows are behind its ids.
constexpr std::uint64_t kRows = 5, kReplacedAt = 64;
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// Writes msgpack, as messages.py has msgspec do.
class Writer {
public:
    std::string bytes;

    Writer& array(std::size_t count) { return put(0x90 | count); }
    Writer& text(const std::string& value) {
        put(0xd9).put(value.size());
        bytes += value;
        return *this;
    }
    Writer& number(std::uint64_t value) {
        if (value < 0x80) {
            return put(value);
        }
        put(0xce);
        for (int shift = 24; shift >= 0; shift -= 8) {
            put(value >> shift & 0xff);
        }
        return *this;
    }
    Writer& put(std::uint64_t byte) {
        bytes.push_back(static_cast<char>(byte));
        return *this;
    }
    Writer& tensor(const std::string& name, const std::string& dtype,
                   const std::vector<std::uint64_t>& shape, std::uint64_t offset) {
        array(4).text(name).text(dtype).array(shape.size());
        for (const std::uint64_t size : shape) {
            number(size);
        }
        return number(offset);
    }
};

struct Graph {
    std::uint64_t nodes = 0, edges = 0;
    std::uint64_t x_at = 0, edges_at = kEdgesAt, output_at = kOutputAt;
    std::uint64_t capacity = 1024;
    std::uint64_t features = 2;
    std::string dtype = "int64";
    // Of a sample, the table that its features are rows of.
    std::uint64_t table = 0, replaced = 0;
    std::string table_dtype = "uint8";
};

struct Asked {
    std::string key = "m";
    std::uint64_t limit_bytes = 1 << 30;
    std::uint64_t run_ns = 0;
    bool bounded = false, gathers = false;
};

std::string packet_of(const std::vector<Graph>& parts, const Asked& asked = {}) {
    Writer writer;
    writer.array(7).text("RunTask").number(77).text(asked.key).array(parts.size());
    for (const Graph& part : parts) {
        writer.array(6).array(part.table == 0 ? 2 : 1);
        if (part.table == 0) {
            writer.tensor("x", "float32", {part.nodes, part.features}, part.x_at);
        }
        writer.tensor("edge_index", part.dtype, {2, part.edges}, part.edges_at);
        writer.number(part.output_at).number(part.capacity);
        if (part.table == 0) {
            writer.put(asked.gathers ? 0xc3 : 0xc0);
        } else {
            writer.array(4).array(5).text("g").number(part.table).text("/file");
            writer.text(part.table_dtype).array(2).number(kRows).number(part.features);
            writer.tensor("ids", "int64", {part.nodes}, part.x_at);
            writer.tensor("at", "int64", {part.replaced}, part.x_at + kReplacedAt);
            writer.tensor("new", "float32", {part.replaced, part.features},
                          part.x_at + kReplacedAt + 8 * part.replaced);
        }
        writer.array(0).put(0xc2);
    }
    writer.number(asked.limit_bytes).number(asked.run_ns).put(asked.bounded ? 0xc3 : 0xc2);
    return writer.bytes;
}

// A lane whose only captured run gives, for each node, its first feature and the sum of the second
// ones of its neighbours.
class Rig {
public:
    explicit Rig(gnnserve::ReplayTask replay = gnnserve_cuda_replay_task, int own = 0,
                 std::int64_t* times = nullptr, std::int64_t slab_bytes = 0)
        : pool_(kPoolBytes), x(2 * kNodes, kNaN), edges(2 * kEdges, 99), output(kNodes, kNaN) {
        CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends_) == 0);
        if (own == 0) {
            cuda_stub::fails.clear();
            CHECK(gnnserve_cuda_route(0, stream(1), stream(2), &route_) == cudaSuccess);
            cuda_stub::graph = [this] { forward(); };
        }
        lane_ = gnnserve_lane_open(
            ends_[1], address(pool_.data()), kPoolBytes, times == nullptr ? run_times : times, 4,
            own, replay, own == 0 ? reinterpret_cast<void*>(route_) : this, 1, slab_bytes, tables_);
        gnnserve_lane_scratch(lane_, address(scratch_), sizeof scratch_);
        for (const int kind : {0, 1, 2}) {
            runs[kind] = add(kind);
        }
    }
    ~Rig() {
        gnnserve_lane_close(lane_);
        delete tables();
        delete reinterpret_cast<Route*>(route_);
        close(ends_[0]);
        close(ends_[1]);
    }
    Rig(const Rig&) = delete;
    Rig& operator=(const Rig&) = delete;

    void forward() {
        for (std::int64_t node = 0; node < kNodes; ++node) {
            output[at(node)] = x[at(2 * node)];
        }
        for (std::int64_t edge = 0; edge < kEdges; ++edge) {
            const std::int64_t target = edges[at(kEdges + edge)];
            if (target >= 0) {
                output[at(target)] += x[at(2 * edges[at(edge)] + 1)];
            }
        }
    }

    // Puts a graph of these features and edges into the pool.
    Graph put(const std::vector<float>& features, const std::vector<std::int64_t>& pairs,
              std::uint64_t part = 0) {
        Graph graph;
        graph.nodes = features.size() / 2;
        graph.edges = pairs.size() / 2;
        graph.x_at += 128 * part;
        graph.edges_at += 256 * part;
        graph.output_at += 64 * part;
        write(graph.x_at, features);
        write(graph.edges_at, pairs);
        return graph;
    }

    void send(const std::string& packet) const {
        CHECK(::send(ends_[0], packet.data(), packet.size(), 0) ==
              static_cast<ssize_t>(packet.size()));
    }
    int serve(bool until_idle = true) { return gnnserve_lane_serve(lane_, until_idle, &failed); }
    // Serves a packet that is not for this loop: it stays, and there is no answer.
    int left(const std::string& packet) {
        send(packet);
        const int outcome = serve();
        std::string found(2 * gnnserve::kMostBytes, '\0');
        const ssize_t bytes = recv(ends_[1], found.data(), found.size(), MSG_DONTWAIT);
        CHECK(bytes == static_cast<ssize_t>(packet.size()));
        CHECK(found.substr(0, packet.size()) == packet);
        CHECK(recv(ends_[0], found.data(), found.size(), MSG_DONTWAIT) < 0);
        return outcome;
    }
    std::string answer() const {
        std::string found(256, '\0');
        const ssize_t bytes = recv(ends_[0], found.data(), found.size(), 0);
        CHECK(bytes > 0);
        found.resize(static_cast<std::size_t>(bytes));
        return found;
    }
    std::vector<float> answered(const Graph& graph) const {
        std::vector<float> found(graph.nodes);
        std::memcpy(found.data(), &pool_[graph.output_at], 4 * found.size());
        return found;
    }
    void hang_up() { shutdown(ends_[0], SHUT_RDWR); }
    void* lane() { return lane_; }
    gnnserve::ResidentTables* tables() { return static_cast<gnnserve::ResidentTables*>(tables_); }
    // Adds table 7 of bytes: row i holds 10 i and 10 i + 1. Rows 0 to 2 of what `hot` says have 100
    // more.
    void add_table() {
        for (std::size_t i = 0; i < 2 * kRows; ++i) {
            rows_[i] = static_cast<unsigned char>(10 * (i / 2) + i % 2);
            hot_[i] = static_cast<unsigned char>(rows_[i] + 100);
        }
        gnnserve_tables_add(tables_, 7, address(rows_), kRows, 2, 1, "uint8");
    }
    void heat() { gnnserve_tables_hot(tables_, 7, address(hot_), address(slots_)); }
    void cool() { gnnserve_tables_hot(tables_, 7, 0, 0); }
    // Puts a sample of these rows of table 7 and edges into the pool; `replaced` are positions
    // whose features are new ones.
    Graph sample(const std::vector<std::int64_t>& ids, const std::vector<std::int64_t>& pairs,
                 const std::vector<std::int64_t>& replaced = {}, std::uint64_t part = 0) {
        Graph graph = put({}, pairs, part);
        graph.nodes = ids.size();
        graph.table = 7;
        graph.replaced = replaced.size();
        write(graph.x_at, ids);
        write(graph.x_at + kReplacedAt, replaced);
        write(graph.x_at + kReplacedAt + 8 * replaced.size(),
              std::vector<float>(2 * replaced.size(), 0.5F));
        return graph;
    }

    static std::uint64_t address(const void* memory) {
        return reinterpret_cast<std::uint64_t>(memory);
    }
    static void* stream(std::uintptr_t number) { return reinterpret_cast<void*>(number); }
    static std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }

    std::int64_t run_times[4] = {};
    void* runs[3] = {};
    void* failed = nullptr;

private:
    template <typename Value>
    void write(std::uint64_t offset, const std::vector<Value>& values) {
        std::copy_n(reinterpret_cast<const unsigned char*>(values.data()),
                    sizeof(Value) * values.size(), &pool_[offset]);
    }

    void* add(int kind) {
        const std::int64_t counts[] = {1, kNodes, 0, kEdges};
        void* run = gnnserve_lane_add_run(lane_, "m", kind, stream(3 + static_cast<unsigned>(kind)),
                                          nullptr, kNodes + kEdges - 1, 1, 0, 1, 512, counts, 2);
        const auto told = [](const void* memory) {
            return static_cast<std::int64_t>(address(memory));
        };
        const std::int64_t of_x[] = {told(x.data()), 4, 0, 0, 0xff, 2, 0, kNodes, 2};
        const std::int64_t of_edges[] = {told(edges.data()), 8, 1, 1, 0xff, 2, 1, 2, kEdges, 0};
        const std::int64_t of_output[] = {told(output.data()), 4, 0, 0, 0, 2, 0, kNodes, 1};
        gnnserve_lane_add_tensor(run, 0, "x", "float32", of_x);
        gnnserve_lane_add_tensor(run, 0, "edge_index", "int64", of_edges);
        gnnserve_lane_add_tensor(run, 1, "output", "float32", of_output);
        return run;
    }

    int ends_[2] = {};
    std::uint64_t route_ = 0;
    void* lane_ = nullptr;
    void* tables_ = gnnserve_tables_open();
    std::int64_t scratch_[kNodes] = {};
    unsigned char rows_[2 * kRows] = {}, hot_[2 * kRows] = {};
    std::int32_t slots_[kRows] = {0, 1, 2, -1, -1};
    std::vector<unsigned char> pool_;

public:
    // Places on the device.
    std::vector<float> x;
    std::vector<std::int64_t> edges;
    std::vector<float> output;
};

void test_a_task_is_answered_and_nothing_of_the_last_one_stays() {
    Rig rig;
    rig.send(packet_of({rig.put({1, 2, 3, 4, 5, 6, 7, 8}, {0, 1, 2, 3, 1, 2, 3, 0})}));
    CHECK(rig.serve() == gnnserve::kIdle);
    CHECK(rig.answer().substr(0, 10) == "\x99\xa8TaskDone");
    const Graph graph = rig.put({10, 20, 30, 40}, {0, 1});
    rig.send(packet_of({graph}));
    CHECK(rig.serve() == gnnserve::kIdle);
    const std::string said = rig.answer();
    CHECK((rig.answered(graph) == std::vector<float>{10, 50}));
    // Task 77, two rows of one column; no peaks, and nothing that is not finite.
    CHECK(said.substr(0, 18) == std::string("\x99\xa8TaskDone\x4d\xdd\0\0\0\x01\x02\x01", 18));
    CHECK(said.substr(said.size() - 4) == std::string("\xc0\xc0\0\x90", 4));
    for (std::size_t i = 4; i < 8; ++i) {
        CHECK(std::isnan(rig.x[i]));
    }
    CHECK((rig.edges == std::vector<std::int64_t>{0, -1, -1, -1, -1, -1, 1, -1, -1, -1, -1, -1}));
    CHECK(gnnserve_lane_used(rig.runs[0]) == 2 && gnnserve_lane_used(rig.runs[1]) == 0);
}

void test_indices_of_merged_requests_count_from_the_first_ones() {
    Rig rig;
    const Graph first = rig.put({1, 2, 3, 4}, {0, 1}), second = rig.put({5, 6, 7, 8}, {1, 0}, 1);
    rig.send(packet_of({first, second}));
    CHECK(rig.serve() == gnnserve::kIdle);
    CHECK(rig.answer().substr(11, 7) == std::string("\xdd\0\0\0\x02\x02\x02", 7));
    CHECK((rig.answered(first) == std::vector<float>{1, 5}));
    CHECK((rig.answered(second) == std::vector<float>{13, 7}));
    CHECK(rig.edges[1] == 3 && rig.edges[kEdges + 1] == 2);
}

void test_what_no_captured_run_serves_stays_for_python() {
    Rig rig;
    const Graph graph = rig.put({1, 2, 3, 4}, {0, 1});
    const std::function<void(Graph&)> changes[] = {
        [](Graph& one) { one.nodes = 5; },
        [](Graph& one) { one.nodes = 0; },
        [](Graph& one) { one.edges = 7; },
        [](Graph& one) { one.nodes = 4, one.edges = 6; },  // more than gains
        [](Graph& one) { one.features = 3; },
        [](Graph& one) { one.dtype = "int32"; },
        [](Graph& one) { one.capacity = 7; },
        [](Graph& one) { one.x_at = kPoolBytes - 8; },
        [](Graph& one) { one.output_at = kPoolBytes + 1; },
    };
    for (const auto& change : changes) {
        Graph other = graph;
        change(other);
        CHECK(rig.left(packet_of({other})) == gnnserve::kPacket);
    }
    CHECK(rig.left(packet_of({graph}, {.key = "another"})) == gnnserve::kPacket);
    CHECK(rig.left(packet_of({graph}, {.gathers = true})) == gnnserve::kPacket);
    CHECK(rig.left(packet_of({graph, graph, graph})) == gnnserve::kPacket);
    CHECK(rig.left("\x92\xa4Stop\x01") == gnnserve::kPacket);
    CHECK(rig.left(std::string(gnnserve::kMostBytes + 1, '\x90')) == gnnserve::kPacket);
    const std::string whole = packet_of({graph});
    CHECK(rig.left(whole + "\xc0") == gnnserve::kPacket);
    for (std::size_t bytes = 1; bytes < whole.size(); ++bytes) {
        CHECK(rig.left(whole.substr(0, bytes)) == gnnserve::kPacket);
    }
    gnnserve_lane_drop_run(rig.lane(), rig.runs[0]);
    CHECK(rig.left(whole) == gnnserve::kPacket);
}

// Python says which value it is, or counts them.
void test_answers_that_are_no_finite_numbers_stay_for_python() {
    Rig rig;
    const float infinite = std::numeric_limits<float>::infinity();
    for (const float value : {kNaN, infinite, -infinite}) {
        CHECK(rig.left(packet_of({rig.put({1, 2, value, 4}, {0, 1})})) == gnnserve::kPacket);
    }
    rig.send(packet_of({rig.put({1, 2, std::numeric_limits<float>::max(), 4}, {0, 1})}));
    CHECK(rig.serve() == gnnserve::kIdle);
}

void test_a_failed_run_is_told_and_its_packet_stays() {
    for (const char* name :
         {"cudaMemcpyAsync", "cudaMemsetAsync", "cudaGraphLaunch", "cudaEventRecord"}) {
        Rig rig;
        const std::string packet = packet_of({rig.put({1, 2, 3, 4}, {0, 1})});
        cuda_stub::fails = name;
        CHECK(rig.left(packet) == cudaErrorUnknown && rig.failed == rig.runs[0]);
        CHECK(cudaGetLastError() == cudaSuccess);
        cuda_stub::fails.clear();
        rig.send(packet);
        CHECK(rig.serve() == gnnserve::kIdle);
    }
}

// Others may have what it gave back by then, so that Python must not launch it.
void test_a_run_gives_back_what_others_could_do_much_with() {
    const std::string says = std::string("\x93\xa9TakesLess\x4d\x00", 13);
    constexpr std::int64_t kSlabBytes = 64 << 20;
    // Inputs take two blocks of 512 bytes and a third one: rows of edges are copied apart.
    for (const std::uint64_t limit_bytes : {(1U << 20) - 1537U, (1U << 20) - 1536U}) {
        Rig rig(gnnserve_cuda_replay_task, 0, nullptr, kSlabBytes);
        const Asked asked{.limit_bytes = limit_bytes};
        const std::string packet = packet_of({rig.put({1, 2, 3, 4}, {0, 1})}, asked);
        const bool much = limit_bytes % 2 == 0;
        rig.send(packet);
        CHECK(rig.serve() == gnnserve::kIdle);
        CHECK(!much || rig.answer() == says);
        CHECK(rig.answer().substr(0, 10) == "\x99\xa8TaskDone");
        cuda_stub::fails = "cudaGraphLaunch";
        if (!much) {
            CHECK(rig.left(packet) == cudaErrorUnknown);
        } else {
            rig.send(packet);
            CHECK(rig.serve() == cudaErrorUnknown && rig.failed == rig.runs[0]);
            CHECK(rig.answer() == says);
            const std::string error = rig.answer();
            CHECK(error.substr(0, 12) == "\x94\xa9TaskError\x4d");
            CHECK(error.find("out_of_memory") != std::string::npos);
        }
        cuda_stub::fails.clear();
        CHECK(rig.serve() == gnnserve::kIdle);
    }
}

void test_all_that_was_begun_is_waited_for_when_a_run_fails() {
    Rig rig;
    cuda_stub::said.clear();
    cuda_stub::fails = "cudaGraphLaunch";
    rig.left(packet_of({rig.put({1, 2, 3, 4}, {0, 1})}));
    const std::vector<std::string> last(cuda_stub::said.end() - 3, cuda_stub::said.end());
    CHECK(last[0].starts_with("s1 records") && last[1].starts_with("s3 records") &&
          last[2].starts_with("s2 records"));
    cuda_stub::fails.clear();
}

void test_the_stream_is_that_of_its_kind() {
    Rig rig;
    const Graph graph = rig.put({1, 2, 3, 4}, {0, 1});
    const auto used = [&](const Asked& asked) {
        std::uint64_t before[3];
        for (int kind = 0; kind < 3; ++kind) {
            before[kind] = gnnserve_lane_used(rig.runs[kind]);
        }
        rig.send(packet_of({graph}, asked));
        CHECK(rig.serve() == gnnserve::kIdle);
        rig.answer();
        for (int kind = 0; kind < 3; ++kind) {
            if (gnnserve_lane_used(rig.runs[kind]) != before[kind]) {
                return kind;
            }
        }
        return -1;
    };
    CHECK(used({.run_ns = 10}) == gnnserve::kOrdinary);
    rig.run_times[2] = 20;
    CHECK(used({.run_ns = 10}) == gnnserve::kUrgent);
    CHECK(used({.run_ns = 11}) == gnnserve::kOrdinary);
    CHECK(used({.run_ns = 0}) == gnnserve::kOrdinary);
    CHECK(used({.run_ns = 10, .bounded = true}) == gnnserve::kBounded);
    CHECK(rig.run_times[0] == 0);
}

void test_a_server_that_is_gone_is_pythons_to_notice() {
    Rig rig;
    rig.hang_up();
    CHECK(rig.serve(false) == gnnserve::kPacket);
}

void test_a_sample_is_gathered_where_it_is_wanted() {
    Rig rig;
    rig.add_table();
    const Graph sample = rig.sample({4, 1}, {0, 1});
    rig.send(packet_of({sample}));
    CHECK(rig.serve() == gnnserve::kIdle);
    rig.answer();
    CHECK((rig.answered(sample) == std::vector<float>{40, 10 + 41}));
    CHECK((std::vector<float>(rig.x.begin(), rig.x.begin() + 4) ==
           std::vector<float>{40, 41, 10, 11}));
    CHECK(std::isnan(rig.x[4]));
    rig.heat();
    rig.send(packet_of({sample}));
    CHECK(rig.serve() == gnnserve::kIdle);
    rig.answer();
    CHECK((rig.answered(sample) == std::vector<float>{40, 110 + 41}));
    rig.cool();
    const Graph changed = rig.sample({4, 1}, {0, 1}, {1});
    rig.send(packet_of({changed}));
    CHECK(rig.serve() == gnnserve::kIdle);
    rig.answer();
    CHECK((rig.answered(changed) == std::vector<float>{40, 0.5F + 41}));
}

void test_samples_are_merged_with_each_other_and_with_others() {
    Rig rig;
    rig.add_table();
    const Graph first = rig.sample({3, 0}, {0, 1}, {0}), second = rig.put({5, 6}, {}, 1),
                third = rig.sample({2}, {0, 0}, {}, 2);
    cuda_stub::said.clear();
    rig.send(packet_of({first, second, third}));
    CHECK(rig.serve() == gnnserve::kIdle);
    rig.answer();
    CHECK((rig.answered(first) == std::vector<float>{0.5F, 0.5F}));
    CHECK((rig.answered(second) == std::vector<float>{5}));
    CHECK((rig.answered(third) == std::vector<float>{20 + 21}));
    // What goes up first is copied before any gather, as the gathers read ids among it.
    const auto place = [](const char* what) {
        std::size_t at = 0;
        while (cuda_stub::said[at].find(what) == std::string::npos) {
            ++at;
        }
        return at;
    };
    CHECK(place("s3 copies 16") < place("s3 gathers 2"));
    CHECK(place("s3 gathers 2") < place("s3 gathers 1"));
}

void test_samples_that_the_loop_cannot_gather_stay_for_python() {
    Rig rig;
    const Graph sample = rig.sample({4, 1}, {0, 1});
    CHECK(rig.left(packet_of({sample})) == gnnserve::kPacket);
    rig.add_table();
    const std::function<void(Graph&)> changes[] = {
        [](Graph& one) { one.table = 8; },     [](Graph& one) { one.table_dtype = "float16"; },
        [](Graph& one) { one.features = 3; },  [](Graph& one) { one.x_at = kPoolBytes - 8; },
        [](Graph& one) { one.replaced = 65; },
    };
    for (const auto& change : changes) {
        Graph other = sample;
        change(other);
        CHECK(rig.left(packet_of({other})) == gnnserve::kPacket);
    }
    CHECK(rig.left(packet_of({rig.sample({4, 1}, {0, 1}, {2})})) == gnnserve::kPacket);
    const std::string whole = packet_of({sample});
    for (std::size_t bytes = 1; bytes < whole.size(); ++bytes) {
        CHECK(rig.left(whole.substr(0, bytes)) == gnnserve::kPacket);
    }
    gnnserve_lane_scratch(rig.lane(), 0, 0);
    CHECK(rig.left(whole) == gnnserve::kPacket);
    gnnserve_tables_remove(rig.tables(), 7);
    gnnserve_tables_remove(rig.tables(), 7);
    rig.heat();
    rig.cool();
}

void test_a_failed_gather_is_told() {
    Rig rig;
    rig.add_table();
    const std::string packet = packet_of({rig.sample({4, 1}, {0, 1})});
    cuda_stub::fails = "gather";
    CHECK(rig.left(packet) == cudaErrorUnknown && rig.failed == rig.runs[0]);
    cuda_stub::fails.clear();
    // Nothing reads the table any more.
    gnnserve_tables_remove(rig.tables(), 7);
}

// Replays in place of the runtime that stands in for CUDA, which is for one thread.
int by_hand(const void* route, const gnnserve::Replay* task) {
    const auto copy = [](const Copy* copies, std::int64_t count) {
        for (std::int64_t i = 0; i < count; ++i) {
            std::memcpy(reinterpret_cast<void*>(copies[i].to),
                        reinterpret_cast<const void*>(copies[i].from),
                        static_cast<std::size_t>(copies[i].bytes));
        }
    };
    copy(task->up, task->up_count);
    for (std::int64_t i = 0; i < task->spare_count; ++i) {
        std::memset(reinterpret_cast<void*>(task->spare[i].to),
                    static_cast<int>(task->spare[i].value),
                    static_cast<std::size_t>(task->spare[i].bytes));
    }
    static_cast<Rig*>(const_cast<void*>(route))->forward();
    copy(task->down, task->down_count);
    return 0;
}

void test_lanes_of_one_device_share_nothing_but_their_times() {
    std::int64_t times[4] = {};
    std::vector<std::thread> threads;
    for (int own = 1; own < 4; ++own) {
        threads.emplace_back([own, &times] {
            Rig rig(by_hand, own, times);
            std::thread lane([&rig] { CHECK(rig.serve(false) == gnnserve::kPacket); });
            for (int number = 0; number < 500; ++number) {
                const auto value = static_cast<float>(number);
                const Graph graph = rig.put({value, 2, 3, value}, {0, 1, 1, 0});
                rig.send(packet_of({graph}, {.run_ns = static_cast<std::uint64_t>(number)}));
                rig.answer();
                CHECK((rig.answered(graph) == std::vector<float>{value + value, 5}));
            }
            rig.send("\x91\xa4Stop");
            lane.join();
        });
    }
    for (std::thread& each : threads) {
        each.join();
    }
}

}  // namespace

int main() {
    test_a_task_is_answered_and_nothing_of_the_last_one_stays();
    test_indices_of_merged_requests_count_from_the_first_ones();
    test_what_no_captured_run_serves_stays_for_python();
    test_answers_that_are_no_finite_numbers_stay_for_python();
    test_a_failed_run_is_told_and_its_packet_stays();
    test_a_run_gives_back_what_others_could_do_much_with();
    test_all_that_was_begun_is_waited_for_when_a_run_fails();
    test_the_stream_is_that_of_its_kind();
    test_a_server_that_is_gone_is_pythons_to_notice();
    test_a_sample_is_gathered_where_it_is_wanted();
    test_samples_are_merged_with_each_other_and_with_others();
    test_samples_that_the_loop_cannot_gather_stay_for_python();
    test_a_failed_gather_is_told();
    test_lanes_of_one_device_share_nothing_but_their_times();
}
