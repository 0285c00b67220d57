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

struct PlanScratch { int ids[MAX_DISTINCT], first[MAX_DISTINCT]; };

// Run by the first 64 threads of a block; `sync` is a barrier that includes them all.
template <typename Sync> DEVICE void make_plan(const Planner &p, PlanScratch &s, int tid, Sync sync) {
    const int choices = p.rows * p.top_k;
    const int id = tid < choices ? load_i32(p.ids + tid) - p.offset : -1;
    s.ids[tid] = id;
    sync();
    int first = id >= 0 && id < p.experts;
#pragma unroll 1
    for (int j = 0; j < tid; ++j) first &= s.ids[j] != id;
    s.first[tid] = first;
    sync();
    int rank = 0, count = 0;
#pragma unroll 1
    for (int j = 0; j < choices; ++j) rank += s.first[j] && s.ids[j] < id, count += s.first[j];
    if (tid == 0) p.plan->count = count;
    if (!first) return;
#pragma unroll
    for (int i = 0; i < 6; ++i) p.plan->address[i][rank] = p.address[i * p.experts + id];
#pragma unroll
    for (int i = 0; i < 3; ++i) p.plan->scale2[i][rank] = p.scale2[i * p.experts + id];
#pragma unroll 1
    for (int r = 0; r < 8; ++r) {
        int place = -1;
        if (r < p.rows)
#pragma unroll 1
            for (int j = 0; j < p.top_k; ++j)
                if (s.ids[r * p.top_k + j] == id) place = j;
        p.plan->place[rank][r] = (signed char)place;
        p.plan->weight[rank][r] = place >= 0 ? load_f32(p.weights + r * p.top_k + place) : 0.0f;
    }
}
