// What logits become before a token is drawn, where something changes them: masks, biases, penalties. A block takes a row;
// the others are left alone. Rounded where `octavo::sample` rounds, which defines it. Bound by memory: a row is read and
// written once, and then its changed values again.
#include "draws.cuh"

// In f64, rounded once; kept finite, so that only masks mask.
__device__ __forceinline__ float rounded(double x) {
    constexpr double MOST = 3.4028234663852886e38; // of an f32
    return float(x < -MOST ? -MOST : x > MOST ? MOST : x);
}

// adjusted (rows, width) of x (rows, width). `masks` (rows, mask_words) has a bit for each token; `changes` (rows, most)
// are pairs of a token and an f32 that is added (-inf: must not be drawn), sorted by token, in order for each; and then
// pairs of a token and how often it was generated, each token once.
KERNEL(adjust, 1024, global<float> adjusted, global<const float> x, global<const u32> draws, global<const u32> masks,
       global<const u32> changes, int width, int mask_words, int most_changes) {
    global<const u32> draw = draws + blockIdx.x * DRAW_WORDS;
    if (!draw[CHANGED]) return;
    global<float> out = adjusted + size_t(blockIdx.x) * width;
    global<const float> in = x + size_t(blockIdx.x) * width;
    global<const u32> mask = masks + size_t(blockIdx.x) * mask_words;
    bool masked = draw[MASKED] != 0;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        out[i] = !masked || mask[i / 32] >> (i % 32) & 1 ? in[i] : -INFINITY;
    }
    __syncthreads();

    global<const u32> change = changes + size_t(blockIdx.x) * most_changes * 2;
    int biases = int(draw[BIASES]), counts = int(draw[COUNTS]);
    for (int i = threadIdx.x; i < biases; i += blockDim.x) {
        u32 token = change[2 * i];
        if (token >= u32(width) || (i > 0 && change[2 * i - 2] == token)) continue;
        float logit = out[token];
        for (int j = i; j < biases && change[2 * j] == token; j++) {
            float bias = __uint_as_float(change[2 * j + 1]);
            if (bias == -INFINITY) logit = -INFINITY;
            else if (logit > -INFINITY) logit = rounded(double(logit) + double(bias));
        }
        out[token] = logit;
    }
    __syncthreads();

    change += 2 * biases;
    double repetition = __uint_as_float(draw[REPETITION]), frequency = __uint_as_float(draw[FREQUENCY]);
    double presence = __uint_as_float(draw[PRESENCE]);
    for (int i = threadIdx.x; i < counts; i += blockDim.x) {
        u32 token = change[2 * i], generated = change[2 * i + 1];
        if (token >= u32(width) || !(out[token] > -INFINITY)) continue;
        double logit = out[token];
        double repeated = logit > 0.0 ? logit / repetition : logit * repetition;
        out[token] = rounded(repeated - frequency * double(generated) - (generated > 0 ? presence : 0.0));
    }
}
