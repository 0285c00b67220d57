// One KDA decode step: conv + SiLU, L2 norm, decay, delta rule, gated norm; `tokens` consecutive rows a sequence.
//
// A block takes a head of one sequence after the other; while one is computed what the next ones need is on its way to shared
// memory: the fp32 state, KR rows of four value columns a thread, and 16 bytes a thread of everything else.
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
#define BUFFERS 2  // items in shared memory; 1: nothing is fetched ahead, f_b and g_b are not staged
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
#define GATE (FUSED ? RANK : HD)  // width of f and g
// Bytes of an item in shared memory: state, lane-private; then q, k, v; conv history; taps; dt_bias; f, g.
#define X (HD * HD * 4)
#define PAST (X + 3 * HD * 2)
#define TAPS (PAST + 9 * HD * 2)
#define BIAS (TAPS + 3 * HD * 8)
#define FG (BIAS + HD * 4)
#define ITEM (FG + 2 * GATE * 2)

struct Kda {
    const u8 *q, *k, *v, *f, *g, *beta;    // rows of bf16 with the strides below; f, g: rank-RANK inputs when FUSED, else [H * HD]
    const u8 *f_b, *g_b;                   // [H * HD, RANK]
    const u8 *q_conv, *k_conv, *v_conv;    // [H * HD, 4]
    const float *a_log, *dt_bias;          // [H], [H * HD]
    const u8 *o_norm;                      // [HD]
    u8 *q_past, *k_past, *v_past;          // last three conv inputs, bf16, [sequence, age, channel] by strides
    float *state;                          // [sequences, H, HD, HD]
    u8 *out;                               // [rows, H * HD]
    float *tap;                            // [rows, H, 6, HD]: q, k, v behind the convolution, g, core, beta; or null
    long long past_sequence, past_time;
    int heads, sequences, tokens, ld, ld_f, ld_g, ld_beta, rehearse;  // ld*: element strides of a row
    float lower, eps;
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) kda(const __grid_constant__ Kda p) {
    extern __shared__ __align__(128) u8 memory[];  // [BUFFERS][ITEM]; f_b and g_b, warp = (matrix, 16 rows): [warp][chunk][2][lane]
    __shared__ __align__(16) float drive[HD][4], value[HD], gate[HD], reduce[KWARPS][VG][8];  // drive: decay, k, q of a state row
    __shared__ float squares[2][WARPS], norms[WARPS], cross[WARPS];
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    const int vg = warp / KWARPS * SIDE + lane % SIDE, kg = warp % KWARPS * KLANES + lane / SIDE;
    const int role = tid / HD, own = tid % HD;  // 0, 1, 2: the channel's q, k, v convolution; 3: its gates

    // Items (head, sequence), heads outermost, in equal shares; f_b and g_b are read again when the head changes.
    const int all = p.heads * p.sequences;
    int item = (int)((long long)all * blockIdx.x / gridDim.x);
    const int end = (int)((long long)all * (blockIdx.x + 1) / gridDim.x);
    auto state_of = [&](int i) {
        return p.state + ((long long)(i % p.sequences * p.heads + i / p.sequences) * HD + kg) * HD + vg * 4;
    };
    auto tapped = [&](long long row, int head, int which) { return p.tap + ((row * p.heads + head) * 6 + which) * HD; };
    // This thread's 16 bytes of the rest: where they lie for head 0 of sequence 0, and how far the next ones are.
    const u8 *piece = nullptr;
    long long by_sequence = 0;
    int by_head = 2 * HD, by_row = 0;  // by_row: the piece belongs to a token, so it is written by the predecessor
    {
        int n = tid;
        if (n < 3 * HD / 8) {
            piece = (n < HD / 8 ? p.q : n < HD / 4 ? p.k : p.v) + n % (HD / 8) * 16, by_row = 2 * p.ld;
        } else if ((n -= 3 * HD / 8) < 9 * HD / 8) {
            const int r = n / (3 * HD / 8);
            piece = (r == 0 ? p.q_past : r == 1 ? p.k_past : p.v_past) + 2 * (n / (HD / 8) % 3) * p.past_time + n % (HD / 8) * 16;
            by_sequence = 2 * p.past_sequence;
        } else if ((n -= 9 * HD / 8) < 3 * HD / 2) {
            piece = (n < HD / 2 ? p.q_conv : n < HD ? p.k_conv : p.v_conv) + n % (HD / 2) * 16, by_head = 8 * HD;
        } else if ((n -= 3 * HD / 2) < HD / 4) {
            piece = (const u8 *)p.dt_bias + n * 16, by_head = 4 * HD;
        } else if ((n -= HD / 4) < GATE / 4) {
            piece = (n < GATE / 8 ? p.f : p.g) + n % (GATE / 8) * 16, by_row = 2 * (n < GATE / 8 ? p.ld_f : p.ld_g);
            if (FUSED) by_head = 0;
        }
        if (by_row) by_sequence = (long long)by_row * p.tokens;
    }
    auto fetch_piece = [&](int i, int token, u32 buffer) {
        if (piece)
            copy16(shared_address(memory) + buffer + X + tid * 16, piece + (long long)by_head * (i / p.sequences) + by_sequence * (i % p.sequences) + (long long)by_row * token, true);
    };
    auto fetch_state = [&](int i, u32 buffer) {
        const float *const from = state_of(i);
#pragma unroll
        for (int r = 0; r < KR; ++r) copy16(shared_address(memory) + buffer + r * THREADS * 16 + tid * 16, from + r * KGROUPS * HD, true);
    };
#if FUSED
    const int g = lane >> 2, t = lane & 3, low_row = warp % (WARPS / 2) * 16 + g;
    const u8 *const low_weight = (warp < WARPS / 2 ? p.f_b : p.g_b) + 2ll * RANK * low_row + t * 16;
    const u32 low_at = FG + (warp < WARPS / 2 ? 0 : 2 * RANK) + t * 16;
#endif
#if FUSED && BUFFERS > 1
    const u32 low = shared_address(memory) + BUFFERS * ITEM + warp * 4096 + lane * 16;
    auto fetch_low_rank = [&](int head) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            copy16(low + c * 1024, low_weight + 2ll * RANK * HD * head + c * 64, true);
            copy16(low + c * 1024 + 512, low_weight + 2ll * RANK * (HD * head + 8) + c * 64, true);
        }
    };
