// Root-mean-square norms, and the residual step between two sub-layers. Rows of f32; a block takes one row, its threads
// neighbouring values in turn. Two passes over a row that lies in the cache by the second: bound by memory.
#include "common.cuh"

// 1 / rms of `width` values, the same in every thread.
__device__ __forceinline__ float inverse_rms(global<const float> x, int width, float eps, shared<float> scratch) {
    float sum = 0.0f;
    for (int i = threadIdx.x; i < width; i += blockDim.x) sum = fmaf(x[i], x[i], sum);
    return 1.0f / sqrtf(block_sum(sum, scratch) / width + eps);
}

// out (rows, width) = x / rms(x) · weight.
KERNEL(rms_norm, 256, global<float> out, global<const float> x, global<const float> weight, int width, float eps) {
    SHARED(float, scratch, WARP);
    size_t row = size_t(blockIdx.x) * width;
    float scale = inverse_rms(x + row, width, eps, scratch);
    for (int i = threadIdx.x; i < width; i += blockDim.x) out[row + i] = x[row + i] * scale * weight[i];
}

// The same in place over `width` columns of x (rows, stride), from `first` on.
KERNEL(rms_norm_columns, 256, global<float> x, global<const float> weight, int stride, int first, int width, float eps) {
    SHARED(float, scratch, WARP);
    size_t row = size_t(blockIdx.x) * stride + first;
    float scale = inverse_rms(x + row, width, eps, scratch);
    for (int i = threadIdx.x; i < width; i += blockDim.x) x[row + i] = x[row + i] * scale * weight[i];
}

// residual += scale · (post ? rms_norm(delta, post) : delta), then out = next ? rms_norm(residual, next) : residual; all
// (rows, width). `post` and `next` may be null.
KERNEL(residual_norm, 256, global<float> residual, global<const float> delta, global<const float> post, float scale,
       global<float> out, global<const float> next, int width, float eps) {
    SHARED(float, scratch, WARP);
    size_t row = size_t(blockIdx.x) * width;
    float delta_scale = post ? inverse_rms(delta + row, width, eps, scratch) : 1.0f;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        float step = delta[row + i];
        if (post) step = step * delta_scale * post[i];
        float x = residual[row + i] + scale * step;
        residual[row + i] = x;
        sum = fmaf(x, x, sum);
    }
    // Every thread reads back what it wrote itself.
    float next_scale = next ? 1.0f / sqrtf(block_sum(sum, scratch) / width + eps) : 1.0f;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        float x = residual[row + i];
        out[row + i] = next ? x * next_scale * next[i] : x;
    }
}
