// What a draw is told and what it says, as 32-bit words: the order is that of `src/cuda/draws.rs`. And the weights that
// draws and log-probabilities are made of, to the bit those of `octavo::sample`, which defines them.
#pragma once
#include "common.cuh"

// Of a row: how to draw. Numbers of 64 bits have their lower half first.
enum {
    CHANGED,     // 1: what is drawn from is not the logits themselves, but what `adjust` made of them
    MASKED,      // 1: the row's mask says what may be drawn
    TEMPERATURE, // 0: the largest
    TOP_K,       // 0: all
    TOP_P,       // 1: all
    MIN_P,       // f64, added to the largest logit: what is below is not drawn
    COIN = MIN_P + 2,
    LOGPROBS = COIN + 2, // 0: none are wanted; else 1 and so many of the best
    BIASES,              // how many of the row's changes are biases …
    COUNTS,              // … and how many, after them, are counts
    REPETITION,
    FREQUENCY,
    PRESENCE,
    DRAW_WORDS,
};

// Of a row: what became of it.
enum {
    TOKEN,     // NONE: none
    BAD,       // 0, or 1 more than the index of the first logit that is none
    BAD_LOGIT, // what it is
    RANK,      // from here on, only where log-probabilities are wanted
    BEST_LOGIT,
    LOGIT,      // the token's
    TOTAL,      // f64: the sum of all weights
    TOPS = TOTAL + 2, // how many of the best there are
    DRAWN_WORDS,
};

constexpr int MOST_TOPS = 64;
constexpr u32 NONE = 0xffffffff;

__device__ __forceinline__ double double_at(global<const u32> words) {
    return __hiloint2double(int(words[1]), int(words[0]));
}

// exp(x) · 2^60 for x <= 0; 0 below -128.6. The same operations in the same order as `softmax::weight`.
__device__ __forceinline__ float weight_of(float x) {
    constexpr float LOWEST = -128.6f, ROUND = 12582912.0f, LN_2_HIGH = 355.0f / 512.0f, LN_2_LOW = -2.1219444e-4f;
    constexpr float LOG2_E = 1.44269504088896340736f;
    float clamped = x > LOWEST ? x : LOWEST;
    float shifted = clamped * LOG2_E + ROUND;
    float n = shifted - ROUND;
    float r = (clamped - n * LN_2_HIGH) - n * LN_2_LOW;
    float exp_r = 1.0f / 5040.0f;
    exp_r = exp_r * r + 1.0f / 720.0f;
    exp_r = exp_r * r + 1.0f / 120.0f;
    exp_r = exp_r * r + 1.0f / 24.0f;
    exp_r = exp_r * r + 1.0f / 6.0f;
    exp_r = exp_r * r + 0.5f;
    exp_r = exp_r * r + 1.0f;
    exp_r = exp_r * r + 1.0f;
    float power = __uint_as_float((__float_as_uint(shifted) << 23) + ((127u + 60u) << 23));
    return x < LOWEST ? 0.0f : exp_r * power;
}

// The weight rounded as `softmax::round` does, in units of 2^26: their sums are exact, in whatever order.
__device__ __forceinline__ u64 units_of(float weight) {
    constexpr float BORDER = 562949953421312.0f; // 2^49
    float rounded = weight < BORDER ? (weight + BORDER) - BORDER : weight;
    return u64(rounded * (1.0f / 67108864.0f));
}
