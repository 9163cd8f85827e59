// Products with bf16 and f16 weights on tensor cores: out (rows, outputs) = x (rows, inputs) · weightsᵀ, with x rounded to
// the weights' type and f32 sums.
//
// One order of additions for any number of rows: inputs in slices of SLICE, counted from the first; within a slice one
// chain of `mma_16x8x16` over ascending inputs, from zero; slices added in order. A lane's 16 bytes, eight neighbouring
// inputs, feed two products: which inner index stands for which input is ours to choose, as long as both operands agree, so
// fragments need no rearranging. Weights are the first operand, so that 16 outputs by 8 rows are the smallest tile and few
// rows waste little. `few` spreads the slices of one tile over warps, `many` goes through them in order: the same bits.
#include "experts.cuh"
#include "tiles.cuh"

constexpr int SLICE = 256, STEP = 32; // inputs; a step is two products deep
constexpr int OUTPUTS = 16;           // of a tile

// Two steps' products of 16 outputs (rows group and group + 8 in `a`, `b`) and 8 rows.
template <class T>
__device__ __forceinline__ void multiply(float (&sums)[4], const uint4 &a, const uint4 &b, const uint4 &x) {
    mma_16x8x16<T>(sums, {a.x, b.x, a.y, b.y}, {x.x, x.y});
    mma_16x8x16<T>(sums, {a.z, b.z, a.w, b.w}, {x.z, x.w});
}

// f16 ends at 65504, where an outlier is better off than at infinity. What is not a number stays that.
template <class T> __device__ __forceinline__ float within(float x) {
    if constexpr (std::is_same_v<T, bf16>) return x;
    else return x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x;
}

// x (rows, width) rounded to T. A thread takes two neighbours; blockIdx.x is the row.
template <class T> __device__ void round_row(global<unsigned> out, global<const float> x, int width) {
    int i = 2 * (blockIdx.y * blockDim.x + threadIdx.x);
    if (i >= width) return;
    size_t at = size_t(blockIdx.x) * width + i;
    float2 two = load<float2>(x + at);
    out[at / 2] = pack<T>(within<T>(two.x), within<T>(two.y));
}

// Up to 8 · TILES rows. A block takes OUTPUTS outputs, blockIdx.y counts them; its warps take slices in turn, loading
// weights straight into fragments, and leave their sums in shared memory, (slice, row, output), where threads add them up.
// Bound by reading the weights.
template <class T, int TILES>
__device__ __forceinline__ void few(global<float> out, int stride, global<const T> x, global<const T> weights,
                                    global<const float> bias, int rows, int outputs, int inputs) {
    DYNAMIC_SHARED(bytes);
    shared<float> slice_sums = cast<float>(bytes);
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, group = lane / 4, quad = lane % 4;
    int first_output = blockIdx.y * OUTPUTS, slices = ceil_div(inputs, SLICE);
    bool has_a = first_output + group < outputs, has_b = first_output + group + 8 < outputs;
    global<const T> of_a = weights + size_t(first_output + group) * inputs, of_b = of_a + size_t(8) * inputs;
    const uint4 none = {0, 0, 0, 0};

    for (int slice = warp; slice < slices; slice += blockDim.x / WARP) {
        float sums[TILES][4] = {};
        uint4 a[SLICE / STEP], b[SLICE / STEP];
#pragma unroll
        for (int step = 0; step < SLICE / STEP; step++) {
            int input = slice * SLICE + step * STEP + 8 * quad;
            a[step] = has_a && input < inputs ? load<uint4>(of_a + input) : none;
            b[step] = has_b && input < inputs ? load<uint4>(of_b + input) : none;
        }
#pragma unroll
        for (int step = 0; step < SLICE / STEP; step++) {
            int input = slice * SLICE + step * STEP + 8 * quad;
#pragma unroll
            for (int tile = 0; tile < TILES; tile++) {
                int row = 8 * tile + group;
                bool inside = row < rows && input < inputs;
                uint4 from_x = inside ? load<uint4>(x + size_t(row) * inputs + input) : none;
                multiply<T>(sums[tile], a[step], b[step], from_x);
            }
        }
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int row = 8 * tile + 2 * quad + i % 2, output = group + i / 2 * 8;
                slice_sums[(slice * 8 * TILES + row) * OUTPUTS + output] = sums[tile][i];
            }
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < rows * OUTPUTS; i += blockDim.x) {
        int row = i / OUTPUTS, output = first_output + i % OUTPUTS;
        if (output >= outputs) continue;
        float sum = 0.0f;
        for (int slice = 0; slice < slices; slice++) sum += slice_sums[slice * 8 * TILES * OUTPUTS + i];
        out[size_t(row) * stride + output] = bias ? sum + bias[output] : sum;
    }
}

