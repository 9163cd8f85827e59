// One value at a time: the gate's non-linearity, scale and soft-cap. A thread computes one value. Bound by memory.
#include "common.cuh"

__device__ __forceinline__ float silu(float x) { return x / (1.0f + expf(-x)); }
__device__ __forceinline__ float gelu_tanh(float x) {
    return 0.5f * x * (1.0f + tanhf(0.7978846f * (x + 0.044715f * x * x * x)));
}

// out (rows, width) = activation(gate) · up, of gate_up (rows, [gate | up]). blockIdx.x is the row.
#define GATED(activation)                                                                                              \
    KERNEL(gated_##activation, 256, global<float> out, global<const float> gate_up, int width) {                       \
        int i = blockIdx.y * blockDim.x + threadIdx.x;                                                                 \
        size_t row = blockIdx.x;                                                                                       \
        if (i >= width) return;                                                                                        \
        float gate = gate_up[row * 2 * width + i], up = gate_up[row * 2 * width + width + i];                          \
        out[row * width + i] = activation(gate) * up;                                                                  \
    }
GATED(silu)
GATED(gelu_tanh)

// x (rows, width) = cap > 0 ? cap · tanh(x · scale / cap) : x · scale. blockIdx.x is the row.
KERNEL(scale_and_cap, 256, global<float> x, int width, float scale, float cap) {
    int i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i >= width) return;
    size_t at = size_t(blockIdx.x) * width + i;
    float scaled = x[at] * scale;
    x[at] = cap > 0.0f ? cap * tanhf(scaled / cap) : scaled;
}
