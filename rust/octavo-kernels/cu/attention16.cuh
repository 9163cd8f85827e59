// What attention over a paged KV cache does on tensor cores, decode (`attention_decode.cu`) and prefill
// (`attention_prefill.cu`) alike. Caches of two-byte values meet queries and weights of their own type; those of e4m3 are
// widened to f16, which holds them exactly.
//
// A warp takes a tile: up to 16 pairs of a row and a query head that share a KV head, the rows neighbours in their sequence.
// It goes through the positions in units of 32, or 16: scores of the unit, its own maximum and weights, their products with
// the values from zero, and only then the merge with what came before. Units are merged in order to a split of KV_SPLIT,
// splits in order to the result; both are counted from the sequence's start. What a row becomes so depends on its own
// position alone: units that it does not see change no bit, and neither does where the tile reads keys and values from.
//
// Keys and values are read eight components at a time, straight into fragments: which inner index of a product stands for
// which component is ours to choose, as long as both operands agree.
#pragma once
#include "cache.cuh"

constexpr int PAIRS = 16, CHUNK = 64; // pairs of a tile; components
// Positions of a unit. Sums of wide heads leave registers for fewer.
template <int CHUNKS> constexpr int UNIT = CHUNKS > 2 ? 16 : 32;

// What a cache of T is multiplied as, and how eight neighbours of it are read.
template <class T> struct Cached {
    using Factor = T;
    template <class P> static __device__ __forceinline__ uint4 eight(P from) { return load<uint4>(from); }
};
template <> struct Cached<e4m3> {
    using Factor = f16;
    template <class P> static __device__ __forceinline__ uint4 eight(P from) {
        uint2 raw = load<uint2>(from);
        return {two_halves<0>(raw.x), two_halves<1>(raw.x), two_halves<0>(raw.y), two_halves<1>(raw.y)};
    }
};

// Merges (most, total, sums) with what follows: what both are to be multiplied by.
__device__ __forceinline__ void merge(float &most, float &total, float next_most, float next_total, float &keep,
                                      float &add) {
    float new_most = fmaxf(most, next_most);
    keep = most == -INFINITY ? 0.0f : expf(most - new_most);
    add = next_most == -INFINITY ? 0.0f : expf(next_most - new_most);
    total = total * keep + next_total * add;
    most = new_most;
}

// Whether a row, not the first, is the next of the sequence of the row before.
__device__ __forceinline__ bool follows(global<const u32> positions, global<const u32> row_tables, int row) {
    return row_tables[row] == row_tables[row - 1] && positions[row] == positions[row - 1] + 1;
}
__device__ __forceinline__ bool is_alone(global<const u32> positions, global<const u32> row_tables, int row, int rows) {
    return (row == 0 || !follows(positions, row_tables, row)) &&
           (row + 1 == rows || !follows(positions, row_tables, row + 1));
}

// Which positions of its sequence a row sees: `first` to before `end`.
struct Seen {
    int first, end;
};
__device__ __forceinline__ Seen seen_from(int position, int window) {
    return {window > 0 ? max(position + 1 - window, 0) : 0, position + 1};
}

// One KV head of a layer of the cache, and one sequence's way through it. Sizes are of bytes.
struct Pages {
    global<const u8> keys; // of block 0
    global<const u32> table;
    u32 block_size, row_bytes, to_values; // positions; of a key; from a key to its value

    __device__ __forceinline__ static bool has(int position, Seen any) {
        return position + 16 > any.first && position < any.end;
    }
    // The keys of `position`, a multiple of 16, and after it: a run of 16 is within one block. Where nothing is to be seen
    // there may be no block: any will do.
    __device__ __forceinline__ global<const u8> at(int position, Seen any) const {
        if (!has(position, any)) return keys;
        u32 block = u32(position) / block_size;
        return keys + (size_t(table[block]) * (2 * to_values) + (position - block * block_size) * row_bytes);
    }
};
template <class T>
__device__ __forceinline__ Pages pages_of(global<const u8> layer, global<const u32> table, int kv_head, int kv_heads,
                                          int head_dim, int block_size) {
    u32 row_bytes = head_dim * sizeof(T), to_values = kv_heads * block_size * row_bytes;
    global<const u8> keys = layer + sizeof(T) * cache_at(0, false, kv_head, 0, kv_heads, block_size, head_dim);
    return {keys, table, u32(block_size), row_bytes, to_values};
}

