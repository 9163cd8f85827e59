// Products with quantised weights, for few rows above all: out (rows, outputs) = x (rows, inputs) · weightsᵀ, with x in
// int8, each 32 values with a scale of their own. This is what `dot_int8` in `src/reference/linear.rs` defines, to the bit:
// the products within a group are integers, so it does not matter how they are added, and over groups there is one chain
// of fused multiply-adds for every output.
//
// A warp takes 4 outputs by 8 rows and goes through runs of 32 units of 32 inputs. The run's bytes come to shared memory
// 16 at a time, whatever their alignment; a lane decodes one unit in registers and multiplies it with every row, four codes
// an instruction; then each lane adds up the run for one output of one row. Bound by reading the weights while rows are
// few, by integer products when they are many.
#include "common.cuh"

constexpr int UNIT = 32, OUTPUTS = 4, ROWS = 8, WARPS = 2; // inputs of a unit; of a warp; of a block
constexpr int LINE = WARP + 1;                             // units of a run, and one so that lanes meet no bank twice
static_assert(OUTPUTS * ROWS == WARP, "a lane adds up one output of one row");

// Codes of x (rows, width), then the scales of every 32 (rows, width / 32). A warp takes 32 values of a row.
KERNEL(quantise_rows, 256, global<u8> out, global<const float> x, int rows, int width) {
    int i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i >= width) return;
    size_t at = size_t(blockIdx.x) * width + i;
    float value = x[at], scale = warp_max(fabsf(value)) / 127.0f;
    float code = scale == 0.0f ? 0.0f : fminf(fmaxf(rintf(value / scale), -127.0f), 127.0f);
    out[at] = u8(i8(code));
    if (i % UNIT == 0) cast<float>(out + size_t(rows) * width)[at / UNIT] = scale;
}

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

template <class F>
__device__ __forceinline__ void product(global<float> out, int stride, global<const u8> x, global<const u8> weights,
                                        global<const float> bias, int rows, int outputs, int inputs) {
    constexpr int G = F::GROUPS, RUN_BYTES = WARP * UNIT / F::LEN * F::BYTES;
    constexpr int PIECES = (RUN_BYTES + 14 + 15) / 16 + 1; // of 16 bytes, the first and the last shared with others
    SHARED(uint4, all_bytes, WARPS *OUTPUTS *PIECES);
    SHARED(int, all_products, WARPS *WARP *G *LINE);
    SHARED(float, all_scales, WARPS *OUTPUTS *G *LINE);
    SHARED(float, all_minimums, WARPS *OUTPUTS *F::MINIMUM *LINE + 1);
    SHARED(float, all_x_scales, WARPS *ROWS *LINE);
    SHARED(float, all_x_sums, WARPS *ROWS *F::MINIMUM *LINE + 1);
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    int first_output = (blockIdx.x * WARPS + warp) * OUTPUTS, first_row = blockIdx.y * ROWS;
    if (first_output >= outputs) return;
    shared<uint4> bytes = all_bytes + warp * OUTPUTS * PIECES;
    shared<int> products = all_products + warp * WARP * G * LINE;
    shared<float> scales = all_scales + warp * OUTPUTS * G * LINE, x_scales = all_x_scales + warp * ROWS * LINE;
    shared<float> minimums = all_minimums + warp * OUTPUTS * F::MINIMUM * LINE;
    shared<float> x_sums = all_x_sums + warp * ROWS * F::MINIMUM * LINE;

    int outputs_here = min(outputs - first_output, OUTPUTS), rows_here = min(rows - first_row, ROWS);
    int units = inputs / UNIT, my_output = lane / ROWS, my_row = lane % ROWS;
    size_t row_bytes = size_t(inputs / F::LEN) * F::BYTES;
    global<const float> scales_of_x = cast<const float>(x + size_t(rows) * inputs);
    float sum = 0.0f;
    for (int first = 0; first < units; first += WARP) {
        int here = min(WARP, units - first), bytes_here = here * UNIT / F::LEN * F::BYTES;
        auto start_of = [&](int o) { return (first_output + o) * row_bytes + size_t(first * UNIT / F::LEN) * F::BYTES; };
        for (int o = 0; o < outputs_here; o++) {
            size_t start = start_of(o);
            int skip = start % 16;
            for (int i = lane; 16 * i < skip + bytes_here; i += WARP) {
                copy_async<16>(bytes + o * PIECES + i, weights + (start - skip + 16 * i));
            }
        }
        copy_async_commit();
        copy_async_wait<0>();
        __syncwarp();
        if (lane < here) {
            Unit<G> unit[OUTPUTS];
#pragma unroll
            for (int o = 0; o < OUTPUTS; o++) {
                int block = lane * UNIT / F::LEN, at = int(start_of(o) % 16) + block * F::BYTES;
                F::decode(unit[o], {cast<const u8>(bytes + o * PIECES), at}, lane % (F::LEN / UNIT));
#pragma unroll
                for (int g = 0; g < G; g++) scales[(o * G + g) * LINE + lane] = unit[o].scales[g];
                if constexpr (F::MINIMUM) minimums[o * LINE + lane] = unit[o].minimum;
            }
            for (int r = 0; r < rows_here; r++) {
                size_t at = size_t(first_row + r) * units + first + lane;
                uint4 a = load<uint4>(x + at * UNIT), b = load<uint4>(x + at * UNIT + 16);
                const unsigned words[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
                float x_scale = scales_of_x[at];
                x_scales[r * LINE + lane] = x_scale;
                if constexpr (F::MINIMUM) {
                    int total = 0;
#pragma unroll
                    for (int i = 0; i < 8; i++) total = __dp4a(int(words[i]), 0x01010101, total);
                    x_sums[r * LINE + lane] = x_scale * float(total);
                }
#pragma unroll
                for (int o = 0; o < OUTPUTS; o++) {
#pragma unroll
                    for (int g = 0; g < G; g++) {
                        int dot = 0;
#pragma unroll
                        for (int i = g * 8 / G; i < (g + 1) * 8 / G; i++) {
                            dot = __dp4a(int(unit[o].codes[i]), int(words[i]), dot);
                        }
                        products[((o * ROWS + r) * G + g) * LINE + lane] = dot;
                    }
                }
            }
        }
        __syncwarp();
        for (int u = 0; u < here; u++) {
#pragma unroll
            for (int g = 0; g < G; g++) {
                float scale = scales[(my_output * G + g) * LINE + u] * x_scales[my_row * LINE + u];
                sum = fmaf(float(products[(lane * G + g) * LINE + u]), scale, sum);
            }
            if constexpr (F::MINIMUM) sum = fmaf(minimums[my_output * LINE + u], x_sums[my_row * LINE + u], sum);
        }
        __syncwarp();
    }
    if (my_row < rows_here && my_output < outputs_here) {
        int output = first_output + my_output;
        out[size_t(first_row + my_row) * stride + output] = bias ? sum + bias[output] : sum;
    }
}

// `stride`: from one row of `out` to the next. `x`: of `quantise_rows`. `bias` may be null.
#define LINEAR8(F)                                                                                                     \
    KERNEL(linear8_##F, WARPS *WARP, global<float> out, int stride, global<const u8> x, global<const u8> weights,      \
           global<const float> bias, int rows, int outputs, int inputs) {                                              \
        product<int8::F>(out, stride, x, weights, bias, rows, outputs, inputs);                                        \
    }
LINEAR8(Q4_0) LINEAR8(Q4_1) LINEAR8(Q5_0) LINEAR8(Q8_0) LINEAR8(Q4_K) LINEAR8(Q6_K)
