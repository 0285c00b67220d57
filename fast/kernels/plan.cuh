// Which experts a step reads, and for whom: built once per layer behind the router, read by every block of both expert kernels.
#pragma once
#include "common.cuh"

#define MAX_DISTINCT 64  // rows * top_k, at most

struct Plan {
    int count, pad[3];
    u64 address[6][MAX_DISTINCT];        // codes and scales of gate, up, down of the distinct experts, ascending
    float scale2[3][MAX_DISTINCT];       // of gate, up, down
    float weight[MAX_DISTINCT][8];       // routing weight of the row, 0 if it did not choose the expert
    signed char place[MAX_DISTINCT][8];  // which of the row's choices the expert is, or -1
};

struct Planner {
    const u64 *address;    // [6][experts]: codes, scales of gate, up, down; null: no plan is wanted
    const float *scale2;   // [3][experts]
    const int *ids;        // [R, top_k]
    const float *weights;  // [R, top_k]
    Plan *plan;
    int experts, offset, rows, top_k;  // the tables hold experts offset .. offset + experts - 1, others are left out
};

#define MOST_CHOICES 256  // of a router, 8 rows of 32

struct PlanScratch { int ids[MOST_CHOICES]; float weights[MOST_CHOICES]; int first[MAX_DISTINCT]; };

// Run by the first 64 threads of a block on the choices in `s`; `sync` is a barrier that includes them all. Nothing is
// stored unless `live`.
template <typename Sync> DEVICE void make_plan(const Planner &p, PlanScratch &s, int tid, bool live, Sync sync) {
    const int choices = p.rows * p.top_k, own = tid < choices ? s.ids[tid] : -1, id = own - p.offset;
    int first = own >= 0 && id >= 0 && id < p.experts;
    // The tables are far away: they are asked before the rank is known.
    u64 address[6] = {};
    float scale2[3] = {};
    if (first) {
#pragma unroll
        for (int i = 0; i < 6; ++i) address[i] = p.address[i * p.experts + id];
#pragma unroll
        for (int i = 0; i < 3; ++i) scale2[i] = p.scale2[i * p.experts + id];
    }
#pragma unroll 4
    for (int j = 0; j < min(tid, choices); ++j) first &= s.ids[j] != own;
    s.first[tid] = first;
    sync();
    int rank = 0, count = 0;
#pragma unroll 4
    for (int j = 0; j < choices; ++j) rank += s.first[j] && s.ids[j] < own, count += s.first[j];
    if (tid == 0 && live) p.plan->count = count;
    if (!first) return;
    if (live) {
#pragma unroll
        for (int i = 0; i < 6; ++i) p.plan->address[i][rank] = address[i];
#pragma unroll
        for (int i = 0; i < 3; ++i) p.plan->scale2[i][rank] = scale2[i];
    }
    u64 places = ~0ull;  // a byte a row
#pragma unroll 4
    for (int j = 0; j < choices; ++j)
        if (s.ids[j] == own) places ^= (u64)(0xff ^ j % p.top_k) << j / p.top_k * 8;
    float weight[8];
#pragma unroll
    for (int r = 0; r < 8; ++r) {
        const int place = (signed char)(places >> r * 8);
        weight[r] = place >= 0 ? s.weights[r * p.top_k + place] : 0.0f;
    }
    if (live) {
        *(u64 *)p.plan->place[rank] = places;
        *(float4 *)p.plan->weight[rank] = make_float4(weight[0], weight[1], weight[2], weight[3]);
        *(float4 *)(p.plan->weight[rank] + 4) = make_float4(weight[4], weight[5], weight[6], weight[7]);
    }
}
