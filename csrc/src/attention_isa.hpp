// Attention and its gradient: a part of aggregate_isa.cpp.
#pragma once

#include "rows_isa.hpp"

namespace gnnserve {
namespace {

inline float leaky(float x, float slope) { return x > 0 ? x : x * slope; }

// Loops over heads are short: a kHeads other than 0 lets compilers make each a single vector.
template <int kHeads>
void score_additive(const Attention& call, Index row, std::int32_t begin, std::int32_t end) {
    const Index heads = kHeads == 0 ? call.heads : kHeads;
    const float* right = call.right + row * heads;
    float mean[kMostHeads] = {};
    for (std::int32_t s = begin; s < end; ++s) {
        const float* left = call.left + call.graph.source[s] * heads;
        float* alpha = call.alpha + s * heads;
        for (Index h = 0; h < heads; ++h) {
            alpha[h] = left[h] + right[h];
        }
        if (call.edge == nullptr) {
            continue;
        }
        if (call.added_loops && s == begin) {
            continue;
        }
        const float* edge = call.edge + call.slot_edge[s] * heads;
        for (Index h = 0; h < heads; ++h) {
            alpha[h] += edge[h];
            mean[h] += edge[h];
        }
    }
    if (call.edge != nullptr && call.added_loops && end - begin > 1) {
        for (Index h = 0; h < heads; ++h) {
            call.alpha[begin * heads + h] += mean[h] / static_cast<float>(end - begin - 1);
        }
    }
    float* alpha = call.alpha + begin * heads;
    const Index count = (end - begin) * heads;
    const float slope = call.scale;
    for (Index k = 0; k < count; ++k) {
        alpha[k] = leaky(alpha[k], slope);
    }
}

void score_wide(const Attention& call, Index row, std::int32_t begin, std::int32_t end) {
    const Index heads = call.heads;
    const Index channels = call.channels;
    const Index width = heads * channels;
    const float scale = call.scale;
    const bool dynamic = call.score == Score::kDynamic;
    for (std::int32_t s = begin; s < end; ++s) {
        for (Index h = 0; h < heads; ++h) {
            const float* left = call.left + call.graph.source[s] * width + h * channels;
            const float* right = call.right + row * width + h * channels;
            float& alpha = call.alpha[s * heads + h];
            if (dynamic) {
                alpha = dot(left, right, call.att + h * channels, channels,
                            [scale](auto a, auto b, auto w) {
                                const auto x = a + b;
                                return w * (x > 0 ? x : x * scale);
                            });
            } else {
                alpha = scale * dot(left, right, left, channels,
                                    [](auto a, auto b, auto) { return a * b; });
            }
        }
    }
}

// Turns a row's scores [slots, heads] into weights that sum to 1 for each head.
template <int kHeads>
void softmax(float* alpha, Index slots, Index any_heads) {
    const Index heads = kHeads == 0 ? any_heads : kHeads;
    float most[kMostHeads];
    float sum[kMostHeads];
    for (Index h = 0; h < heads; ++h) {
        most[h] = alpha[h];
        sum[h] = 1e-16F;
    }
    for (Index s = 1; s < slots; ++s) {
        for (Index h = 0; h < heads; ++h) {
            const float score = alpha[s * heads + h];
            most[h] = score > most[h] ? score : most[h];
        }
    }
    for (Index s = 0; s < slots; ++s) {
        for (Index h = 0; h < heads; ++h) {
            alpha[s * heads + h] -= most[h];
        }
    }
    for (Index k = 0; k < slots * heads; ++k) {
        alpha[k] = exp_negative(alpha[k]);
    }
    for (Index s = 0; s < slots; ++s) {
        for (Index h = 0; h < heads; ++h) {
            sum[h] += alpha[s * heads + h];
        }
    }
    for (Index h = 0; h < heads; ++h) {
        sum[h] = 1.0F / sum[h];
    }
    for (Index s = 0; s < slots; ++s) {
        for (Index h = 0; h < heads; ++h) {
            alpha[s * heads + h] *= sum[h];
        }
    }
}

template <int kHeads>
void attend_with(const Attention& call) {
    const Csr& graph = call.graph;
    const Index heads = call.heads;
    const Index channels = call.channels;
    const Index width = heads * channels;
    const Index out_width = call.average ? channels : width;
    Block blocks[kMostBlocks];
    for (Index start = 0; start < channels;) {
        const bool scored = start == 0;
        const auto sums = call.average ? cut<Terms::kByHead> : cut<Terms::kWeighted>;
        const int count = sums(channels, Reduce::kSum, start, blocks);
        const bool done = start >= channels;
        in_pieces(graph, [&](Index first, const Csr& rows) {
            for (Index i = 0; scored && i < rows.rows; ++i) {
                const std::int32_t begin = rows.begin[i];
                const std::int32_t end = rows.begin[i + 1];
                if (begin == end) {
                    continue;
                }
                if (call.score == Score::kAdditive) {
                    score_additive<kHeads>(call, first + i, begin, end);
                } else {
                    score_wide(call, first + i, begin, end);
                }
                softmax<kHeads>(call.alpha + begin * heads, end - begin, heads);
            }
            float* out = call.out + first * out_width;
            for (Index h = 0; h < (call.average ? 1 : heads); ++h) {
                for (int b = 0; b < count; ++b) {
                    const Block& block = blocks[b];
                    block.run({rows, call.value + h * channels + block.start, width, call.alpha + h,
                               heads, heads, channels, block.last, out + h * channels + block.start,
                               out_width});
                }
            }
            if (done) {
                const float scale = call.average ? 1.0F / static_cast<float>(heads) : 1.0F;
                for (Index i = 0; i < rows.rows; ++i) {
                    finish_row(call.finish, first + i, out_width, scale, out + i * out_width);
                }
            }
        });
    }
}

void run_attend(const Attention& call) {
    switch (call.heads) {
        case 1:
            return attend_with<1>(call);
        case 4:
            return attend_with<4>(call);
        case 8:
            return attend_with<8>(call);
        default:
            return attend_with<0>(call);
    }
}

// out[i, h, c] = Σ over the slots s of i of weight[s, h] · x[source[s], h, c], where rows of x are
// `stride` apart, and heads `head_stride`: 0 when all have the same columns.
void sum_by_head(const Csr& graph, const float* weight, const float* x, Index stride,
                 Index head_stride, Index heads, Index channels, float* out) {
    Block blocks[kMostBlocks];
    for (Index start = 0; start < channels;) {
        const int count = cut<Terms::kWeighted>(channels, Reduce::kSum, start, blocks);
        in_pieces(graph, [&](Index first, const Csr& rows) {
            for (Index h = 0; h < heads; ++h) {
                for (int b = 0; b < count; ++b) {
                    const Block& block = blocks[b];
                    block.run({rows, x + h * head_stride + block.start, stride, weight + h, heads,
                               1, 0, block.last, out + (first * heads + h) * channels + block.start,
                               heads * channels});
                }
            }
        });
    }
}

// Sums weights [slots, H] over the slots of each row.
void sum_weights(const Csr& graph, const float* weight, Index heads, float* out) {
    for (Index i = 0; i < graph.rows; ++i) {
        float sum[kMostHeads] = {};
        for (std::int32_t s = graph.begin[i]; s < graph.begin[i + 1]; ++s) {
            for (Index h = 0; h < heads; ++h) {
                sum[h] += weight[s * heads + h];
            }
        }
        for (Index h = 0; h < heads; ++h) {
            out[i * heads + h] = sum[h];
        }
    }
}

// Writes the gradient of each score: through the softmax, and through the leaky sum of kAdditive.
void score_gradients(const AttentionGradient& call) {
    const Csr& graph = call.graph;
    const Index heads = call.heads;
    const Index channels = call.channels;
    const Index width = heads * channels;
    const Index out_width = call.average ? channels : width;
    const Index head_stride = call.average ? 0 : channels;
    for (Index i = 0; i < graph.rows; ++i) {
        const float* gradient = call.gradient + i * out_width;
        float total[kMostHeads] = {};
        for (std::int32_t s = graph.begin[i]; s < graph.begin[i + 1]; ++s) {
            const float* value = call.value + graph.source[s] * width;
            for (Index h = 0; h < heads; ++h) {
                const float of_alpha = dot(gradient + h * head_stride, value + h * channels, value,
                                           channels, [](auto a, auto b, auto) { return a * b; });
                call.of_score[s * heads + h] = of_alpha;
                total[h] += call.alpha[s * heads + h] * of_alpha;
            }
        }
        for (std::int32_t s = graph.begin[i]; s < graph.begin[i + 1]; ++s) {
            for (Index h = 0; h < heads; ++h) {
                float& of_score = call.of_score[s * heads + h];
                of_score = call.alpha[s * heads + h] * (of_score - total[h]);
                if (call.score == Score::kAdditive) {
                    const Index j = graph.source[s];
                    const float sum = call.left[j * heads + h] + call.right[i * heads + h];
                    of_score *= sum > 0 ? 1 : call.scale;
                } else if (call.score == Score::kDot) {
                    of_score *= call.scale;
                }
            }
        }
    }
}

// For one vector of columns of one head, writes the gradient of `own`, one of the two terms of a
// dynamic score, whose other term comes from the sources; and that of `att` unless it is null.
template <int L>
void dynamic_columns(const Csr& graph, const float* of_score, const AttentionGradient& call,
                     const float* own, const float* other, const float* att, float* of_own,
                     float* of_att) {
    using V = Lanes<L>;
    using Vector = typename V::Vector;
    const Index heads = call.heads;
    const Index width = heads * call.channels;
    const Vector zero = {};
    Vector by_att = {};
    for (Index i = 0; i < graph.rows; ++i) {
        const Vector fixed = V::load(own + i * width);
        Vector sum = {};
        Vector row_by_att = {};
        for (std::int32_t s = graph.begin[i]; s < graph.begin[i + 1]; ++s) {
            const Vector x = fixed + V::load(other + graph.source[s] * width);
            const Vector above = zero + of_score[s * heads];
            const Vector below = zero + of_score[s * heads] * call.scale;
            const Vector slope = x > 0 ? above : below;
            sum += slope;
            row_by_att += slope * x;
        }
        V::store(of_own + i * width, sum * V::load(att));
        by_att += row_by_att;
    }
    if (of_att != nullptr) {
        V::store(of_att, by_att);
    }
}

template <int L>
void dynamic_gradients(const AttentionGradient& call) {
    const Index channels = call.channels;
    for (Index h = 0; h < call.heads; ++h) {
        for (Index start = 0; start < channels; start += L) {
            // The last vector ends with the last column.
            const Index at = h * channels + (start + L < channels ? start : channels - L);
            dynamic_columns<L>(call.graph, call.of_score + h, call, call.right + at, call.left + at,
                               call.att + at, call.of_right + at, call.of_att + at);
            dynamic_columns<L>(call.reversed, call.by_source + h, call, call.left + at,
                               call.right + at, call.att + at, call.of_left + at, nullptr);
        }
    }
}

// Gathers along the slots and along the reversed ones, so that the order of sums is fixed.
void run_attention_gradient(const AttentionGradient& call) {
    const Index heads = call.heads;
    const Index channels = call.channels;
    const Index width = heads * channels;
    const Index slots = call.reversed.begin[call.reversed.rows];
    const auto reverse = [&](const float* by_slot) {
        for (Index r = 0; r < slots; ++r) {
            for (Index h = 0; h < heads; ++h) {
                call.by_source[r * heads + h] = by_slot[call.reversed_slot[r] * heads + h];
            }
        }
    };
    reverse(call.alpha);
    sum_by_head(call.reversed, call.by_source, call.gradient, call.average ? channels : width,
                call.average ? 0 : channels, heads, channels, call.of_value);
    score_gradients(call);
    reverse(call.of_score);
    switch (call.score) {
        case Score::kAdditive:
            sum_weights(call.graph, call.of_score, heads, call.of_right);
            return sum_weights(call.reversed, call.by_source, heads, call.of_left);
        case Score::kDynamic:
            return channels >= kWide     ? dynamic_gradients<kWide>(call)
                   : channels >= kNarrow ? dynamic_gradients<kNarrow>(call)
                                         : dynamic_gradients<1>(call);
        case Score::kDot:
            sum_by_head(call.graph, call.of_score, call.left, width, channels, heads, channels,
                        call.of_right);
            return sum_by_head(call.reversed, call.by_source, call.right, width, channels, heads,
                               channels, call.of_left);
    }
}

}  // namespace
}  // namespace gnnserve
