// Products with quantised weights for many rows, on the tensor cores' integer products; the same bits as `linear8.cu`, for
// the reason that `int8.cuh` gives.
//
// Integers, and not weights widened to bf16: a row's result must not depend on how many rows there are, and few rows are
// best off with four-byte products of what is stored. Nor is it slow. A product of 16 × 8 × 32 takes a quarter of a
// multiprocessor 8 cycles of its tensor core at most; its four sums a lane take 12 instructions of scaling and adding, 12
// cycles on an H200. That is 1365 products a cycle, where bf16 by `mma` gets some 1300; an A100, with half as many lanes for
// f32, makes 683, two thirds of its bf16. The sums start from 1.5 · 2^23 as an integer, which makes them floats that are off
// by just that: an addition, where a conversion would take twice as long.
//
// A block takes WARPS_M · 16 M_TILES outputs by WARPS_N · 8 N_TILES rows, and stages of 4 units. Weights come to shared
// memory as they are stored, in runs of 8 units, whatever their alignment; for each stage the block decodes them once, for
// all of its rows. DEPTH - 1 stages are under way: few rows wait for memory, many have other blocks to run meanwhile.
#include "experts.cuh"
#include "int8.cuh"
#include "tiles.cuh"

constexpr int STAGE = 4, RUN = 8;      // units
constexpr int LINE = STAGE * UNIT / 16; // pieces of 16 bytes of an output or a row in a stage
constexpr int AS_FLOAT = 0x4b400000;   // 1.5 · 2^23

// Where a piece of a line is: lanes that read at once (four lines) meet no bank twice.
__device__ __forceinline__ int place(int line, int piece) { return line * LINE + (piece ^ (line % 4 * 2)); }

// The words that a lane multiplies of unit number `unit` of a line.
__device__ __forceinline__ uint2 fragment(shared<uint4> lines, int line, int unit) {
    int quad = threadIdx.x % 4;
    return cast<uint2>(lines + place(line, 2 * unit + quad / 2))[quad % 2];
}

// Adds a group's products, times the scales of two outputs and two rows.
__device__ __forceinline__ void add_scaled(float (&sums)[4], const int (&products)[4], const float (&scales)[2],
                                           float2 of_x) {
#pragma unroll
    for (int k = 0; k < 4; k++) {
        float product = __uint_as_float(products[k]) - __uint_as_float(AS_FLOAT);
        sums[k] = fmaf(product, scales[k / 2] * (k % 2 ? of_x.y : of_x.x), sums[k]);
    }
}

