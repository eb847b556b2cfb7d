#pragma once

namespace gnnserve {

// Defines torch.ops.gnnserve.* once per process; throws runtime_error when PyTorch is not loaded.
void define_operators();

}  // namespace gnnserve
