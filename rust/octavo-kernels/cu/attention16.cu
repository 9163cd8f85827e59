// Causal attention over a paged KV cache of two-byte values, decode and prefill in one form, with tensor cores. A warp is a
// block. It takes a tile: up to 16 pairs of a row and a query head that share a KV head, the rows neighbours in their
// sequence. It goes through the positions in units of 32, or 16: scores of the unit, its own maximum and weights, their products
// with the values from zero, and only then the merge with what came before. Units are merged in order to a split of
// KV_SPLIT, splits in order to the result; both are counted from the sequence's start. What a row becomes so depends on its
// own position alone: units that it does not see change no bit.
//
// A row that is its sequence's only one in the step has the splits to spread: the warps of `blockIdx.z` take them in turn
// and `merge_splits` brings them together. Other tiles have warps enough and keep the splits' sum in `out`.
//
// Every key and value is loaded once by the tile, 16 bytes at a time, straight into fragments: which inner index of a
// product stands for which component is ours to choose, as long as both operands agree. Decode is bound by memory. Prefill
// is bound by the level-1 cache, from which neighbouring tiles read the same keys again.
#include "cache.cuh"

constexpr int PAIRS = 16, CHUNK = 64; // pairs of a tile; components
// Positions of a unit. Sums of wide heads leave registers for fewer.
template <int CHUNKS> constexpr int UNIT = CHUNKS > 2 ? 16 : 32;

// Merges (most, total, sums) with what follows: what both are to be multiplied by.
__device__ __forceinline__ void merge(float &most, float &total, float next_most, float next_total, float &keep,
                                      float &add) {
    float new_most = fmaxf(most, next_most);
    keep = most == -INFINITY ? 0.0f : expf(most - new_most);
    add = next_most == -INFINITY ? 0.0f : expf(next_most - new_most);
    total = total * keep + next_total * add;
    most = new_most;
}

__device__ __forceinline__ bool follows(global<const u32> positions, global<const u32> row_tables, int row) {
    return row_tables[row] == row_tables[row - 1] && positions[row] == positions[row - 1] + 1;
}

// Where a row's splits lie among the partial results: no two rows that are alone in their sequence share one.
__device__ __forceinline__ size_t first_split_of(global<const u32> row_tables, int row, int block_size) {
    return size_t(row_tables[row]) * block_size / KV_SPLIT + row;
}

__device__ __forceinline__ uint4 load_if(bool wanted, global<const u8> from) {
    return wanted ? load<uint4>(from) : uint4{0, 0, 0, 0};
}

// Which positions of its sequence a row sees: `first` to before `end`.
struct Seen {
    int first, end;
};
__device__ __forceinline__ Seen seen_from(int position, int window) {
    return {window > 0 ? max(position + 1 - window, 0) : 0, position + 1};
}

// The warp's part of a tile: lane `l` has pairs group = l / 4 and group + 8. Sums have the layout of D: the lane has
// components 64 c + 16 (l % 4) + 0 … 15 of both pairs, the first eight in columns 0 of fragments 8 c … 8 c + 7.
template <int CHUNKS> struct Tile {
    float sums[8 * CHUNKS][4];
    float most[2], total[2];
    int ends[2]; // of what the pairs see
};

// Where the unit's positions lie: a run of 16 is within one block.
template <class T> struct Pages {
    global<const u8> layer;
    global<const u32> table;
    int kv_head, kv_heads, head_dim, block_size;
    // The keys of `position`, a multiple of 16, and after it. Where nothing is to be seen there may be no block: any will do.
    __device__ __forceinline__ global<const u8> at(int position, Seen any) const {
        if (position + 16 <= any.first || position >= any.end) return layer;
        int block = position / block_size;
        return layer + sizeof(T) * cache_at(table[block], false, kv_head, position - block * block_size, kv_heads,
                                            block_size, head_dim);
    }
};