// The warp's part of a tile: lane `l` has pairs group = l / 4 and group + 8. Sums have the layout of D: the lane has
// components 64 c + 16 (l % 4) + 0 … 15 of both pairs, the first eight in columns 0 of fragments 8 c … 8 c + 7.
template <int CHUNKS> struct Tile {
    float sums[8 * CHUNKS][4];
    float most[2], total[2];
    int ends[2]; // of what the pairs see

    // Before a split.
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int half = 0; half < 2; half++) most[half] = -INFINITY, total[half] = 0.0f;
#pragma unroll
        for (int n = 0; n < 8 * CHUNKS; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) sums[n][i] = 0.0f;
        }
    }
};

// How many uint4 a warp's queries take: (component / 32, pair / 8, lane), what each lane needs in a product's first operand.
template <int CHUNKS> constexpr int QUERIES = 4 * CHUNKS * WARP;

// Puts the lane's part of its pair number `half`, which begins at `from`, among the queries. Every lane reads what it has
// written.
template <class T, int CHUNKS>
__device__ __forceinline__ void put_query(shared<uint4> queries, global<const float> from, int half, int head_dim) {
    using F = typename Cached<T>::Factor;
    int lane = threadIdx.x % WARP;
#pragma unroll
    for (int i = 0; i < 2 * CHUNKS; i++) {
        int component = 32 * i + 8 * (lane % 4);
        float4 a = {}, b = {};
        if (component < head_dim) a = load<float4>(from + component), b = load<float4>(from + component + 4);
        queries[(2 * i + half) * WARP + lane] = {pack<F>(a.x, a.y), pack<F>(a.z, a.w), pack<F>(b.x, b.y),
                                                 pack<F>(b.z, b.w)};
    }
}

// Adds the unit from `start` on to the tile's sums. `unit` reads: `key` and `value` are eight components of a position,
// counted from `start`; zeroes after the last component. Keys that are not seen give scores that are not looked at, but
// values of positions that no row sees are zeroes: nothing times anything may be not a number.
template <class T, int CHUNKS, class U>
__device__ __forceinline__ void add_unit(Tile<CHUNKS> &tile, shared<uint4> queries, const U &unit, int start, float scale,
                                         int window, float soft_cap) {
    using F = typename Cached<T>::Factor;
    int lane = threadIdx.x % WARP, group = lane / 4, quad = lane % 4;

    float scores[UNIT<CHUNKS> / 8][4] = {};
#pragma unroll
    for (int i = 0; i < 2 * CHUNKS; i++) {
        int component = 32 * i + 8 * quad;
        uint4 a = queries[2 * i * WARP + lane], b = queries[(2 * i + 1) * WARP + lane];
#pragma unroll
        for (int n = 0; n < UNIT<CHUNKS> / 8; n++) {
            uint4 key = unit.key(8 * n + group, component);
            mma_16x8x16<F>(scores[n], {a.x, b.x, a.y, b.y}, {key.x, key.y});
            mma_16x8x16<F>(scores[n], {a.z, b.z, a.w, b.w}, {key.z, key.w});
        }
    }

    float keep[2], add[2];
    unsigned weights[UNIT<CHUNKS> / 8][2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float most = -INFINITY, total = 0.0f;
        int end = tile.ends[half], first = window > 0 ? end - window : 0;
#pragma unroll
        for (int n = 0; n < UNIT<CHUNKS> / 8; n++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int position = start + 8 * n + 2 * quad + i;
                float score = scores[n][2 * half + i] * scale;
                if (soft_cap > 0.0f) score = soft_cap * tanhf(score / soft_cap);
                if (position < first || position >= end) score = -INFINITY;
                scores[n][2 * half + i] = score;
                most = fmaxf(most, score);
            }
        }
        for (int other = 1; other < 4; other *= 2) most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, other));
        float base = most == -INFINITY ? 0.0f : most;
