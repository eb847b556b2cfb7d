// The order in which a lane's copies and events are given to a runtime that writes it down.

#include "../cuda/copies.cu"

#include <limits>
#include <string>
#include <vector>

#include "check.hpp"
#include "gather_by_hand.hpp"

namespace {

using Said = std::vector<std::string>;

// Streams 1 and 2 copy up and down, runs are on stream 3. Large copies have 100,000 bytes.
class Lane {
public:
    Lane() {
        cuda_stub::events = 0;
        CHECK(gnnserve_cuda_route(0, stream(1), stream(2), &made_) == cudaSuccess);
    }
    ~Lane() { delete route(); }
    Lane(const Lane&) = delete;
    Lane& operator=(const Lane&) = delete;

    Said upload(std::size_t bytes, bool behind = false) {
        return told(
            [&](const Copy* copy) {
                return gnnserve_cuda_upload(route(), stream(3), behind, copy, 1);
            },
            bytes);
    }
    Said download(std::size_t bytes) {
        return told(
            [&](const Copy* copy) { return gnnserve_cuda_download(route(), stream(3), copy, 1); },
            bytes);
    }
    Route* route() { return reinterpret_cast<Route*>(made_); }
    static cudaStream_t stream(std::uintptr_t number) {
        return reinterpret_cast<cudaStream_t>(number);
    }

private:
    template <typename Call>
    Said told(Call call, std::size_t bytes) {
        const std::string from(bytes, 'x');
        std::string to(bytes, '-');
        const Copy copy{reinterpret_cast<std::uint64_t>(to.data()),
                        reinterpret_cast<std::uint64_t>(from.data()),
                        static_cast<std::int64_t>(bytes)};
        cuda_stub::said.clear();
        CHECK(call(&copy) == cudaSuccess);
        CHECK(to == from);
        return cuda_stub::said;
    }

    std::uint64_t made_ = 0;
};

void test_a_run_waits_for_what_goes_up_and_the_host_for_what_comes_down() {
    Lane lane;
    CHECK((lane.upload(100000) == Said{"s1 copies 100000", "s1 records e2", "s3 waits for e2"}));
    CHECK((lane.download(100000) ==
           Said{"s3 records e3", "s2 waits for e3", "s2 copies 100000", "s2 records e4"}));
}

// It may go where kernels that have not run yet are about to read or write.
void test_what_goes_up_later_waits_for_what_was_launched() {
    Lane lane;
    CHECK((lane.upload(100000, true) == Said{"s3 records e1", "s1 waits for e1", "s1 copies 100000",
                                             "s1 records e2", "s3 waits for e2"}));
}

void test_little_is_copied_on_the_stream_of_the_run() {
    Lane lane;
    CHECK((lane.upload(64 << 10) == Said{"s3 copies 65536"}));
    CHECK((lane.upload(1, true) == Said{"s3 copies 1"}));
    CHECK((lane.download(1) == Said{"s3 copies 1", "s3 records e4"}));
}

void test_the_host_sleeps_only_when_the_end_is_not_near() {
    Lane lane;
    cuda_stub::not_ready = 1;
    CHECK((lane.download(1) == Said{"s3 copies 1", "s3 records e4"}));
    cuda_stub::not_ready = std::numeric_limits<int>::max();
    CHECK((lane.download(1) == Said{"s3 copies 1", "s3 records e4", "host waits for e4"}));
    CHECK(cudaGetLastError() == cudaSuccess);
    cuda_stub::not_ready = 0;
}

void test_all_three_streams_are_waited_for() {
    Lane lane;
    cuda_stub::said.clear();
    CHECK(gnnserve_cuda_finish(lane.route(), Lane::stream(3)) == cudaSuccess);
    CHECK((cuda_stub::said == Said{"s1 records e4", "s3 records e4", "s2 records e4"}));
}

void test_a_failure_is_told_once() {
    Lane lane;
    const Copy none{0, 0, 100000};
    for (const char* name : {"cudaEventRecord", "cudaStreamWaitEvent"}) {
        cuda_stub::fails = name;
        CHECK(gnnserve_cuda_upload(lane.route(), nullptr, 1, &none, 1) == cudaErrorUnknown);
        CHECK(cudaGetLastError() == cudaSuccess);
    }
    cuda_stub::fails = "cudaEventQuery";
    CHECK(gnnserve_cuda_finish(lane.route(), nullptr) == cudaErrorUnknown);
    CHECK(gnnserve_cuda_download(lane.route(), nullptr, nullptr, 0) == cudaErrorUnknown);
    CHECK(cudaGetLastError() == cudaSuccess);
    for (const char* name : {"cudaSetDevice", "cudaEventCreateWithFlags"}) {
        std::uint64_t made = 1;
        cuda_stub::fails = name;
        CHECK(gnnserve_cuda_route(0, nullptr, nullptr, &made) == cudaErrorUnknown && made == 0);
        CHECK(cudaGetLastError() == cudaSuccess);
    }
    cuda_stub::fails.clear();
}

}  // namespace

int main() {
    test_a_run_waits_for_what_goes_up_and_the_host_for_what_comes_down();
    test_what_goes_up_later_waits_for_what_was_launched();
    test_little_is_copied_on_the_stream_of_the_run();
    test_the_host_sleeps_only_when_the_end_is_not_near();
    test_all_three_streams_are_waited_for();
    test_a_failure_is_told_once();
}
