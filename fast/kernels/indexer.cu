// The DSA indexer of decode rows: norms and state update (q_resid, latent, index key, pool key), pool scores, selection.
//
// Row r belongs to sequence r / tokens and is its (r % tokens)-th new token; position[s] counts the tokens the sequence held
// before this step. A row sees n = position + r % tokens + 1 tokens and P = n / POOL complete pools.
#include "common.cuh"

#ifndef HEADS
#define HEADS 32  // index heads, at most 32
#endif
#ifndef ID
#define ID 128    // index width, a multiple of 32
#endif
#ifndef POOL
#define POOL 4
#endif
#define CHUNKS (ID / 32)
#define TILES ((HEADS + 15) / 16)
#define CHANNELS (ID / 32)  // of one lane

struct Indexer {
    const u8 *kv, *key, *gate, *query, *weights;  // rows of bf16: kv_a, wk and gate products, wq_b and weights_proj products
    const u8 *q_a, *q_norm;                       // q_a product [R, q_rank] bf16, [q_rank]
    u8 *q_resid;                                  // [R, q_rank] bf16
    const u8 *kv_norm, *key_weight, *key_bias, *ape;  // [L], [ID], [ID], [POOL, ID] bf16
    u8 *latents, *pools, *ring;  // [S, capacity, L], [S, pool_capacity, ID], [S, ring_slots, 2, ID] bf16
    const int *position;         // [S]
    float *scores;               // [R, pool_capacity]
    int *selected, *count;       // [R, width], [R]
    int rows, tokens, latent, capacity, pool_capacity, ring_slots, topk, width;
    int ld_kv, ld_key, ld_gate, ld_query, ld_weights, q_rank, ld_q_a;
    float rms_eps;
};

DEVICE int visible(const Indexer &p, int row) { return min(load_i32(p.position + row / p.tokens) + row % p.tokens + 1, p.capacity); }

// to <- bf16(weight from / sqrt(mean from^2 + eps)) of n values, by a block; sums in thread, then warp order.
DEVICE void rms_norm(const u8 *from, const u8 *weight, u8 *to, int n, float eps) {
    __shared__ float squares[32];
    const int tid = threadIdx.x, warps = blockDim.x >> 5;
    float square = 0.0f;
#pragma unroll 1
    for (int i = tid; i < n; i += blockDim.x) {
        const float v = load_bf16(from + 2 * i);
        square += v * v;
    }
    square = warp_sum(square);
    __syncthreads();
    if ((tid & 31) == 0) squares[tid >> 5] = square;
    __syncthreads();
    square = 0.0f;
#pragma unroll 4
    for (int w = 0; w < warps; ++w) square += squares[w];
    const float scale = inverse_root(square / (float)n + eps);
#pragma unroll 1
    for (int i = tid; i < n; i += blockDim.x)
        *(u16 *)(to + 2 * i) = to_bf16(load_bf16(from + 2 * i) * scale * bf16_to_float(*(const u16 *)(weight + 2 * i)));
}