#pragma unroll
        for (int n = 0; n < UNIT<CHUNKS> / 8; n++) {
            unsigned word = pack<F>(expf(scores[n][2 * half] - base), expf(scores[n][2 * half + 1] - base));
            weights[n][half] = word;
            total += low_of<F>(word);
            total += high_of<F>(word);
        }
        for (int other = 1; other < 4; other *= 2) total += __shfl_xor_sync(FULL_WARP, total, other);
        merge(tile.most[half], tile.total[half], most, total, keep[half], add[half]);
    }

#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        float sums[8][4] = {};
        int component = CHUNK * c + 8 * group;
#pragma unroll
        for (int k = 0; k < UNIT<CHUNKS> / 16; k++) {
            unsigned words[4][4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int at = 16 * k + 2 * quad + i / 2 * 8 + i % 2;
                uint4 value = unit.value(at, component);
                words[i][0] = value.x, words[i][1] = value.y, words[i][2] = value.z, words[i][3] = value.w;
            }
#pragma unroll
            for (int n = 0; n < 8; n++) {
                unsigned halves = n % 2 ? 0x7632 : 0x5410;
                unsigned(&w)[2] = weights[2 * k], (&next)[2] = weights[2 * k + 1];
                mma_16x8x16<F>(sums[n], {w[0], w[1], next[0], next[1]},
                               {__byte_perm(words[0][n / 2], words[1][n / 2], halves),
                                __byte_perm(words[2][n / 2], words[3][n / 2], halves)});
            }
        }
#pragma unroll
        for (int n = 0; n < 8; n++) {
            float(&before)[4] = tile.sums[8 * c + n];
#pragma unroll
            for (int i = 0; i < 4; i++) before[i] = fmaf(sums[n][i], add[i / 2], before[i] * keep[i / 2]);
        }
    }
}

// Calls `put(component, sums)` for every four neighbouring components that the lane has of its pair number `half`. Heads are
// of a multiple of eight.
template <int CHUNKS, class Put>
__device__ __forceinline__ void for_components(const Tile<CHUNKS> &tile, int half, int head_dim, Put put) {
    int first = 16 * (afresh(threadIdx.x) % 4);
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
#pragma unroll
        for (int i = 0; i < 16; i += 4) {
            int component = CHUNK * c + first + i, column = 2 * half + i / 8;
            const float(*four)[4] = tile.sums + 8 * c + i % 8;
            float4 sums = {four[0][column], four[1][column], four[2][column], four[3][column]};
            if (component < head_dim) put(component, sums);
        }
    }
}

// The forms of a kernel, `FORM(T, name, chunks, whole)`: …_bf16_128 is for heads of 128 components, …_bf16_to_128 for those
// of up to 128: a multiple of eight.
#define FOR_EVERY_CACHE(FORM)                                                                                          \
    FOR_EVERY_WIDTH(FORM, f16, f16) FOR_EVERY_WIDTH(FORM, bf16, bf16) FOR_EVERY_WIDTH(FORM, e4m3, fp8_e4m3)
#define FOR_EVERY_WIDTH(FORM, T, name)                                                                                 \
    FORM(T, name##_64, 1, true) FORM(T, name##_to_64, 1, false)                                                        \
    FORM(T, name##_128, 2, true) FORM(T, name##_to_128, 2, false)                                                      \
    FORM(T, name##_256, 4, true) FORM(T, name##_to_256, 4, false)
