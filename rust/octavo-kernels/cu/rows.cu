// Rows on the move: embeddings, the rows that need logits, the rows that experts read; and the largest value of a row. A
// block takes one row.
#include "formats.cuh"

// out (rows, width) = table[ids] · scale.
#define EMBED(F)                                                                                                       \
    KERNEL(embed_##F, 256, global<float> out, global<const u8> table, global<const u32> ids, int width, float scale) { \
        size_t row_bytes = size_t(width / F::LEN) * F::BYTES;                                                          \
        global<const u8> row = table + ids[blockIdx.x] * row_bytes;                                                    \
        for (int i = threadIdx.x; i < width; i += blockDim.x) {                                                        \
            out[size_t(blockIdx.x) * width + i] = weight_at<F>(row, i) * scale;                                        \
        }                                                                                                              \
    }
FOR_EVERY_FORMAT(EMBED)

// out (n, width) = x[rows].
KERNEL(gather, 256, global<float> out, global<const float> x, global<const u32> rows, int width) {
    size_t from = size_t(rows[blockIdx.x]) * width, to = size_t(blockIdx.x) * width;
    for (int i = threadIdx.x; i < width; i += blockDim.x) out[to + i] = x[from + i];
}

constexpr u32 NONE = 0xffffffff;

// A value and where it was found.
struct Found {
    float value;
    u32 index;

    // The larger of two; of equal ones the one with the smaller index.
    __device__ __forceinline__ void meet(float other, u32 other_index) {
        if (other > value || (other == value && other_index < index)) {
            value = other;
            index = other_index;
        }
    }
    __device__ __forceinline__ void meet_in_warp() {
        for (int other = WARP / 2; other > 0; other /= 2) {
            float its_value = __shfl_xor_sync(FULL_WARP, value, other);
            u32 its_index = __shfl_xor_sync(FULL_WARP, index, other);
            meet(its_value, its_index);
        }
    }
};

// out (rows) = index of the largest value of x (rows, width), the smallest one among equals; NONE for a row that holds NaN
// or +∞, or nothing but -∞. A thread takes every so-manieth value, then lanes meet, then warps.
KERNEL(largest, 1024, global<u32> out, global<const float> x, int width) {
    SHARED(float, values, WARP);
    SHARED(u32, indices, WARP);
    size_t row = size_t(blockIdx.x) * width;
    Found found = {-INFINITY, NONE};
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        float value = x[row + i];
        if (!(value < INFINITY)) value = INFINITY; // no logit: nothing is larger
        if (value > found.value) found = {value, u32(i)};
    }
    found.meet_in_warp();
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
    if (lane == 0) {
        values[warp] = found.value;
        indices[warp] = found.index;
    }
    __syncthreads();
    if (warp > 0) return;
    found = {-INFINITY, NONE};
    if (lane < warps) found = {values[lane], indices[lane]};
    found.meet_in_warp();
    if (lane == 0) out[blockIdx.x] = found.value < INFINITY ? found.index : NONE;
}
