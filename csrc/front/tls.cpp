#include "tls.hpp"

#include <dlfcn.h>

#include <array>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <utility>

namespace gnnserve::front {
namespace {

constexpr const char* kLibraries[] = {"libcrypto.so.3", "libssl.so.3"};

// Names of OpenSSL's constants are in the comments.
constexpr int kModeOption = 33;                       // SSL_CTRL_MODE
constexpr int kSessionCacheOption = 44;               // SSL_CTRL_SET_SESS_CACHE_MODE
constexpr int kMinVersionOption = 123;                // SSL_CTRL_SET_MIN_PROTO_VERSION
constexpr long kTls12 = 0x0303;                       // TLS1_2_VERSION
constexpr long kReleaseBuffers = 0x10;                // SSL_MODE_RELEASE_BUFFERS
constexpr std::uint64_t kNoTicket = 1u << 14;         // SSL_OP_NO_TICKET
constexpr std::uint64_t kNoRenegotiation = 1u << 30;  // SSL_OP_NO_RENEGOTIATION
constexpr int kPem = 1;                               // SSL_FILETYPE_PEM
constexpr int kVerifyPeer = 1 | 2;  // SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT
constexpr int kAlpnTaken = 0, kAlpnRefused = 2;  // SSL_TLSEXT_ERR_OK, …_ALERT_FATAL
constexpr int kWantRead = 2, kWantWrite = 3;     // SSL_ERROR_WANT_READ, …_WANT_WRITE
constexpr unsigned long kCheckRevoked = 4;       // X509_V_FLAG_CRL_CHECK
constexpr int kMessageArgument = 16;             // SSL_CTRL_SET_MSG_CALLBACK_ARG
constexpr int kAlert = 21, kHandshake = 22;      // SSL3_RT_ALERT, SSL3_RT_HANDSHAKE
constexpr int kAlternativeNames = 85;            // NID_subject_alt_name
constexpr int kEmail = 1, kDns = 2, kUri = 6;    // GEN_EMAIL, GEN_DNS, GEN_URI
constexpr std::size_t kMostNames = 4096;

using Alpn = int (*)(void* session, const unsigned char** out, unsigned char* out_size,
                     const unsigned char* in, unsigned in_size, void* user);

using Told = void (*)(int sent, int version, int kind, const void* content, std::size_t size,
                      void* session, void* user);

struct Api {
    // libssl
    const void* (*TLS_server_method)();
    void* (*SSL_CTX_new)(const void* method);
    void (*SSL_CTX_free)(void*);
    long (*SSL_CTX_ctrl)(void*, int what, long value, void* pointer);
    std::uint64_t (*SSL_CTX_set_options)(void*, std::uint64_t);
    int (*SSL_CTX_use_certificate_chain_file)(void*, const char*);
    int (*SSL_CTX_use_PrivateKey_file)(void*, const char*, int);
    int (*SSL_CTX_check_private_key)(const void*);
    int (*SSL_CTX_load_verify_locations)(void*, const char* file, const char* folder);
    void (*SSL_CTX_set_verify)(void*, int mode, void* callback);
    void (*SSL_CTX_set_alpn_select_cb)(void*, Alpn, void* user);
    void (*SSL_CTX_set_default_passwd_cb)(void*, int (*)(char*, int, int, void*));
    void (*SSL_CTX_set_msg_callback)(void*, Told);
    void* (*SSL_CTX_get0_param)(void*);
    void* (*SSL_new)(void* context);
    long (*SSL_ctrl)(void*, int what, long value, void* pointer);
    void (*SSL_free)(void*);
    void (*SSL_set_bio)(void*, void* in, void* out);
    void (*SSL_set_accept_state)(void*);
    int (*SSL_is_init_finished)(const void*);
    int (*SSL_read)(void*, void*, int);
    int (*SSL_write)(void*, const void*, int);
    int (*SSL_get_error)(const void*, int);
    void* (*SSL_get1_peer_certificate)(const void*);
    // libcrypto
    const void* (*BIO_s_mem)();
    void* (*BIO_new)(const void* method);
    int (*BIO_free)(void*);
    int (*BIO_read)(void*, void*, int);
    int (*BIO_write)(void*, const void*, int);
    void (*ERR_clear_error)();
    unsigned long (*ERR_get_error)();
    const char* (*ERR_reason_error_string)(unsigned long);
    int (*X509_VERIFY_PARAM_set_flags)(void*, unsigned long);
    void (*X509_free)(void*);
    void* (*X509_get_ext_d2i)(const void*, int nid, int*, int*);
    void (*GENERAL_NAMES_free)(void*);
    int (*OPENSSL_sk_num)(const void*);
    void* (*OPENSSL_sk_value)(const void*, int);
    void* (*GENERAL_NAME_get0_value)(const void*, int* kind);
    const unsigned char* (*ASN1_STRING_get0_data)(const void*);
    int (*ASN1_STRING_length)(const void*);
};

struct Loaded {
    Api api{};
    std::string why;
};

Loaded load() {
    Loaded found;
    std::array<void*, std::size(kLibraries)> libraries{};
    for (std::size_t i = 0; i < libraries.size(); ++i) {
        libraries[i] = dlopen(kLibraries[i], RTLD_NOW | RTLD_LOCAL);
        if (libraries[i] == nullptr) {
            found.why = std::string(kLibraries[i]) + " is not installed";
            return found;
        }
    }
    const auto find = [&]<typename Function>(Function& into, const char* name) {
        for (void* library : libraries) {
            if (into == nullptr) {
                into = reinterpret_cast<Function>(dlsym(library, name));
            }
        }
        if (into == nullptr && found.why.empty()) {
            found.why = std::string(kLibraries[1]) + " has no " + name;
        }
    };
    Api& api = found.api;
#define GNNSERVE_FIND(name) find(api.name, #name)
    GNNSERVE_FIND(TLS_server_method);
    GNNSERVE_FIND(SSL_CTX_new);
    GNNSERVE_FIND(SSL_CTX_free);
    GNNSERVE_FIND(SSL_CTX_ctrl);
    GNNSERVE_FIND(SSL_CTX_set_options);
    GNNSERVE_FIND(SSL_CTX_use_certificate_chain_file);
    GNNSERVE_FIND(SSL_CTX_use_PrivateKey_file);
    GNNSERVE_FIND(SSL_CTX_check_private_key);
    GNNSERVE_FIND(SSL_CTX_load_verify_locations);
    GNNSERVE_FIND(SSL_CTX_set_verify);
    GNNSERVE_FIND(SSL_CTX_set_alpn_select_cb);
    GNNSERVE_FIND(SSL_CTX_set_default_passwd_cb);
    GNNSERVE_FIND(SSL_CTX_set_msg_callback);
    GNNSERVE_FIND(SSL_CTX_get0_param);
    GNNSERVE_FIND(SSL_new);
    GNNSERVE_FIND(SSL_ctrl);
    GNNSERVE_FIND(SSL_free);
    GNNSERVE_FIND(SSL_set_bio);
    GNNSERVE_FIND(SSL_set_accept_state);
    GNNSERVE_FIND(SSL_is_init_finished);
    GNNSERVE_FIND(SSL_read);
    GNNSERVE_FIND(SSL_write);
    GNNSERVE_FIND(SSL_get_error);
    GNNSERVE_FIND(SSL_get1_peer_certificate);
    GNNSERVE_FIND(BIO_s_mem);
    GNNSERVE_FIND(BIO_new);
    GNNSERVE_FIND(BIO_free);
    GNNSERVE_FIND(BIO_read);
    GNNSERVE_FIND(BIO_write);
    GNNSERVE_FIND(ERR_clear_error);
    GNNSERVE_FIND(ERR_get_error);
    GNNSERVE_FIND(ERR_reason_error_string);
    GNNSERVE_FIND(X509_VERIFY_PARAM_set_flags);
    GNNSERVE_FIND(X509_free);
    GNNSERVE_FIND(X509_get_ext_d2i);
    GNNSERVE_FIND(GENERAL_NAMES_free);
    GNNSERVE_FIND(OPENSSL_sk_num);
    GNNSERVE_FIND(OPENSSL_sk_value);
    GNNSERVE_FIND(GENERAL_NAME_get0_value);
    GNNSERVE_FIND(ASN1_STRING_get0_data);
    GNNSERVE_FIND(ASN1_STRING_length);
#undef GNNSERVE_FIND
    return found;
}

const Loaded& loaded() {
    static const Loaded found = load();
    return found;
}

const Api& api() { return loaded().api; }

// Takes `h2`, and refuses clients that do not offer it.
int choose_protocol(void*, const unsigned char** out, unsigned char* out_size,
                    const unsigned char* in, unsigned in_size, void*) {
    for (unsigned at = 0; at < in_size; at += 1u + in[at]) {
        if (in[at] == 2 && at + 2 < in_size && in[at + 1] == 'h' && in[at + 2] == '2') {
            *out = in + at + 1;
            *out_size = 2;
            return kAlpnTaken;
        }
    }
    return kAlpnRefused;
}

// A key with a password is refused: the library would ask the terminal for it.
int no_password(char*, int, int, void*) { return 0; }

// Counts what the protocol says of itself, as that a key is renewed, in the session's counter.
void count_told(int, int, int kind, const void*, std::size_t, void*, void* user) {
    if (user != nullptr && (kind == kHandshake || kind == kAlert)) {
        *static_cast<std::size_t*>(user) += 1;
    }
}

// The file holds a list of certificates that an authority has revoked.
bool has_revoked(const std::string& name) {
    std::ifstream file(name, std::ios::binary);
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    return text.find("-----BEGIN X509 CRL-----") != std::string::npos;
}

[[noreturn]] void fail(const std::string& what) {
    const char* reason = api().ERR_reason_error_string(api().ERR_get_error());
    throw std::runtime_error(what + ": " + (reason == nullptr ? "it cannot be used" : reason));
}

int size_of(std::size_t size) { return static_cast<int>(size); }

// A name that can stand in a header between commas.
bool is_plain(const std::string& name) {
    for (const char one : name) {
        if (one <= ' ' || one > '~' || one == ',') {
            return false;
        }
    }
    return !name.empty();
}

}  // namespace

std::string tls_lacks() { return loaded().why; }

TlsContext::TlsContext(const std::string& certificate, const std::string& key,
                       const std::string& client_ca) {
    if (!loaded().why.empty()) {
        throw std::runtime_error(loaded().why);
    }
    const Api& a = api();
    a.ERR_clear_error();
    context_ = a.SSL_CTX_new(a.TLS_server_method());
    if (context_ == nullptr) {
        fail("TLS");
    }
    try {
        a.SSL_CTX_ctrl(context_, kMinVersionOption, kTls12, nullptr);
        // No session is resumed: each client shows its certificate, and a new one counts at once.
        a.SSL_CTX_ctrl(context_, kSessionCacheOption, 0, nullptr);
        a.SSL_CTX_ctrl(context_, kModeOption, kReleaseBuffers, nullptr);
        a.SSL_CTX_set_options(context_, kNoTicket | kNoRenegotiation);
        a.SSL_CTX_set_alpn_select_cb(context_, choose_protocol, nullptr);
        a.SSL_CTX_set_default_passwd_cb(context_, no_password);
        a.SSL_CTX_set_msg_callback(context_, count_told);
        if (a.SSL_CTX_use_certificate_chain_file(context_, certificate.c_str()) != 1) {
            fail(certificate);
        }
        if (a.SSL_CTX_use_PrivateKey_file(context_, key.c_str(), kPem) != 1 ||
            a.SSL_CTX_check_private_key(context_) != 1) {
            fail(key);
        }
        if (!client_ca.empty()) {
            if (a.SSL_CTX_load_verify_locations(context_, client_ca.c_str(), nullptr) != 1) {
                fail(client_ca);
            }
            a.SSL_CTX_set_verify(context_, kVerifyPeer, nullptr);
            if (has_revoked(client_ca)) {
                a.X509_VERIFY_PARAM_set_flags(a.SSL_CTX_get0_param(context_), kCheckRevoked);
            }
        }
    } catch (...) {
        a.SSL_CTX_free(context_);
        throw;
    }
}

TlsContext::~TlsContext() { api().SSL_CTX_free(context_); }

TlsSession::TlsSession(const TlsContext& context) {
    const Api& a = api();
    session_ = a.SSL_new(context.context_);
    in_ = a.BIO_new(a.BIO_s_mem());
    out_ = a.BIO_new(a.BIO_s_mem());
    if (session_ == nullptr || in_ == nullptr || out_ == nullptr) {
        a.SSL_free(session_);
        a.BIO_free(in_);
        a.BIO_free(out_);
        throw std::runtime_error("TLS: there is no memory for a session");
    }
    a.SSL_set_bio(session_, in_, out_);
    a.SSL_set_accept_state(session_);
    a.SSL_ctrl(session_, kMessageArgument, 0, &told_);
}

TlsSession::~TlsSession() { api().SSL_free(session_); }

bool TlsSession::ready() const { return api().SSL_is_init_finished(session_) == 1; }

void TlsSession::put(const char* data, std::size_t size) {
    api().BIO_write(in_, data, size_of(size));
}

ssize_t TlsSession::read(char* buffer, std::size_t size) {
    api().ERR_clear_error();
    const int got = api().SSL_read(session_, buffer, size_of(size));
    if (got > 0) {
        return got;
    }
    const int error = api().SSL_get_error(session_, got);
    return error == kWantRead || error == kWantWrite ? 0 : -1;
}

bool TlsSession::write(const char* data, std::size_t size) {
    api().ERR_clear_error();
    // All of it is taken, as it goes to memory.
    return size == 0 || api().SSL_write(session_, data, size_of(size)) == size_of(size);
}

void TlsSession::collect(std::string& out) {
    std::array<char, 16 << 10> part;
    for (int got; (got = api().BIO_read(out_, part.data(), size_of(part.size()))) > 0;) {
        out.append(part.data(), static_cast<std::size_t>(got));
    }
}

const std::string& TlsSession::names() {
    if (std::exchange(has_names_, true)) {
        return names_;
    }
    const Api& a = api();
    void* certificate = a.SSL_get1_peer_certificate(session_);
    if (certificate == nullptr) {
        return names_;
    }
    void* list = a.X509_get_ext_d2i(certificate, kAlternativeNames, nullptr, nullptr);
    const int count = list == nullptr ? 0 : a.OPENSSL_sk_num(list);
    for (int i = 0; i < count; ++i) {
        int kind = 0;
        const void* value = a.GENERAL_NAME_get0_value(a.OPENSSL_sk_value(list, i), &kind);
        if (kind != kEmail && kind != kDns && kind != kUri) {
            continue;
        }
        const std::string name(reinterpret_cast<const char*>(a.ASN1_STRING_get0_data(value)),
                               static_cast<std::size_t>(a.ASN1_STRING_length(value)));
        if (is_plain(name) && names_.size() + name.size() < kMostNames) {
            names_ += (names_.empty() ? "" : ",") + name;
        }
    }
    if (list != nullptr) {
        a.GENERAL_NAMES_free(list);
    }
    a.X509_free(certificate);
    return names_;
}

}  // namespace gnnserve::front
