// The routed experts of 1..8 rows, NVFP4 weights, bf16 activations, in one launch: up for all experts, then down.
//
// Both halves walk the distinct experts of all rows in ascending order, so each is read once; the eight columns of the
// m16n8k16 products are the rows. A row meets its own experts in that order with a K split fixed by the shapes, and what
// other rows chose adds exact zeros to it: its bits do not depend on the other rows.
//
// Every warp streams its share of the weights through a private ring of cp.async slots, from the first tile of up to the
// last of down without a break: the shared expert, which needs nothing from up, bridges the wait for the other blocks.
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
#define TEAM 8                // warps of up that share a tile: each owns an eighth of K
#define TEAMS (WARPS / TEAM)
#define TILES 2               // 16-row tiles in a slot: of up one of gate and one of up, of down two below one another
#define SLOT 2304             // 128 values of K: codes [TILES][2][512], scales [TILES * 16][8]
// 1: the scales of a warp's tile of up, 32 bytes a row, are fetched at once into a ring of two, [TILES][16][32] each
#define BY_TILE (HIDDEN == TEAM * 512 && STAGES > 1)
#define TILE_SCALES (TILES * 16 * 32)

struct Experts {
    const Plan *plan;
    const u8 *x;                    // [R, hidden] bf16
    u8 *h;                          // [R, top_k, width] bf16, between the halves, every eight values in nvfp4_place's order
    const u8 *shared_x, *shared_w;  // [R, shared_k], [hidden, shared_k] bf16, or null
    u16 *out;                       // [R, hidden]
    u32 *barrier;                   // one word: its top bit turns when all blocks have arrived, the others are 0 between launches
    int rows, top_k, hidden, width, shared_k;
    int phases;  // 1: up, 2: down, 3: both, for which all blocks must be on the device at once
    int early;   // the kernel in front did not write x and has waited for the one that did before it let this one start
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

// Tables in shared memory are read by number: the compiler would work out a generic address every time.
DEVICE u64 shared_u64(u32 a) {
    u64 v;
    asm volatile("ld.shared.u64 %0, [%1];" : "=l"(v) : "r"(a) : "memory");
    return v;
}
DEVICE int shared_i32(u32 a) {
    int v;
    asm volatile("ld.shared.s32 %0, [%1];" : "=r"(v) : "r"(a) : "memory");
    return v;
}
DEVICE float2 shared_f32x2(u32 a) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(a) : "memory");
    return v;
}
DEVICE void fence_block() { asm volatile("fence.acq_rel.cta;" ::: "memory"); }
DEVICE void mbarrier_init(u32 a, u32 count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(a), "r"(count) : "memory");
}
DEVICE void mbarrier_arrive(u32 a) {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(a) : "memory");
}
DEVICE void mbarrier_wait(u32 a, u32 parity) {
    u32 done;
    do asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                    : "=r"(done) : "r"(a), "r"(parity) : "memory");
    while (!done);
}

// Eight block scales of one row, `available` of which exist.
DEVICE void copy_scales(u32 dst, const u8 *src, int available) {
#if EXACT
    copy8(dst, src, true);
#else
#pragma unroll 1
    for (int i = 0; i < 8; ++i) {
        const u32 v = i < available ? src[i] : 0;
        asm volatile("st.shared.u8 [%0], %1;" ::"r"(dst + i), "r"(v) : "memory");
    }
#endif
}

// Inputs of 128 values of K: four words, `step` apart.
DEVICE void load_inputs(u32 (&x)[4][4], u32 from, u32 step) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const uint4 v = shared16(from + j * step);
        x[j][0] = v.x, x[j][1] = v.y, x[j][2] = v.z, x[j][3] = v.w;
    }
}

// What a lane multiplies of a slot: codes and block scales of rows g and g + 8 of each tile.
struct Piece {
    uint4 codes[TILES][2];
    u32 scales[TILES][2];
};

// `codes`, `scales`: where those of the lane's row g lie; BELOW and NEXT further are the scales of row g + 8 and of the
// second tile.
template <int BELOW, int NEXT> DEVICE void take(Piece &w, u32 codes, u32 scales) {
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int j = 0; j < 2; ++j) w.codes[i][j] = shared16(codes + i * 1024 + j * 512), w.scales[i][j] = shared_u16(scales + i * NEXT + j * BELOW);
}

// c += W x for the rows of a slot.
DEVICE void multiply(float (&c)[TILES][4], const Piece &w, const u32 (&x)[4][4]) {
#pragma unroll
    for (int i = 0; i < TILES; ++i) nvfp4_group(c[i], w.codes[i][0], w.codes[i][1], w.scales[i][0], w.scales[i][1], x);
}

