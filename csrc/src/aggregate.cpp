#include "gnnserve/aggregate.hpp"

#include "aggregate_isa.hpp"

namespace gnnserve {
namespace {

struct Level {
    const char* name;
    const AggregateKernels* kernels;
};

// NOTE: the program itself asks, once. The loader's own mechanisms (ifunc, target_clones) run
// before sanitizers are initialised.
Level best_level() {
#ifdef GNNSERVE_X86_LEVELS
    __builtin_cpu_init();
    if (__builtin_cpu_supports("x86-64-v4") > 0) {
        return {"x86-64-v4", &kV4Kernels};
    }
    if (__builtin_cpu_supports("x86-64-v3") > 0) {
        return {"x86-64-v3", &kV3Kernels};
    }
#endif
    return {"baseline", &kBaselineKernels};
}

const Level& level() {
    static const Level best = best_level();
    return best;
}

}  // namespace

void aggregate(const Aggregation& call) { level().kernels->aggregate(call); }
void combine(const Combination& call) { level().kernels->combine(call); }
void attend(const Attention& call) { level().kernels->attend(call); }
void attention_gradient(const AttentionGradient& call) {
    level().kernels->attention_gradient(call);
}
void head_dots(const HeadDots& call) { level().kernels->head_dots(call); }
const char* instruction_set() { return level().name; }

}  // namespace gnnserve
