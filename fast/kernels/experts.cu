// The routed experts of 1..8 rows, NVFP4 weights, bf16 activations, in one launch: up for all experts, then down.
//
// Both halves walk the distinct experts of all rows in ascending order, so each is read once; the eight columns of the
// m16n8k16 products are the rows. A row meets its own experts in that order with a K split fixed by the shapes, and what
// other rows chose adds exact zeros to it: its bits do not depend on the other rows.
//
// Every warp streams its share of the weights through a private ring of cp.async slots, from the first tile of up to the
// last of down without a break: the shared expert, which needs nothing from up, bridges the wait for the other blocks.
//
// With `rehearse` a block goes once through all loops before the wait for its predecessor, on whatever lies in shared
// memory and storing nothing: that brings the code into the instruction cache.
#include "nvfp4.cuh"
#include "plan.cuh"

#ifndef STAGES
#define STAGES 2  // ring slots of a warp
#endif
#ifndef EXACT
#define EXACT 1   // 1: K fills every group and N every tile, so no bounds are checked; 0: any K that is a multiple of 32
#endif
#ifndef HIDDEN
#define HIDDEN 0  // hidden size and expert width known to the compiler, or 0 (HIDDEN / 1024 is a multiple of STAGES then)
#endif
#ifndef WIDTH
#define WIDTH 0
#endif
#define WARPS 16
#define THREADS (WARPS * 32)
#define TEAM 4                // warps of up that share a tile: each owns a quarter of K
#define TEAMS (WARPS / TEAM)
#define UP 2                  // 128-value groups of K in a slot of up
#define TILES 2               // 16-row tiles in a slot of down: a block has 32 rows, its warps split K
#define SLOT 2304             // up: codes [UP][2][512], scales [16][8 UP]; down: codes [TILES][2][512], scales [32][8]

struct Experts {
    const Plan *plan;
    const u8 *x;                    // [R, hidden] bf16
    u8 *h;                          // [R, top_k, width] bf16, between the halves
    const u8 *shared_x, *shared_w;  // [R, shared_k], [hidden, shared_k] bf16, or null
    u16 *out;                       // [R, hidden]
    u32 *barrier;                   // two words: blocks that have arrived, 0 between launches; generation
    int rows, top_k, hidden, width, shared_k;
    int phases;  // 1: up, 2: down, 3: both, for which all blocks must be on the device at once
    int early;   // the kernel in front did not write x and has waited for the one that did before it let this one start
    int rehearse;
    float limit;
};

extern "C" __global__ void __launch_bounds__(64) experts_plan(const __grid_constant__ Planner p) {
    __shared__ PlanScratch scratch;
    pdl_launch();
    pdl_wait();
    const int choices = p.rows * p.top_k, tid = threadIdx.x;
    if (tid < choices) scratch.ids[tid] = load_i32(p.ids + tid), scratch.weights[tid] = load_f32(p.weights + tid);
    __syncthreads();
    make_plan(p, scratch, tid, true, [] { __syncthreads(); });
}