// A warp's sums of the two tiles -> partial [rows][TILES * 16].
DEVICE void put(float *partial, const float (&c)[TILES][4], int lane, int rows) {
    const int column = lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2 * TILES; ++i) {
        float *const to = partial + column * (TILES * 16) + i * 8 + lane / 4;
        if (column < rows) to[0] = c[i / 2][i % 2 * 2];
        if (column + 1 < rows) to[TILES * 16] = c[i / 2][i % 2 * 2 + 1];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) experts(const __grid_constant__ Experts p) {
    extern __shared__ __align__(128) u8 memory[];
    // up: [TEAMS][2][TEAM][rows][32], down: [WARPS][rows][32]
    float *const partial = (float *)(memory + WARPS * (STAGES * SLOT + BY_TILE * 2 * TILE_SCALES));
    // x, behind up h: [group; warp and slot][word][rows][t] of 8 values in the order of the products
    uint4 *const inputs = (uint4 *)(partial + 2 * WARPS * 32 * p.rows);
    __shared__ __align__(16) Plan d;
    __shared__ int input[MAX_DISTINCT][8];  // byte offset of the row's input to the expert in h, or -1
    __shared__ uint4 nothing;
    __shared__ u64 through[TEAMS];  // mbarrier of a team: its threads that are through with a tile
    __shared__ int arrived;         // warps that are through with up
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, team = warp / TEAM, slice = warp % TEAM;
    const u32 ring = shared_address(memory) + warp * STAGES * SLOT, in_slot = TILES * 1024 + g * 8 + t * 2;
    const u32 scale_ring = shared_address(memory) + WARPS * STAGES * SLOT + warp * 2 * TILE_SCALES;
    // The halves of every other four rows are swapped there, against bank conflicts.
    const u32 scale_to = scale_ring + (lane >> 1) * 32 + ((lane ^ lane >> 3) & 1) * 16;
    const u32 scale_from = scale_ring + g * 32 + (g >> 2) * 16 + 2 * t;
    u32 fetched = 0, used = 0;  // which of the ring's two
    const u32 table = shared_address(d.address), row_of = 8 * MAX_DISTINCT;
    const u32 input_at = shared_address(&input[0][g]), weight_at = shared_address(&d.weight[0][2 * t]);
    u32 turn = 0, stage = 0;  // stage: the next slot of the ring to be used up
    auto advance = [&]() { stage = stage + 1 == STAGES ? 0 : stage + 1; };

    // ---- up: tiles of 16 rows of gate and the same 16 of up
    const int D = HIDDEN ? HIDDEN : p.hidden, N = WIDTH ? WIDTH : p.width, tiles = (N + 15) >> 4;
    const int units = (((D + 127) >> 7) + TEAM - 1) / TEAM, k0 = slice * units * 128;  // groups of K of a warp and tile
    const int step = gridDim.x * TEAMS, start = blockIdx.x * TEAMS + team;
    int items = 0, count = 1, next = start, next_tile = 0, next_unit = 0;  // the prefetch cursor, and where it reads
    const u8 *a = p.x, *b = p.x, *scale = p.x, *scale_b = p.x;
    auto locate = [&](u64 gate, u64 gate_scale, u64 up, u64 up_scale) {
        next_tile = (u32)next % tiles;
        const u32 at = (next_tile * 16 + g) * (D >> 1) + (k0 >> 1) + t * 16;
        a = (const u8 *)gate + at, b = (const u8 *)up + at;
        if (BY_TILE) {
            const u32 from = (next_tile * 16 + (lane >> 1)) * (D >> 4) + (k0 >> 4) + (lane & 1) * 16;
            scale = (const u8 *)gate_scale + from, scale_b = (const u8 *)up_scale + from;
        } else scale = (const u8 *)(lane & 16 ? up_scale : gate_scale) + ((next_tile * 16 + (lane & 15)) * (D >> 4) + (k0 >> 4));
    };
    auto locate_up = [&]() {
        const u32 at = table + (u32)next / tiles * 8;
        locate(shared_u64(at), shared_u64(at + row_of), shared_u64(at + 2 * row_of), shared_u64(at + 3 * row_of));
    };
    auto next_item = [&]() {
        next += step;
        if (next < items) locate_up();
    };
    auto issue_up = [&](u32 slot, int unit) {
        const int k = k0 + unit * 128;
        const u32 to = ring + slot * SLOT;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const bool ok = EXACT || (next_tile * 16 + i * 8 + g < N && k + t * 32 < D);
            copy16(to + i * 512 + lane * 16, ok ? a + i * 8 * (D >> 1) + unit * 64 : p.x, ok);
            copy16(to + i * 512 + 1024 + lane * 16, ok ? b + i * 8 * (D >> 1) + unit * 64 : p.x, ok);
        }
        if (!BY_TILE) {
            const int have = EXACT ? 8 : next_tile * 16 + (lane & 15) < N ? (D >> 4) - (k >> 4) : 0;
            copy_scales(to + TILES * 1024 + lane * 8, scale + unit * 8, have);
        } else if (unit == 0) {
            copy16(scale_to + fetched, scale, true), copy16(scale_to + TILE_SCALES / 2 + fetched, scale_b, true);
            fetched ^= TILE_SCALES;
        }
    };

    // ---- down: 32 rows at a time; for each the shared expert in chunks of 32 values of K, then the experts in groups of 128
    const int row_blocks = p.phases & 2 ? (D + 31) >> 5 : 0;
    const int groups = (((N + 127) >> 7) + WARPS - 1) / WARPS;                          // of an expert and warp
    const int chunks = p.shared_w ? (((p.shared_k + 31) >> 5) + WARPS - 1) / WARPS : 0;  // of the shared expert
    int next_block = blockIdx.x, next_chunk = 0, next_choice = 0, next_group = 0;  // the prefetch cursor
    int code_at = 0, scale_at = 0;  // of this lane in the cursor's block
    auto locate_down = [&]() {
        code_at = (next_block * 32 + g) * (N >> 1) + warp * groups * 64 + t * 16;
        scale_at = (next_block * 32 + lane) * (N >> 4) + warp * groups * 8;
    };
    locate_down();
    const u32 h_step = p.rows * 64, h_at = shared_address(inputs) + warp * STAGES * 4 * h_step + lane * 16;
    auto issue_h = [&](u32 slot, int choice, int group) {
        if (g >= p.rows) return;
        const int from = shared_i32(input_at + choice * 32), k = (warp * groups + group) * 128 + t * 32;
        const bool in = from >= 0 && (EXACT || k < N);
        const u8 *const h = p.h + (in ? from + 2 * k : 0);
#pragma unroll
        for (int j = 0; j < 4; ++j) copy16(h_at + (slot * 4 + j) * h_step, h + j * 16, in);
    };
    auto issue_down = [&](u32 slot, bool with_h) {
        if (next_block >= row_blocks) return;
        const int row = next_block * 32 + g;
        const u32 to = ring + slot * SLOT;
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
            const u8 *w = (const u8 *)shared_u64(table + 4 * row_of + next_choice * 8) + (code_at + next_group * 64);
            const u8 *scales = (const u8 *)shared_u64(table + 5 * row_of + next_choice * 8) + (scale_at + next_group * 8);
#pragma unroll
            for (int i = 0; i < 2 * TILES; ++i) {
                const bool in = EXACT || (group * 128 + t * 32 < N && row + i * 8 < D);
                copy16(to + i * 512 + lane * 16, in ? w + i * 8 * (N >> 1) : p.x, in);
            }
            copy_scales(to + TILES * 1024 + lane * 8, scales, EXACT ? 8 : next_block * 32 + lane < D ? (N >> 4) - group * 8 : 0);
            if (with_h) issue_h(slot, next_choice, next_group);
            if (++next_group == groups) next_group = 0, ++next_choice;
        }
        if (next_chunk == chunks && next_choice >= count) next_block += gridDim.x, next_chunk = next_choice = 0, locate_down();
    };

    if (threadIdx.x == 0) nothing = make_uint4(0, 0, 0, 0), arrived = 0;
    if (threadIdx.x < TEAMS) mbarrier_init(shared_address(&through[threadIdx.x]), TEAM * 32);
    __syncthreads();
    auto load_x = [&]() {
#pragma unroll 1
        for (int i = threadIdx.x; i < TEAM * units * 16 * p.rows; i += THREADS) {
            const int piece = p.rows == 1 ? i : i / p.rows, row = p.rows == 1 ? 0 : i % p.rows;
            const int k = piece >> 4 << 7 | (piece & 3) << 5 | (piece >> 2 & 3) << 3;
            u32 x[4];
            nvfp4_inputs(EXACT || k < D ? load16(p.x + 2ll * ((long long)row * D + k)) : make_uint4(0, 0, 0, 0), x);
            inputs[((piece >> 2) * p.rows + row) * 4 + (piece & 3)] = make_uint4(x[0], x[1], x[2], x[3]);
        }
    };
    if (p.early && p.phases & 1) load_x();
    const u32 x_step = g < p.rows ? p.rows * 64 : 0;  // lanes without a row read the same zeros again
    const u32 x_first = g < p.rows ? shared_address(inputs) + (slice * units * 4 * p.rows + g) * 64 + t * 16 : shared_address(&nothing);

    pdl_wait();
    pdl_launch();
    u32 generation = 0;
    static_assert(sizeof(Plan) <= THREADS * 16 && sizeof(Plan) % 16 == 0, "one piece a thread");
    if (threadIdx.x < sizeof(Plan) / 16) ((uint4 *)&d)[threadIdx.x] = load16((const u8 *)p.plan + threadIdx.x * 16);
    if (threadIdx.x == 0) generation = load_i32((const int *)p.barrier);
    __syncthreads();
    count = d.count, items = p.phases & 1 ? count * tiles : 0, stage = 0;
    if (chunks == 0 && count == 0) next_block = row_blocks;
    if (next < items) locate_up();