// Up to N rows from those on at which `out` and `x` begin; the weights begin at `first_byte`, an even one. blockIdx.y counts
// outputs.
template <class F, int M_TILES, int N_TILES, int WARPS_M, int WARPS_N, int DEPTH>
__device__ __forceinline__ void many(global<float> out, int stride, const Int8Rows &x, global<const u8> weights,
                                     size_t first_byte, global<const float> bias, int rows, int outputs, int inputs) {
    constexpr int G = F::GROUPS, THREADS = WARPS_M * WARPS_N * WARP;
    constexpr int M = WARPS_M * M_TILES * 16, N = WARPS_N * N_TILES * 8;
    constexpr int RUNS = DEPTH / 2, RUN_BYTES = RUN * UNIT / F::LEN * F::BYTES;
    constexpr int PIECES = (RUN_BYTES + 14 + 15) / 16 + 1; // of a run; the first and the last shared with others
    static_assert(DEPTH % 2 == 0, "a run is two stages");
    DYNAMIC_SHARED(bytes);
    shared<uint4> raw = cast<uint4>(bytes), codes = raw + RUNS * M * PIECES, x_codes = codes + M * LINE;
    shared<float> scales = cast<float>(x_codes + DEPTH * N * LINE), minimums = scales + STAGE * G * M;
    shared<float> x_scales = minimums + STAGE * M, x_sums = x_scales + DEPTH * STAGE * N;
    int warp = threadIdx.x / WARP, group = threadIdx.x % WARP / 4, quad = threadIdx.x % 4;
    int m = warp / WARPS_N * M_TILES * 16, n = warp % WARPS_N * N_TILES * 8;
    int first_output = blockIdx.y * M, units = inputs / UNIT, stages = ceil_div(units, STAGE);
    size_t row_bytes = size_t(inputs / F::LEN) * F::BYTES;
    auto start_of = [&](int output, int run) {
        return first_byte + (first_output + output) * row_bytes + size_t(run) * RUN_BYTES;
    };

    auto fetch = [&](int stage) {
        int slot = stage % DEPTH;
        for (int i = threadIdx.x; i < N * LINE; i += THREADS) {
            int row = i / LINE, piece = i % LINE;
            bool wanted = row < rows && STAGE * stage + piece / 2 < units;
            copy_async<16>(x_codes + slot * N * LINE + place(row, piece),
                           x.codes + size_t(row) * inputs + stage * STAGE * UNIT + 16 * piece, wanted);
        }
        for (int i = threadIdx.x; i < N * STAGE; i += THREADS) {
            int row = i / STAGE, unit = STAGE * stage + i % STAGE, to = (slot * STAGE + i % STAGE) * N + row;
            bool wanted = row < rows && unit < units;
            copy_async<4>(x_scales + to, x.scales + size_t(row) * units + unit, wanted);
            if constexpr (F::MINIMUM) copy_async<4>(x_sums + to, x.sums + size_t(row) * units + unit, wanted);
        }
        if (stage % 2) return;
        int run = stage / 2, run_bytes = min(RUN, units - run * RUN) * UNIT / F::LEN * F::BYTES;
        for (int i = threadIdx.x; i < M * PIECES; i += THREADS) {
            int output = i / PIECES, piece = i % PIECES;
            size_t start = start_of(output, run);
            int skip = start % 16;
            if (first_output + output >= outputs || 16 * piece >= skip + run_bytes) continue;
            copy_async<16>(raw + (run % RUNS * M + output) * PIECES + piece, weights + (start - skip + 16 * piece));
        }
    };
    // Codes in the order of `Int8Rows`.
    auto decode = [&](int stage) {
        for (int i = threadIdx.x; i < M * STAGE; i += THREADS) {
            int output = i % M, in_stage = i / M, unit = STAGE * stage + in_stage, run = stage / 2;
            if (unit >= units) return;
            int at = int(start_of(output, run) % 16) + unit % RUN * UNIT / F::LEN * F::BYTES;
            Unit<G> decoded;
            F::decode(decoded, {cast<const u8>(raw + (run % RUNS * M + output) * PIECES), at}, unit % (F::LEN / UNIT));
            const unsigned(&c)[8] = decoded.codes;
            codes[place(output, 2 * in_stage)] = {c[0], c[4], c[1], c[5]};
            codes[place(output, 2 * in_stage + 1)] = {c[2], c[6], c[3], c[7]};
#pragma unroll
            for (int g = 0; g < G; g++) scales[(in_stage * G + g) * M + output] = decoded.scales[g];
            if constexpr (F::MINIMUM) minimums[in_stage * M + output] = decoded.minimum;
        }
    };

    float sums[M_TILES][N_TILES][4] = {};
#pragma unroll
    for (int stage = 0; stage < DEPTH - 1; stage++) {
        if (stage < stages) fetch(stage);
        copy_async_commit();
    }
    for (int stage = 0; stage < stages; stage++) {
        copy_async_wait<DEPTH - 2>();
        __syncthreads();
        decode(stage);
        __syncthreads();
        if (stage + DEPTH - 1 < stages) fetch(stage + DEPTH - 1);
        copy_async_commit();
        int slot = stage % DEPTH, here = n < rows ? min(STAGE, units - STAGE * stage) : 0;
        for (int unit = 0; unit < here; unit++) {
            uint2 a[M_TILES], b[M_TILES];
            float of_w[M_TILES][G][2], least[M_TILES][2];
#pragma unroll
            for (int i = 0; i < M_TILES; i++) {
                int first = m + 16 * i + group;
                a[i] = fragment(codes, first, unit), b[i] = fragment(codes, first + 8, unit);
#pragma unroll
                for (int k = 0; k < 2; k++) {
                    int output = first + 8 * k;
#pragma unroll
                    for (int g = 0; g < G; g++) of_w[i][g][k] = scales[(unit * G + g) * M + output];
                    if constexpr (F::MINIMUM) least[i][k] = minimums[unit * M + output];
                }
            }
#pragma unroll
            for (int j = 0; j < N_TILES; j++) {
                uint2 c = fragment(x_codes + slot * N * LINE, n + 8 * j + group, unit);
                int at = (slot * STAGE + unit) * N + n + 8 * j + 2 * quad;
                float2 of_x = load<float2>(x_scales + at), sum_of_x = {};
                if constexpr (F::MINIMUM) sum_of_x = load<float2>(x_sums + at);
#pragma unroll
                for (int i = 0; i < M_TILES; i++) {
                    int products[4];
                    if constexpr (G == 1) {
                        mma_bytes<32>(products, {a[i].x, b[i].x, a[i].y, b[i].y}, {c.x, c.y}, AS_FLOAT);
                        add_scaled(sums[i][j], products, of_w[i][0], of_x);
                    } else {
                        mma_bytes<16>(products, {a[i].x, b[i].x}, {c.x}, AS_FLOAT);
                        add_scaled(sums[i][j], products, of_w[i][0], of_x);
                        mma_bytes<16>(products, {a[i].y, b[i].y}, {c.y}, AS_FLOAT);
                        add_scaled(sums[i][j], products, of_w[i][1], of_x);
                    }
                    if constexpr (F::MINIMUM) {
#pragma unroll
                        for (int k = 0; k < 4; k++) {
                            sums[i][j][k] = fmaf(least[i][k / 2], k % 2 ? sum_of_x.y : sum_of_x.x, sums[i][j][k]);
                        }
                    }
                }
            }
        }
    }
    copy_async_wait<0>();
    write_tiles(out, stride, bias, sums, first_output + m, n, outputs, rows);
}

