// TLS for clients of the front, by OpenSSL 3, which is found at run time.
//
// A session turns bytes of the socket into bytes of HTTP/2 and back, in memory: it knows no socket.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <memory>
#include <string>
#include <utility>

namespace gnnserve::front {

// Why encryption is not possible on this machine; empty when it is.
std::string tls_lacks();

// Certificate, key and authorities of clients; connections that begin share it.
class TlsContext {
public:
    // Files in PEM format; with `client_ca`, clients must show a certificate of its authorities,
    // and none that a list in the same file says is revoked.
    // Throws std::runtime_error when the files, or the library, cannot be used.
    TlsContext(const std::string& certificate, const std::string& key,
               const std::string& client_ca);
    ~TlsContext();
    TlsContext(const TlsContext&) = delete;
    TlsContext& operator=(const TlsContext&) = delete;

private:
    friend class TlsSession;
    void* context_;
};

// The server's side of one connection. Belongs to the thread that polls.
class TlsSession {
public:
    explicit TlsSession(const TlsContext& context);
    ~TlsSession();
    TlsSession(const TlsSession&) = delete;
    TlsSession& operator=(const TlsSession&) = delete;

    // The handshake is over: `write` may be called.
    bool ready() const;
    // Takes bytes that came from the socket.
    void put(const char* data, std::size_t size);
    // Returns the number of bytes read, 0 when more must come first, -1 when the connection is
    // over.
    ssize_t read(char* buffer, std::size_t size);
    // Encrypts bytes; false when the connection is over.
    bool write(const char* data, std::size_t size);
    // Appends what is to be sent.
    void collect(std::string& out);
    // Alternative names of the client's certificate, with commas between them.
    const std::string& names();
    // Returns how many messages of the protocol itself there were since the last call: a client
    // may send them without end, and each costs more than its bytes.
    std::size_t take_told() { return std::exchange(told_, 0); }

private:
    void* session_;
    void *in_, *out_;
    std::size_t told_ = 0;
    bool has_names_ = false;
    std::string names_;
};

}  // namespace gnnserve::front