// Many rows. A block takes WARPS_M · 16 M_TILES outputs, blockIdx.y counts them, by WARPS_N · 8 N_TILES rows from those on
// at which `out` and `x` begin; both operands come through shared memory, STAGES steps under way. Lines of 64 bytes there:
// the eight lanes that read at once hit every bank once. Bound by tensor cores.
template <class T, int M_TILES, int N_TILES, int WARPS_M, int WARPS_N>
__device__ __forceinline__ void many(global<float> out, int stride, global<const T> x, global<const T> weights,
                                     global<const float> bias, int rows, int outputs, int inputs) {
    constexpr int M = WARPS_M * M_TILES * 16, N = WARPS_N * N_TILES * 8, STAGES = 4;
    constexpr int THREADS = WARPS_M * WARPS_N * WARP, CHUNKS = STEP / 8; // of a line, 16 bytes each
    DYNAMIC_SHARED(bytes); // STAGES · (M + N) lines
    shared<uint4> w_stages = cast<uint4>(bytes), x_stages = w_stages + STAGES * M * CHUNKS;
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, group = lane / 4, quad = lane % 4;
    int first_output = blockIdx.y * M;
    int m = warp / WARPS_N * M_TILES * 16, n = warp % WARPS_N * N_TILES * 8;

    auto fetch = [&](int step) {
        int stage = step % STAGES;
        for (int i = threadIdx.x; i < M * CHUNKS; i += THREADS) {
            int output = first_output + i / CHUNKS, input = step * STEP + i % CHUNKS * 8;
            copy_async<16>(w_stages + stage * M * CHUNKS + i, weights + size_t(output) * inputs + input,
                           output < outputs && input < inputs);
        }
        for (int i = threadIdx.x; i < N * CHUNKS; i += THREADS) {
            int row = i / CHUNKS, input = step * STEP + i % CHUNKS * 8;
            copy_async<16>(x_stages + stage * N * CHUNKS + i, x + size_t(row) * inputs + input,
                           row < rows && input < inputs);
        }
    };

    float totals[M_TILES][N_TILES][4] = {}, sums[M_TILES][N_TILES][4] = {};
    int steps = ceil_div(inputs, STEP);
#pragma unroll
    for (int step = 0; step < STAGES - 1; step++) {
        if (step < steps) fetch(step);
        copy_async_commit();
    }
    for (int step = 0; step < steps; step++) {
        copy_async_wait<STAGES - 2>();
        __syncthreads();
        if (step + STAGES - 1 < steps) fetch(step + STAGES - 1);
        copy_async_commit();
        shared<uint4> w_stage = w_stages + step % STAGES * M * CHUNKS, x_stage = x_stages + step % STAGES * N * CHUNKS;
        uint4 a[M_TILES], b[M_TILES];
#pragma unroll
        for (int i = 0; i < M_TILES; i++) {
            a[i] = w_stage[(m + 16 * i + group) * CHUNKS + quad];
            b[i] = w_stage[(m + 16 * i + group + 8) * CHUNKS + quad];
        }
#pragma unroll
        for (int j = 0; j < N_TILES; j++) {
            uint4 from_x = x_stage[(n + 8 * j + group) * CHUNKS + quad];
#pragma unroll
            for (int i = 0; i < M_TILES; i++) multiply<T>(sums[i][j], a[i], b[i], from_x);
        }
        if ((step + 1) % (SLICE / STEP) != 0 && step + 1 < steps) continue;
#pragma unroll
        for (int i = 0; i < M_TILES; i++) {
#pragma unroll
            for (int j = 0; j < N_TILES; j++) {
#pragma unroll
                for (int k = 0; k < 4; k++) totals[i][j][k] += sums[i][j][k], sums[i][j][k] = 0.0f;
            }
        }
    }
    copy_async_wait<0>();
    write_tiles(out, stride, bias, totals, first_output + m, n, outputs, rows);
}

// Named by how many rows they are for, ROWS of which go to a tile; blockIdx.x counts tiles, so that neighbouring blocks
// share weights. `inputs` is a multiple of eight. `stride`: from one row of `out` to the next. `bias` may be null.
#define PRODUCT(name, threads, T, ROWS, form, ...)                                                                     \
    KERNEL(linear_##name, threads, global<float> out, int stride, global<const T> x, global<const T> weights,          \
           global<const float> bias, int rows, int outputs, int inputs) {                                              \
        int first = blockIdx.x * ROWS;                                                                                 \
        form<T, __VA_ARGS__>(out + size_t(first) * stride, stride, x + size_t(first) * inputs, weights, bias,          \
                             min(rows - first, ROWS), outputs, inputs);                                                \
    }                                                                                                                  \
    KERNEL(expert_linear_##name, threads, global<float> out, int stride, global<const T> x, int,                       \
           global<const u8> weights, int first_byte, u32 expert_bytes, global<const u32> first_slots,                  \
           int first_expert, int experts, int outputs, int inputs) {                                                   \
        ExpertTile tile = find_tile(first_slots, first_expert, experts, ROWS, blockIdx.x);                             \
        if (tile.expert < 0) return;                                                                                   \
        global<const u8> of_expert = weights + (first_byte + size_t(tile.expert) * expert_bytes);                      \
        form<T, __VA_ARGS__>(out + size_t(tile.slot) * stride, stride, x + size_t(tile.slot) * inputs,                 \
                             cast<const T>(of_expert), nullptr, tile.rows, outputs, inputs);                           \
    }
#define PRODUCTS(T, name)                                                                                              \
    KERNEL(round_##name, 256, global<unsigned> out, global<const float> x, int, int width) {                           \
        round_row<T>(out, x, width);                                                                                   \
    }                                                                                                                  \
    PRODUCT(8_##name, 128, T, 8, few, 1)                                                                               \
    PRODUCT(16_##name, 128, T, 16, few, 2)                                                                             \
    PRODUCT(64_##name, 128, T, 32, many, 1, 4, 4, 1)                                                                   \
    PRODUCT(many_##name, 256, T, 128, many, 2, 8, 4, 2)
PRODUCTS(f16, F16)
PRODUCTS(bf16, BF16)
