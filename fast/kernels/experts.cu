// The routed experts of 1..8 rows, NVFP4 weights, bf16 activations: experts_up, then experts_down, from one plan.
//
// Both kernels walk the distinct experts of all rows in ascending order, so each is read once; the eight columns of the
// m16n8k16 products are the rows. A row meets its own experts in that order with a K split fixed by the shapes, and what
// other rows chose adds exact zeros to it: its bits do not depend on the other rows.
#include "nvfp4.cuh"
#include "plan.cuh"

#ifndef STAGES
#define STAGES 2  // ring slots of a warp in experts_up
#endif
#ifndef RING
#define RING 2    // and in experts_down
#endif
#ifndef EXACT
#define EXACT 1   // 1: K fills every group and N every tile, so no bounds are checked; 0: any K that is a multiple of 32
#endif
#ifndef UP
#define UP 2      // 128-value groups of K in a ring slot of experts_up
#endif
#ifndef K_UP
#define K_UP 0    // contraction width of experts_up, 0: given at run time
#endif
#ifndef K_DOWN
#define K_DOWN 0  // and of experts_down
#endif
#ifndef DOWN_BLOCKS
#define DOWN_BLOCKS 2
#endif
#define WARPS 16
#define TEAM 4                // warps of experts_up that share a tile: each owns a quarter of K
#define TEAMS (WARPS / TEAM)
#define DOWN 1
#define SLOT(groups) ((groups) * 1152)  // codes of 16 rows, then their scales

struct Experts {
    const Plan *plan;
    const u8 *x;                    // up: [R, k] bf16; down: [R, top_k, k] bf16
    const u8 *shared_x, *shared_w;  // down: [R, shared_k] and [n, shared_k] bf16, or null
    u16 *out;                       // up: [R, top_k, n]; down: [R, n]
    int rows, top_k, k, n, shared_k, early;
    float limit;
};

extern "C" __global__ void __launch_bounds__(64) experts_plan(const __grid_constant__ Planner p) {
    __shared__ PlanScratch scratch;
    pdl_launch();
    pdl_wait();
    make_plan(p, scratch, threadIdx.x, [] { __syncthreads(); });
}

DEVICE void load_plan(const Plan *from, Plan &to) {
    static_assert(sizeof(Plan) <= WARPS * 32 * 16 && sizeof(Plan) % 16 == 0, "one piece a thread");
    if (threadIdx.x < sizeof(Plan) / 16) ((uint4 *)&to)[threadIdx.x] = load16((const u8 *)from + threadIdx.x * 16);
}

// Scales of one of 16 rows: a lane copies GROUPS * 8 bytes, `available` of which exist.
template <int GROUPS> DEVICE void copy_scales(u32 dst, const u8 *src, int available) {
#if EXACT
    if (GROUPS == 2) copy16(dst, src, true);
    else copy8(dst, src, true);
#else
    for (int i = 0; i < GROUPS * 8; ++i) {
        const u32 v = i < available ? src[i] : 0;
        asm volatile("st.shared.u8 [%0], %1;" ::"r"(dst + i), "r"(v) : "memory");
    }
#endif
}

