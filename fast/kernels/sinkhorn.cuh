// Doubly stochastic combination weights of one mHC site from their logits, one thread a row.
#pragma once
#include "common.cuh"

#ifndef C
#define C 4  // streams
#endif

struct Sinkhorn {
    const float *logits;  // [R, C, C], null: nothing to do
    float *comb;          // [R, C, C]
    int rows, iterations, streams;  // streams: C
    float eps;
};

// comb = softmax(logits, last axis) + eps; columns, then rows and columns in turn, are divided by their sums + eps.
// Nothing is stored unless `live`.
DEVICE void sinkhorn(const Sinkhorn &p, int row, bool live) {
    float k[C][C];
#pragma unroll
    for (int i = 0; i < C; ++i) {
        float top = -INFINITY, sum = 0.0f;
#pragma unroll
        for (int j = 0; j < C; ++j) k[i][j] = load_f32(p.logits + (row * C + i) * C + j), top = fmaxf(top, k[i][j]);
#pragma unroll
        for (int j = 0; j < C; ++j) sum += k[i][j] = exponential(k[i][j] - top);
#pragma unroll
        for (int j = 0; j < C; ++j) k[i][j] = k[i][j] * reciprocal(sum) + p.eps;
    }
#pragma unroll 1
    for (int n = 0; n < p.iterations; ++n) {
        if (n)
#pragma unroll
            for (int i = 0; i < C; ++i) {
                float sum = p.eps;
#pragma unroll
                for (int j = 0; j < C; ++j) sum += k[i][j];
                const float inverse = reciprocal(sum);
#pragma unroll
                for (int j = 0; j < C; ++j) k[i][j] *= inverse;
            }
#pragma unroll
        for (int j = 0; j < C; ++j) {
            float sum = p.eps;
#pragma unroll
            for (int i = 0; i < C; ++i) sum += k[i][j];
            const float inverse = reciprocal(sum);
#pragma unroll
            for (int i = 0; i < C; ++i) k[i][j] *= inverse;
        }
    }
#pragma unroll
    for (int i = 0; i < C; ++i)
#pragma unroll
        for (int j = 0; j < C; ++j)
            if (live) p.comb[(row * C + i) * C + j] = k[i][j];
}
