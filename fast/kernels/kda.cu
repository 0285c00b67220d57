// One KDA decode step: conv + SiLU, L2 norm, decay, delta rule, gated norm; `tokens` consecutive rows a sequence.
//
// A block takes a head of one sequence after the other; while one is computed the fp32 state of the next is on its way to
// shared memory, KR rows of four value columns a thread.
// With FUSED the two low-rank products f_b f_a x and g_b g_a x are done here. bf16 storage points: projections, conv output,
// recurrence output, result. Everything else fp32, sums in a fixed order.
#include "common.cuh"

#ifndef HD
#define HD 128  // head width, d_k = d_v
#endif
#ifndef FUSED
#define FUSED 1
#endif
#ifndef BUFFERS
#define BUFFERS 2  // 1 where shared memory is short: no state is fetched ahead, f_b and g_b are not staged
#endif
#define THREADS (HD * 4)
#define RANK 128              // gate rank of the fused products
#define VG (HD / 4)           // column groups of four
#define SIDE (VG < 8 ? VG : 8)  // of them side by side in a warp
#define KLANES (32 / SIDE)    // state rows side by side in a warp
#define WARPS (THREADS / 32)
#define KWARPS (WARPS / (VG / SIDE))  // warps on different rows of the same columns
#define KGROUPS (KLANES * KWARPS)
#define KR (HD / KGROUPS)     // state rows of a thread

struct Kda {
    const u8 *q, *k, *v, *f, *g, *beta;    // rows of bf16 with the strides below; f, g: rank-RANK inputs when FUSED, else [H * HD]
    const u8 *f_b, *g_b;                   // [H * HD, RANK]
    const u8 *q_conv, *k_conv, *v_conv;    // [H * HD, 4]
    const float *a_log, *dt_bias;          // [H], [H * HD]
    const u8 *o_norm;                      // [HD]
    u8 *q_past, *k_past, *v_past;          // last three conv inputs, bf16, [sequence, channel, age] by strides
    float *state;                          // [sequences, H, HD, HD]
    u8 *out;                               // [rows, H * HD]
    long long past_sequence, past_channel, past_time;
    int heads, sequences, tokens, ld, ld_f, ld_g, ld_beta, rehearse;  // ld*: element strides of a row
    float lower, eps;
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) kda(const __grid_constant__ Kda p) {
    // Lane-private pieces: states [BUFFERS][KR][THREADS][16]; f_b and g_b, warp = (matrix, 16 rows): [warp][chunk][2][lane].
    extern __shared__ __align__(128) u8 memory[];
    __shared__ __align__(16) float mixed[3][HD], decay[HD], gate[HD], reduce[KWARPS][VG][8];
    __shared__ float squares[2][WARPS], norms[WARPS], cross[WARPS];
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    const int vg = warp / KWARPS * SIDE + lane % SIDE, kg = warp % KWARPS * KLANES + lane / SIDE;
    const int role = tid / HD;  // 0, 1, 2: the channel's q, k, v convolution

    // Items (head, sequence), heads outermost, in equal shares; f_b and g_b are read again when the head changes.
    const int all = p.heads * p.sequences;
    int item = (int)((long long)all * blockIdx.x / gridDim.x);
    const int end = (int)((long long)all * (blockIdx.x + 1) / gridDim.x);
    auto state_of = [&](int i) {
        return p.state + ((long long)(i % p.sequences * p.heads + i / p.sequences) * HD + kg) * HD + vg * 4;
    };
    u32 held = tid * 16;  // of the item being computed, in memory
    auto fetch = [&](int i, u32 at) {
        if (i < end) {
            const float *const from = state_of(i);
#pragma unroll
            for (int r = 0; r < KR; ++r) copy16(shared_address(memory) + at + r * THREADS * 16, from + r * KGROUPS * HD, true);
        }
        copy_commit();
    };
#if FUSED
    const int g = lane >> 2, t = lane & 3, low_row = warp % (WARPS / 2) * 16 + g;
    const u32 own = shared_address(memory) + BUFFERS * KR * THREADS * 16 + warp * 4096 + lane * 16;
    const u8 *const low_weight = (warp < WARPS / 2 ? p.f_b : p.g_b) + 2ll * RANK * low_row + t * 16;
    const u8 *const low_x = warp < WARPS / 2 ? p.f : p.g;
    const int low_ld = warp < WARPS / 2 ? p.ld_f : p.ld_g;
#endif
#if FUSED && BUFFERS == 2
    int loaded = -1;
    auto fetch_low_rank = [&](int head) {
        if (head != loaded)
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                copy16(own + c * 1024, low_weight + 2ll * RANK * HD * head + c * 64, true);
                copy16(own + c * 1024 + 512, low_weight + 2ll * RANK * (HD * head + 8) + c * 64, true);
            }
        loaded = head;
        copy_commit();
    };
