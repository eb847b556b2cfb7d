// Makes the calls of a plan with gRPC C++; see tests/interop/plan.py.
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <chrono>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

namespace {

using grpc::ByteBuffer;

struct Found {
    grpc::Status status;
    std::vector<std::string> answers;
};

std::string text_of(ByteBuffer& buffer) {
    std::vector<grpc::Slice> slices;
    (void)buffer.Dump(&slices);
    std::string text;
    for (const grpc::Slice& slice : slices) {
        text.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
    }
    return text;
}

// One call, from its beginning to `finish`.
struct Unary {
    Unary(grpc::GenericStub& stub, grpc::CompletionQueue& queue, const std::string& path,
          const ByteBuffer& message, int deadline_ms, bool gzip) {
        context.set_deadline(std::chrono::system_clock::now() +
                             std::chrono::milliseconds(deadline_ms));
        if (gzip) {
            context.set_compression_algorithm(GRPC_COMPRESS_GZIP);
        }
        reader = stub.PrepareUnaryCall(&context, path, message, &queue);
        reader->StartCall();
        reader->Finish(&answer, &status, this);
    }

    grpc::ClientContext context;
    std::unique_ptr<grpc::GenericClientAsyncResponseReader> reader;
    ByteBuffer answer;
    grpc::Status status;
};

void wait(grpc::CompletionQueue& queue) {
    void* tag = nullptr;
    bool ok = false;
    queue.Next(&tag, &ok);
}

Found stream(grpc::GenericStub& stub, const std::string& path, const ByteBuffer& message, int count,
             int deadline_ms) {
    grpc::CompletionQueue queue;
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(deadline_ms));
    Found found;
    auto call = stub.PrepareCall(&context, path, &queue);
    const auto wait_ok = [&queue] {
        void* tag = nullptr;
        bool ok = false;
        queue.Next(&tag, &ok);
        return ok;
    };
    call->StartCall(nullptr);
    bool alive = wait_ok();
    for (int i = 0; i < count && alive; ++i) {
        call->Write(message, nullptr);
        alive = wait_ok();
    }
    call->WritesDone(nullptr);
    wait_ok();
    for (;;) {
        ByteBuffer answer;
        call->Read(&answer, nullptr);
        if (!wait_ok()) {
            break;
        }
        found.answers.push_back(text_of(answer));
    }
    call->Finish(&found.status, nullptr);
    wait_ok();
    return found;
}

Found make(grpc::GenericStub& stub, const std::string& op, const std::string& path,
           const ByteBuffer& message, int count, int deadline_ms) {
    if (op == "stream") {
        return stream(stub, path, message, count, deadline_ms);
    }
    grpc::CompletionQueue queue;
    std::vector<std::unique_ptr<Unary>> calls;
    for (int i = 0; i < (op == "many" ? count : 1); ++i) {
        calls.push_back(
            std::make_unique<Unary>(stub, queue, path, message, deadline_ms, op == "gzip"));
    }
    if (op == "cancel") {
        std::this_thread::sleep_for(std::chrono::milliseconds(count));
        calls.front()->context.TryCancel();
    }
    Found found;
    for (std::size_t i = 0; i < calls.size(); ++i) {
        wait(queue);
    }
    for (const auto& call : calls) {
        if (call->status.ok()) {
            found.answers.push_back(text_of(call->answer));
        } else {
            found.status = call->status;
        }
    }
    return found;
}

}  // namespace

int main(int, char** arguments) {
    grpc::ChannelArguments options;
    options.SetMaxReceiveMessageSize(-1);
    const auto channel = grpc::CreateCustomChannel(std::string("127.0.0.1:") + arguments[1],
                                                   grpc::InsecureChannelCredentials(), options);
    grpc::GenericStub stub(channel);
    for (std::string line; std::getline(std::cin, line);) {
        std::istringstream words(line);
        std::string op, path, name;
        int count = 0, deadline_ms = 0;
        words >> op >> path >> name >> count >> deadline_ms;
        std::ifstream file(name, std::ios::binary);
        const std::string text{std::istreambuf_iterator<char>(file), {}};
        const grpc::Slice slice(text);
        const Found found = make(stub, op, path, ByteBuffer(&slice, 1), count, deadline_ms);
        if (!found.answers.empty()) {
            std::ofstream(name + ".answer", std::ios::binary) << found.answers.front();
        }
        std::printf("%d %zu ", found.status.error_code(), found.answers.size());
        for (const char one : found.status.error_message()) {
            std::printf("%02x", static_cast<unsigned char>(one));
        }
        std::printf("\n");
        std::fflush(stdout);
    }
}
