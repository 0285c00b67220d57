// Expert choice from fp32 router logits, one warp a row.
// s = sigmoid(logit); the top_k of s + bias are chosen (after the group limit), equal scores taking the lower index, and
// written in ascending order; the weights are s of the chosen, divided by (their sum + 1e-20) when `norm`, times `scaling`. All fp32.
#pragma once
#include "common.cuh"

struct Router {
    const float *bias;   // [experts]
    int *ids;            // [rows, top_k]
    float *weights;      // [rows, top_k]
    u32 *counter;        // one zero word: tiles finished so far (the fused path leaves it zero again)
    int experts, top_k, groups, top_groups, norm;
    float scaling;
};

#ifndef PER_LANE
#define PER_LANE 16  // experts of a lane: at most 32 * PER_LANE in all
#endif

// ids, weights: where the row's choice goes.
DEVICE void router_select(const Router &p, const float *logits, int lane, int *ids, float *weights) {
    const int experts = p.experts, width = experts / p.groups;
    u32 key[PER_LANE];  // monotone map of s + bias, 0 where there is no expert
    float chance[PER_LANE];  // s
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
        const int e = i * 32 + lane;
        key[i] = e < experts ? __float_as_uint(load_f32(logits + e)) : 0u;
    }
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
        const int e = i * 32 + lane;
        chance[i] = sigmoid(__uint_as_float(key[i]));
        if (e < experts) key[i] = ordered(chance[i] + p.bias[e]) + 1u;  // NaN is 1
    }
    if (p.groups > 1) {  // a group's score is the sum of its two best
        u32 score = 0;   // of group `lane`
#pragma unroll 1
        for (int o = 0; o < p.groups; ++o) {
            u32 best[2];
            int gone = -1;
#pragma unroll 1
            for (int n = 0; n < 2; ++n) {
                u32 v = 0;
#pragma unroll
                for (int i = 0; i < PER_LANE; ++i)
                    if ((i * 32 + lane) / width == o && i * 32 + lane != gone) v = max(v, key[i]);
                best[n] = __reduce_max_sync(~0u, v);
                int holder = 0x7fffffff;
#pragma unroll
                for (int i = PER_LANE - 1; i >= 0; --i)
                    if ((i * 32 + lane) / width == o && i * 32 + lane != gone && key[i] == best[n]) holder = i * 32 + lane;
                gone = __reduce_min_sync(~0u, holder);
            }
            const u32 sum = ordered(unordered(best[0] - 1u) + unordered(best[1] - 1u));
            if (lane == o) score = sum;
        }
        int rank = 0;
        for (int o = 0; o < p.groups; ++o) {
            const u32 other = __shfl_sync(~0u, score, o);
            rank += other > score || (other == score && o < lane);
        }
        const u32 dropped = __ballot_sync(~0u, lane < p.groups && rank >= p.top_groups);
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i)
            if (i * 32 + lane < experts && (dropped >> ((i * 32 + lane) / width) & 1)) key[i] = 0u;
    }
    int mine = 0;
    float s = 0.0f;
    u32 best;  // of the lane's keys, and where it is
    int at;
    auto offer = [&] {
        best = key[0], at = lane;
#pragma unroll
        for (int i = 1; i < PER_LANE; ++i)
            if (key[i] > best) best = key[i], at = i * 32 + lane;
    };
    offer();
#pragma unroll 1
    for (int j = 0; j < p.top_k; ++j) {
        const u32 top = __reduce_max_sync(~0u, best);
        const int winner = __reduce_min_sync(~0u, best == top ? at : 0x7fffffff);
        float won = 0.0f;
        if (at == winner) {
#pragma unroll
            for (int i = 0; i < PER_LANE; ++i)
                if (i * 32 + lane == winner) key[i] = 0u, won = chance[i];
            offer();
        }
        won = __shfl_sync(~0u, won, winner & 31);
        if (lane == j) mine = winner, s = won;
    }
    int rank = 0;  // ascending expert ids, like every selection of the engine
    for (int j = 0; j < p.top_k; ++j) rank += __shfl_sync(~0u, mine, j) < mine;
    float total = 0.0f;
    for (int j = 0; j < p.top_k; ++j)
        total += __shfl_sync(~0u, s, __ffs(__ballot_sync(~0u, lane < p.top_k && rank == j)) - 1);
    if (lane < p.top_k) {
        ids[rank] = mine;
        weights[rank] = (p.norm ? s / (total + 1e-20f) : s) * p.scaling;
    }
}
