// One KDA decode step: conv + SiLU, L2 norm, decay, delta rule, gated norm; `tokens` consecutive rows a sequence.
//
// A block takes one head of some sequences, one after the other; its neighbours take the other heads, so that what is read
// and written at a time lies together in memory. The fp32 state is in registers, KR rows of four value columns a thread,
// while the one of the next sequence is on its way to shared memory.
// With FUSED the two low-rank products f_b f_a x and g_b g_a x are done here, for up to eight rows at once. bf16 storage
// points: projections, conv output, recurrence output, result. Everything else fp32, sums in a fixed order.
#include "common.cuh"

#ifndef HD
#define HD 128  // head width, d_k = d_v
#endif
#ifndef FUSED
#define FUSED 1
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
#define KEPT (8 / KLANES)     // sums of a lane behind the reduction in its warp
#define WINDOW 8              // rows whose low-rank products are computed together

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

// Of a matrix, which no kernel writes: kept in L1 from the rehearsal to the row itself.
DEVICE uint4 weight16(const void *p) {
    uint4 v;
    asm("ld.global.nc.L1::evict_last.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}
DEVICE u32 load_u32(const void *p) {
    u32 v;
    asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}
// Keeps the computation of an address where it stands, in front of the wait.
DEVICE const u8 *pinned(const u8 *p) {
    asm volatile("" : "+l"(p));
    return p;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) kda(const __grid_constant__ Kda p) {
    extern __shared__ __align__(128) u8 memory[];  // state of a sequence, lane-private
    __shared__ __align__(16) float drive[2][HD][4];  // decay, k and q of a state row
    __shared__ __align__(16) float value[2][HD], gate[2][HD], reduce[KWARPS][VG][8], lengths[3], betas[2];
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    const int vg = warp / KWARPS * SIDE + lane % SIDE, kg = warp % KWARPS * KLANES + lane / SIDE;
    // Two channels of the q, k or v convolution for roles 0, 1, 2; one gate for the upper half of the threads.
    const int role = tid / (HD / 2), own = tid % (HD / 2) * 2;
    const int gated = tid - 2 * HD;  // 0 .. HD - 1: decay of this channel; from HD: output gate

    // The heads, `parts` times: each block of a head has its share of the sequences.
    const int parts = gridDim.x / p.heads, part = blockIdx.x / p.heads, head = blockIdx.x % p.heads;
    const int end = p.sequences * (part + 1) / parts;
    int sequence = p.sequences * part / parts;
    auto tapped = [&](int row, int which) { return p.tap + (((long long)row * p.heads + head) * 6 + which) * HD; };
    auto state_of = [&](int sequence) { return p.state + ((long long)sequence * p.heads + head) * HD * HD + kg * HD + vg * 4; };
    auto fetch_state = [&](const float *from) {
#pragma unroll
        for (int r = 0; r < KR; ++r) copy16(shared_address(memory) + r * THREADS * 16 + tid * 16, from + r * KGROUPS * HD, true);
        copy_commit();
    };
    // What the predecessor does not write was last written by this kernel a whole step ago: it is read before the wait.
    fetch_state(state_of(sequence));
    const int channel = head * HD + own;
    auto past_of = [&](int sequence) { return (role == 0 ? p.q_past : role == 1 ? p.k_past : p.v_past) + 2 * (sequence * p.past_sequence + channel); };
    // Of the next row: two inputs of the convolution, or beta for the threads that have no other part in the gates.
    const u8 *fresh_at = role == 3 ? p.beta + 2 * ((long long)sequence * p.tokens * p.ld_beta + head)
                                   : (role == 0 ? p.q : role == 1 ? p.k : p.v) + 2 * ((long long)sequence * p.tokens * p.ld + channel);
    auto fetch_fresh = [&] { return role == 3 ? load_u16(fresh_at) : load_u32(fresh_at); };
    u32 past[3] = {}, fresh = 0;
    auto fetch_past = [&](int from) {
        if (role < 3)
#pragma unroll
            for (int j = 0; j < 3; ++j) past[j] = load_u32(past_of(from) + 2 * j * p.past_time);
    };
    fetch_past(sequence);
    uint4 taps = make_uint4(0, 0, 0, 0);  // of the convolution; or a_log and dt_bias of a decay
    if (role < 3) taps = weight16((role == 0 ? p.q_conv : role == 1 ? p.k_conv : p.v_conv) + 8 * channel);
    if (gated >= 0 && gated < HD) taps.x = __float_as_uint(__ldg(p.a_log + head)), taps.y = __float_as_uint(__ldg(p.dt_bias + HD * head + gated));
    pdl_launch();

#if FUSED
    __shared__ __align__(16) u16 low_rank[WINDOW][2 * HD];
    // The first half of the warps does f, the other one g: 16 rows of the matrix each.
    const int g = lane >> 2, t = lane & 3, tile = warp % (WARPS / 2) * 16 + g;
    const bool opening = warp >= WARPS / 2;
    const u8 *const low_weight = (opening ? p.g_b : p.f_b) + 2ll * RANK * (HD * head + tile) + t * 16;
    int window = 0;  // the first of the rows with products in low_rank
#endif
    bool waited = false;
#pragma unroll 1
    for (; sequence < end; ++sequence) {
        const bool opened = waited;
        float4 *const incoming = (float4 *)memory + tid;
        // Token -1, with `rehearse`: everything runs once for nothing while the predecessor still works, to bring code and
        // weights into the caches.
#pragma unroll 1
        for (int token = p.rehearse && !waited ? -1 : 0; token < p.tokens; ++token) {
            const int row = sequence * p.tokens + max(token, 0);
            const bool live = token >= 0, last = token == p.tokens - 1;
            const int turn = (row + live) & 1;
            float4 m[KR];
            auto take_state = [&] {
                if (token <= 0) copy_wait<0>();
#pragma unroll
                for (int r = 0; r < KR; ++r) m[r] = incoming[r * THREADS];
            };
#if FUSED
            const bool open_window = !waited || row >= window + WINDOW;
            const int count = min(WINDOW, end * p.tokens - row);
            uint4 weights[4][2];
            const u8 *input_at = nullptr;
            if (open_window) {
#pragma unroll
                for (int j = 0; j < 4; ++j) weights[j][0] = weight16(low_weight + j * 64), weights[j][1] = weight16(low_weight + j * 64 + 16 * RANK);
                // Columns behind the last row repeat it.
                input_at = pinned((opening ? p.g : p.f) + 2ll * (row + min(g, count - 1)) * (opening ? p.ld_g : p.ld_f) + t * 16);
            }
#endif
            if (live && !waited) {
                pdl_wait();
                if (role < 4) fresh = fetch_fresh();
                waited = true;
            }
#if FUSED
            if (open_window) {
                uint4 x[4] = {};
                if (live)
#pragma unroll
                    for (int j = 0; j < 4; ++j) x[j] = load16(input_at + j * 64);
                float c[2][4] = {};
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const u32 y[4] = {x[j].x, x[j].y, x[j].z, x[j].w};
                    mma_chunk(c[j & 1], weights[j][0], weights[j][1], y);
                }
#pragma unroll
                for (int j = 0; j < 4; ++j) low_rank[2 * t + (j & 1)][(opening ? HD : 0) + tile + j / 2 * 8] = to_bf16(c[0][j] + c[1][j]);
                window = row;
                __syncthreads();
            }
#endif
            if (!opened && token <= 0) take_state();  // it has long been there
            if (role < 3) {
                const float y0 = bf16_low(taps.x) * bf16_low(past[0]) + bf16_high(taps.x) * bf16_low(past[1]) + bf16_low(taps.y) * bf16_low(past[2]) +
                                 bf16_high(taps.y) * bf16_low(fresh);
                const float y1 = bf16_low(taps.z) * bf16_high(past[0]) + bf16_high(taps.z) * bf16_high(past[1]) + bf16_low(taps.w) * bf16_high(past[2]) +
                                 bf16_high(taps.w) * bf16_high(fresh);
                const float x0 = round_bf16(y0 * sigmoid(y0)), x1 = round_bf16(y1 * sigmoid(y1));
                if (role == 2) *(float2 *)(value[turn] + own) = make_float2(x0, x1);
                else drive[turn][own][2 - role] = x0, drive[turn][own + 1][2 - role] = x1;
                if (p.tap && live) *(float2 *)(tapped(row, role) + own) = make_float2(x0, x1);
                if (live) past[0] = past[1], past[1] = past[2], past[2] = fresh;
                if (live && last)
#pragma unroll
                    for (int j = 0; j < 3; ++j) *(u32 *)(past_of(sequence) + 2 * j * p.past_time) = past[j];
            }
            if (tid == 3 * HD / 2) betas[turn] = sigmoid(bf16_to_float((u16)fresh));
            if (gated >= 0) {
                const bool decays = gated < HD;
                float v = 0.0f;
#if FUSED
                v = bf16_to_float(low_rank[row - window][gated]);
#else
                if (live) v = load_bf16(decays ? p.f + 2 * ((long long)row * p.ld_f + head * HD + gated) : p.g + 2 * ((long long)row * p.ld_g + head * HD + gated - HD));
#endif
                const float s = sigmoid(decays ? exponential(__uint_as_float(taps.x)) * (v + __uint_as_float(taps.y)) : v);
                if (decays) {
                    const float decay = p.lower * s;
                    drive[turn][gated][0] = exponential(decay);
                    if (p.tap && live) tapped(row, 3)[gated] = decay;
                } else gate[turn][gated - HD] = s;
            }
            if (opened || token > 0) take_state();
            __syncthreads();
            const bool more = sequence + 1 < end;
            if (live && last && more) fetch_state(state_of(sequence + 1));
            if (live) {
                fresh_at += 2 * (role == 3 ? p.ld_beta : p.ld);
                if ((!last || more) && role < 4) fresh = fetch_fresh();
                if (last && more) fetch_past(sequence + 1);
            }
            // One pass over the decayed state gives k^T M and q^T M; then o = q^T (M + k delta) = q^T M + (q.k) delta. q and k
            // are normalised behind the sums, their lengths being common factors.
            float sums[8] = {};
#pragma unroll
            for (int r = 0; r < KR; ++r) {
                const float4 f = *(const float4 *)drive[turn][r * KGROUPS + kg];
                m[r].x *= f.x, m[r].y *= f.x, m[r].z *= f.x, m[r].w *= f.x;
                sums[0] += f.y * m[r].x, sums[1] += f.y * m[r].y, sums[2] += f.y * m[r].z, sums[3] += f.y * m[r].w;
                sums[4] += f.z * m[r].x, sums[5] += f.z * m[r].y, sums[6] += f.z * m[r].z, sums[7] += f.z * m[r].w;
            }
            // Lanes of the same columns: at each step a lane keeps half of the sums that it has, and gives the others away.
            int kept = 0;
#pragma unroll
            for (int s = SIDE, n = 4; s < 32; s <<= 1, n >>= 1) {
                const bool upper = lane & s;
#pragma unroll
                for (int i = 0; i < n; ++i) {
                    const float give = upper ? sums[i] : sums[i + n], keep = upper ? sums[i + n] : sums[i];
                    sums[i] = keep + __shfl_xor_sync(~0u, give, s);
                }
                if (upper) kept += n;
            }
#pragma unroll
            for (int i = 0; i < KEPT; ++i) reduce[warp % KWARPS][vg][kept + i] = sums[i];
            if (warp == 0) {
                float qq = 0.0f, kk = 0.0f, qk = 0.0f;
#pragma unroll
                for (int i = 0; i < HD; i += 32)
                    if (HD >= 32 || lane < HD) {
                        const float k = drive[turn][i + lane][1], q = drive[turn][i + lane][2];
                        kk += k * k, qq += q * q, qk += k * q;
                    }
                qq = warp_sum(qq), kk = warp_sum(kk), qk = warp_sum(qk);
                if (lane == 0) lengths[0] = qq, lengths[1] = kk, lengths[2] = qk;
            }
            __syncthreads();
            const float k_scale = inverse_root(lengths[1] + 1e-6f), beta = betas[turn];
            // Of four columns; the state changes by k delta, which has the k_scale of the outer product.
            float total[8], delta[4];
            auto finish = [&](int columns) {
#pragma unroll
                for (int i = 0; i < 8; ++i) total[i] = 0.0f;
#pragma unroll
                for (int w = 0; w < KWARPS; ++w)
#pragma unroll
                    for (int i = 0; i < 8; ++i) total[i] += reduce[w][columns][i];
#pragma unroll
                for (int i = 0; i < 4; ++i) delta[i] = k_scale * beta * (value[turn][columns * 4 + i] - k_scale * total[i]);
            };
            finish(vg);
#pragma unroll
            for (int r = 0; r < KR; ++r) {
                const float k = drive[turn][r * KGROUPS + kg][1];
                m[r].x += k * delta[0], m[r].y += k * delta[1], m[r].z += k * delta[2], m[r].w += k * delta[3];
            }
            if (live && last)
#pragma unroll
                for (int r = 0; r < KR; ++r) *(float4 *)(state_of(sequence) + r * KGROUPS * HD) = m[r];
            else if (live)
#pragma unroll
                for (int r = 0; r < KR; ++r) incoming[r * THREADS] = m[r];
            if (warp == WARPS - 1) {
                const int columns = lane % VG;
                finish(columns);
                const float q_scale = inverse_root(lengths[0] + 1e-6f) * (1.0f / sqrtf((float)HD)), qk = lengths[2];
                float o[4], square = 0.0f;
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    o[i] = round_bf16(q_scale * (total[4 + i] + qk * delta[i]));
                    square += o[i] * o[i];
                }
                square = warp_sum(lane < VG ? square : 0.0f);
                const float scale = inverse_root(square / (float)HD + p.eps);
                const float4 open = *(const float4 *)(gate[turn] + columns * 4);
                const uint2 norm = __ldg((const uint2 *)p.o_norm + columns);
                const float y0 = o[0] * scale * bf16_low(norm.x) * open.x, y1 = o[1] * scale * bf16_high(norm.x) * open.y;
                const float y2 = o[2] * scale * bf16_low(norm.y) * open.z, y3 = o[3] * scale * bf16_high(norm.y) * open.w;
                if (live && lane < VG) {
                    *(uint2 *)(p.out + 2 * (((long long)row * p.heads + head) * HD + columns * 4)) = make_uint2(pack_bf16(y0, y1), pack_bf16(y2, y3));
                    if (p.tap) {
                        *(float4 *)(tapped(row, 4) + columns * 4) = make_float4(o[0], o[1], o[2], o[3]);
                        if (lane == 0) *tapped(row, 5) = beta;
                    }
                }
            }
        }
    }
}