#else
    auto fetch_low_rank = [](int) {};
#endif
    // State and history were last written by this kernel a whole step ago, so they are read before the wait.
    fetch_low_rank(item / p.sequences);
    fetch(item, held);
    pdl_launch();
    bool waited = false;

#pragma unroll 1
    for (; item < end; ++item) {
        const int head = item / p.sequences, sequence = item % p.sequences, channel = head * HD + tid % HD;
        float *const state = state_of(item);
        const u32 other = BUFFERS == 1 ? held : held < KR * THREADS * 16 ? held + KR * THREADS * 16 : held - KR * THREADS * 16;
        fetch_low_rank(head);
        if (BUFFERS == 2) fetch(item + 1, other);
        // Token -1, with `rehearse`: everything runs once for nothing while the predecessor still works, to bring the code
        // into the instruction cache. What a token needs beside the state is read afresh, so that no register outlives it.
#pragma unroll 1
        for (int token = p.rehearse && !waited ? -1 : 0; token < p.tokens; ++token) {
            u8 *const past_at = (role == 0 ? p.q_past : role == 1 ? p.k_past : p.v_past) + 2 * (sequence * p.past_sequence + channel * p.past_channel);
            const float rate = exponential(load_f32(p.a_log + head));
            float tap[4] = {}, past[3] = {};
            if (role < 3) {
                const u8 *const w = (role == 0 ? p.q_conv : role == 1 ? p.k_conv : p.v_conv) + 8ll * channel;
#pragma unroll
                for (int j = 0; j < 4; ++j) tap[j] = load_bf16(w + 2 * j);
#pragma unroll
                for (int j = 0; j < 3; ++j) past[j] = load_bf16(past_at + 2 * j * p.past_time);
            }
#if FUSED
            const float bias[2] = {load_f32(p.dt_bias + head * HD + low_row), load_f32(p.dt_bias + head * HD + low_row + 8)};
#else
            const float bias = load_f32(p.dt_bias + channel);
#endif
            if (token == 0 && !waited) pdl_wait(), waited = true;
            const long long row = (long long)sequence * p.tokens + max(token, 0);
            const float beta = sigmoid(load_bf16(p.beta + 2 * (row * p.ld_beta + head)));
            if (role < 3) {
                const float x = load_bf16((role == 0 ? p.q : role == 1 ? p.k : p.v) + 2 * (row * p.ld + channel));
                const float y = tap[0] * past[0] + tap[1] * past[1] + tap[2] * past[2] + tap[3] * x;
                mixed[role][tid % HD] = round_bf16(y * sigmoid(y));
                if (token >= 0) {
                    *(u16 *)past_at = to_bf16(past[1]);
                    *(u16 *)(past_at + 2 * p.past_time) = to_bf16(past[2]);
                    *(u16 *)(past_at + 4 * p.past_time) = to_bf16(x);
                }
            }
            copy_wait<BUFFERS - 1>();  // all but the next item's
#if FUSED
            float c[4] = {};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const uint4 v = g == 0 ? load16(low_x + 2 * (row * low_ld + i * 32 + t * 8)) : make_uint4(0, 0, 0, 0);
                const u32 x[4] = {v.x, v.y, v.z, v.w};
                const u8 *const w = low_weight + 2ll * RANK * HD * head + i * 64;
                if (BUFFERS == 2) mma_chunk(c, shared16(own + i * 1024), shared16(own + i * 1024 + 512), x);
                else mma_chunk(c, load16(w), load16(w + 16 * RANK), x);
            }
            if (t == 0)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const float v = round_bf16(c[2 * i]);
                    const int at = warp % (WARPS / 2) * 16 + i * 8 + g;
                    if (warp < WARPS / 2) decay[at] = exponential(p.lower * sigmoid(rate * (v + bias[i])));
                    else gate[at] = sigmoid(v);
                }
#else
            if (role == 3) {
                decay[tid % HD] = exponential(p.lower * sigmoid(rate * (load_bf16(p.f + 2 * (row * p.ld_f + channel)) + bias)));
                gate[tid % HD] = sigmoid(load_bf16(p.g + 2 * (row * p.ld_g + channel)));
            }