// h[r, j, n] = bf16(swiglu(gate_e x_r, up_e x_r)) for the j-th choice e of row r. A tile is eight rows of gate and the same
// eight of up; the four warps of a team split K and meet at a barrier of their own. x lies in shared memory in the order in
// which the products take it: [group][word][row][t] pieces of eight values.
extern "C" __global__ void __launch_bounds__(WARPS * 32, 2) experts_up(const __grid_constant__ Experts p) {
    extern __shared__ __align__(128) u8 memory[];
    float *const partial = (float *)(memory + WARPS * STAGES * SLOT(UP));  // [TEAMS][2][TEAM][16][8]
    uint4 *const inputs = (uint4 *)(partial + WARPS * 2 * 128);
    __shared__ __align__(16) Plan d;
    __shared__ uint4 nothing;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, team = warp / TEAM, slice = warp % TEAM;
    const u32 ring = shared_address(memory) + warp * STAGES * SLOT(UP);
    const int K = K_UP ? K_UP : p.k, tiles = (p.n + 7) >> 3, row_bytes = K >> 1, scale_bytes = K >> 4;
    const int units = (((K + 127) >> 7) + TEAM * UP - 1) / (TEAM * UP), k0 = slice * units * UP * 128;  // of a warp and tile
    if (threadIdx.x == 0) nothing = make_uint4(0, 0, 0, 0);
    pdl_wait();
    pdl_launch();  // behind the wait: experts_down may then read the plan before its own
    load_plan(p.plan, d);
    __syncthreads();

    const int items = d.count * tiles, step = gridDim.x * TEAMS, start = blockIdx.x * TEAMS + team;
    // Prefetch cursor: item = (expert, tile), units left in the tile, and the lane's addresses there.
    int next = start, next_tile = start, next_expert = 0, left = 0;
    const u8 *a = p.x, *b = p.x, *scale = p.x;
    auto locate = [&]() {
        while (next_tile >= tiles) next_tile -= tiles, ++next_expert;
        const long long at = (long long)(next_tile * 8 + g) * row_bytes + (k0 >> 1) + t * 16;
        a = (const u8 *)d.address[0][next_expert] + at, b = (const u8 *)d.address[2][next_expert] + at;
        scale = (const u8 *)d.address[lane & 8 ? 3 : 1][next_expert];
        scale += (long long)(next_tile * 8 + (lane & 7)) * scale_bytes + (k0 >> 4);
        left = units;
    };
    auto issue = [&](u32 slot) {
        if (left > 0) {
            const int k = k0 + (units - left) * UP * 128;
#pragma unroll
            for (int q = 0; q < UP; ++q) {
                const bool ok = EXACT || (next_tile * 8 + g < p.n && k + q * 128 + t * 32 < K);
                copy16(slot + q * 1024 + lane * 16, ok ? a + q * 64 : p.x, ok);
                copy16(slot + q * 1024 + 512 + lane * 16, ok ? b + q * 64 : p.x, ok);
            }
            if (lane < 16) {
                const int have = EXACT ? UP * 8 : next_tile * 8 + (lane & 7) < p.n ? scale_bytes - (k >> 4) : 0;
                copy_scales<UP>(slot + UP * 1024 + lane * UP * 8, scale, have);
            }
            a += UP * 64, b += UP * 64, scale += UP * 8;
            if (--left == 0) {
                next += step, next_tile += step;
                if (next < items) locate();
            }
        }
        copy_commit();
    };
    if (next < items) locate();
#pragma unroll
    for (int s = 0; s < STAGES; ++s) issue(ring + s * SLOT(UP));
#pragma unroll 2
    for (int i = threadIdx.x; i < TEAM * units * UP * 16 * p.rows; i += WARPS * 32) {
        const int piece = p.rows == 1 ? i : i / p.rows, row = p.rows == 1 ? 0 : i % p.rows;
        const int k = piece >> 4 << 7 | (piece & 3) << 5 | (piece >> 2 & 3) << 3;
        u32 x[4];
        nvfp4_inputs(EXACT || k < K ? load16(p.x + 2ll * ((long long)row * K + k)) : make_uint4(0, 0, 0, 0), x);
        inputs[((piece >> 2) * p.rows + row) * 4 + (piece & 3)] = make_uint4(x[0], x[1], x[2], x[3]);
    }
    __syncthreads();

    u32 slot = 0, parity = 0;
    int tile = start, expert = 0, turn = 0;
    const u32 x_step = g < p.rows ? p.rows * 64 : 0;  // lanes without a row read the same zeros again
    const u32 x_first = g < p.rows ? shared_address(inputs) + ((slice * units * UP * 4) * p.rows + g) * 64 + t * 16 : shared_address(&nothing);
#pragma unroll 1
    for (int item = start; item < items; item += step, tile += step) {
        while (tile >= tiles) tile -= tiles, ++expert;
        float c[4] = {};
        u32 from_x = x_first;
#pragma unroll 1
        for (int unit = 0; unit < units; ++unit) {
            copy_wait<STAGES - 1>();
            __syncwarp();  // scales were copied by other lanes
            const u32 from = ring + slot;
#pragma unroll
            for (int q = 0; q < UP; ++q) {
                u32 x[4][4];
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const uint4 v = shared16(from_x);
                    x[j][0] = v.x, x[j][1] = v.y, x[j][2] = v.z, x[j][3] = v.w;
                    from_x += x_step;
                }
                const u32 s = from + UP * 1024 + g * UP * 8 + q * 8 + t * 2;
                nvfp4_group(c, shared16(from + q * 1024 + lane * 16), shared16(from + q * 1024 + 512 + lane * 16),
                            shared_u16(s), shared_u16(s + 8 * UP * 8), x);
            }
            __syncwarp();
            issue(from);
            slot = slot + SLOT(UP) == STAGES * SLOT(UP) ? 0 : slot + SLOT(UP);
        }
        float *const out = partial + (team * 2 + parity) * (TEAM * 128);
        parity ^= 1;
        if (2 * t < p.rows) {
            *(float2 *)(out + slice * 128 + g * 8 + 2 * t) = make_float2(c[0], c[1]);
            *(float2 *)(out + slice * 128 + (g + 8) * 8 + 2 * t) = make_float2(c[2], c[3]);
        }
        named_barrier(1 + team, TEAM * 32);
        const int id = (slice * 32 + lane + turn) & (TEAM * 32 - 1);  // the warps take turns at the sums
        turn += 64;
        if (id < 64) {
            const int n = tile * 8 + (id >> 3), row = id & 7;
            const int place = row < p.rows && n < p.n ? d.place[expert][row] : -1;
            if (place >= 0) {
                float gate = 0.0f, up = 0.0f;
#pragma unroll
                for (int w = 0; w < TEAM; ++w) gate += out[w * 128 + id], up += out[w * 128 + 64 + id];
                gate *= d.scale2[0][expert] * NVFP4_RESIDUE, up *= d.scale2[1][expert] * NVFP4_RESIDUE;
                p.out[((long long)row * p.top_k + place) * p.n + n] = to_bf16(swiglu(gate, up, p.limit));
            }
        }
    }
    copy_wait<0>();
}