#pragma unroll 1
    for (int s = 0; s < STAGES; ++s) {
        if (next >= items) issue_down(s, false);
        else {
            issue_up(s, next_unit);
            if (++next_unit == units) next_unit = 0, next_item();
        }
        copy_commit();
    }
    if (!p.early && p.phases & 1) load_x();
    {  // a thread each: MAX_DISTINCT * 8 = THREADS
        const int expert = threadIdx.x >> 3, row = threadIdx.x & 7;
        const int place = expert < count && row < p.rows ? d.place[expert][row] : -1;
        input[expert][row] = place < 0 ? -1 : 2 * (row * p.top_k + place) * N;
        if (expert < count) d.weight[expert][row] *= d.scale2[2][expert] * NVFP4_RESIDUE;
    }
    __syncthreads();
    int old = -1;
#pragma unroll 1
    for (int item = start;; item += step) {
        const bool working = item < items;
        float c[TILES][4] = {};
        u32 from_x = x_first;
        if (working)
#pragma unroll (HIDDEN ? HIDDEN / (TEAM * 128) : 1)
            for (int unit = 0; unit < units; ++unit) {
                u32 x[4][4];
                load_inputs(x, from_x, x_step);
                from_x += 4 * x_step;
                copy_wait<STAGES - 1>();
                __syncwarp();  // scales were copied by other lanes
                const u32 slot = HIDDEN ? unit % STAGES : stage, from = ring + slot * SLOT;
                Piece w;
                if (BY_TILE) take<256, TILE_SCALES / 2>(w, from + lane * 16, (scale_from ^ (unit & 2) * 8) + used + (unit & 1) * 8);
                else take<64, 128>(w, from + lane * 16, from + in_slot);
                __syncwarp();  // the slot is refilled while its weights are multiplied
                if (HIDDEN) {  // the cursor is STAGES units ahead
                    if (unit + STAGES == units) next_item();
                    if (unit + STAGES < units) issue_up(slot, unit + STAGES);
                    else if (next < items) issue_up(slot, unit + STAGES - units);
                    else issue_down(slot, false);
                } else {
                    if (next >= items) issue_down(slot, false);
                    else {
                        issue_up(slot, next_unit);
                        if (++next_unit == units) next_unit = 0, next_item();
                    }
                    advance();
                }
                copy_commit();
                multiply(c, w, x);
            }
        // The sums are taken when the team is through with the next tile: no warp waits for the others.
        if (turn) mbarrier_wait(shared_address(&through[team]), (turn - 1) & 1);
        if (old >= 0) {
            const float *const from = partial + (team * 2 + ((turn - 1) & 1)) * (TEAM * 32 * p.rows);
            const int id = (slice * 32 + lane + turn * 32) & (TEAM * 32 - 1), row = id >> 4;  // the warps take turns
            const int expert = (u32)old / tiles, first = (u32)old % tiles * 16, n = id & 15;
            const int place = row < p.rows && first + n < N ? d.place[expert][row] : -1;
            if (place >= 0) {
                float gate = 0.0f, up = 0.0f;
#pragma unroll
                for (int w = 0; w < TEAM; ++w) gate += from[(w * p.rows + row) * 32 + n], up += from[(w * p.rows + row) * 32 + 16 + n];
                gate *= d.scale2[0][expert] * NVFP4_RESIDUE, up *= d.scale2[1][expert] * NVFP4_RESIDUE;
                const u16 h = to_bf16(swiglu(gate, up, p.limit));
                *(u16 *)(p.h + 2 * (((long long)row * p.top_k + place) * N + first + nvfp4_place(n))) = h;
            }
        }
        if (!working) break;
        put(partial + ((team * 2 + (turn & 1)) * TEAM + slice) * (32 * p.rows), c, lane, p.rows);
        mbarrier_arrive(shared_address(&through[team]));
        ++turn, old = item;
        used ^= TILE_SCALES;
    }
    if (p.phases == 3) {
        __syncwarp();
        if (lane == 0) {
            fence_block();
            if (atomicAdd(&arrived, 1) == WARPS - 1) {
                fence();
                atomicAdd(p.barrier, blockIdx.x ? 1u : 0x80000000u - (gridDim.x - 1));  // all together turn the top bit
            }
        }
        __syncwarp();
    }

    auto shared_inputs = [&](int chunk) {  // of the lane's row and word, for one chunk of the shared expert
        const int k = (warp * chunks + chunk) * 32 + t * 8;
        const bool in = chunk < chunks && g < p.rows && (EXACT || k < p.shared_k);
        return in ? load16(p.shared_x + 2ll * ((long long)g * p.shared_k + k)) : make_uint4(0, 0, 0, 0);
    };
    bool entering = true;
