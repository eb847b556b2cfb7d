// The pool of blocks as Python has it.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>

#include "gnnserve/block_pool.hpp"

namespace gnnserve::bindings {

class PythonPool {
public:
    // Holds the buffer `memory` until it is closed and no block is left.
    PythonPool(nanobind::handle memory, std::int64_t capacity, std::int64_t alignment);

    // Throws ValueError once it is closed.
    const std::shared_ptr<BlockPool>& get() const;
    void close() { pool_.reset(); }

private:
    std::shared_ptr<BlockPool> pool_;
};

void bind_block_pool(nanobind::module_& module);

}  // namespace gnnserve::bindings
