// BF16 products of 1..8 rows with one or several weight matrices that share the input: y[r, n] = sum_k x[r, k] W[n, k].
//
// Each block takes 16-row tiles of the weights in turn. Its 16 warps split K by the weight's shape alone; a warp streams
// its slice through a private ring of cp.async slots into m16n8k16 products, where the eight columns are the input rows.
// A column never meets another one and the partial sums are added in warp order, so row r has the same bits whatever the
// number of rows (row invariance). Accumulation fp32, one rounding at the store.
//
// Weights do not depend on earlier kernels: the ring is filled, and the code of the epilogue run once for nothing so that
// it is in the instruction cache, before the wait for the predecessor. With `rehearse` so is that of the block beside.
#ifndef ROUTER
#define ROUTER 0  // not 0: the launch holds router logits and ends in the choice among up to 32 * ROUTER experts
#endif
#if ROUTER
#define PER_LANE ROUTER
#endif
#include "plan.cuh"
#include "router.cuh"
#include "sinkhorn.cuh"

#ifndef CW
#define CW 8      // 32-value chunks of a K segment that one warp owns
#endif
#ifndef SEGMENTS
#define SEGMENTS 1  // K segments of 16 * CW * 32 values
#endif
#ifndef TAIL
#define TAIL 0    // 1: K does not fill its segments
#endif
#ifndef STAGES
#define STAGES 10  // ring slots of 1 KiB a warp, one chunk of 16 rows each
#endif
#ifndef ARGMAX
#define ARGMAX 0  // 1: lm_head, ends in the argmax of every row
#endif
#define WARPS 16
#define GROUP (SEGMENTS == 1 && CW > 3 ? 1 : 2)  // tiles whose sums end together: x is loaded once for both, short ones pay once
#define CHOOSING 8    // warps of the block beside that choose the experts: one a row, and all that plan
#define MAX_MATRICES 8

enum Kind { OUT_BF16 = 0, OUT_F32 = 1, OUT_SWIGLU = 2, OUT_ROUTER = 3, OUT_ARGMAX = 4 };

struct Matrix {
    const u8 *w, *w2;  // [rows, k] bf16; w2: the up projection of a SwiGLU pair, else null
    void *out;         // [R, ld]
    int rows, tile0, kind, ld;
};
struct Gemv {
    Matrix matrix[MAX_MATRICES];
    Router router;
    Planner planner;         // what the router's choice is turned into
    const u8 *x;             // [R, ldx] bf16
    float *best;             // argmax candidates [blocks, 8] values, then [blocks, 8] indices
    int *token, *position;   // argmax result [R]; positions [R] to advance, or null
    u32 *counter;            // argmax: blocks finished
    Sinkhorn side;           // this, the expert choice and its plan are done by one block `beside` those of the tiles
    const float *router_logits;  // [R, experts]
    int matrices, tiles, blocks, rows, k, ldx, router_tiles, beside, rehearse;
    float limit;
};

// Walks the blocks' (tile group, segment, tile of the group); a, b: where the lane's two weight rows begin there.
struct Cursor { int base, inner, segment; const u8 *a, *b; };

DEVICE int matrix_of(const Gemv &p, int tile) {
    int m = 0;
#pragma unroll 1
    while (m + 1 < p.matrices && tile >= p.matrix[m + 1].tile0) ++m;
    return m;
}
DEVICE void locate(const Gemv &p, Cursor &c, int warp, int g, int t) {
    const int tile = blockIdx.x - p.beside + (c.base + c.inner) * p.blocks;
    const Matrix &q = p.matrix[matrix_of(p, tile)];
    const int i = tile - q.tile0, a = q.w2 ? 8 * i + g : 16 * i + g, b = q.w2 ? a : a + 8;
    const long long stride = 2ll * p.k, at = ((c.segment * WARPS + warp) * CW) * 64 + t * 16;
    c.a = q.w + (a < q.rows ? a : 0) * stride + at;  // rows past the end are computed from row 0 and not stored
    c.b = (q.w2 ? q.w2 : q.w) + (b < q.rows ? b : 0) * stride + at;
}
// False when no tile is left.
DEVICE bool advance(const Gemv &p, Cursor &c, int mine, int warp, int g, int t) {
    if (SEGMENTS == 1) ++c.base;
    else if (++c.inner == min(GROUP, mine - c.base)) {
        c.inner = 0;
        if (++c.segment == SEGMENTS) c.segment = 0, c.base += GROUP;
    }
    const bool more = c.base + c.inner < mine;
    if (more) locate(p, c, warp, g, t);
    return more;
}

