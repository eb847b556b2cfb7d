// The part of libnghttp2's C interface that the front uses, found at run time.
//
// Declared here and loaded with dlopen, so that neither a build nor a wheel needs its headers: the
// library itself, `libnghttp2.so.14`, has kept this interface since 2015. csrc/tests compares the
// declarations with the library's own header where that is installed.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace gnnserve::front {

struct H2Session;
struct H2Callbacks;
struct H2Option;

// A header field; flags 0: the library copies both.
struct H2Field {
    const std::uint8_t* name;
    const std::uint8_t* value;
    std::size_t name_size;
    std::size_t value_size;
    std::uint8_t flags;
};

struct H2FrameHead {
    std::size_t length;
    std::int32_t stream_id;
    std::uint8_t type;
    std::uint8_t flags;
    std::uint8_t reserved;
};

struct H2Headers {
    H2FrameHead head;
    std::size_t padding;
    std::int32_t priority_stream_id;
    std::int32_t priority_weight;
    std::uint8_t priority_exclusive;
    H2Field* fields;
    std::size_t count;
    std::int32_t category;
};

// Any frame: only these of its members are read here.
union H2Frame {
    H2FrameHead head;
    H2Headers headers;
};

union H2Source {
    int fd;
    void* pointer;
};

using H2Read = ssize_t (*)(H2Session*, std::int32_t stream_id, std::uint8_t* buffer,
                           std::size_t length, std::uint32_t* flags, H2Source*, void* user);

struct H2Provider {
    H2Source source;
    H2Read read;
};

struct H2Setting {
    std::int32_t id;
    std::uint32_t value;
};

// RFC 9113 and the library's own numbers, by their names there.
inline constexpr std::uint8_t kDataFrame = 0, kHeadersFrame = 1, kResetFrame = 3, kGoAwayFrame = 7,
                              kWindowFrame = 8;
inline constexpr std::uint8_t kEndStream = 1;
inline constexpr std::int32_t kRequestHeaders = 0;
inline constexpr std::int32_t kMaxConcurrentStreams = 3, kInitialWindowSize = 4, kMaxFrameSize = 5,
                              kMaxHeaderListSize = 6;
inline constexpr std::uint32_t kNoError = 0, kProtocolError = 1, kInternalError = 2,
                               kFlowControlError = 3, kStreamClosed = 5, kFrameSizeError = 6,
                               kCancel = 8, kEnhanceYourCalm = 11;
inline constexpr std::uint32_t kDataEnds = 1, kNoEndStream = 2, kNoCopy = 4;
inline constexpr int kWouldBlock = -504, kDeferred = -508, kStreamFails = -521,
                     kSessionFails = -902;

// The functions, each under its name in the library without `nghttp2_`.
struct H2Api {
    // Version number as 0xMMmmpp.
    int version_number = 0;

    int (*session_callbacks_new)(H2Callbacks**);
    void (*session_callbacks_del)(H2Callbacks*);
    void (*session_callbacks_set_send_callback)(H2Callbacks*,
                                                ssize_t (*)(H2Session*, const std::uint8_t* data,
                                                            std::size_t size, int, void* user));
    void (*session_callbacks_set_send_data_callback)(H2Callbacks*, int (*)(H2Session*, H2Frame*,
                                                                           const std::uint8_t* head,
                                                                           std::size_t size,
                                                                           H2Source*, void* user));
    void (*session_callbacks_set_data_source_read_length_callback)(
        H2Callbacks*, ssize_t (*)(H2Session*, std::uint8_t type, std::int32_t stream_id,
                                  std::int32_t session_window, std::int32_t stream_window,
                                  std::uint32_t max_frame_size, void* user));
    void (*session_callbacks_set_on_begin_headers_callback)(H2Callbacks*,
                                                            int (*)(H2Session*, const H2Frame*,
                                                                    void* user));
    void (*session_callbacks_set_on_header_callback)(
        H2Callbacks*,
        int (*)(H2Session*, const H2Frame*, const std::uint8_t* name, std::size_t name_size,
                const std::uint8_t* value, std::size_t value_size, std::uint8_t flags, void* user));
    void (*session_callbacks_set_on_data_chunk_recv_callback)(
        H2Callbacks*, int (*)(H2Session*, std::uint8_t flags, std::int32_t stream_id,
                              const std::uint8_t* data, std::size_t size, void* user));
    void (*session_callbacks_set_on_frame_recv_callback)(H2Callbacks*,
                                                         int (*)(H2Session*, const H2Frame*,
                                                                 void* user));
    void (*session_callbacks_set_on_frame_send_callback)(H2Callbacks*,
                                                         int (*)(H2Session*, const H2Frame*,
                                                                 void* user));
    void (*session_callbacks_set_on_stream_close_callback)(
        H2Callbacks*,
        int (*)(H2Session*, std::int32_t stream_id, std::uint32_t error_code, void* user));
    int (*option_new)(H2Option**);
    void (*option_del)(H2Option*);
    void (*option_set_no_auto_window_update)(H2Option*, int);
    // Null before 1.57.
    void (*option_set_stream_reset_rate_limit)(H2Option*, std::uint64_t, std::uint64_t);
    int (*session_server_new2)(H2Session**, const H2Callbacks*, void* user, const H2Option*);
    int (*session_client_new2)(H2Session**, const H2Callbacks*, void* user, const H2Option*);
    void (*session_del)(H2Session*);
    ssize_t (*session_mem_recv)(H2Session*, const std::uint8_t*, std::size_t);
    int (*session_send)(H2Session*);
    int (*session_want_read)(H2Session*);
    int (*session_want_write)(H2Session*);
    int (*session_consume)(H2Session*, std::int32_t stream_id, std::size_t);
    int (*session_consume_connection)(H2Session*, std::size_t);
    int (*session_consume_stream)(H2Session*, std::int32_t stream_id, std::size_t);
    int (*session_resume_data)(H2Session*, std::int32_t stream_id);
    int (*session_set_local_window_size)(H2Session*, std::uint8_t flags, std::int32_t stream_id,
                                         std::int32_t size);
    int (*submit_settings)(H2Session*, std::uint8_t flags, const H2Setting*, std::size_t);
    int (*submit_response)(H2Session*, std::int32_t stream_id, const H2Field*, std::size_t,
                           const H2Provider*);
    std::int32_t (*submit_request)(H2Session*, const void* priority, const H2Field*, std::size_t,
                                   const H2Provider*, void* stream_user);
    int (*submit_trailer)(H2Session*, std::int32_t stream_id, const H2Field*, std::size_t);
    int (*submit_rst_stream)(H2Session*, std::uint8_t flags, std::int32_t stream_id,
                             std::uint32_t error_code);
    int (*submit_shutdown_notice)(H2Session*);
    int (*session_terminate_session)(H2Session*, std::uint32_t error_code);
};

// The library's functions, loaded once and for good; null when it cannot be used, and then
// `why` says so in one sentence.
const H2Api* h2_api(std::string& why);

}  // namespace gnnserve::front
