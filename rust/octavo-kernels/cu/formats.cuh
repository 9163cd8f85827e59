// What the bytes of a weight mean, one struct per type that products are made with. `value` is number `i` of a block,
// rounded as `src/reference/dequantise.rs` rounds it: multiplied, then added, never fused.
#pragma once
#include "common.cuh"

__device__ __forceinline__ float half_at(global<const u8> block, int at) {
    return to_float(*cast<const f16>(block + at));
}
// A bit of a field that starts at byte `at`.
__device__ __forceinline__ int bit_at(global<const u8> block, int at, int bit) {
    return block[at + bit / 8] >> (bit % 8) & 1;
}
// Nibble `i` of 2 · `bytes`: low nibbles are the first half of the values, high nibbles the second.
__device__ __forceinline__ int nibble(global<const u8> block, int at, int bytes, int i) {
    return i < bytes ? block[at + i] & 15 : block[at + i - bytes] >> 4;
}

template <class T> struct Dense {
    static constexpr int LEN = 1, BYTES = sizeof(T);
    static __device__ __forceinline__ float value(global<const u8> block, int) {
        return to_float(*cast<const T>(block));
    }
};
using F32 = Dense<float>;
using F16 = Dense<f16>;
using BF16 = Dense<bf16>;

struct Q4_0 {
    static constexpr int LEN = 32, BYTES = 18;
    static __device__ __forceinline__ float value(global<const u8> block, int i) {
        return half_at(block, 0) * float(nibble(block, 2, 16, i) - 8);
    }
};

struct Q4_1 {
    static constexpr int LEN = 32, BYTES = 20;
    static __device__ __forceinline__ float value(global<const u8> block, int i) {
        return half_at(block, 0) * float(nibble(block, 4, 16, i)) + half_at(block, 2);
    }
};

struct Q5_0 {
    static constexpr int LEN = 32, BYTES = 22;
    static __device__ __forceinline__ float value(global<const u8> block, int i) {
        return half_at(block, 0) * float((nibble(block, 6, 16, i) | bit_at(block, 2, i) << 4) - 16);
    }
};

struct Q5_1 {
    static constexpr int LEN = 32, BYTES = 24;
    static __device__ __forceinline__ float value(global<const u8> block, int i) {
        return half_at(block, 0) * float(nibble(block, 8, 16, i) | bit_at(block, 4, i) << 4) + half_at(block, 2);
    }
};

struct Q8_0 {
    static constexpr int LEN = 32, BYTES = 34;
    static __device__ __forceinline__ float value(global<const u8> block, int i) {
        return half_at(block, 0) * float(i8(block[2 + i]));
    }
};

// Two bits for each value, in runs of 32 bytes that hold four groups of 32 values.
__device__ __forceinline__ int pair(global<const u8> block, int at, int i) {
    return block[at + i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
}

struct Q2_K {
    static constexpr int LEN = 256, BYTES = 84;
    static __device__ __forceinline__ float value(global<const u8> block, int i) {
        int scales = block[i / 16];
        float scale = half_at(block, 80) * float(scales & 15), minimum = half_at(block, 82) * float(scales >> 4);
        return scale * float(pair(block, 16, i)) - minimum;
    }
};

struct Q3_K {
    static constexpr int LEN = 256, BYTES = 110;
    static __device__ __forceinline__ float value(global<const u8> block, int i) {
        int group = i / 16;
        int low = block[96 + group % 8] >> (group / 8 * 4) & 15, high = block[104 + group % 4] >> (group / 4 * 2) & 3;
        int third = block[i % 32] >> (i / 32) & 1;
        return half_at(block, 108) * float((low | high << 4) - 32) * float(pair(block, 32, i) + 4 * third - 4);
    }
};

// The six-bit scale and minimum of a group of 32, out of the 12 bytes after `d` and `dmin`.
__device__ __forceinline__ void six_bits(global<const u8> block, int group, int &scale, int &minimum) {
    global<const u8> packed = block + 4;
    if (group < 4) {
        scale = packed[group] & 63;
        minimum = packed[group + 4] & 63;
    } else {
        scale = (packed[group + 4] & 15) | packed[group - 4] >> 6 << 4;
        minimum = packed[group + 4] >> 4 | packed[group] >> 6 << 4;
    }
}
__device__ __forceinline__ float with_minimum(global<const u8> block, int i, int code) {
    int scale, minimum;
    six_bits(block, i / 32, scale, minimum);
    return half_at(block, 0) * float(scale) * float(code) - half_at(block, 2) * float(minimum);
}

struct Q4_K {
    static constexpr int LEN = 256, BYTES = 144;
    static __device__ __forceinline__ float value(global<const u8> block, int i) {
        return with_minimum(block, i, nibble(block, 16 + i / 64 * 32, 32, i % 64));
    }
};

struct Q5_K {
    static constexpr int LEN = 256, BYTES = 176;
    static __device__ __forceinline__ float value(global<const u8> block, int i) {
        int fifth = block[16 + i % 32] >> (i / 32) & 1;
        return with_minimum(block, i, nibble(block, 48 + i / 64 * 32, 32, i % 64) | fifth << 4);
    }
};

struct Q6_K {
    static constexpr int LEN = 256, BYTES = 210;
    static __device__ __forceinline__ float value(global<const u8> block, int i) {
        int half = i / 128, quarter = i % 128 / 32, j = i % 32;
        int low = block[half * 64 + quarter % 2 * 32 + j] >> (quarter / 2 * 4) & 15;
        int high = block[128 + half * 32 + j] >> (quarter * 2) & 3;
        return half_at(block, 208) * float(i8(block[192 + i / 16])) * float((low | high << 4) - 32);
    }
};

// Ours: `d: f32 | 16 signed scales | 256 signed codes`.
struct Q8_16 {
    static constexpr int LEN = 256, BYTES = 276;
    static __device__ __forceinline__ float value(global<const u8> block, int i) {
        return *cast<const float>(block) * float(i8(block[4 + i / 16])) * float(i8(block[20 + i]));
    }
};

// Value `k` of a row that begins at `row`.
template <class F> __device__ __forceinline__ float weight_at(global<const u8> row, int k) {
    return F::value(row + size_t(k / F::LEN) * F::BYTES, k % F::LEN);
}

// Does something for every type.
#define FOR_EVERY_FORMAT(DO)                                                                                           \
    DO(F32) DO(F16) DO(BF16) DO(Q4_0) DO(Q4_1) DO(Q5_0) DO(Q5_1) DO(Q8_0) DO(Q2_K) DO(Q3_K) DO(Q4_K) DO(Q5_K) DO(Q6_K) \
    DO(Q8_16)
