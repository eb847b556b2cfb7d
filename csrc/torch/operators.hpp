#pragma once

namespace gnnserve {

// Defines torch.ops.gnnserve.*, once a process; throws runtime_error when PyTorch is not there.
void define_operators();

}  // namespace gnnserve