#pragma unroll 1
    for (int block = blockIdx.x; block < row_blocks; block += gridDim.x) {
        float total[TILES][4] = {};
        uint4 ahead = shared_inputs(0);
#pragma unroll 1
        for (int chunk = 0; chunk < chunks; ++chunk) {
            const u32 x[4] = {ahead.x, ahead.y, ahead.z, ahead.w}, from = ring + stage * SLOT + lane * 16;
            ahead = shared_inputs(chunk + 1);
            copy_wait<STAGES - 1>();
#pragma unroll
            for (int i = 0; i < TILES; ++i) mma_chunk(total[i], shared16(from + i * 1024), shared16(from + i * 1024 + 512), x);
            __syncwarp();
            issue_down(stage, !entering), advance();
            copy_commit();
        }
        if (entering) {
            entering = false;
            if (p.phases == 3) {
                if (threadIdx.x == 0)
                    while (((load_acquire(p.barrier) ^ generation) & 0x80000000u) == 0) __nanosleep(20);
                __syncthreads();
            }
            // The slots under way lack their h: what they are for, as issue_down went.
            int behind = chunks, choice = 0, group = 0;
            if (count)
#pragma unroll 1
                for (int s = 0, slot = stage; s < STAGES; ++s, slot = slot + 1 == STAGES ? 0 : slot + 1) {
                    if (behind < chunks) ++behind;
                    else {
                        issue_h(slot, choice, group);
                        if (++group == groups) group = 0, ++choice;
                    }
                    if (behind == chunks && choice == count) behind = choice = 0;
                }
            copy_commit();
            copy_wait<0>();
        }
#pragma unroll 1
        for (int choice = 0; choice < count; ++choice) {
            float c[TILES][4] = {};
#pragma unroll 1
            for (int group = 0; group < groups; ++group) {
                copy_wait<STAGES - 1>();
                __syncwarp();  // scales were copied by other lanes
                const u32 from = ring + stage * SLOT;
                u32 x[4][4];
                load_inputs(x, g < p.rows ? h_at + stage * 4 * h_step : shared_address(&nothing), x_step);
                Piece w;
                take<64, 128>(w, from + lane * 16, from + in_slot);
                __syncwarp();
                issue_down(stage, true), advance();
                copy_commit();
                multiply(c, w, x);
            }
            const float2 w = shared_f32x2(weight_at + choice * 32);
#pragma unroll
            for (int i = 0; i < TILES; ++i) {
                total[i][0] += w.x * c[i][0], total[i][1] += w.y * c[i][1];
                total[i][2] += w.x * c[i][2], total[i][3] += w.y * c[i][3];
            }
        }
        put(partial + warp * (32 * p.rows), total, lane, p.rows);
        __syncthreads();
        if (warp < p.rows) {
            const int n = block * 32 + lane;
            float part[WARPS], sum = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) part[w] = partial[(w * p.rows + warp) * 32 + lane];
#pragma unroll
            for (int w = 0; w < WARPS; ++w) sum += part[w];
            if (n < D) p.out[(long long)warp * D + n] = to_bf16(sum);
        }
        __syncthreads();
    }
    copy_wait<0>();
}
