// Products with weights of every type: out (rows, outputs) = x (rows, inputs) · weightsᵀ. A block takes 32 outputs by 8
// rows, a thread one of each; both operands pass through shared memory in runs of 32 inputs. Every output is one chain of
// fused multiply-adds over ascending inputs, as in `src/reference/linear.rs`, so it depends on its own row alone.
// Bound by instructions: this is the plain form, for all types and shapes.
#include "experts.cuh"
#include "formats.cuh"

constexpr int OUTPUTS = 32, ROWS = 8, DEPTH = 32;

// Up to ROWS rows from those on at which `out` and `x` begin. blockIdx.y counts tiles of outputs.
template <class F>
__device__ void product(global<float> out, int stride, global<const float> x, global<const u8> weights,
                        global<const float> bias, int rows, int outputs, int inputs) {
    SHARED(float, w_tile, OUTPUTS * (DEPTH + 1));
    SHARED(float, x_tile, ROWS * DEPTH);
    int first_output = blockIdx.y * OUTPUTS;
    int lane = threadIdx.x % OUTPUTS, row = threadIdx.x / OUTPUTS, output = first_output + lane;
    size_t row_bytes = size_t(inputs / F::LEN) * F::BYTES;

    float sum = 0.0f;
    for (int depth = 0; depth < inputs; depth += DEPTH) {
        int k = depth + lane;
        for (int i = row; i < OUTPUTS; i += ROWS) {
            bool inside = k < inputs && first_output + i < outputs;
            w_tile[i * (DEPTH + 1) + lane] =
                inside ? weight_at<F>(weights + (first_output + i) * row_bytes, k) : 0.0f;
        }
        x_tile[row * DEPTH + lane] = k < inputs && row < rows ? x[size_t(row) * inputs + k] : 0.0f;
        __syncthreads();
        int end = min(DEPTH, inputs - depth);
        for (int i = 0; i < end; i++) {
            sum = fmaf(w_tile[lane * (DEPTH + 1) + i], x_tile[row * DEPTH + i], sum);
        }
        __syncthreads();
    }
    if (row < rows && output < outputs) {
        out[size_t(row) * stride + output] = bias ? sum + bias[output] : sum;
    }
}

// `stride`: from one row of `out` to the next. `bias` may be null. blockIdx.x counts tiles of rows.
#define LINEAR(F)                                                                                                      \
    KERNEL_WITH_BLOCKS(linear_##F, 256, 4, global<float> out, int stride, global<const float> x,                       \
                       global<const u8> weights, global<const float> bias, int rows, int outputs, int inputs) {        \
        int first = blockIdx.x * ROWS;                                                                                 \
        product<F>(out + size_t(first) * stride, stride, x + size_t(first) * inputs, weights, bias, rows - first,      \
                   outputs, inputs);                                                                                   \
    }                                                                                                                  \
    KERNEL(expert_linear_##F, 256, global<float> out, int stride, global<const float> x, int,                          \
           global<const u8> weights, int first_byte, u32 expert_bytes, global<const u32> first_slots,                  \
           int first_expert, int experts, int outputs, int inputs) {                                                   \
        ExpertTile tile = find_tile(first_slots, first_expert, experts, ROWS, blockIdx.x);                             \
        if (tile.expert < 0) return;                                                                                   \
        product<F>(out + size_t(tile.slot) * stride, stride, x + size_t(tile.slot) * inputs,                           \
                   weights + (first_byte + size_t(tile.expert) * expert_bytes), nullptr, tile.rows, outputs, inputs);  \
    }
// Types that have better forms in `linear16.cu` and `linear8.cu` are here for shapes that those do not take.
LINEAR(F32) LINEAR(F16) LINEAR(BF16) LINEAR(Q5_1) LINEAR(Q2_K) LINEAR(Q3_K) LINEAR(Q5_K) LINEAR(Q8_16)