#endif
            __syncthreads();
            // q.q, k.k and q.k, by the first warps while the others go on.
            float qq = 0.0f, kk = 0.0f, qk = 0.0f;
            if (warp < (HD + 31) / 32) {
                const float q = tid < HD ? mixed[0][tid] : 0.0f, k = tid < HD ? mixed[1][tid] : 0.0f;
                qq = warp_sum(q * q), kk = warp_sum(k * k), qk = warp_sum(q * k);
                if (lane == 0) squares[0][warp] = qq, squares[1][warp] = kk, cross[warp] = qk;
            }
            // One pass over the decayed state gives k^T M and q^T M; then o = q^T (M + k delta) = q^T M + (q.k) delta. q and k
            // are normalised behind the sums, their lengths being common factors.
            float sums[8] = {};
            float4 m[KR];
#pragma unroll
            for (int r = 0; r < KR; ++r) {
                const int i = r * KGROUPS + kg;
                const float e = decay[i], k = mixed[1][i], q = mixed[0][i];
                m[r] = *(const float4 *)(memory + held + r * THREADS * 16);
                m[r].x *= e, m[r].y *= e, m[r].z *= e, m[r].w *= e;
                sums[0] += k * m[r].x, sums[1] += k * m[r].y, sums[2] += k * m[r].z, sums[3] += k * m[r].w;
                sums[4] += q * m[r].x, sums[5] += q * m[r].y, sums[6] += q * m[r].z, sums[7] += q * m[r].w;
            }
#pragma unroll
            for (int s = SIDE; s < 32; s <<= 1)
#pragma unroll
                for (int i = 0; i < 8; ++i) sums[i] += __shfl_xor_sync(~0u, sums[i], s);
            if (lane < SIDE) {
                *(float4 *)reduce[warp % KWARPS][vg] = make_float4(sums[0], sums[1], sums[2], sums[3]);
                *(float4 *)(reduce[warp % KWARPS][vg] + 4) = make_float4(sums[4], sums[5], sums[6], sums[7]);
            }
            __syncthreads();
            qq = kk = qk = 0.0f;
#pragma unroll
            for (int w = 0; w < (HD + 31) / 32; ++w) qq += squares[0][w], kk += squares[1][w], qk += cross[w];
            const float q_scale = inverse_root(qq + 1e-6f) * (1.0f / sqrtf((float)HD)), k_scale = inverse_root(kk + 1e-6f);
#pragma unroll
            for (int i = 0; i < 8; ++i) sums[i] = 0.0f;
#pragma unroll
            for (int w = 0; w < KWARPS; ++w)
#pragma unroll
                for (int i = 0; i < 8; ++i) sums[i] += reduce[w][vg][i];
            float delta[4], o[4], square = 0.0f;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                delta[i] = k_scale * beta * (mixed[2][vg * 4 + i] - k_scale * sums[i]);  // k_scale of the outer product included
                o[i] = round_bf16(q_scale * (sums[4 + i] + qk * delta[i]));
                square += o[i] * o[i];
            }
#pragma unroll
            for (int s = 1; s < SIDE; s <<= 1) square += __shfl_xor_sync(~0u, square, s);
            if (lane == 0) norms[warp] = square;
#pragma unroll
            for (int r = 0; r < KR; ++r) {
                const float k = mixed[1][r * KGROUPS + kg];
                m[r].x += k * delta[0], m[r].y += k * delta[1], m[r].z += k * delta[2], m[r].w += k * delta[3];
                if (token == p.tokens - 1) *(float4 *)(state + r * KGROUPS * HD) = m[r];
                else if (token >= 0) *(float4 *)(memory + held + r * THREADS * 16) = m[r];
            }
            __syncthreads();
            if (kg == 0) {
                square = 0.0f;
#pragma unroll
                for (int w = 0; w < VG / SIDE; ++w) square += norms[w * KWARPS];
                const float scale = inverse_root(square / (float)HD + p.eps);
                const uint2 w = *(const uint2 *)(p.o_norm + 2 * (vg * 4));
                const float y0 = o[0] * scale * bf16_low(w.x) * gate[vg * 4], y1 = o[1] * scale * bf16_high(w.x) * gate[vg * 4 + 1];
                const float y2 = o[2] * scale * bf16_low(w.y) * gate[vg * 4 + 2], y3 = o[3] * scale * bf16_high(w.y) * gate[vg * 4 + 3];
                if (token >= 0)
                    *(uint2 *)(p.out + 2 * (row * p.heads * HD + head * HD + vg * 4)) = make_uint2(pack_bf16(y0, y1), pack_bf16(y2, y3));
            }
            __syncthreads();
        }
        if (BUFFERS == 1) fetch(item + 1, held);
        held = other;
    }
}
