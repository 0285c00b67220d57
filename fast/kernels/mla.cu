// Absorbed NoPE latent attention of decode rows over selected tokens, in three launches:
//   mla_absorb   qa[r, h] = bf16(q[r, h] W_k[h])                      W_k: first N rows of the head in kv_b_proj
//   mla_partial  for KEYS selected tokens: weights of 16 heads (fp32, max-shifted) and their sum over the latents
//   mla_merge    latent output (merged in split order, bf16), then core[r, h] = bf16(W_v[h] .)
// Logits, softmax and sums are fp32; the softmax weights enter the product as a bf16 pair (hi + lo). Splits are cut by position in the
// selection, so a row's bits do not depend on the other rows.
#include "common.cuh"

#define N 256   // q width
#define O 256   // v width
#define L 512   // latent width
#ifndef KEYS
#define KEYS 128  // selected tokens of a block of mla_partial; 64 where shared memory is short
#endif
#define WARPS (KEYS / 16)
#define PARTS 4   // blocks that share a head in mla_absorb (latent columns) and in mla_merge (output rows)
#define W_ROW (KEYS * 2 + 16)
#define COLUMNS (L / WARPS)
#define ROW 1040  // bytes of a latent row in shared memory: 16 more, so that ldmatrix meets no bank twice

// At most 64 splits.
struct Mla {
    const u8 *q;      // [R, ld_q] bf16: H * N
    const u8 *kv_b;   // [H * (N + O), L]
    u8 *qa;           // [R, H, L] bf16
    const u8 *latents;           // [S, capacity, L] bf16
    const int *selected, *count;  // [R, width], [R]
    float *part, *part_ml;       // [R, splits, H, L], [R, splits, H, 2] (max, sum)
    u8 *out;                     // [R, H * O] bf16
    int rows, heads, tokens, capacity, width, splits, ld_q;
};

// Block = (head, 128 latent columns): 256 x 128 weights in shared memory; a thread sums 8 rows of N for 8 columns.
extern "C" __global__ void __launch_bounds__(512, 2) mla_absorb(const __grid_constant__ Mla p) {
    extern __shared__ __align__(128) u8 memory[];  // [8][512 threads][16]: lane-private, then the reduction
    float *const reduce = (float *)(memory + 8 * 512 * 16);  // [32][128]
    __shared__ float q[N];
    const int tid = threadIdx.x, column = tid & 15, part = tid >> 4, head = blockIdx.x / PARTS, first = blockIdx.x % PARTS * 128;
    const u8 *w = p.kv_b + 2ll * ((long long)(head * (N + O) + part * 8) * L + first + column * 8);
    const u32 mine = shared_address(memory) + tid * 16;
#pragma unroll
    for (int i = 0; i < 8; ++i) copy16(mine + i * 8192, w + 2ll * i * L, true);
    copy_commit();
    pdl_launch();
    pdl_wait();
    copy_wait<0>();
    for (int row = 0; row < p.rows; ++row) {
        __syncthreads();
        if (tid < N) q[tid] = load_bf16(p.q + 2 * ((long long)row * p.ld_q + head * N + tid));
        __syncthreads();
        float acc[8] = {};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            float f[8];
            unpack8(shared16(mine + i * 8192), f);
            const float x = q[part * 8 + i];
#pragma unroll
            for (int j = 0; j < 8; ++j) acc[j] += x * f[j];
        }
#pragma unroll
        for (int j = 0; j < 8; j += 4)
            *(float4 *)(reduce + part * 128 + column * 8 + j) = make_float4(acc[j], acc[j + 1], acc[j + 2], acc[j + 3]);
        __syncthreads();
        if (tid < 128) {
            float sum = 0.0f;
#pragma unroll
            for (int v = 0; v < 32; ++v) sum += reduce[v * 128 + tid];
            *(u16 *)(p.qa + 2 * (((long long)row * p.heads + head) * L + first + tid)) = to_bf16(sum);
        }
    }
}

