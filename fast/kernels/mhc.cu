// One manifold-constrained hyper-connection site for 1..8 rows: [combine of the previous site ->] mix, collapse, RMSNorm.
// One cluster of 8 blocks; a warp owns 32 columns of all C streams, kept in registers as mma operands.
//
// S'[j] = bf16(post[j] o + sum_i comb[i][j] S[i]);  m = (flatten(S') / rms) fn^T;  pre, post, comb from m;  x = bf16(sum_i
// pre[i] S'[i]);  y = bf16(w x / rms(x)). The 24 sums run over the cluster in block order, then warp order inside a block;
// rows are mma columns and never meet. All mHC arithmetic is fp32. The block behind the site does not need comb: its logits are
// stored here, and Sinkhorn runs beside the next large kernel (gemv.cu) or alone (hc_sinkhorn).
#include "sinkhorn.cuh"

#ifndef STAGED
#define STAGED C  // streams whose part of fn waits in shared memory; fewer where it is short
#endif
#define M ((2 + C) * C)
#define BLOCKS 8
#define WARPS 16
#define SUMS (M + 1)

struct Hc {
    const u8 *streams;           // [R, C, D] bf16, S; null: every stream is embedding[token]
    const u8 *embedding;         // [V, D]
    const int *token;            // [R]
    const u8 *o;                 // [R, D] bf16 sublayer output to combine first, or null
    const float *old_post, *old_comb;  // [R, C], [R, C, C] of the site that produced o
    const u8 *fn;                // [M, C * D] bf16; null: the final stream mean and norm
    const float *base, *scale;   // [M], [3]
    const u8 *norm;              // [D]
    u8 *new_streams;             // [R, C, D] S' (null: not stored)
    u8 *x, *y;                   // [R, D] collapsed row (or null), normalised row
    float *pre, *post, *logits;  // [R, C] (or null), [R, C], [R, C, C] of comb
    int rows, d, rehearse;
    float rms_eps, hc_eps;
};

