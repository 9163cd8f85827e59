// Causal attention over a paged KV cache for rows that are alone in their sequence: decode. A warp is a block. It takes up to
// 16 query heads of one KV head; the warps of `blockIdx.z` take the splits of the row's positions in turn, and
// `merge_splits` brings them together, in order. A row of one split needs no second kernel. How the tile is computed is said
// in `attention16.cuh`.
//
// Every key and value is read once for all the heads that share it, straight from the cache into fragments. Bound by memory.
#include "attention16.cuh"

// Where a row's splits lie among the partial results: as its block table lies among those of all sequences, which begins
// where a split does.
__device__ __forceinline__ size_t first_split_of(global<const u32> row_tables, int row, int block_size) {
    return size_t(row_tables[row]) * block_size / KV_SPLIT;
}

// A unit where it lies in the cache.
template <class T, int CHUNKS, bool WHOLE> struct InCache {
    global<const u8> keys[UNIT<CHUNKS> / 16];
    int to_values, row_bytes;

    __device__ __forceinline__ InCache(const Pages<T> &pages, int start, Seen any)
        : to_values(pages.to_values()), row_bytes(sizeof(T) * (WHOLE ? CHUNK * CHUNKS : pages.head_dim)) {
#pragma unroll
        for (int k = 0; k < UNIT<CHUNKS> / 16; k++) keys[k] = pages.at(start + 16 * k, any);
    }
    __device__ __forceinline__ uint4 key(int at, int component) const {
        return Cached<T>::eight(keys[at / 16] + at % 16 * row_bytes + sizeof(T) * component);
    }
    __device__ __forceinline__ uint4 value(int at, int component) const {
        return Cached<T>::eight(keys[at / 16] + to_values + at % 16 * row_bytes + sizeof(T) * component);
    }
};

// out (rows, query_heads · head_dim), qkv (rows, (query_heads + 2 kv_heads) · head_dim). The block table of a row begins
// at `tables[row_tables[row]]`. No `window`: 0. No `soft_cap`: 0. Blocks: a row; a KV head and a tile of query heads; one of
// those that share the row's splits.
template <class T, int CHUNKS, bool WHOLE>
__device__ __forceinline__ void decode(global<float> out, global<float> partials, global<const float> qkv,
                                       global<const u8> layer, global<const u32> positions,
                                       global<const u32> row_tables, global<const u32> tables, int rows, int query_heads,
                                       int kv_heads, int head_dim, int block_size, float scale, int window,
                                       float soft_cap) {
    SHARED(uint4, queries, QUERIES<CHUNKS>);
    if constexpr (WHOLE) head_dim = CHUNK * CHUNKS;
    int row = blockIdx.x, kv_head = blockIdx.y % kv_heads, heads = query_heads / kv_heads;
    int first_head = kv_head * heads + blockIdx.y / kv_heads * PAIRS;
    int heads_here = min((kv_head + 1) * heads - first_head, PAIRS);
    Seen seen = seen_from(positions[row], window);
    int splits = ceil_div(seen.end, KV_SPLIT), first_split = seen.first / KV_SPLIT;
    bool spread = splits - first_split > 1;
    if (!is_alone(positions, row_tables, row, rows) || (!spread && blockIdx.z > 0)) return;

    int group = threadIdx.x / 4, quad = threadIdx.x % 4;
    Tile<CHUNKS> tile;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int head = first_head + min(group + 8 * half, heads_here - 1); // of no pair: any
        tile.ends[half] = seen.end;
        size_t at = (size_t(row) * (query_heads + 2 * kv_heads) + head) * head_dim;
        put_query<T, CHUNKS>(queries, qkv + at, half, head_dim);
    }

    Pages<T> pages = {layer, tables + row_tables[row], kv_head, kv_heads, head_dim, block_size};
    for (int split = first_split + blockIdx.z; split < splits; split += gridDim.z) {
        tile.clear();
        int end = min((split + 1) * KV_SPLIT, seen.end);
        int start = max(split * KV_SPLIT, seen.first / UNIT<CHUNKS> * UNIT<CHUNKS>);
        for (; start < end; start += UNIT<CHUNKS>) {
            InCache<T, CHUNKS, WHOLE> unit(pages, start, seen);
            add_unit<T, CHUNKS, WHOLE>(tile, queries, unit, start, seen, head_dim, scale, window, soft_cap);
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int pair = group + 8 * half, head = first_head + pair;
            if (pair >= heads_here) continue;
            size_t at = (first_split_of(row_tables, row, block_size) + split) * query_heads + head;
            global<float> place =
                spread ? partials + at * (head_dim + 2) : out + (size_t(row) * query_heads + head) * head_dim;
            // Added to nothing, as in a merge: that changes a negative zero.
            float share = spread ? 1.0f : 1.0f / tile.total[half];
            for_components<CHUNKS>(head_dim, [&](int component, int n, int column) {
                place[component] = (0.0f + tile.sums[n][2 * half + column]) * share;
            });
            if (spread && quad == 0) place[head_dim] = tile.most[half], place[head_dim + 1] = tile.total[half];
        }
    }
}

#define DECODE(T, name, chunks, whole)                                                                                 \
    KERNEL_WITH_BLOCKS(attention_decode_##name, WARP, chunks > 2 || !whole ? 8 : 11, global<float> out,                \
                       global<float> partials, global<const float> qkv, global<const u8> layer,                        \
                       global<const u32> positions, global<const u32> row_tables, global<const u32> tables, int rows,  \
                       int query_heads, int kv_heads, int head_dim, int block_size, float scale, int window,           \
                       float soft_cap) {                                                                               \
        decode<T, chunks, whole>(out, partials, qkv, layer, positions, row_tables, tables, rows, query_heads,          \
                                 kv_heads, head_dim, block_size, scale, window, soft_cap);                             \
    }
FOR_EVERY_CACHE(DECODE)

// The result of a row whose splits were spread, out of `partials`. Blocks: a row, a query head; a thread: a component.
KERNEL(merge_splits, 256, global<float> out, global<const float> partials, global<const u32> positions,
       global<const u32> row_tables, int rows, int head_dim, int block_size, int window) {
    int row = blockIdx.x, head = blockIdx.y, component = threadIdx.x;
    Seen seen = seen_from(positions[row], window);
    int split = seen.first / KV_SPLIT, splits = ceil_div(seen.end, KV_SPLIT);
    if (splits - split < 2 || component >= head_dim || !is_alone(positions, row_tables, row, rows)) return;

    float most = -INFINITY, total = 0.0f, sum = 0.0f;
    for (; split < splits; split++) {
        size_t at = ((first_split_of(row_tables, row, block_size) + split) * gridDim.y + head) * (head_dim + 2);
        float keep, add;
        merge(most, total, partials[at + head_dim], partials[at + head_dim + 1], keep, add);
        sum = sum * keep + partials[at + component] * add;
    }
    out[(size_t(row) * gridDim.y + head) * head_dim + component] = sum * (1.0f / total);
}