// grid (splits, heads / 16, rows): scores of 16 heads x 16 keys a warp, then L / WARPS latent columns a warp.
extern "C" __global__ void __launch_bounds__(KEYS * 2) mla_partial(const __grid_constant__ Mla p) {
    extern __shared__ __align__(128) u8 memory[];
    const u32 rows = shared_address(memory), query = rows + KEYS * ROW, weights = query + 16 * ROW;  // weights: [2][16][W_ROW]
    __shared__ float top[WARPS][16], sum[WARPS][16];
    const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3;
    const int split = blockIdx.x, head0 = blockIdx.y * 16, row = blockIdx.z, first = split * KEYS;
    pdl_launch();
    pdl_wait();
    const int left = load_i32(p.count + row) - first;
    if (left <= 0) return;

    const u8 *const latents = p.latents + 2ll * (row / p.tokens) * p.capacity * L;
    const int own = warp * 16 + (lane & 15);  // a warp copies whole rows: its 16 token ids first, one a lane
    const int tokens = own < left ? load_i32(p.selected + (long long)row * p.width + first + own) : -1;
    for (int i = 0; i < 16; ++i) {
        const int key = warp * 16 + i, token = __shfl_sync(~0u, tokens, i);
        const u8 *from = latents + 2ll * max(token, 0) * L + lane * 32;
        copy16(rows + key * ROW + lane * 32, from, token >= 0);
        copy16(rows + key * ROW + lane * 32 + 16, from + 16, token >= 0);
    }
    for (int head = warp; head < 16; head += WARPS) {
        const u8 *from = p.qa + 2ll * (((long long)row * p.heads + head0 + head) * L) + lane * 32;
        const bool in = head0 + head < p.heads;
        copy16(query + head * ROW + lane * 32, in ? from : p.qa, in);
        copy16(query + head * ROW + lane * 32 + 16, in ? from + 16 : p.qa, in);
    }
    copy_commit();
    copy_wait<0>();
    __syncthreads();

    float s[2][4] = {};
    const u32 a_at = query + (lane & 15) * ROW + (lane >> 4) * 16;
    const u32 b_at = rows + (warp * 16 + (lane & 7) + (lane >> 4) * 8) * ROW + ((lane >> 3) & 1) * 16;
#pragma unroll 4
    for (int k = 0; k < L / 16; ++k) {
        u32 a[4], b[4];
        ldmatrix4(a, a_at + k * 32);
        ldmatrix4(b, b_at + k * 32);
        mma(s[0], a[0], a[1], a[2], a[3], b[0], b[1]);
        mma(s[1], a[0], a[1], a[2], a[3], b[2], b[3]);
    }
    float high[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int key = warp * 16 + j * 8 + 2 * t + (i & 1);
            s[j][i] = key < left ? s[j][i] * (1.0f / 16.0f) : -INFINITY;
            high[i >> 1] = fmaxf(high[i >> 1], s[j][i]);
        }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        high[i] = fmaxf(high[i], __shfl_xor_sync(~0u, high[i], 1));
        high[i] = fmaxf(high[i], __shfl_xor_sync(~0u, high[i], 2));
        if (t == 0) top[warp][i * 8 + g] = high[i];
    }
    __syncthreads();
    float part[2] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int w = 0; w < WARPS; ++w) high[i] = fmaxf(high[i], top[w][i * 8 + g]);
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float a = exponential(s[j][2 * i] - high[i]), b = exponential(s[j][2 * i + 1] - high[i]);
            part[i] += a + b;
            const u32 hi = pack_bf16(a, b), lo = pack_bf16(a - bf16_low(hi), b - bf16_high(hi));
            const u32 at = weights + (i * 8 + g) * W_ROW + (warp * 16 + j * 8 + 2 * t) * 2;
            asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(hi) : "memory");
            asm volatile("st.shared.u32 [%0], %1;" ::"r"(at + 16 * W_ROW), "r"(lo) : "memory");
        }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        part[i] += __shfl_xor_sync(~0u, part[i], 1);
        part[i] += __shfl_xor_sync(~0u, part[i], 2);
        if (t == 0) sum[warp][i * 8 + g] = part[i];
    }
    __syncthreads();
    if (tid < 16 && head0 + tid < p.heads) {
        float total = 0.0f, m = -INFINITY;
        for (int w = 0; w < WARPS; ++w) total += sum[w][tid], m = fmaxf(m, top[w][tid]);
        float *const ml = p.part_ml + 2 * (((long long)row * p.splits + split) * p.heads + head0 + tid);
        ml[0] = m, ml[1] = total;
    }
    float o[COLUMNS / 8][4] = {};
    const u32 p_at = weights + (lane & 15) * W_ROW + (lane >> 4) * 16;
    const u32 v_at = rows + ((lane & 7) + ((lane >> 3) & 1) * 8) * ROW + (warp * COLUMNS + (lane >> 4) * 8) * 2;
#pragma unroll 1
    for (int k = 0; k < KEYS / 16; ++k) {
        u32 hi[4], lo[4];
        ldmatrix4(hi, p_at + k * 32);
        ldmatrix4(lo, p_at + 16 * W_ROW + k * 32);
#pragma unroll
        for (int n = 0; n < COLUMNS / 16; ++n) {
            u32 v[4];
            ldmatrix4_transposed(v, v_at + k * 16 * ROW + n * 32);
            mma(o[2 * n], hi[0], hi[1], hi[2], hi[3], v[0], v[1]);
            mma(o[2 * n], lo[0], lo[1], lo[2], lo[3], v[0], v[1]);
            mma(o[2 * n + 1], hi[0], hi[1], hi[2], hi[3], v[2], v[3]);
            mma(o[2 * n + 1], lo[0], lo[1], lo[2], lo[3], v[2], v[3]);
        }
    }
#pragma unroll
    for (int n = 0; n < COLUMNS / 8; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (head0 + i * 8 + g < p.heads)
                *(float2 *)(p.part + (((long long)row * p.splits + split) * p.heads + head0 + i * 8 + g) * L + warp * COLUMNS + n * 8 + 2 * t) =
                    make_float2(o[n][2 * i], o[n][2 * i + 1]);
}

