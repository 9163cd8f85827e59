// Products with quantised weights for few rows: out (rows, outputs) = x (rows, inputs) · weightsᵀ, with x in int8, each 32
// values with a scale of their own. What is computed, to the bit, is said in `int8.cuh`.
//
// A warp takes 4 outputs by 8 rows and goes through runs of 32 units of 32 inputs. The run's bytes come to shared memory
// 16 at a time, whatever their alignment; a lane decodes one unit in registers and multiplies it with every row, four codes
// an instruction; then each lane adds up the run for one output of one row. Bound by reading the weights.
#include "experts.cuh"
#include "int8.cuh"

constexpr int OUTPUTS = 4, ROWS = 8, WARPS = 2; // of a warp; of a block
constexpr int LINE = WARP + 1;                  // units of a run, and one so that lanes meet no bank twice
static_assert(OUTPUTS * ROWS == WARP, "a lane adds up one output of one row");

// `Int8Rows` of x (rows, width). A warp takes the 32 values of a unit.
KERNEL(quantise_rows, 256, global<u8> out, global<const float> x, int rows, int width) {
    int i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i >= width) return;
    size_t at = size_t(blockIdx.x) * width + i;
    float value = x[at], scale = warp_max(fabsf(value)) / 127.0f;
    float inverse = scale < 0x1p-126f ? 0.0f : 1.0f / scale;
    int code = int(rintf(fmaxf(value * inverse, -127.0f))), sum = code, word = i % UNIT / 4;
    for (int other = WARP / 2; other > 0; other /= 2) sum += __shfl_xor_sync(FULL_WARP, sum, other);
    out[at - i % UNIT + (word % 4 * 2 + word / 4) * 4 + i % 4] = u8(i8(code));
    if (i % UNIT > 0) return;
    global<float> scales = cast<float>(out + size_t(rows) * width);
    scales[at / UNIT] = scale;
    scales[(size_t(rows) * width + at) / UNIT] = scale * float(sum);
}

// Up to ROWS rows from those on at which `out` and `x` begin; the weights begin at `first_byte`, an even one. blockIdx.y
// counts outputs.
template <class F>
__device__ __forceinline__ void product(global<float> out, int stride, const Int8Rows &x, global<const u8> weights,
                                        size_t first_byte, global<const float> bias, int rows, int outputs, int inputs) {
    constexpr int G = F::GROUPS, RUN_BYTES = WARP * UNIT / F::LEN * F::BYTES;
    constexpr int PIECES = (RUN_BYTES + 14 + 15) / 16 + 1; // of 16 bytes, the first and the last shared with others
    SHARED(uint4, all_bytes, WARPS *OUTPUTS *PIECES);
    SHARED(int, all_products, WARPS *WARP *G *LINE);
    SHARED(float, all_scales, WARPS *OUTPUTS *G *LINE);
    SHARED(float, all_minimums, WARPS *OUTPUTS *F::MINIMUM *LINE + 1);
    SHARED(float, all_x_scales, WARPS *ROWS *LINE);
    SHARED(float, all_x_sums, WARPS *ROWS *F::MINIMUM *LINE + 1);
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    int first_output = (blockIdx.y * WARPS + warp) * OUTPUTS;
    if (first_output >= outputs) return;
    shared<uint4> bytes = all_bytes + warp * OUTPUTS * PIECES;
    shared<int> products = all_products + warp * WARP * G * LINE;
    shared<float> scales = all_scales + warp * OUTPUTS * G * LINE, x_scales = all_x_scales + warp * ROWS * LINE;
    shared<float> minimums = all_minimums + warp * OUTPUTS * F::MINIMUM * LINE;
    shared<float> x_sums = all_x_sums + warp * ROWS * F::MINIMUM * LINE;

    int outputs_here = min(outputs - first_output, OUTPUTS);
    int units = inputs / UNIT, my_output = lane / ROWS, my_row = lane % ROWS;
    size_t row_bytes = size_t(inputs / F::LEN) * F::BYTES;
    float sum = 0.0f;
    for (int first = 0; first < units; first += WARP) {
        int here = min(WARP, units - first), bytes_here = here * UNIT / F::LEN * F::BYTES;
        auto start_of = [&](int o) {
            return first_byte + (first_output + o) * row_bytes + size_t(first * UNIT / F::LEN) * F::BYTES;
        };
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
            for (int r = 0; r < rows; r++) {
                size_t at = size_t(r) * units + first + lane;
                uint4 a = load<uint4>(x.codes + at * UNIT), b = load<uint4>(x.codes + at * UNIT + 16);
                const unsigned words[8] = {a.x, a.z, b.x, b.z, a.y, a.w, b.y, b.w};
                x_scales[r * LINE + lane] = x.scales[at];
                if constexpr (F::MINIMUM) x_sums[r * LINE + lane] = x.sums[at];
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
    if (my_row < rows && my_output < outputs_here) {
        int output = first_output + my_output;
        out[size_t(my_row) * stride + output] = bias ? sum + bias[output] : sum;
    }
}

// `stride`: from one row of `out` to the next. `x`: of `quantise_rows`. `bias` may be null. blockIdx.x counts tiles of rows.
#define LINEAR8(F)                                                                                                     \
    KERNEL_WITH_BLOCKS(linear8_##F, WARPS *WARP, 8, global<float> out, int stride, global<const u8> x,                 \
                       global<const u8> weights, global<const float> bias, int rows, int outputs, int inputs) {        \
        int first = blockIdx.x * ROWS;                                                                                 \
        product<int8::F>(out + size_t(first) * stride, stride, {x, rows, first, inputs}, weights, 0, bias,             \
                         min(rows - first, ROWS), outputs, inputs);                                                    \
    }                                                                                                                  \
    KERNEL_WITH_BLOCKS(expert_linear8_##F, WARPS *WARP, 8, global<float> out, int stride, global<const u8> x,          \
                       int slots, global<const u8> weights, int first_byte, u32 expert_bytes,                          \
                       global<const u32> first_slots, int first_expert, int experts, int outputs, int inputs) {        \
        ExpertTile tile = find_tile(first_slots, first_expert, experts, ROWS, blockIdx.x);                             \
        if (tile.expert < 0) return;                                                                                   \
        product<int8::F>(out + size_t(tile.slot) * stride, stride, {x, slots, tile.slot, inputs}, weights,             \
                         first_byte + size_t(tile.expert) * expert_bytes, nullptr, tile.rows, outputs, inputs);        \
    }
FOR_EVERY_INT8(LINEAR8)