// Adds the unit from `start` on to the tile's sums. `any`: what some row of the tile sees, and all that is read.
// `queries`: (component / 32, pair / 8, lane), what each lane needs in a product's first operand.
template <class T, int CHUNKS, bool WHOLE>
__device__ __forceinline__ void add_unit(Tile<CHUNKS> &tile, shared<uint4> queries, const Pages<T> &pages, int start,
                                         Seen any, float scale, int window, float soft_cap) {
    int group = threadIdx.x / 4, quad = threadIdx.x % 4;
    int head_dim = WHOLE ? CHUNK * CHUNKS : pages.head_dim, row_bytes = sizeof(T) * head_dim;
    global<const u8> keys[UNIT<CHUNKS> / 16];
#pragma unroll
    for (int k = 0; k < UNIT<CHUNKS> / 16; k++) keys[k] = pages.at(start + 16 * k, any);

    float scores[UNIT<CHUNKS> / 8][4] = {};
#pragma unroll
    for (int i = 0; i < 2 * CHUNKS; i++) {
        int component = 32 * i + 8 * quad;
        uint4 a = queries[2 * i * WARP + threadIdx.x], b = queries[(2 * i + 1) * WARP + threadIdx.x];
#pragma unroll
        for (int n = 0; n < UNIT<CHUNKS> / 8; n++) {
            // Keys that are not seen give scores that are not looked at.
            global<const u8> from = keys[n / 2] + (n % 2 * 8 + group) * row_bytes + sizeof(T) * component;
            uint4 key = load_if(WHOLE || component < head_dim, from);
            mma_16x8x16<T>(scores[n], {a.x, b.x, a.y, b.y}, {key.x, key.y});
            mma_16x8x16<T>(scores[n], {a.z, b.z, a.w, b.w}, {key.z, key.w});
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
            unsigned word = pack<T>(expf(scores[n][2 * half] - base), expf(scores[n][2 * half + 1] - base));
            weights[n][half] = word;
            total += low_of<T>(word);
            total += high_of<T>(word);
        }
        for (int other = 1; other < 4; other *= 2) total += __shfl_xor_sync(FULL_WARP, total, other);
        merge(tile.most[half], tile.total[half], most, total, keep[half], add[half]);
    }

    bool all_seen = start >= any.first && start + UNIT<CHUNKS> <= any.end;
    size_t to_values = size_t(pages.kv_heads) * pages.block_size * row_bytes;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        float unit[8][4] = {};
        int component = CHUNK * c + 8 * group;
#pragma unroll
        for (int k = 0; k < UNIT<CHUNKS> / 16; k++) {
            unsigned words[4][4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int in_run = 2 * quad + i / 2 * 8 + i % 2, position = start + 16 * k + in_run;
                global<const u8> from = keys[k] + to_values + in_run * row_bytes + sizeof(T) * component;
                uint4 value = load_if(WHOLE || component < head_dim, from);
                // Values that are not seen may be anything, and nothing times anything may be not a number.
                if (!all_seen && (position < any.first || position >= any.end)) value = {0, 0, 0, 0};
                words[i][0] = value.x, words[i][1] = value.y, words[i][2] = value.z, words[i][3] = value.w;
            }
#pragma unroll
            for (int n = 0; n < 8; n++) {
                unsigned halves = n % 2 ? 0x7632 : 0x5410;
                mma_16x8x16<T>(unit[n], {weights[2 * k][0], weights[2 * k][1], weights[2 * k + 1][0], weights[2 * k + 1][1]},
                               {__byte_perm(words[0][n / 2], words[1][n / 2], halves),
                                __byte_perm(words[2][n / 2], words[3][n / 2], halves)});
            }
        }
#pragma unroll
        for (int n = 0; n < 8; n++) {
            float(&sums)[4] = tile.sums[8 * c + n];
#pragma unroll
            for (int i = 0; i < 4; i++) sums[i] = sums[i] * keep[i / 2] + unit[n][i] * add[i / 2];
        }
    }
}