// y[r, n] = bf16(shared_w x + sum over the row's experts, ascending, of weight * scale_2 * (down_e h)), fp32 until the end.
// A block owns 32 output rows, its 16 warps split every K; a warp has two row tiles, so that its inputs serve both. Nothing
// but the inputs depends on experts_up: with `early` (the kernel in front is experts_up of the same plan) the plan is read
// and the ring filled before the wait. The shared expert comes first.
#define TILES 2
#define DOWN_SLOT (TILES * SLOT(DOWN))  // codes [TILES][2][512], then scales [TILES * 16][8]
extern "C" __global__ void __launch_bounds__(WARPS * 32, DOWN_BLOCKS) experts_down(const __grid_constant__ Experts p) {
    extern __shared__ __align__(128) u8 memory[];
    float *const partial = (float *)(memory + WARPS * RING * DOWN_SLOT);  // [WARPS][32][8]
    __shared__ __align__(16) Plan d;
    __shared__ int input[MAX_DISTINCT][8];  // byte offset of the row's input to the expert in x, or -1
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const u32 ring = shared_address(memory) + warp * RING * DOWN_SLOT;
    const int K = K_DOWN ? K_DOWN : p.k, row0 = blockIdx.x * 32, row_bytes = K >> 1, scale_bytes = K >> 4;
    const int units = (((K + 127) >> 7) + WARPS - 1) / WARPS;                            // groups of an expert a warp owns
    const int chunks = p.shared_w ? (((p.shared_k + 31) >> 5) + WARPS - 1) / WARPS : 0;  // of the shared expert
    const int code_at = (row0 + g) * row_bytes + warp * units * 64 + t * 16;
    const int scale_at = (row0 + lane) * scale_bytes + warp * units * 8;

    int next = 0, next_expert = 0, next_unit = 0;
    auto issue_shared = [&](u32 slot) {
        const int k = (warp * chunks + next) * 32 + t * 8;
        const u8 *w = p.shared_w + 2 * ((long long)(row0 + g) * p.shared_k + k);
#pragma unroll
        for (int i = 0; i < 2 * TILES; ++i) {
            const bool in = EXACT || (k < p.shared_k && row0 + i * 8 + g < p.n);
            copy16(slot + i * 512 + lane * 16, in ? w + 16ll * i * p.shared_k : p.shared_w, in);
        }
        ++next;
        copy_commit();
    };
    auto issue_expert = [&](u32 slot) {
        if (next_expert < d.count) {
            const u8 *w = (const u8 *)d.address[4][next_expert] + (code_at + next_unit * 64);
#pragma unroll
            for (int i = 0; i < 2 * TILES; ++i) {
                const bool in = EXACT || ((warp * units + next_unit) * 128 + t * 32 < K && row0 + i * 8 + g < p.n);
                copy16(slot + i * 512 + lane * 16, in ? w + i * 8 * row_bytes : p.x, in);
            }
            const int have = EXACT ? 8 : row0 + lane < p.n ? scale_bytes - (warp * units + next_unit) * 8 : 0;
            copy_scales<DOWN>(slot + TILES * 1024 + lane * 8, (const u8 *)d.address[5][next_expert] + (scale_at + next_unit * 8), have);
            if (++next_unit == units) next_unit = 0, ++next_expert;
        }
        copy_commit();
    };
    const int first = min(RING, chunks);
#pragma unroll 1
    for (int s = 0; s < first; ++s) issue_shared(ring + s * DOWN_SLOT);
    if (!p.early) pdl_wait();
    load_plan(p.plan, d);
    __syncthreads();
    {
        const int expert = threadIdx.x >> 3, row = threadIdx.x & 7;  // a thread each: MAX_DISTINCT * 8 = WARPS * 32
        const int place = expert < d.count && row < p.rows ? d.place[expert][row] : -1;
        input[expert][row] = place < 0 ? -1 : 2 * (row * p.top_k + place) * K;
        if (expert < d.count) d.weight[expert][row] *= d.scale2[2][expert] * NVFP4_RESIDUE;
    }
#pragma unroll 1
    for (int s = first; s < RING; ++s) issue_expert(ring + s * DOWN_SLOT);
    __syncthreads();
    pdl_launch();
    pdl_wait();

    u32 slot = ring;
    float total[TILES][4] = {};
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
        const int k = (warp * chunks + chunk) * 32 + t * 8;
        const bool in = g < p.rows && (EXACT || k < p.shared_k);
        const uint4 v = in ? load16(p.shared_x + 2ll * ((long long)g * p.shared_k + k)) : make_uint4(0, 0, 0, 0);
        const u32 x[4] = {v.x, v.y, v.z, v.w};
        copy_wait<RING - 1>();
#pragma unroll
        for (int i = 0; i < TILES; ++i)
            mma_chunk(total[i], shared16(slot + i * 1024 + lane * 16), shared16(slot + i * 1024 + 512 + lane * 16), x);
        __syncwarp();
        if (next < chunks) issue_shared(slot);
        else issue_expert(slot);
        slot = slot + DOWN_SLOT == ring + RING * DOWN_SLOT ? ring : slot + DOWN_SLOT;
    }
    // The inputs of the next group are fetched while this one is multiplied.
    uint4 ahead[4] = {};
    const int x_at = 2 * (warp * units * 128 + t * 32);
    const bool alone = EXACT && p.rows == 1;  // then a lane has a row for every expert or for none
    auto fetch = [&](int expert, int unit) {
        if (expert >= d.count) return;
        const int from = input[expert][g];
        if (from >= 0 && (EXACT || x_at + unit * 256 < 2 * K)) {
            const u8 *h = p.x + (from + x_at + unit * 256);
#pragma unroll
            for (int j = 0; j < 4; ++j) ahead[j] = load16(h + j * 16);
        } else if (!alone)
#pragma unroll
            for (int j = 0; j < 4; ++j) ahead[j] = make_uint4(0, 0, 0, 0);
    };
    fetch(0, 0);