// latents <- rms(kv); ring <- (LayerNorm(key), gate); pools <- the pool that the token completes. Block = sequence.
DEVICE void indexer_store(const Indexer &p, int sequence) {
    const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, warps = blockDim.x >> 5;
    for (int token = 0; token < p.tokens; ++token) {
        const long long row = (long long)sequence * p.tokens + token;
        const int at = load_i32(p.position + sequence) + token;
        if (at >= p.capacity) return;  // a full sequence goes on over what it holds
        rms_norm(p.kv + 2 * row * p.ld_kv, p.kv_norm, p.latents + 2 * ((long long)sequence * p.capacity + at) * p.latent, p.latent, p.rms_eps);
        if (warp >= warps - CHANNELS) {  // each of the last warps: the statistics of the whole key, then 32 of its channels
            float x[CHANNELS], sum = 0.0f, spread = 0.0f;
#pragma unroll
            for (int i = 0; i < CHANNELS; ++i) sum += x[i] = load_bf16(p.key + 2 * (row * p.ld_key + i * 32 + lane));
            const float mean = warp_sum(sum) / (float)ID;
#pragma unroll
            for (int i = 0; i < CHANNELS; ++i) spread += (x[i] - mean) * (x[i] - mean);
            const float inverse = inverse_root(warp_sum(spread) / (float)ID + 1e-6f);
            const int c = (warps - 1 - warp) * 32 + lane;
            u16 *const ring = (u16 *)p.ring + 2ll * sequence * p.ring_slots * ID + c;
            u16 *const slot = ring + at % p.ring_slots * 2 * ID;
            const float weight = bf16_to_float(*(const u16 *)(p.key_weight + 2 * c)), bias = bf16_to_float(*(const u16 *)(p.key_bias + 2 * c));
            slot[0] = to_bf16((load_bf16(p.key + 2 * (row * p.ld_key + c)) - mean) * inverse * weight + bias);
            slot[ID] = load_u16(p.gate + 2 * (row * p.ld_gate + c));
            if (at % POOL == POOL - 1) {  // this lane wrote its channel of all slots
                float k[POOL], gate[POOL], top = -INFINITY, whole = 0.0f, total = 0.0f;
#pragma unroll
                for (int s = 0; s < POOL; ++s) {
                    const u16 *const from = ring + (at - POOL + 1 + s) % p.ring_slots * 2 * ID;
                    k[s] = bf16_to_float(from[0]);
                    gate[s] = bf16_to_float(from[ID]) + bf16_to_float(*(const u16 *)(p.ape + 2 * (s * ID + c)));
                    top = fmaxf(top, gate[s]);
                }
#pragma unroll
                for (int s = 0; s < POOL; ++s) gate[s] = exponential(gate[s] - top), whole += gate[s];
#pragma unroll
                for (int s = 0; s < POOL; ++s) total += gate[s] * k[s];
                *(u16 *)(p.pools + 2 * (((long long)sequence * p.pool_capacity + at / POOL) * ID + c)) = to_bf16(total * reciprocal(whole));
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(512) indexer_update(const __grid_constant__ Indexer p) {
    pdl_launch();
    pdl_wait();
    const int sequences = p.rows / p.tokens, row = (int)blockIdx.x - sequences;
    if (row < 0) indexer_store(p, blockIdx.x);
    else rms_norm(p.q_a + 2ll * row * p.ld_q_a, p.q_norm, p.q_resid + 2ll * row * p.q_rank, p.q_rank, p.rms_eps);
}

// scores[r, pool] = sum_h w[h] HEADS^-0.5 relu(q[h] . key ID^-0.5), fp32, heads summed in mma row order. grid (blocks, rows);
// a warp takes eight pools at a time. Nothing is done while every pool fits the budget.
extern "C" __global__ void __launch_bounds__(256) indexer_score(const __grid_constant__ Indexer p) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, row = blockIdx.y;
    pdl_launch();
    pdl_wait();
    const int pools = visible(p, row) / POOL;
    if (pools <= p.topk / POOL) return;

    uint4 q[TILES][2][CHUNKS];
    float w[TILES][2];
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int head = m * 16 + i * 8 + g;
            const bool in = head < HEADS;
            w[m][i] = in ? load_bf16(p.weights + 2 * ((long long)row * p.ld_weights + head)) * (1.0f / sqrtf((float)HEADS)) : 0.0f;
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c)
                q[m][i][c] = in ? load16(p.query + 2 * ((long long)row * p.ld_query + head * ID + c * 32 + t * 8)) : make_uint4(0, 0, 0, 0);
        }
    const u8 *const keys = p.pools + 2ll * (row / p.tokens) * p.pool_capacity * ID + t * 16;
    const int step = gridDim.x * 8;
    int block = blockIdx.x * 8 + warp;
    uint4 k[CHUNKS] = {};
    auto fetch = [&](int b) {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c)
            if (b * 8 + g < pools) k[c] = load16(keys + 2ll * (b * 8 + g) * ID + c * 64);
    };
    fetch(block);
    for (; block * 8 < pools; block += step) {
        float acc[TILES][4] = {};
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const u32 x[4] = {k[c].x, k[c].y, k[c].z, k[c].w};
#pragma unroll
            for (int m = 0; m < TILES; ++m) mma_chunk(acc[m], q[m][0][c], q[m][1][c], x);
        }
        fetch(block + step);
        float s[2] = {};
#pragma unroll
        for (int m = 0; m < TILES; ++m)
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int j = 0; j < 2; ++j) s[j] += w[m][i] * relu(acc[m][2 * i + j] * (1.0f / sqrtf((float)ID)));
#pragma unroll
        for (int j = 0; j < 2; ++j)
#pragma unroll
            for (int m = 4; m < 32; m <<= 1) s[j] += __shfl_xor_sync(~0u, s[j], m);
        if (g == 0)
#pragma unroll
            for (int j = 0; j < 2; ++j)
                if (block * 8 + 2 * t + j < pools) p.scores[(long long)row * p.pool_capacity + block * 8 + 2 * t + j] = s[j];
    }
}

// selected[r] = tokens of the best topk / POOL pools and of the incomplete tail, ascending, then -1; count[r] = how many.
//
// The budget-th largest of the threads' own maxima bounds the wanted score from below, which leaves a few hundred candidates;
// among them the value of the last place is found bit by bit, and of the pools that equal it the lowest indices are taken.
// Too many candidates (ties) are searched where they lie instead.
#define CANDIDATES 4096
#define THREADS 1024
#define HELD 32  // scores a thread keeps; more than 32 * 1024 pools are read again

struct Found { u32 last; int places; };  // the score of the last place, and how many pools that equal it are in

template <typename Count> DEVICE Found find_last(Count count_from, int budget) {
    u32 last = 0;
#pragma unroll 1
    for (int bit = 31; bit >= 0; --bit) {
        const int c = count_from(last | 1u << bit);
        if (c >= budget) last |= 1u << bit;
        if (c == budget) break;
    }
    return {last, budget - (last == ~0u ? 0 : count_from(last + 1))};
}