// Calls `put(component, fragment, column)` for every component whose sums the lane has.
template <int CHUNKS, class Put> __device__ __forceinline__ void for_components(int head_dim, Put put) {
    int quad = threadIdx.x % 4;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
#pragma unroll
        for (int i = 0; i < 16; i++) {
            int component = CHUNK * c + 16 * quad + i;
            if (component < head_dim) put(component, 8 * c + i % 8, i / 8);
        }
    }
}

// out (rows, query_heads · head_dim), qkv (rows, (query_heads + 2 kv_heads) · head_dim). The block table of a row begins
// at `tables[row_tables[row]]`. Blocks: a row, of which only the first of a tile goes on; a KV head and a run of 16 of its
// query heads; warps that share splits. `partials`: sums, maximum and total of (split, query head).
template <class T, int CHUNKS, bool WHOLE>
__device__ __forceinline__ void attention(global<float> out, global<float> partials, global<const float> qkv,
                                          global<const u8> layer, global<const u32> positions,
                                          global<const u32> row_tables, global<const u32> tables, int rows,
                                          int query_heads, int kv_heads, int any_head_dim, int block_size,
                                          float scale, int window, float soft_cap) {
    int head_dim = WHOLE ? CHUNK * CHUNKS : any_head_dim;
    int row = blockIdx.x, heads = query_heads / kv_heads, runs = ceil_div(heads, PAIRS);
    int kv_head = blockIdx.y / runs, first_head = blockIdx.y % runs * PAIRS;
    int heads_here = min(heads - first_head, PAIRS), most_rows = PAIRS / heads_here;
    int position = positions[row];
    bool first_of_sequence = row == 0 || !follows(positions, row_tables, row);
    if (!first_of_sequence && position % most_rows != 0) return;
    bool alone = first_of_sequence && (row + 1 == rows || !follows(positions, row_tables, row + 1));
    int here = 1;
    while (here < most_rows && row + here < rows && (position + here) % most_rows != 0 &&
           follows(positions, row_tables, row + here)) {
        here++;
    }
    Seen any = {seen_from(position, window).first, position + here};
    int splits = ceil_div(any.end, KV_SPLIT), first_split = any.first / KV_SPLIT;
    bool spread = alone && splits - first_split > 1;
    if (!spread && blockIdx.z > 0) return;

    int group = threadIdx.x / 4, quad = threadIdx.x % 4;
    SHARED(uint4, queries, 4 * CHUNKS * WARP); // every lane reads what it has written
    Tile<CHUNKS> tile;
    int places[2]; // of the pairs, in units of head_dim of `out`
    bool real[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int pair = group + 8 * half, of_row = pair / heads_here, head = first_head + pair % heads_here;
        real[half] = of_row < here;
        if (!real[half]) of_row = 0;
        tile.ends[half] = position + of_row + 1;
        head += kv_head * heads;
        places[half] = (row + of_row) * query_heads + head;
        size_t at = (size_t(row + of_row) * (query_heads + 2 * kv_heads) + head) * head_dim;
#pragma unroll
        for (int i = 0; i < 2 * CHUNKS; i++) {
            int component = 32 * i + 8 * quad;
            bool inside = component < head_dim;
            float4 a = {}, b = {};
            if (inside) a = load<float4>(qkv + at + component), b = load<float4>(qkv + at + component + 4);
            queries[(2 * i + half) * WARP + threadIdx.x] = {pack<T>(a.x, a.y), pack<T>(a.z, a.w), pack<T>(b.x, b.y),
                                                            pack<T>(b.z, b.w)};
        }
    }

    Pages<T> pages = {layer, tables + row_tables[row], kv_head, kv_heads, head_dim, block_size};
    float most[2] = {-INFINITY, -INFINITY}, total[2] = {};
    int step = spread ? gridDim.z : 1;
    for (int split = first_split + (spread ? blockIdx.z : 0); split < splits; split += step) {
#pragma unroll
        for (int half = 0; half < 2; half++) tile.most[half] = -INFINITY, tile.total[half] = 0.0f;
#pragma unroll
        for (int n = 0; n < 8 * CHUNKS; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) tile.sums[n][i] = 0.0f;
        }
        int end = min((split + 1) * KV_SPLIT, any.end);
        for (int start = max(split * KV_SPLIT, any.first / UNIT<CHUNKS> * UNIT<CHUNKS>); start < end; start += UNIT<CHUNKS>) {
            add_unit<T, CHUNKS, WHOLE>(tile, queries, pages, start, any, scale, window, soft_cap);
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (!real[half]) continue;
            if (spread) {
                size_t head = places[half] % query_heads;
                size_t at = ((first_split_of(row_tables, row, block_size) + split) * query_heads + head) * (head_dim + 2);
                for_components<CHUNKS>(head_dim, [&](int component, int n, int column) {
                    partials[at + component] = tile.sums[n][2 * half + column];
                });
                if (quad == 0) partials[at + head_dim] = tile.most[half], partials[at + head_dim + 1] = tile.total[half];
                continue;
            }
            float keep, add;
            bool only = split == first_split, last = split + 1 == splits;
            merge(most[half], total[half], tile.most[half], tile.total[half], keep, add);
            for_components<CHUNKS>(head_dim, [&](int component, int n, int column) {
                global<float> place = out + size_t(places[half]) * head_dim + component;
                float before = only ? 0.0f : *place;
                float sum = before * keep + tile.sums[n][2 * half + column] * add;
                *place = last ? sum / total[half] : sum;
            });
        }
    }
}

