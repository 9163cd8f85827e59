// Quantised weights as bytes with scales, and activations quantised to bytes: what products of them are made of. What they
// are is defined, to the bit, by `dot_int8` in `src/reference/linear.rs`: the products within a group are integers, so it
// does not matter how they are added, and over groups there is one chain of fused multiply-adds for every output.
#pragma once
#include "common.cuh"

constexpr int UNIT = 32; // inputs that share a scale of the activations

// Activations as `quantise_rows` leaves them: codes (rows, inputs), then of every unit its scale and scale · Σ codes (rows,
// inputs / 32). Of the eight words of a unit, word i is at place i % 4 · 2 + i / 4: then what a lane needs of a unit for
// tensor cores is 8 bytes.
struct Int8Rows {
    global<const u8> codes;
    global<const float> scales, sums;

    __device__ __forceinline__ Int8Rows(global<const u8> begin, int all_rows, int first, int inputs) : codes(begin) {
        size_t units = inputs / UNIT;
        scales = cast<const float>(begin + size_t(all_rows) * inputs) + first * units;
        sums = scales + all_rows * units;
        codes = begin + size_t(first) * inputs;
    }
};

// Bytes in shared memory, from an even place on.
struct Bytes {
    shared<const u8> begin; // a multiple of 16
    int at;
    __device__ __forceinline__ unsigned byte(int i) const { return begin[at + i]; }
    __device__ __forceinline__ float half(int i) const { return to_float(*cast<const f16>(begin + at + i)); }
    __device__ __forceinline__ unsigned word(int i) const {
        int from = at + i;
        shared<const unsigned> words = cast<const unsigned>(begin) + from / 4;
        return from % 4 ? __byte_perm(words[0], words[1], 0x5432) : words[0];
    }
};

// The 32 codes of a unit, four to a word, and what its groups' products are multiplied by.
template <int GROUPS> struct Unit {
    unsigned codes[8];
    float scales[GROUPS], minimum;
};

// Each byte less `by`, for bytes below 2 · by, a power of two.
__device__ __forceinline__ unsigned less(unsigned bytes, unsigned by) {
    return (bytes + (0x80 - by) * 0x01010101) ^ 0x80808080;
}
// Words of low nibbles, then of high ones.
__device__ __forceinline__ unsigned nibbles(const Bytes &block, int at, int i) {
    return block.word(at + i % 4 * 4) >> (i / 4 * 4) & 0x0f0f0f0f;
}

namespace int8 {

// Formats: inputs and bytes of a block, groups of a unit, whether there is a minimum; unit `u` of a block.
struct Q4_0 {
    static constexpr int LEN = 32, BYTES = 18, GROUPS = 1, MINIMUM = 0;
    static __device__ __forceinline__ void decode(Unit<1> &unit, const Bytes &block, int) {
        unit.scales[0] = block.half(0);
#pragma unroll
        for (int i = 0; i < 8; i++) unit.codes[i] = less(nibbles(block, 2, i), 8);
    }
};
struct Q4_1 {
    static constexpr int LEN = 32, BYTES = 20, GROUPS = 1, MINIMUM = 1;
    static __device__ __forceinline__ void decode(Unit<1> &unit, const Bytes &block, int) {
        unit.scales[0] = block.half(0), unit.minimum = block.half(2);
#pragma unroll
        for (int i = 0; i < 8; i++) unit.codes[i] = nibbles(block, 4, i);
    }
};
struct Q5_0 {
    static constexpr int LEN = 32, BYTES = 22, GROUPS = 1, MINIMUM = 0;
    static __device__ __forceinline__ void decode(Unit<1> &unit, const Bytes &block, int) {
        unsigned fifths = block.word(2);
        unit.scales[0] = block.half(0);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            unsigned b = fifths >> (4 * i);
            unsigned spread = (b & 1) << 4 | (b & 2) << 11 | (b & 4) << 18 | (b & 8) << 25;
            unit.codes[i] = less(nibbles(block, 6, i) | spread, 16);
        }
    }
};
struct Q8_0 {
    static constexpr int LEN = 32, BYTES = 34, GROUPS = 1, MINIMUM = 0;
    static __device__ __forceinline__ void decode(Unit<1> &unit, const Bytes &block, int) {
        unit.scales[0] = block.half(0);
#pragma unroll
        for (int i = 0; i < 8; i++) unit.codes[i] = block.word(2 + 4 * i);
    }
};
struct Q4_K {
    static constexpr int LEN = 256, BYTES = 144, GROUPS = 1, MINIMUM = 1;
    static __device__ __forceinline__ void decode(Unit<1> &unit, const Bytes &block, int u) {
        int scale, minimum;
        if (u < 4) {
            scale = block.byte(4 + u) & 63, minimum = block.byte(8 + u) & 63;
        } else {
            scale = (block.byte(8 + u) & 15) | block.byte(u) >> 6 << 4;
            minimum = block.byte(8 + u) >> 4 | block.byte(4 + u) >> 6 << 4;
        }
        unit.scales[0] = block.half(0) * float(scale), unit.minimum = -(block.half(2) * float(minimum));
#pragma unroll
        for (int i = 0; i < 8; i++) unit.codes[i] = block.word(16 + u / 2 * 32 + 4 * i) >> (u % 2 * 4) & 0x0f0f0f0f;
    }
};
struct Q6_K {
    static constexpr int LEN = 256, BYTES = 210, GROUPS = 2, MINIMUM = 0;
    static __device__ __forceinline__ void decode(Unit<2> &unit, const Bytes &block, int u) {
        int half = u / 4, quarter = u % 4;
#pragma unroll
        for (int g = 0; g < 2; g++) unit.scales[g] = block.half(208) * float(i8(block.byte(192 + 2 * u + g)));
#pragma unroll
        for (int i = 0; i < 8; i++) {
            unsigned low = block.word(half * 64 + quarter % 2 * 32 + 4 * i) >> (quarter / 2 * 4) & 0x0f0f0f0f;
            unsigned high = block.word(128 + half * 32 + 4 * i) >> (quarter * 2) & 0x03030303;
            unit.codes[i] = less(low | high << 4, 32);
        }
    }
};

} // namespace int8

// Does something for every type.
#define FOR_EVERY_INT8(DO) DO(Q4_0) DO(Q4_1) DO(Q5_0) DO(Q8_0) DO(Q4_K) DO(Q6_K)