extern "C" __global__ void __launch_bounds__(THREADS) indexer_select(const __grid_constant__ Indexer p) {
    __shared__ u32 keys[CANDIDATES];
    __shared__ int pool_of[CANDIDATES], before[2][33];
    const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, row = blockIdx.x;
    const u32 lower = (1u << lane) - 1;
    pdl_launch();
    pdl_wait();
    const int n = visible(p, row), pools = n / POOL, budget = p.topk / POOL;
    int *const out = p.selected + (long long)row * p.width;
    if (pools <= budget) {
#pragma unroll 1
        for (int i = tid; i < p.width; i += THREADS) out[i] = i < n ? i : -1;
        if (tid == 0) p.count[row] = n;
        return;
    }
    const float *const scores = p.scores + (long long)row * p.pool_capacity;
    const int steps = (pools + THREADS - 1) / THREADS, first = warp * steps * 32;  // this warp: pools first + 32 j + lane
    auto read = [&](int j) { return j < steps && first + j * 32 + lane < pools ? load_f32(scores + first + j * 32 + lane) : 0.0f; };
    auto exists = [&](int j) { return j < steps && first + j * 32 + lane < pools; };
    u32 held[HELD], top = 0;
#pragma unroll
    for (int j = 0; j < HELD; ++j) held[j] = __float_as_uint(read(j));
#pragma unroll
    for (int j = 0; j < HELD; ++j) {
        held[j] = exists(j) ? ordered(__uint_as_float(held[j])) : 0u;
        top = max(top, held[j]);
    }
#pragma unroll 4
    for (int j = HELD; j < steps; ++j)
        if (exists(j)) top = max(top, ordered(read(j)));
    // At least `budget` threads hold a key: pools > budget, and a warp's pools go to its lanes in turn.
    const bool bounded = budget <= min(THREADS, pools / steps);
    const u32 least = bounded ? find_last([&](u32 v) { return __syncthreads_count(top >= v); }, budget).last : 0u;

    int mine = 0;
#pragma unroll
    for (int j = 0; j < HELD; ++j) mine += exists(j) && held[j] >= least;
#pragma unroll 4
    for (int j = HELD; j < steps; ++j) mine += exists(j) && ordered(read(j)) >= least;
    mine = __reduce_add_sync(~0u, mine);
    if (lane == 0) before[0][warp] = mine;
    __syncthreads();
    int at = 0, total = 0;
    for (int w = 0; w < 32; ++w) total += before[0][w], at += w < warp ? before[0][w] : 0;
    const bool few = total <= CANDIDATES;
    if (few) {
        auto keep = [&](int j, u32 key) {
            const bool in = exists(j) && key >= least;
            const u32 votes = __ballot_sync(~0u, in);
            if (in) keys[at + __popc(votes & lower)] = key, pool_of[at + __popc(votes & lower)] = first + j * 32 + lane;
            at += __popc(votes);
        };
#pragma unroll
        for (int j = 0; j < HELD; ++j) keep(j, held[j]);
#pragma unroll 4
        for (int j = HELD; j < steps; ++j) keep(j, ordered(read(j)));
        __syncthreads();
    } else total = pools;
    const int rounds = (total + THREADS - 1) / THREADS;
    auto key_of = [&](int i) { return few ? keys[i] : ordered(load_f32(scores + i)); };
    const Found found = find_last(
        [&](u32 v) {
            int c = 0;
#pragma unroll 1
            for (int j = 0; j < rounds; ++j) {
                const int i = j * THREADS + tid;
                c += __syncthreads_count(i < total && key_of(i) >= v);
            }
            return c;
        },
        budget);
    int above_at = 0, equal_at = 0;  // chosen so far, over the block
#pragma unroll 1
    for (int j = 0; j < rounds; ++j) {
        const int i = j * THREADS + tid;
        const u32 key = i < total ? key_of(i) : 0u;
        const bool above = i < total && key > found.last, equal = i < total && key == found.last;
        const u32 aboves = __ballot_sync(~0u, above), equals = __ballot_sync(~0u, equal);
        __syncthreads();
        if (lane == 0) before[0][warp] = __popc(aboves), before[1][warp] = __popc(equals);
        __syncthreads();
        int a = above_at, e = equal_at;
        for (int w = 0; w < 32; ++w) {
            if (w == warp) a = above_at, e = equal_at;
            above_at += before[0][w], equal_at += before[1][w];
        }
        const int rank = e + __popc(equals & lower);
        if (above || (equal && rank < found.places)) {
            const int place = a + __popc(aboves & lower) + min(rank, found.places), pool = few ? pool_of[i] : i;
#pragma unroll
            for (int s = 0; s < POOL; ++s) out[place * POOL + s] = pool * POOL + s;
        }
    }
    const int tail = n - pools * POOL;
#pragma unroll 1
    for (int i = budget * POOL + tid; i < p.width; i += THREADS) out[i] = i - budget * POOL < tail ? i - budget * POOL + pools * POOL : -1;
    if (tid == 0) p.count[row] = budget * POOL + tail;
}