extern "C" __global__ void __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__(WARPS * 32, 1) hc_site(const __grid_constant__ Hc p) {
    extern __shared__ __align__(128) u8 memory[];                   // fn: [WARPS][STAGED][3][512], lane-private pieces
    __shared__ float partial[WARPS][SUMS][8], received[BLOCKS][SUMS][8], total[SUMS][8];
    __shared__ float squares[WARPS][8], received_squares[BLOCKS][8], mix[8][C + C * C], base[M], scale[3];
    const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3;
    const u32 rank = cluster_rank();
    const int column = (rank * WARPS + warp) * 32 + t * 8;          // this lane: eight columns of row g, every stream
    const bool in = column < p.d, live = in && g < p.rows;
    const u32 fn = shared_address(memory) + warp * (STAGED * 3 * 512) + lane * 16;

    auto fn_at = [&](int j, int i) { return p.fn + 2 * ((long long)(i * 8 + g) * C * p.d + j * p.d + column); };
    if (p.fn)
#pragma unroll
        for (int j = 0; j < STAGED; ++j)
#pragma unroll
            for (int i = 0; i < 3; ++i) {
                const bool ok = in && i * 8 + g < M;
                copy16(fn + (j * 3 + i) * 512, ok ? fn_at(j, i) : p.fn, ok);
            }
    copy_commit();
    if (p.fn && tid < M) base[tid] = p.base[tid];
    if (p.fn && tid < 3) scale[tid] = p.scale[tid];
    cluster_arrive();  // no block may write to another one before that one runs
    const uint4 weight = in ? *(const uint4 *)(p.norm + 2 * column) : make_uint4(0, 0, 0, 0);
    pdl_launch();
    cluster_wait();
    // With `rehearse` everything runs once for nothing while the predecessor still works: it brings the code into the
    // instruction cache. Only the second pass stores.
#pragma unroll 1
    for (int pass = p.rehearse ? 0 : 1; pass < 2; ++pass) {
        const bool real = pass == 1;
        if (real) pdl_wait();
        u32 s[C][4] = {};  // S' of the lane's columns
        float square = 0.0f;
        if (p.o && tid < p.rows * (C + C * C)) {
            const int row = tid / (C + C * C), i = tid % (C + C * C);
            mix[row][i] = load_f32(i < C ? p.old_post + row * C + i : p.old_comb + row * C * C + i - C);
        }
        u32 old[C][4];
        uint4 o = make_uint4(0, 0, 0, 0);
        if (live) {
            const u8 *from = p.streams + 2 * ((long long)g * C * p.d + column);
            if (!p.streams) from = p.embedding + 2 * ((long long)(real ? load_i32(p.token + g) : 0) * p.d + column);
#pragma unroll
            for (int j = 0; j < C; ++j) {
                const uint4 v = load16(from);
                old[j][0] = v.x, old[j][1] = v.y, old[j][2] = v.z, old[j][3] = v.w;
                if (p.streams) from += 2 * p.d;
            }
            if (p.o) o = load16(p.o + 2 * ((long long)g * p.d + column));
        }
        __syncthreads();
        if (live) {
            const u32 out[4] = {o.x, o.y, o.z, o.w};
#pragma unroll
            for (int j = 0; j < C; ++j) {
#pragma unroll
                for (int i = 0; i < 4; ++i) s[j][i] = old[j][i];
                if (p.o) {
                    const float post = mix[g][j];
                    float comb[C];
#pragma unroll
                    for (int k = 0; k < C; ++k) comb[k] = mix[g][C + k * C + j];
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        float a = post * bf16_low(out[i]), b = post * bf16_high(out[i]);
#pragma unroll
                        for (int k = 0; k < C; ++k) a += comb[k] * bf16_low(old[k][i]), b += comb[k] * bf16_high(old[k][i]);
                        s[j][i] = pack_bf16(a, b);
                    }
                }
                if (p.new_streams && real)
                    *(uint4 *)(p.new_streams + 2 * (((long long)g * C + j) * p.d + column)) = make_uint4(s[j][0], s[j][1], s[j][2], s[j][3]);
#pragma unroll
                for (int i = 0; i < 4; ++i) square += bf16_low(s[j][i]) * bf16_low(s[j][i]) + bf16_high(s[j][i]) * bf16_high(s[j][i]);
            }
        }
        float pre[C];
#pragma unroll
        for (int j = 0; j < C; ++j) pre[j] = 1.0f / C;
        if (p.fn) {
            copy_wait<0>();
            float low[4] = {}, high[4] = {};  // fn rows 0..15 and 16..23
#pragma unroll
            for (int j = 0; j < C; ++j) {
                uint4 f[3];
#pragma unroll
                for (int i = 0; i < 3; ++i) {
                    if (j < STAGED) f[i] = shared16(fn + (j * 3 + i) * 512);
                    else f[i] = in && i * 8 + g < M ? load16(fn_at(j, i)) : make_uint4(0, 0, 0, 0);
                }
                mma_chunk(low, f[0], f[1], s[j]);
                mma_chunk(high, f[2], make_uint4(0, 0, 0, 0), s[j]);
            }
            square += __shfl_xor_sync(~0u, square, 1);
            square += __shfl_xor_sync(~0u, square, 2);
            if (2 * t < p.rows)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    if (g < M) partial[warp][g][2 * t + i] = low[i];
                    if (g + 8 < M) partial[warp][g + 8][2 * t + i] = low[2 + i];
                    if (g + 16 < M) partial[warp][g + 16][2 * t + i] = high[i];
                }
            if (t == 0) partial[warp][M][g] = square;
            __syncthreads();
            const int n = tid >> 3, at = tid & 7;  // sum and row
            const bool summing = tid < SUMS * 8 && at < p.rows;
            if (summing) {
                float sum = 0.0f;
#pragma unroll
                for (int w = 0; w < WARPS; ++w) sum += partial[w][n][at];
#pragma unroll
                for (int b = 0; b < BLOCKS; ++b) remote_store(shared_address(&received[rank][n][at]), b, sum);
            }
            cluster_arrive();
            cluster_wait();
            if (summing) {
                float sum = 0.0f;
#pragma unroll
                for (int b = 0; b < BLOCKS; ++b) sum += received[b][n][at];
                total[n][at] = sum;
            }
            __syncthreads();
            const float rms = inverse_root(total[M][g] / (float)(C * p.d) + p.rms_eps);
#pragma unroll
            for (int j = 0; j < C; ++j) pre[j] = sigmoid(total[j][g] * rms * scale[0] + base[j]) + p.hc_eps;
            if (real && rank == 0 && summing && n >= C && n < M) {
                const float r = inverse_root(total[M][at] / (float)(C * p.d) + p.rms_eps);
                const float v = total[n][at] * r * scale[n < 2 * C ? 1 : 2] + base[n];
                if (n < 2 * C) p.post[at * C + n - C] = 2.0f * sigmoid(v);
                else p.logits[at * C * C + n - 2 * C] = v;
            }
            if (real && p.pre && rank == 0 && warp == 0 && t == 0 && g < p.rows)
#pragma unroll
                for (int j = 0; j < C; ++j) p.pre[g * C + j] = pre[j];
        }
        u32 x[4];
        square = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float a = 0.0f, b = 0.0f;
