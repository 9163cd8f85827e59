// What products on tensor cores leave: outputs are the rows of D, and rows its columns, so that few of them waste little.
#pragma once
#include "common.cuh"

// Writes a warp's sums: those of outputs from `first_output` on and of rows from `first_row` on that there are. `stride`:
// from one row of `out` to the next. `bias` may be null.
template <int M_TILES, int N_TILES>
__device__ __forceinline__ void write_tiles(global<float> out, int stride, global<const float> bias,
                                            const float (&sums)[M_TILES][N_TILES][4], int first_output, int first_row,
                                            int outputs, int rows) {
    int group = threadIdx.x % WARP / 4, quad = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < M_TILES; i++) {
#pragma unroll
        for (int j = 0; j < N_TILES; j++) {
#pragma unroll
            for (int k = 0; k < 4; k++) {
                int output = first_output + 16 * i + group + k / 2 * 8, row = first_row + 8 * j + 2 * quad + k % 2;
                if (row >= rows || output >= outputs) continue;
                float sum = sums[i][j][k];
                out[size_t(row) * stride + output] = bias ? sum + bias[output] : sum;
            }
        }
    }
}