#else
    auto fetch_low_rank = [](int) {};
#endif
    // What the predecessor does not write was last written by this kernel a whole step ago: it is read before the wait.
    fetch_low_rank(item / p.sequences);
    fetch_state(item, 0);
    if (!by_row) fetch_piece(item, 0, 0);
    float a_log = load_f32(p.a_log + item / p.sequences);
    pdl_launch();

    u32 held = 0;  // the item being computed, in memory
    bool waited = false;
    u32 beta_bits = 0;  // of the item being computed, then of the next one
    const uint2 norm = *(const uint2 *)(p.o_norm + 2 * (vg * 4));
#pragma unroll 1
    for (; item < end; ++item) {
        const int head = item / p.sequences, sequence = item % p.sequences;
        float *const state = state_of(item);
        const float rate = exponential(a_log);
        // Token -1, with `rehearse`: everything runs once for nothing while the predecessor still works, to bring the code
        // into the instruction cache.
#pragma unroll 1
        for (int token = p.rehearse && !waited ? -1 : 0; token < p.tokens; ++token) {
            const long long row = (long long)sequence * p.tokens + max(token, 0);
            const bool live = token >= 0, first = !waited;
            if (live && first) {
                pdl_wait();
                if (by_row) fetch_piece(item, 0, held);
                copy_commit();
#pragma unroll 1
                for (int i = 1; i < BUFFERS - 1; ++i) {
                    if (item + i < end) fetch_state(item + i, i * ITEM), fetch_piece(item + i, 0, i * ITEM);
                    copy_commit();
                }
                copy_wait<(BUFFERS > 2 ? BUFFERS - 2 : 0)>();
                __syncthreads();
                waited = true;
            }
            if (token > 0 || (live && (first || p.tokens > 1))) beta_bits = load_u16(p.beta + 2 * (row * p.ld_beta + head));
            const u32 raw_beta = beta_bits;
            u8 *const in = memory + held;
            if (role < 3) {
                u16 *const past = (u16 *)(in + PAST) + role * 3 * HD + own;
                const uint2 taps = *(const uint2 *)(in + TAPS + tid * 8);
                const u16 last = *(const u16 *)(in + X + tid * 2), first = past[HD], second = past[2 * HD];
                const float y = bf16_low(taps.x) * bf16_to_float(past[0]) + bf16_high(taps.x) * bf16_to_float(first) +
                                bf16_low(taps.y) * bf16_to_float(second) + bf16_high(taps.y) * bf16_to_float(last);
                const float x = round_bf16(y * sigmoid(y));
                if (role < 2) drive[own][2 - role] = x;
                else value[own] = x;
                if (p.tap && live) tapped(row, head, role)[own] = x;
                if (live) past[0] = first, past[HD] = second, past[2 * HD] = last;
                if (token == p.tokens - 1) {
                    u16 *const to = (u16 *)(role == 0 ? p.q_past : role == 1 ? p.k_past : p.v_past) + sequence * p.past_sequence + head * HD + own;
                    to[0] = first, to[p.past_time] = second, to[2 * p.past_time] = last;
                }
            }
#if FUSED
            float c[4] = {};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const uint4 v = g == 0 ? *(const uint4 *)(in + low_at + i * 64) : make_uint4(0, 0, 0, 0);
                const u32 x[4] = {v.x, v.y, v.z, v.w};
#if BUFFERS > 1
                mma_chunk(c, shared16(low + i * 1024), shared16(low + i * 1024 + 512), x);
#else
                const u8 *const w = low_weight + 2ll * RANK * HD * head + i * 64;
                mma_chunk(c, load16(w), load16(w + 16 * RANK), x);
#endif
            }
            if (t == 0)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const float v = round_bf16(c[2 * i]);
                    const int at = low_row + i * 8;
                    if (warp < WARPS / 2) {
                        const float decay = p.lower * sigmoid(rate * (v + ((const float *)(in + BIAS))[at]));
                        drive[at][0] = exponential(decay);
                        if (p.tap && live) tapped(row, head, 3)[at] = decay;
                    } else gate[at] = sigmoid(v);
                }
