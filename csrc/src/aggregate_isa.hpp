// One set of the functions of aggregate.hpp per instruction set; aggregate.cpp picks one.
#pragma once

#include "gnnserve/aggregate.hpp"

namespace gnnserve {

struct AggregateKernels {
    void (*aggregate)(const Aggregation&);
    void (*combine)(const Combination&);
    void (*attend)(const Attention&);
    void (*attention_gradient)(const AttentionGradient&);
    void (*head_dots)(const HeadDots&);
};

extern const AggregateKernels kBaselineKernels;
#ifdef GNNSERVE_X86_LEVELS
extern const AggregateKernels kV3Kernels;
extern const AggregateKernels kV4Kernels;
#endif

}  // namespace gnnserve