// Named by how many rows they are for, ROWS of which go to a tile; blockIdx.x counts tiles. `stride`: from one row of `out`
// to the next. `x`: of `quantise_rows`. `bias` may be null.
#define PRODUCT(name, threads, F, ROWS, ...)                                                                           \
    KERNEL_WITH_BLOCKS(linear8_##name, threads, 4 - int8::F::GROUPS, global<float> out, int stride,                    \
                       global<const u8> x, global<const u8> weights, global<const float> bias, int rows, int outputs,  \
                       int inputs) {                                                                                   \
        int first = blockIdx.x * ROWS;                                                                                 \
        many<int8::F, __VA_ARGS__>(out + size_t(first) * stride, stride, {x, rows, first, inputs}, weights, 0, bias,   \
                                   min(rows - first, ROWS), outputs, inputs);                                          \
    }                                                                                                                  \
    KERNEL_WITH_BLOCKS(expert_linear8_##name, threads, 4 - int8::F::GROUPS, global<float> out, int stride,             \
                       global<const u8> x, int slots, global<const u8> weights, int first_byte, u32 expert_bytes,      \
                       global<const u32> first_slots, int first_expert, int experts, int outputs, int inputs) {        \
        ExpertTile tile = find_tile(first_slots, first_expert, experts, ROWS, blockIdx.x);                             \
        if (tile.expert < 0) return;                                                                                   \
        many<int8::F, __VA_ARGS__>(out + size_t(tile.slot) * stride, stride, {x, slots, tile.slot, inputs}, weights,   \
                                   first_byte + size_t(tile.expert) * expert_bytes, nullptr, tile.rows, outputs,       \
                                   inputs);                                                                            \
    }
#define PRODUCTS(F) PRODUCT(64_##F, 64, F, 32, 1, 4, 2, 1, 6) PRODUCT(many_##F, 128, F, 128, 4, 4, 1, 4, 2)
FOR_EVERY_INT8(PRODUCTS)