#else
            if (role == 3) {
                const float v = bf16_to_float(((const u16 *)(in + FG))[own]) + ((const float *)(in + BIAS))[own];
                const float decay = p.lower * sigmoid(rate * v);
                drive[own][0] = exponential(decay);
                if (p.tap && live) tapped(row, head, 3)[own] = decay;
                gate[own] = sigmoid(bf16_to_float(((const u16 *)(in + FG))[HD + own]));
            }
#endif
            __syncthreads();
            if (token == 0) {  // the items ahead, while this one is computed
                if (BUFFERS > 1 && item + BUFFERS - 1 < end) {
                    const u32 to = held >= ITEM ? held - ITEM : held + (BUFFERS - 1) * ITEM;
                    fetch_state(item + BUFFERS - 1, to), fetch_piece(item + BUFFERS - 1, 0, to);
                }
                if (item + 1 < end) {
                    const int after = (item + 1) / p.sequences;
                    a_log = load_f32(p.a_log + after);
                    beta_bits = load_u16(p.beta + 2 * ((long long)((item + 1) % p.sequences) * p.tokens * p.ld_beta + after));
                    if (after != head) fetch_low_rank(after);
                }
                copy_commit();
            }
            // q.q, k.k and q.k, by the first warps while the others go on.
            float qq = 0.0f, kk = 0.0f, qk = 0.0f;
            if (warp < (HD + 31) / 32) {
                const float q = tid < HD ? drive[tid][2] : 0.0f, k = tid < HD ? drive[tid][1] : 0.0f;
                qq = warp_sum(q * q), kk = warp_sum(k * k), qk = warp_sum(q * k);
                if (lane == 0) squares[0][warp] = qq, squares[1][warp] = kk, cross[warp] = qk;
            }
            // One pass over the decayed state gives k^T M and q^T M; then o = q^T (M + k delta) = q^T M + (q.k) delta. q and k
            // are normalised behind the sums, their lengths being common factors.
            float sums[8] = {};
            float4 m[KR];
            float keys[KR];