#pragma unroll
            for (int j = 0; j < C; ++j) a += pre[j] * bf16_low(s[j][i]), b += pre[j] * bf16_high(s[j][i]);
            x[i] = pack_bf16(a, b);
            square += bf16_low(x[i]) * bf16_low(x[i]) + bf16_high(x[i]) * bf16_high(x[i]);
        }
        if (real && live && p.x) *(uint4 *)(p.x + 2 * ((long long)g * p.d + column)) = make_uint4(x[0], x[1], x[2], x[3]);
        square += __shfl_xor_sync(~0u, square, 1);
        square += __shfl_xor_sync(~0u, square, 2);
        if (t == 0) squares[warp][g] = square;
        __syncthreads();
        if (tid < 64) {  // thread (block, row)
            float sum = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) sum += squares[w][tid & 7];
            remote_store(shared_address(&received_squares[rank][tid & 7]), tid >> 3, sum);
        }
        cluster_arrive();
        cluster_wait();
        if (live) {
            float sum = 0.0f;
#pragma unroll
            for (int b = 0; b < BLOCKS; ++b) sum += received_squares[b][g];
            const float root = inverse_root(sum / (float)p.d + p.rms_eps);
            const u32 w[4] = {weight.x, weight.y, weight.z, weight.w};
#pragma unroll
            for (int i = 0; i < 4; ++i)
                x[i] = pack_bf16(bf16_low(x[i]) * root * bf16_low(w[i]), bf16_high(x[i]) * root * bf16_high(w[i]));
            if (real) *(uint4 *)(p.y + 2 * ((long long)g * p.d + column)) = make_uint4(x[0], x[1], x[2], x[3]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(32) hc_sinkhorn(const __grid_constant__ Sinkhorn p) {
    pdl_launch();
    pdl_wait();
    const int row = blockIdx.x * 32 + threadIdx.x;
    if (row < p.rows) sinkhorn(p, row, true);
}

// S'[r, j] = bf16(post[r, j] o[r] + sum_i comb[r, i, j] S[r, i]) alone; any number of rows, grid (column blocks, rows).
extern "C" __global__ void hc_combine(const __grid_constant__ Hc p) {
    const int column = (blockIdx.x * blockDim.x + threadIdx.x) * 8;
    const long long row = blockIdx.y;
    if (column >= p.d) return;
    float f[C][8], o[8];
    unpack8(load16(p.o + 2 * (row * p.d + column)), o);
#pragma unroll
    for (int j = 0; j < C; ++j) unpack8(load16(p.streams + 2 * ((row * C + j) * p.d + column)), f[j]);
#pragma unroll
    for (int j = 0; j < C; ++j) {
        float n[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            n[i] = p.old_post[row * C + j] * o[i];
#pragma unroll
            for (int k = 0; k < C; ++k) n[i] += p.old_comb[(row * C + k) * C + j] * f[k][i];
        }
        *(uint4 *)(p.new_streams + 2 * ((row * C + j) * p.d + column)) = pack8(n);
    }
}