// A cluster of PARTS blocks owns a head: each merges the splits for 128 latent columns and hands them to all, then multiplies
// its 64 rows of W_v, which have been waiting in shared memory; warp = (16 rows, quarter of L).
extern "C" __global__ void __cluster_dims__(PARTS, 1, 1) __launch_bounds__(512, 2) mla_merge(const __grid_constant__ Mla p) {
    extern __shared__ __align__(128) u8 memory[];  // [16 warps][4 chunks][2][512]
    float *const partial = (float *)(memory + 16 * 4096);  // [4][64][8]
    u32 *const latent = (u32 *)(partial + 4 * 64 * 8);     // [8][L] bf16
    float *const share = (float *)(latent + 8 * L / 2);    // [8][64]
    float *const quarters = share + 8 * 64;                // [8][4][128]
    const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3;
    const int head = blockIdx.x / PARTS, rank = blockIdx.x % PARTS, tile = warp & 3, side = warp >> 2;
    const u8 *w = p.kv_b + 2ll * ((long long)(head * (N + O) + N + rank * 64 + tile * 16 + g) * L + side * 128 + t * 8);
    const u32 mine = shared_address(memory) + warp * 4096 + lane * 16;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        copy16(mine + c * 1024, w + c * 64, true);
        copy16(mine + c * 1024 + 512, w + 16ll * L + c * 64, true);
    }
    copy_commit();
    cluster_arrive();  // no block may write to another one before that one runs
    pdl_launch();
    pdl_wait();
    cluster_wait();
    if (warp < p.rows) {  // each split's share of the row: its maximum and sum, two splits a lane
        const int used = (load_i32(p.count + warp) + KEYS - 1) / KEYS;
        float high[2], sum[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const bool in = lane + 32 * i < used;
            const float *const ml = p.part_ml + 2 * (((long long)warp * p.splits + (in ? lane + 32 * i : 0)) * p.heads + head);
            high[i] = in ? load_f32(ml) : -INFINITY, sum[i] = in ? load_f32(ml + 1) : 0.0f;
        }
        const float top = warp_max(fmaxf(high[0], high[1]));
        const float part[2] = {exponential(high[0] - top), exponential(high[1] - top)};
        const float scale = reciprocal(warp_sum(part[0] * sum[0] + part[1] * sum[1]));
        share[warp * 64 + lane] = part[0] * scale, share[warp * 64 + 32 + lane] = part[1] * scale;
    }
    __syncthreads();
    const int column = rank * 128 + (tid & 127), quarter = tid >> 7;  // of the splits: every fourth
#pragma unroll 2
    for (int row = 0; row < p.rows; ++row) {
        const float *const from = p.part + ((long long)row * p.splits * p.heads + head) * L + column;
        const long long step = (long long)p.heads * L;
        float v = 0.0f;
#pragma unroll 1
        for (int s = quarter; s < p.splits; s += 32) {  // splits without tokens have share 0; what they hold is not read
            float x[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) x[i] = share[row * 64 + s + 4 * i] > 0.0f ? load_f32(from + (s + 4 * i) * step) : 0.0f;
#pragma unroll
            for (int i = 0; i < 8; ++i) v += share[row * 64 + s + 4 * i] * x[i];
        }
        quarters[(row * 4 + quarter) * 128 + (tid & 127)] = v;
    }
    __syncthreads();
#pragma unroll 1
    for (int row = quarter; row < 8; row += 4) {
        float v = 0.0f;
        if (row < p.rows)
#pragma unroll
            for (int i = 0; i < 4; ++i) v += quarters[(row * 4 + i) * 128 + (tid & 127)];
        const u32 pair = pack_bf16(v, __shfl_down_sync(~0u, v, 1));
        if (!(lane & 1))
#pragma unroll
            for (int b = 0; b < PARTS; ++b) remote_store(shared_address(latent + (row * L + column) / 2), b, __uint_as_float(pair));
    }
    copy_wait<0>();
    cluster_arrive();
    cluster_wait();
    float c[4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint4 v = *(const uint4 *)(latent + (g * L + side * 128 + i * 32 + t * 8) / 2);
        const u32 x[4] = {v.x, v.y, v.z, v.w};
        mma_chunk(c, shared16(mine + i * 1024), shared16(mine + i * 1024 + 512), x);
    }
    float *const to = partial + side * 512 + tile * 128;
    *(float2 *)(to + g * 8 + 2 * t) = make_float2(c[0], c[1]);
    *(float2 *)(to + (g + 8) * 8 + 2 * t) = make_float2(c[2], c[3]);
    __syncthreads();
    const int row = tid & 7, n = tid >> 3;
    if (row < p.rows)
        *(u16 *)(p.out + 2 * ((long long)row * p.heads * O + head * O + rank * 64 + n)) =
            to_bf16(partial[tid] + partial[512 + tid] + partial[1024 + tid] + partial[1536 + tid]);
}