#pragma unroll 1
    for (int expert = 0; expert < d.count; ++expert) {
        float c[TILES][4] = {};
#pragma unroll 1
        for (int unit = 0; unit < units; ++unit) {
            u32 x[4][4];
#pragma unroll
            for (int j = 0; j < 4; ++j) nvfp4_inputs(ahead[j], x[j]);
            if (unit + 1 < units) fetch(expert, unit + 1);
            else fetch(expert + 1, 0);
            copy_wait<RING - 1>();
            __syncwarp();  // scales were copied by other lanes
#pragma unroll
            for (int i = 0; i < TILES; ++i) {
                const u32 s = slot + TILES * 1024 + (i * 16 + g) * 8 + t * 2, from = slot + i * 1024 + lane * 16;
                nvfp4_group(c[i], shared16(from), shared16(from + 512), shared_u16(s), shared_u16(s + 64), x);
            }
            __syncwarp();
            issue_expert(slot);
            slot = slot + DOWN_SLOT == ring + RING * DOWN_SLOT ? ring : slot + DOWN_SLOT;
        }
        const float2 w = *(const float2 *)&d.weight[expert][2 * t];
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            total[i][0] += w.x * c[i][0], total[i][1] += w.y * c[i][1];
            total[i][2] += w.x * c[i][2], total[i][3] += w.y * c[i][3];
        }
    }
    copy_wait<0>();
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
        *(float2 *)(partial + warp * 256 + (i * 16 + g) * 8 + 2 * t) = make_float2(total[i][0], total[i][1]);
        *(float2 *)(partial + warp * 256 + (i * 16 + g + 8) * 8 + 2 * t) = make_float2(total[i][2], total[i][3]);
    }
    __syncthreads();
    if (threadIdx.x < 256) {
        const int row = threadIdx.x & 7, n = row0 + (threadIdx.x >> 3);
        float part[WARPS], sum = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) part[w] = partial[w * 256 + threadIdx.x];
#pragma unroll
        for (int w = 0; w < WARPS; ++w) sum += part[w];
        if (row < p.rows && n < p.n) p.out[(long long)row * p.n + n] = to_bf16(sum);
    }
}
