// Reads memory as fast as this GPU can and keeps nothing: the measuring stick of every bandwidth fraction.
#include "common.cuh"

struct Stream { const u8 *data; u32 *sink; long long bytes; };

extern "C" __global__ void __launch_bounds__(512) stream_read(const __grid_constant__ Stream p) {
    const long long step = (long long)gridDim.x * blockDim.x * 16;
    long long at = ((long long)blockIdx.x * blockDim.x + threadIdx.x) * 16;
    u32 x = 0;
    for (; at + 7 * step < p.bytes; at += 8 * step) {
        uint4 v[8];
#pragma unroll
        for (int i = 0; i < 8; ++i)
            asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
                         : "=r"(v[i].x), "=r"(v[i].y), "=r"(v[i].z), "=r"(v[i].w) : "l"(p.data + at + i * step));
#pragma unroll
        for (int i = 0; i < 8; ++i) x ^= v[i].x ^ v[i].y ^ v[i].z ^ v[i].w;
    }
    for (; at < p.bytes; at += step) {
        const uint4 v = load16(p.data + at);
        x ^= v.x ^ v.y ^ v.z ^ v.w;
    }
    if (x == 0x9e3779b9u) *p.sink = x;  // practically never; keeps the loads alive
}
