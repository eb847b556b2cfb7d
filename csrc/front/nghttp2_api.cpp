#include "nghttp2_api.hpp"

#include <dlfcn.h>

namespace gnnserve::front {
namespace {

constexpr const char* kLibrary = "libnghttp2.so.14";
// 1.43 is Debian 11's and Ubuntu 22.04's: older ones were not tried.
constexpr int kOldest = 0x012b00;

struct Info {  // nghttp2_info
    int age;
    int version_number;
    const char* version;
    const char* protocol;
};

struct Loaded {
    H2Api api{};
    std::string why;
};

Loaded load() {
    Loaded found;
    void* library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        found.why = std::string(kLibrary) + " is not installed";
        return found;
    }
    const auto find = [&]<typename Function>(Function& into, const char* name) {
        into = reinterpret_cast<Function>(dlsym(library, (std::string("nghttp2_") + name).c_str()));
        if (into == nullptr && found.why.empty()) {
            found.why = std::string(kLibrary) + " has no nghttp2_" + name;
        }
    };
    H2Api& api = found.api;
    const Info* (*version)(int) = nullptr;
    find(version, "version");
    if (version != nullptr) {
        const Info* info = version(0);
        api.version_number = info->version_number;
        if (info->version_number < kOldest) {
            found.why = std::string(kLibrary) + " is version " + info->version +
                        "; the front needs 1.43 or newer";
        }
    }
#define GNNSERVE_FIND(name) find(api.name, #name)
    GNNSERVE_FIND(session_callbacks_new);
    GNNSERVE_FIND(session_callbacks_del);
    GNNSERVE_FIND(session_callbacks_set_send_callback);
    GNNSERVE_FIND(session_callbacks_set_send_data_callback);
    GNNSERVE_FIND(session_callbacks_set_data_source_read_length_callback);
    GNNSERVE_FIND(session_callbacks_set_on_begin_headers_callback);
    GNNSERVE_FIND(session_callbacks_set_on_header_callback);
    GNNSERVE_FIND(session_callbacks_set_on_data_chunk_recv_callback);
    GNNSERVE_FIND(session_callbacks_set_on_frame_recv_callback);
    GNNSERVE_FIND(session_callbacks_set_on_frame_send_callback);
    GNNSERVE_FIND(session_callbacks_set_on_stream_close_callback);
    GNNSERVE_FIND(option_new);
    GNNSERVE_FIND(option_del);
    GNNSERVE_FIND(option_set_no_auto_window_update);
    GNNSERVE_FIND(session_server_new2);
    GNNSERVE_FIND(session_client_new2);
    GNNSERVE_FIND(session_del);
    GNNSERVE_FIND(session_mem_recv);
    GNNSERVE_FIND(session_send);
    GNNSERVE_FIND(session_want_read);
    GNNSERVE_FIND(session_want_write);
    GNNSERVE_FIND(session_consume);
    GNNSERVE_FIND(session_consume_connection);
    GNNSERVE_FIND(session_consume_stream);
    GNNSERVE_FIND(session_resume_data);
    GNNSERVE_FIND(session_set_local_window_size);
    GNNSERVE_FIND(submit_settings);
    GNNSERVE_FIND(submit_response);
    GNNSERVE_FIND(submit_request);
    GNNSERVE_FIND(submit_trailer);
    GNNSERVE_FIND(submit_rst_stream);
    GNNSERVE_FIND(submit_shutdown_notice);
    GNNSERVE_FIND(session_terminate_session);
#undef GNNSERVE_FIND
    api.option_set_stream_reset_rate_limit =
        reinterpret_cast<decltype(api.option_set_stream_reset_rate_limit)>(
            dlsym(library, "nghttp2_option_set_stream_reset_rate_limit"));
    return found;
}

}  // namespace

const H2Api* h2_api(std::string& why) {
    static const Loaded loaded = load();
    why = loaded.why;
    return loaded.why.empty() ? &loaded.api : nullptr;
}

}  // namespace gnnserve::front