DEVICE void load_x(const Gemv &p, int segment, int warp, int g, int t, u32 (&x)[CW][4]) {
#pragma unroll
    for (int c = 0; c < CW; ++c) {
        const int k = ((segment * WARPS + warp) * CW + c) * 32 + t * 8;
        const bool in = g < p.rows && (!TAIL || k < p.k);
        const uint4 v = in ? load16(p.x + 2ll * ((long long)g * p.ldx + k)) : make_uint4(0, 0, 0, 0);
        x[c][0] = v.x, x[c][1] = v.y, x[c][2] = v.z, x[c][3] = v.w;
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) gemv(const __grid_constant__ Gemv p) {
    extern __shared__ __align__(128) u8 memory[];
    float *const partial = (float *)(memory + WARPS * STAGES * 1024);  // [2][WARPS][16][8]
#if ARGMAX
    __shared__ int is_last;
#endif
#if ROUTER
    __shared__ PlanScratch scratch;
#endif
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int self = (int)blockIdx.x - p.beside;  // among the blocks that have tiles
    if (self < 0) {  // the block beside them, the first to start
        if (!ROUTER) pdl_launch();
#pragma unroll 1
        for (int pass = p.rehearse ? 0 : 1; pass < 2; ++pass) {
            const bool live = pass;
            if (live) pdl_wait();
            if (ROUTER && live) pdl_launch();
            if (warp == WARPS - 1 && lane < p.side.rows) sinkhorn(p.side, lane, live);
#if ROUTER
            if (warp < CHOOSING) {  // the warps that choose do not wait for that one
                if (live && threadIdx.x == 0) {  // the router's tiles come first and are all being worked on
                    while (load_acquire(p.router.counter) != (u32)p.router_tiles) __nanosleep(20);
                    *p.router.counter = 0;
                }
                named_barrier(1, CHOOSING * 32);
                const int top_k = p.router.top_k;
                if (warp < p.rows) {
                    const float *const logits = p.router_logits + (long long)warp * p.router.experts;
                    router_select(p.router, logits, lane, scratch.ids + warp * top_k, scratch.weights + warp * top_k);
                }
                named_barrier(1, CHOOSING * 32);
                if (live && (int)threadIdx.x < p.rows * top_k)
                    p.router.ids[threadIdx.x] = scratch.ids[threadIdx.x], p.router.weights[threadIdx.x] = scratch.weights[threadIdx.x];
                if (p.planner.address && threadIdx.x < 64) make_plan(p.planner, scratch, threadIdx.x, live, [] { named_barrier(2, 64); });
            }
#endif
        }
        return;
    }
    const u32 ring = shared_address(memory) + warp * STAGES * 1024 + lane * 16;
    const int mine = (p.tiles - 1 - self) / p.blocks + 1;

    Cursor cursor = {};
    bool more = true;
    locate(p, cursor, warp, g, t);
    auto load = [&](int chunk, u32 slot) {
        if (more) {
            const bool in = !TAIL || ((cursor.segment * WARPS + warp) * CW + chunk) * 32 + t * 8 < p.k;
            copy16(slot, TAIL && !in ? p.matrix[0].w : cursor.a + chunk * 64, in);
            copy16(slot + 512, TAIL && !in ? p.matrix[0].w : cursor.b + chunk * 64, in);
        }
        copy_commit();
    };
    // The cursor is STAGES chunks ahead of the products.
#pragma unroll 1
    for (int s = 0; s < STAGES; ++s) {
        if (s && s % CW == 0 && more) more = advance(p, cursor, mine, warp, g, t);
        load(s % CW, ring + s * 1024);
    }
    if (!ROUTER) pdl_launch();

    u32 x[CW][4], slot = ring;
    float best = -INFINITY;
    int best_index = 0x7fffffff, parity = 0;
#pragma unroll 1
    for (int first = -GROUP; first < mine; first += GROUP) {
        if (first == 0) {
            pdl_wait();
            if (ROUTER) pdl_launch();  // behind the wait: experts.cu may then read x before its own
            load_x(p, 0, warp, g, t, x);
        }
        float c[GROUP][4] = {};
#pragma unroll 1
        for (int s = first < 0 ? SEGMENTS : 0; s < SEGMENTS; ++s) {
            if (SEGMENTS > 1 && (s || first)) load_x(p, s, warp, g, t, x);
#pragma unroll
            for (int i = 0; i < GROUP; ++i)
                if (first + i < mine) {
#pragma unroll
                    for (int j = 0; j < CW; ++j) {
                        copy_wait<STAGES - 1>();
                        mma_chunk(c[i], shared16(slot), shared16(slot + 512), x[j]);
                        if ((j + STAGES) % CW == 0 && more) more = advance(p, cursor, mine, warp, g, t);
                        load((j + STAGES) % CW, slot);
                        slot = slot == ring + (STAGES - 1) * 1024 ? ring : slot + 1024;
                    }
                }
        }
        if (GROUP > 1) __syncthreads();  // the sums of the group before have been read
#pragma unroll
        for (int i = 0; i < GROUP; ++i) {
            float *const out = partial + (GROUP > 1 ? i : parity) * (WARPS * 128);
            if (2 * t < p.rows) {
                *(float2 *)(out + warp * 128 + g * 8 + 2 * t) = make_float2(c[i][0], c[i][1]);
                *(float2 *)(out + warp * 128 + (g + 8) * 8 + 2 * t) = make_float2(c[i][2], c[i][3]);
            }
        }
        __syncthreads();
        const bool live = first >= 0;
        const int i = threadIdx.x >> 7, id = threadIdx.x & 127;  // tile of the group
        float *const out = partial + (GROUP > 1 ? i : parity) * (WARPS * 128);
        parity ^= 1;
        if (i >= GROUP || first + i >= mine) continue;
        const int r = id >> 3, column = id & 7;  // weight row of the tile, input row
        const int tile = live ? self + (first + i) * p.blocks : self;
        const Matrix &q = p.matrix[matrix_of(p, tile)];
        const bool pair = q.kind == OUT_SWIGLU;
        const int n = (tile - q.tile0) * (pair ? 8 : 16) + r;
        float part[WARPS], sum = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) part[w] = out[w * 128 + id];
#pragma unroll
        for (int w = 0; w < WARPS; ++w) sum += part[w];
        if (pair) {  // rows 8..15 of the tile are up: they hand their sums to the threads of rows 0..7
            if (r >= 8) out[id] = sum;
            named_barrier(1 + 2 * i, 128);
            sum = swiglu(sum, out[64 + (id & 63)], p.limit);
        }
        if (live && column < p.rows && n < q.rows && (!pair || r < 8)) {
            const long long at = (long long)column * q.ld + n;
            if (q.kind == OUT_BF16 || pair) ((u16 *)q.out)[at] = to_bf16(sum);
            else ((float *)q.out)[at] = sum;
            if (ARGMAX && (sum > best || (sum == best && n < best_index))) best = sum, best_index = n;
        }
#if ROUTER
        if (live && q.kind == OUT_ROUTER) {
            fence();
            named_barrier(1 + 2 * i, 128);
            if (id == 0) atomicAdd(p.router.counter, 1u);
        }
#endif
    }
    copy_wait<0>();

#if ARGMAX
    {
        __syncthreads();
        int *const index = (int *)(partial + GROUP * 128);
        if (threadIdx.x < GROUP * 128) partial[threadIdx.x] = best, index[threadIdx.x] = best_index;
        __syncthreads();
        if (threadIdx.x < 8) {
            for (int r = 0; r < 16 * GROUP; ++r) {
                const float v = partial[r * 8 + threadIdx.x];
                const int n = index[r * 8 + threadIdx.x];
                if (v > best || (v == best && n < best_index) || r == 0) best = v, best_index = n;
            }
            p.best[self * 8 + threadIdx.x] = best;
            ((int *)p.best)[(p.blocks + self) * 8 + threadIdx.x] = best_index;
            fence();
        }
        __syncthreads();
        if (threadIdx.x == 0) is_last = atomicAdd(p.counter, 1u) == (u32)p.blocks - 1;
        __syncthreads();
        if (is_last) {
            fence();
            if (warp < p.rows) {
                best = -INFINITY, best_index = 0x7fffffff;
                for (int b = lane; b < p.blocks; b += 32) {
                    const float v = load_f32(p.best + b * 8 + warp);
                    const int n = load_i32((const int *)p.best + (p.blocks + b) * 8 + warp);
                    if (v > best || (v == best && n < best_index)) best = v, best_index = n;
                }
#pragma unroll
                for (int m = 16; m; m >>= 1) {
                    const float v = __shfl_xor_sync(~0u, best, m);
                    const int n = __shfl_xor_sync(~0u, best_index, m);
                    if (v > best || (v == best && n < best_index)) best = v, best_index = n;
                }
                if (lane == 0) {
                    p.token[warp] = best_index == 0x7fffffff ? 0 : best_index;  // a row of NaN picks token 0
                    if (p.position) p.position[warp] += 1;
                }
            }
            if (threadIdx.x == 0) *p.counter = 0;
        }
    }
#endif
}
