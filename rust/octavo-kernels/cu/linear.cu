// Products with weights of every type: out (rows, outputs) = x (rows, inputs) · weightsᵀ. A block takes 32 outputs by 8
// rows, a thread one of each; both operands pass through shared memory in runs of 32 inputs. Every output is one chain of
// fused multiply-adds over ascending inputs, as in `src/reference/linear.rs`, so it depends on its own row alone.
// Bound by instructions: this is the plain form, for all types and shapes.
#include "formats.cuh"

constexpr int OUTPUTS = 32, ROWS = 8, DEPTH = 32;

template <class F>
__device__ void product(global<float> out, int stride, global<const float> x, global<const u8> weights,
                        global<const float> bias, int first_row, int end_row, int outputs, int inputs) {
    SHARED(float, w_tile, OUTPUTS * (DEPTH + 1));
    SHARED(float, x_tile, ROWS * DEPTH);
    int first_output = blockIdx.x * OUTPUTS;
    int lane = threadIdx.x % OUTPUTS, warp = threadIdx.x / OUTPUTS;
    int row = first_row + blockIdx.y * ROWS + warp, output = first_output + lane;
    size_t row_bytes = size_t(inputs / F::LEN) * F::BYTES;
    if (first_row + int(blockIdx.y) * ROWS >= end_row) return;

    float sum = 0.0f;
    for (int depth = 0; depth < inputs; depth += DEPTH) {
        int k = depth + lane;
        for (int i = warp; i < OUTPUTS; i += ROWS) {
            bool inside = k < inputs && first_output + i < outputs;
            w_tile[i * (DEPTH + 1) + lane] =
                inside ? weight_at<F>(weights + (first_output + i) * row_bytes, k) : 0.0f;
        }
        x_tile[warp * DEPTH + lane] = k < inputs && row < end_row ? x[size_t(row) * inputs + k] : 0.0f;
        __syncthreads();
        int end = min(DEPTH, inputs - depth);
        for (int i = 0; i < end; i++) {
            sum = fmaf(w_tile[lane * (DEPTH + 1) + i], x_tile[warp * DEPTH + i], sum);
        }
        __syncthreads();
    }
    if (row < end_row && output < outputs) {
        out[size_t(row) * stride + output] = bias ? sum + bias[output] : sum;
    }
}

// `stride`: from one row of `out` to the next. `bias` may be null.
//
// expert_linear: the rows are slots, sorted by expert; those of expert e are first_slots[e] … first_slots[e + 1], and its
// weights begin `expert_bytes` after those of the one before. `blockIdx.z` counts experts from `first_expert` on.
#define LINEAR(F)                                                                                                      \
    KERNEL(linear_##F, 256, global<float> out, int stride, global<const float> x, global<const u8> weights,            \
           global<const float> bias, int rows, int outputs, int inputs) {                                              \
        product<F>(out, stride, x, weights, bias, 0, rows, outputs, inputs);                                           \
    }
// Types that have better forms in `linear16.cu` and `linear8.cu` are here for shapes that those do not take.
LINEAR(F32) LINEAR(F16) LINEAR(BF16) LINEAR(Q5_1) LINEAR(Q2_K) LINEAR(Q3_K) LINEAR(Q5_K) LINEAR(Q8_16)

#define EXPERT_LINEAR(F)                                                                                               \
    KERNEL(expert_linear_##F, 256, global<float> out, int stride, global<const float> x, global<const u8> weights,     \
           u32 expert_bytes, global<const u32> first_slots, int first_expert, int outputs, int inputs) {            \
        int expert = first_expert + blockIdx.z;                                                                        \
        product<F>(out, stride, x, weights + size_t(blockIdx.z) * expert_bytes, nullptr, first_slots[expert],  \
                   first_slots[expert + 1], outputs, inputs);                                                          \
    }
FOR_EVERY_FORMAT(EXPERT_LINEAR)