// attention_bf16_128 is for heads of 128 components, attention_bf16_to_128 for those of up to 128: a multiple of eight.
#define ATTENTION(T, name, chunks, whole)                                                                              \
    KERNEL(attention_##name, WARP, global<float> out, global<float> partials, global<const float> qkv,                 \
           global<const u8> layer, global<const u32> positions, global<const u32> row_tables,                          \
           global<const u32> tables, int rows, int query_heads, int kv_heads, int head_dim, int block_size,            \
           float scale, int window, float soft_cap) {                                                                  \
        attention<T, chunks, whole>(out, partials, qkv, layer, positions, row_tables, tables, rows, query_heads,       \
                                    kv_heads, head_dim, block_size, scale, window, soft_cap);                          \
    }
#define ATTENTIONS(T, name)                                                                                            \
    ATTENTION(T, name##_64, 1, true) ATTENTION(T, name##_to_64, 1, false)                                              \
    ATTENTION(T, name##_128, 2, true) ATTENTION(T, name##_to_128, 2, false)                                            \
    ATTENTION(T, name##_256, 4, true) ATTENTION(T, name##_to_256, 4, false)
ATTENTIONS(f16, f16)
ATTENTIONS(bf16, bf16)

// The result of a row whose splits were spread, out of `partials`. Blocks: a row, a query head; a thread: a component.
KERNEL(merge_splits, 256, global<float> out, global<const float> partials, global<const u32> positions,
       global<const u32> row_tables, int rows, int head_dim, int block_size, int window) {
    int row = blockIdx.x, head = blockIdx.y, component = threadIdx.x;
    bool first = row == 0 || !follows(positions, row_tables, row);
    bool alone = first && (row + 1 == rows || !follows(positions, row_tables, row + 1));
    Seen seen = seen_from(positions[row], window);
    int split = seen.first / KV_SPLIT, splits = ceil_div(seen.end, KV_SPLIT);
    if (!alone || splits - split < 2 || component >= head_dim) return;

    float most = -INFINITY, total = 0.0f, sum = 0.0f;
    for (; split < splits; split++) {
        size_t at = ((first_split_of(row_tables, row, block_size) + split) * gridDim.y + head) * (head_dim + 2);
        float keep, add;
        merge(most, total, partials[at + head_dim], partials[at + head_dim + 1], keep, add);
        sum = sum * keep + partials[at + component] * add;
    }
    out[(size_t(row) * gridDim.y + head) * head_dim + component] = sum / total;
}
