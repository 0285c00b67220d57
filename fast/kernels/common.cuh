// PTX helpers shared by every kernel. No CUDA header is included, so NVRTC and nvcc see the same self-contained source.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// 1 where cvt.rn.f16x2.e2m1x2 is an instruction. compile.py says so for the target: NVRTC 13.0 defines no feature macro of
// sm_121a, and the code would silently fall back to the bit operations below.
#ifndef FP4_CVT
#define FP4_CVT 0
#endif

#define DEVICE __device__ __forceinline__
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif

// ---- bf16 <-> fp32 -------------------------------------------------------------------------------------------------
DEVICE float bf16_low(u32 pair) { return __uint_as_float(pair << 16); }
DEVICE float bf16_high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
DEVICE float bf16_to_float(u16 v) { return __uint_as_float((u32)v << 16); }
DEVICE u32 pack_bf16(float low, float high) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
DEVICE u16 to_bf16(float v) { return (u16)pack_bf16(v, 0.0f); }
DEVICE float round_bf16(float v) { return bf16_low(pack_bf16(v, 0.0f)); }
DEVICE u32 mul_bf16x2(u32 a, u32 b) {
    u32 r;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
DEVICE void unpack8(uint4 v, float (&f)[8]) {
    f[0] = bf16_low(v.x), f[1] = bf16_high(v.x), f[2] = bf16_low(v.y), f[3] = bf16_high(v.y);
    f[4] = bf16_low(v.z), f[5] = bf16_high(v.z), f[6] = bf16_low(v.w), f[7] = bf16_high(v.w);
}
DEVICE uint4 pack8(const float (&f)[8]) {
    return make_uint4(pack_bf16(f[0], f[1]), pack_bf16(f[2], f[3]), pack_bf16(f[4], f[5]), pack_bf16(f[6], f[7]));
}

// ---- memory --------------------------------------------------------------------------------------------------------
// Activations are read through L2 (.cg): with programmatic launch a block may start before its inputs are written.
DEVICE uint4 load16(const void *p) {
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}
DEVICE float load_f32(const float *p) {
    float v;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(p));
    return v;
}
DEVICE int load_i32(const int *p) {
    int v;
    asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}
DEVICE u32 load_acquire(const u32 *p) {
    u32 v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
DEVICE void fence() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
DEVICE u16 load_u16(const void *p) {
    u16 v;
    asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(v) : "l"(p));
    return v;
}
DEVICE float load_bf16(const void *p) { return bf16_to_float(load_u16(p)); }
DEVICE u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }
// 16 bytes to shared memory, or 16 zero bytes when `valid` is false (the source is then not read).
DEVICE void copy16(u32 dst, const void *src, bool valid) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(valid ? 16 : 0)
                 : "memory");
}
DEVICE void copy8(u32 dst, const void *src, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(dst), "l"(src), "r"(valid ? 8 : 0) : "memory");
}
DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> DEVICE void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }
DEVICE uint4 shared16(u32 a) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a) : "memory");
    return v;
}
DEVICE u32 shared_u16(u32 a) {
    u16 v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(a) : "memory");
    return v;
}

// ---- programmatic dependent launch ---------------------------------------------------------------------------------
// Before pdl_wait a kernel may read only what no kernel of the same step writes (weights, tables, its own old state).
DEVICE void pdl_launch() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
DEVICE void pdl_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// ---- tensor cores --------------------------------------------------------------------------------------------------
// c += A B, m16n8k16. With lane = 4 g + t: a0/a2 hold row g, a1/a3 row g + 8; b0/b1 column g; c0,c1 row g, c2,c3 row
// g + 8, columns 2t, 2t+1. Which k a register holds is free as long as A and B agree.
DEVICE void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// Two k16 steps on 16 contiguous bytes (8 values of k) a lane: rows g from `a`, rows g + 8 from `b`, columns from `x`.
DEVICE void mma_chunk(float (&c)[4], uint4 a, uint4 b, const u32 (&x)[4]) {
    mma(c, a.x, b.x, a.y, b.y, x[0], x[1]);
    mma(c, a.z, b.z, a.w, b.w, x[2], x[3]);
}
DEVICE void ldmatrix4(u32 (&r)[4], u32 a) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(a) : "memory");
}
DEVICE void ldmatrix4_transposed(u32 (&r)[4], u32 a) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(a) : "memory");
}

// ---- reductions and barriers (fixed order) -------------------------------------------------------------------------
DEVICE float warp_sum(float v) {
#pragma unroll
    for (int m = 16; m; m >>= 1) v += __shfl_xor_sync(~0u, v, m);
    return v;
}
DEVICE float warp_max(float v) {
#pragma unroll
    for (int m = 16; m; m >>= 1) v = fmaxf(v, __shfl_xor_sync(~0u, v, m));
    return v;
}
DEVICE void named_barrier(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
DEVICE u32 cluster_rank() {
    u32 r;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
}
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// Writes a float at the same shared-memory place of another block of the cluster.
DEVICE void remote_store(u32 local, u32 rank, float v) {
    u32 a;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(a) : "r"(local), "r"(rank));
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(a), "f"(v) : "memory");
}

// ---- elementary functions: short code, within a few units in the last place ------------------------------------------
DEVICE float reciprocal(float x) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
DEVICE float inverse_root(float x) {
    float r;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
DEVICE float exponential(float x) {  // the rounding error of x log2(e) is put back; NaN stays NaN
    asm("max.NaN.f32 %0, %0, 0fC3160000;\n\tmin.NaN.f32 %0, %0, 0f42B00000;" : "+f"(x));  // -150 .. 88
    const float y = x * 1.44269504f, lost = __fmaf_rn(x, 1.44269504f, -y) + x * 1.92596303e-8f;
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(y));
    return __fmaf_rn(r, lost * 0.69314718f, r);
}
DEVICE float relu(float x) { return x < 0.0f ? 0.0f : x; }  // NaN stays NaN
DEVICE float sigmoid(float x) { return reciprocal(1.0f + exponential(-x)); }
// silu(min(gate, limit)) * clip(up, -limit, limit); comparisons instead of fmin so that NaN stays NaN.
DEVICE float swiglu(float gate, float up, float limit) {
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : (up < -limit ? -limit : up);
    return gate * sigmoid(gate) * up;
}
// Monotone map of a float to unsigned; NaN sorts below everything, -0 equals +0.
DEVICE u32 ordered(float v) {
    if (v != v) return 0u;
    const u32 b = __float_as_uint(v + 0.0f);
    return (b & 0x80000000u) ? ~b : (b | 0x80000000u);
}
DEVICE float unordered(u32 u) { return __uint_as_float((u & 0x80000000u) ? u & 0x7fffffffu : ~u); }