#pragma unroll
            for (int r = 0; r < KR; ++r) {
                const float4 f = *(const float4 *)drive[r * KGROUPS + kg];
                const float e = f.x, k = keys[r] = f.y, q = f.z;
                m[r] = *(const float4 *)(in + r * THREADS * 16 + tid * 16);
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
            const float beta = sigmoid(bf16_to_float((u16)raw_beta));
            float delta[4], o[4], square = 0.0f;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                delta[i] = k_scale * beta * (value[vg * 4 + i] - k_scale * sums[i]);  // k_scale of the outer product included
                o[i] = round_bf16(q_scale * (sums[4 + i] + qk * delta[i]));
                square += o[i] * o[i];
            }
#pragma unroll
            for (int s = 1; s < SIDE; s <<= 1) square += __shfl_xor_sync(~0u, square, s);
            if (lane == 0) norms[warp] = square;
#pragma unroll
            for (int r = 0; r < KR; ++r) {
                const float k = keys[r];
                m[r].x += k * delta[0], m[r].y += k * delta[1], m[r].z += k * delta[2], m[r].w += k * delta[3];
                if (token == p.tokens - 1) *(float4 *)(state + r * KGROUPS * HD) = m[r];
                else if (live) *(float4 *)(in + r * THREADS * 16 + tid * 16) = m[r];
            }
            __syncthreads();
            if (kg == 0) {
                if (p.tap && live) {
                    *(float4 *)(tapped(row, head, 4) + vg * 4) = make_float4(o[0], o[1], o[2], o[3]);
                    if (vg == 0) *tapped(row, head, 5) = beta;
                }
                square = 0.0f;
#pragma unroll
                for (int w = 0; w < VG / SIDE; ++w) square += norms[w * KWARPS];
                const float scale = inverse_root(square / (float)HD + p.eps);
                const float y0 = o[0] * scale * bf16_low(norm.x) * gate[vg * 4], y1 = o[1] * scale * bf16_high(norm.x) * gate[vg * 4 + 1];
                const float y2 = o[2] * scale * bf16_low(norm.y) * gate[vg * 4 + 2], y3 = o[3] * scale * bf16_high(norm.y) * gate[vg * 4 + 3];
                if (live)
                    *(uint2 *)(p.out + 2 * (row * p.heads * HD + head * HD + vg * 4)) = make_uint2(pack_bf16(y0, y1), pack_bf16(y2, y3));
            }
            if (token + 1 < p.tokens) {  // what the next token brings
                __syncthreads();
                if (live && by_row) fetch_piece(item, token + 1, held);
                if (live) copy_commit(), copy_wait<0>();
            } else if (BUFFERS > 1) copy_wait<(BUFFERS > 1 ? BUFFERS - 2 : 0)>();  // all of the next item
            __syncthreads();
        }
        if (BUFFERS == 1 && item + 1 < end) {
            fetch_state(item + 1, 0), fetch_piece(item + 1, 0, 0);
            copy_commit();
            copy_wait<0>();
            __syncthreads();
        }
        held = held + ITEM == BUFFERS * ITEM ? 0 : held + ITEM;
    }
}
