// NVFP4 weights in registers: exact bf16 products code * block scale, times a power of two that the caller removes.
//
// A 32-bit word holds eight codes of one row, code i in bits 4i..4i+3. e2m1 x e4m3 has at most six significant bits, so
// the product is exact in bf16; scale_2 stays outside, on the fp32 accumulator.
#pragma once
#include "common.cuh"

// The block scale enters as e4m3 * 2^118 and the code as e2m1 * 2^-126 (sm_90) or 2^-112 (through fp16 on Blackwell).
#if FP4_CVT
#define NVFP4_RESIDUE 0.015625f  // 2^-6
#else
#define NVFP4_RESIDUE 256.0f  // 2^8
#endif

// Two non-negative e4m3 bytes -> bf16x2 of their values * 2^118. The byte shifted into the bf16 exponent is the value *
// 2^-120, subnormal scales included; two exact multiplications bring it up.
DEVICE u32 nvfp4_scales(u32 bytes) {
    const u32 raw = __byte_perm(bytes, 0, 0x4140) << 4;
    return mul_bf16x2(mul_bf16x2(raw, 0x7b807b80u), 0x7a807a80u);
}

// Eight codes -> four bf16x2 registers; nvfp4_inputs puts x in the matching order.
DEVICE void nvfp4_decode(u32 q, u32 scale, u32 (&r)[4]) {
#if FP4_CVT
    asm("{\n.reg .b8 b0, b1, b2, b3;\nmov.b32 {b0, b1, b2, b3}, %4;\n"
        "cvt.rn.f16x2.e2m1x2 %0, b0;\ncvt.rn.f16x2.e2m1x2 %1, b1;\n"
        "cvt.rn.f16x2.e2m1x2 %2, b2;\ncvt.rn.f16x2.e2m1x2 %3, b3;\n}"
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(q));
#pragma unroll
    for (int i = 0; i < 4; ++i) r[i] = (r[i] & 0x80008000u) | ((r[i] >> 3) & 0x0fff0fffu);  // fp16 bits -> bf16 * 2^-112
#else
    // A nibble s eem moved to bits 9..6 and, by the same product, to 15..12: its sign ends at 15, its magnitude at 8..6.
    const u32 u = q >> 6;
    r[0] = ((q & 0x000f000fu) * 4160u) & 0x81c081c0u;  // codes 0 and 4: * (2^6 + 2^12)
    r[1] = ((q & 0x00f000f0u) * 260u) & 0x81c081c0u;   // codes 1 and 5: * (2^2 + 2^8)
    r[2] = ((u & 0x003c003cu) * 1040u) & 0x81c081c0u;  // codes 2 and 6: * (2^4 + 2^10)
    r[3] = (q & 0x80008000u) | (u & 0x01c001c0u);      // codes 3 and 7
#endif
#pragma unroll
    for (int i = 0; i < 4; ++i) r[i] = mul_bf16x2(r[i], scale);
}

// Eight bf16 inputs in the order of nvfp4_decode's registers.
DEVICE void nvfp4_inputs(uint4 v, u32 (&x)[4]) {
#if FP4_CVT
    x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
#else
    x[0] = __byte_perm(v.x, v.z, 0x5410), x[1] = __byte_perm(v.x, v.z, 0x7632);
    x[2] = __byte_perm(v.y, v.w, 0x5410), x[3] = __byte_perm(v.y, v.w, 0x7632);
#endif
}

// Where value i of a row belongs for its words to be in the order of nvfp4_decode's registers.
DEVICE int nvfp4_place(int i) {
#if FP4_CVT
    return i;
#else
    return (i & ~7) | (i & 3) << 1 | (i >> 2 & 1);
#endif
}

// c += W x for 128 values of k: `a`, `b` are the lane's 32 codes of rows g and g + 8, `sa`, `sb` their two block scales.
DEVICE void nvfp4_group(float (&c)[4], uint4 a, uint4 b, u32 sa, u32 sb, const u32 (&x)[4][4]) {
    const u32 qa[4] = {a.x, a.y, a.z, a.w}, qb[4] = {b.x, b.y, b.z, b.w};
    sa = nvfp4_scales(sa), sb = nvfp4_scales(sb);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        u32 ra[4], rb[4];
        nvfp4_decode(qa[j], __byte_perm(sa, 0, j < 2 ? 0x1010 : 0x3232), ra);
        nvfp4_decode(qb[j], __byte_perm(sb, 0, j < 2 ? 0x1010 : 0x3232), rb);
        mma(c, ra[0], rb[0], ra[1], rb[1], x[j][0], x[j][1]);
        mma(c, ra[2], rb[2], ra[3], rb[3], x[j][2], x[j][3]);
    }
}
