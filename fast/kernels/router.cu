// The expert choice alone, for logits that were computed elsewhere: one warp a row.
#include "router.cuh"

struct Choose {
    Router router;
    const float *logits;  // [R, experts]
    int rows;
};

extern "C" __global__ void __launch_bounds__(128) router_choose(const __grid_constant__ Choose p) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, row = blockIdx.x * 4 + warp;
    pdl_launch();
    pdl_wait();
    if (row < p.rows) {
        const int first = row * p.router.top_k;
        router_select(p.router, p.logits + (long long)row * p.router.experts, lane, p.router.ids + first, p.router.weights + first);
    }
}