// BYTES of the scales of one row, `available` of which exist.
template <int BYTES> DEVICE void copy_scales(u32 dst, const u8 *src, int available) {
#if EXACT
    if (BYTES == 16) copy16(dst, src, true);
    else copy8(dst, src, true);
#else
#pragma unroll 1
    for (int i = 0; i < BYTES; ++i) {
        const u32 v = i < available ? src[i] : 0;
        asm volatile("st.shared.u8 [%0], %1;" ::"r"(dst + i), "r"(v) : "memory");
    }
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) experts(const __grid_constant__ Experts p) {
    extern __shared__ __align__(128) u8 memory[];
    float *const partial = (float *)(memory + WARPS * STAGES * SLOT);  // up: [TEAMS][2][TEAM][16][8]; down: [WARPS][32][8]
    uint4 *const inputs = (uint4 *)(partial + WARPS * 256);  // x in the order of the products: [group][word][row][t] of 8 values
    __shared__ __align__(16) Plan d;
    __shared__ int input[MAX_DISTINCT][8];  // byte offset of the row's input to the expert in h, or -1
    __shared__ uint4 nothing;
    __shared__ int arrived;  // warps that are through with up
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, team = warp / TEAM, slice = warp % TEAM;
    const u32 ring = shared_address(memory) + warp * STAGES * SLOT;
    u32 turn = 0, slot = 0;  // slot: the next one to be used up
    auto advance = [&]() { slot = slot + SLOT == STAGES * SLOT ? 0 : slot + SLOT; };

    // ---- up: tiles of eight rows of gate and the same eight of up
    const int D = HIDDEN ? HIDDEN : p.hidden, N = WIDTH ? WIDTH : p.width, tiles = (N + 7) >> 3;
    const int units = (((D + 127) >> 7) + TEAM * UP - 1) / (TEAM * UP), k0 = slice * units * UP * 128;  // of a warp and tile
    const int step = gridDim.x * TEAMS, start = blockIdx.x * TEAMS + team;
    int items = 0, next = start, next_tile = start, next_expert = 0, next_unit = 0;  // the prefetch cursor, and where it reads
    const u8 *a = p.x, *b = p.x, *scale = p.x;
    auto locate_up = [&]() {
        while (next_tile >= tiles) next_tile -= tiles, ++next_expert;
        const long long at = (long long)(next_tile * 8 + g) * (D >> 1) + (k0 >> 1) + t * 16;
        a = (const u8 *)d.address[0][next_expert] + at, b = (const u8 *)d.address[2][next_expert] + at;
        scale = (const u8 *)d.address[lane & 8 ? 3 : 1][next_expert];
        scale += (long long)(next_tile * 8 + (lane & 7)) * (D >> 4) + (k0 >> 4);
    };
    auto next_item = [&]() {
        next += step, next_tile += step;
        if (next < items) locate_up();
    };
    auto issue_up = [&](u32 to, int unit) {
        const int k = k0 + unit * UP * 128;
#pragma unroll
        for (int q = 0; q < UP; ++q) {
            const bool ok = EXACT || (next_tile * 8 + g < N && k + q * 128 + t * 32 < D);
            copy16(to + q * 1024 + lane * 16, ok ? a + unit * UP * 64 + q * 64 : p.x, ok);
            copy16(to + q * 1024 + 512 + lane * 16, ok ? b + unit * UP * 64 + q * 64 : p.x, ok);
        }
        if (lane < 16) {
            const int have = EXACT ? UP * 8 : next_tile * 8 + (lane & 7) < N ? (D >> 4) - (k >> 4) : 0;
            copy_scales<UP * 8>(to + UP * 1024 + lane * UP * 8, scale + unit * UP * 8, have);
        }
    };

    // ---- down: 32 rows at a time; for each the shared expert in chunks of 32 values of K, then the experts in groups of 128
    const int row_blocks = p.phases & 2 ? (D + 31) >> 5 : 0;
    const int groups = (((N + 127) >> 7) + WARPS - 1) / WARPS;                          // of an expert and warp
    const int chunks = p.shared_w ? (((p.shared_k + 31) >> 5) + WARPS - 1) / WARPS : 0;  // of the shared expert
    int next_block = blockIdx.x, next_chunk = 0, next_choice = 0, next_group = 0;  // the prefetch cursor
    auto issue_down = [&](u32 to) {
        if (next_block >= row_blocks) return;
        const int row = next_block * 32 + g;
        if (next_chunk < chunks) {
            const int k = (warp * chunks + next_chunk++) * 32 + t * 8;
            const u8 *w = p.shared_w + 2 * ((long long)row * p.shared_k + k);
#pragma unroll
            for (int i = 0; i < 2 * TILES; ++i) {
                const bool in = EXACT || (k < p.shared_k && row + i * 8 < D);
                copy16(to + i * 512 + lane * 16, in ? w + 16ll * i * p.shared_k : p.shared_w, in);
            }
        } else {
            const int group = warp * groups + next_group;
            const u8 *w = (const u8 *)d.address[4][next_choice] + (row * (N >> 1) + group * 64 + t * 16);
#pragma unroll
            for (int i = 0; i < 2 * TILES; ++i) {
                const bool in = EXACT || (group * 128 + t * 32 < N && row + i * 8 < D);
                copy16(to + i * 512 + lane * 16, in ? w + i * 8 * (N >> 1) : p.x, in);
            }
            const int scaled = next_block * 32 + lane, have = EXACT ? 8 : scaled < D ? (N >> 4) - group * 8 : 0;
            copy_scales<8>(to + TILES * 1024 + lane * 8, (const u8 *)d.address[5][next_choice] + (scaled * (N >> 4) + group * 8), have);
            if (++next_group == groups) next_group = 0, ++next_choice;
        }
        if (next_chunk == chunks && next_choice == d.count) next_block += gridDim.x, next_chunk = next_choice = 0;
    };

    if (threadIdx.x == 0) nothing = make_uint4(0, 0, 0, 0), arrived = 0;
    if (!p.early) pdl_wait();
    if (p.phases & 1)
#pragma unroll 2
        for (int i = threadIdx.x; i < TEAM * units * UP * 16 * p.rows; i += THREADS) {
            const int piece = p.rows == 1 ? i : i / p.rows, row = p.rows == 1 ? 0 : i % p.rows;
            const int k = piece >> 4 << 7 | (piece & 3) << 5 | (piece >> 2 & 3) << 3;
            u32 x[4];
            nvfp4_inputs(EXACT || k < D ? load16(p.x + 2ll * ((long long)row * D + k)) : make_uint4(0, 0, 0, 0), x);
            inputs[((piece >> 2) * p.rows + row) * 4 + (piece & 3)] = make_uint4(x[0], x[1], x[2], x[3]);
        }
    const u32 x_step = g < p.rows ? p.rows * 64 : 0;  // lanes without a row read the same zeros again
    const u32 x_first = g < p.rows ? shared_address(inputs) + ((slice * units * UP * 4) * p.rows + g) * 64 + t * 16 : shared_address(&nothing);

#pragma unroll 1
    for (int pass = p.rehearse ? 0 : 1; pass < 2; ++pass) {
        const bool live = pass;
        u32 generation = 0;
        if (live) {
            pdl_wait();
            pdl_launch();
            if (lane == 0) generation = load_i32((const int *)p.barrier + 1);
            __syncthreads();
            static_assert(sizeof(Plan) <= THREADS * 16 && sizeof(Plan) % 16 == 0, "one piece a thread");
            if (threadIdx.x < sizeof(Plan) / 16) ((uint4 *)&d)[threadIdx.x] = load16((const u8 *)p.plan + threadIdx.x * 16);
            __syncthreads();
            items = p.phases & 1 ? d.count * tiles : 0;
            if (chunks == 0 && d.count == 0) next_block = row_blocks;
            if (next < items) locate_up();
            slot = 0;
#pragma unroll 1
            for (int s = 0; s < STAGES; ++s) {
                if (next >= items) issue_down(ring + s * SLOT);
                else {
                    issue_up(ring + s * SLOT, next_unit);
                    if (++next_unit == units) next_unit = 0, next_item();
                }
                copy_commit();
            }
            {  // a thread each: MAX_DISTINCT * 8 = THREADS
                const int expert = threadIdx.x >> 3, row = threadIdx.x & 7;
                const int place = expert < d.count && row < p.rows ? d.place[expert][row] : -1;
                input[expert][row] = place < 0 ? -1 : 2 * (row * p.top_k + place) * N;
                if (expert < d.count) d.weight[expert][row] *= d.scale2[2][expert] * NVFP4_RESIDUE;
            }
            __syncthreads();
        }
        int tile = start, expert = 0;
#pragma unroll 1
        for (int item = live ? start : 0; item < (live ? items : p.phases & 1); item += step, tile += step) {
            while (tile >= tiles) tile -= tiles, ++expert;
            float c[4] = {};
            u32 from_x = x_first;
#pragma unroll (HIDDEN ? HIDDEN / 1024 : 1)
            for (int unit = 0; unit < units; ++unit) {
                copy_wait<STAGES - 1>();
                __syncwarp();  // scales were copied by other lanes
                const u32 from = ring + (HIDDEN ? unit % STAGES * SLOT : slot);
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
                if (HIDDEN && live) {  // the cursor is STAGES units ahead
                    if (unit + STAGES == units) next_item();
                    if (unit + STAGES < units) issue_up(from, unit + STAGES);
                    else if (next < items) issue_up(from, unit + STAGES - units);
                    else issue_down(from);
                } else if (live) {
                    if (next >= items) issue_down(from);
                    else {
                        issue_up(from, next_unit);
                        if (++next_unit == units) next_unit = 0, next_item();
                    }
                    advance();
                }
                copy_commit();
            }
            float *const out = partial + (team * 2 + (turn >> 6 & 1)) * (TEAM * 128);
            if (2 * t < p.rows) {
                *(float2 *)(out + slice * 128 + g * 8 + 2 * t) = make_float2(c[0], c[1]);
                *(float2 *)(out + slice * 128 + (g + 8) * 8 + 2 * t) = make_float2(c[2], c[3]);
            }
            named_barrier(1 + team, TEAM * 32);
            const int id = (slice * 32 + lane + turn) & (TEAM * 32 - 1);  // the warps take turns at the sums
            turn += 64;
            if (id < 64) {
                const int n = tile * 8 + (id >> 3), row = id & 7;
                const int place = live && row < p.rows && n < N ? d.place[expert][row] : -1;
                if (place >= 0 || !live) {
                    float gate = 0.0f, up = 0.0f;
#pragma unroll
                    for (int w = 0; w < TEAM; ++w) gate += out[w * 128 + id], up += out[w * 128 + 64 + id];
                    gate *= d.scale2[0][expert] * NVFP4_RESIDUE, up *= d.scale2[1][expert] * NVFP4_RESIDUE;
                    const u16 h = to_bf16(swiglu(gate, up, p.limit));
                    if (live) *(u16 *)(p.h + 2 * (((long long)row * p.top_k + place) * N + n)) = h;
                }
            }
        }
        if (live && p.phases == 3) {
            __syncwarp();
            if (lane == 0) {
                fence();
                if (atomicAdd(&arrived, 1) == WARPS - 1 && atomicAdd(p.barrier, 1u) == gridDim.x - 1) {
                    p.barrier[0] = 0;
                    fence();
                    atomicAdd(p.barrier + 1, 1u);
                }
            }
            __syncwarp();
        }

        bool waiting = live && p.phases == 3;
#pragma unroll 1
        for (int block = live ? blockIdx.x : 0; block < (live ? row_blocks : p.phases >> 1); block += gridDim.x) {
            float total[TILES][4] = {};
#pragma unroll 1
            for (int chunk = live ? 0 : max(chunks - 1, 0); chunk < chunks; ++chunk) {
                const int k = (warp * chunks + chunk) * 32 + t * 8;
                const bool in = g < p.rows && (EXACT || k < p.shared_k);
                const uint4 v = in ? load16(p.shared_x + 2ll * ((long long)g * p.shared_k + k)) : make_uint4(0, 0, 0, 0);
                const u32 x[4] = {v.x, v.y, v.z, v.w}, from = ring + slot;
                copy_wait<STAGES - 1>();
#pragma unroll
                for (int i = 0; i < TILES; ++i)
                    mma_chunk(total[i], shared16(from + i * 1024 + lane * 16), shared16(from + i * 1024 + 512 + lane * 16), x);
                __syncwarp();
                if (live) issue_down(from), advance();
                copy_commit();
            }
            if (waiting) {
                if (lane == 0)
                    while (load_acquire(p.barrier + 1) == generation) __nanosleep(20);
                __syncwarp();
                waiting = false;
            }
            // The inputs of the next group are fetched while this one is multiplied.
            uint4 ahead[4] = {};
            const int x_at = 2 * (warp * groups * 128 + t * 32);
            const bool alone = EXACT && p.rows == 1;  // then a lane has a row for every expert or for none
            const int count = live ? d.count : 1;
            auto fetch = [&](int choice, int group) {
                if (choice >= count) return;
                const int from = live ? input[choice][g] : g ? -1 : 0;
                if (from >= 0 && (EXACT || x_at + group * 256 < 2 * N)) {
                    const u8 *h = p.h + (from + x_at + group * 256);
#pragma unroll
                    for (int j = 0; j < 4; ++j) ahead[j] = load16(h + j * 16);
                } else if (!alone)
#pragma unroll
                    for (int j = 0; j < 4; ++j) ahead[j] = make_uint4(0, 0, 0, 0);
            };
            fetch(0, 0);
#pragma unroll 1
            for (int choice = 0; choice < count; ++choice) {
                float c[TILES][4] = {};
#pragma unroll 1
                for (int group = live ? 0 : groups - 1; group < groups; ++group) {
                    u32 x[4][4];
#pragma unroll
                    for (int j = 0; j < 4; ++j) nvfp4_inputs(ahead[j], x[j]);
                    if (group + 1 < groups) fetch(choice, group + 1);
                    else fetch(choice + 1, 0);
                    copy_wait<STAGES - 1>();
                    __syncwarp();  // scales were copied by other lanes
                    const u32 from = ring + slot;
#pragma unroll
                    for (int i = 0; i < TILES; ++i) {
                        const u32 s = from + TILES * 1024 + (i * 16 + g) * 8 + t * 2, codes = from + i * 1024 + lane * 16;
                        nvfp4_group(c[i], shared16(codes), shared16(codes + 512), shared_u16(s), shared_u16(s + 64), x);
                    }
                    __syncwarp();
                    if (live) issue_down(from), advance();
                    copy_commit();
                }
                const float2 w = *(const float2 *)&d.weight[choice][2 * t];
#pragma unroll
                for (int i = 0; i < TILES; ++i) {
                    total[i][0] += w.x * c[i][0], total[i][1] += w.y * c[i][1];
                    total[i][2] += w.x * c[i][2], total[i][3] += w.y * c[i][3];
                }
            }
#pragma unroll
            for (int i = 0; i < TILES; ++i) {
                float *const to = partial + warp * 256 + (i * 16 + g) * 8 + 2 * t;
                *(float2 *)to = make_float2(total[i][0], total[i][1]);
                *(float2 *)(to + 64) = make_float2(total[i][2], total[i][3]);
            }
            __syncthreads();
            if (threadIdx.x < 256) {
                const int row = threadIdx.x & 7, n = block * 32 + (threadIdx.x >> 3);
                float part[WARPS], sum = 0.0f;
#pragma unroll
                for (int w = 0; w < WARPS; ++w) part[w] = partial[w * 256 + threadIdx.x];
#pragma unroll
                for (int w = 0; w < WARPS; ++w) sum += part[w];
                if (live && row < p.rows && n < D) p.out[(long long)row * D + n] = to_bf16(sum);
            }
            __syncthreads();
        }
    }
    copy_wait<0>();
}
