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
    u32 to_values, row_bytes;
    int first, end; // what is seen, counted from the unit's start

    __device__ __forceinline__ InCache(const Pages &pages, int start, Seen any)
        : to_values(pages.to_values), row_bytes(pages.row_bytes), first(any.first - start), end(any.end - start) {
#pragma unroll
        for (int k = 0; k < UNIT<CHUNKS> / 16; k++) keys[k] = pages.at(start + 16 * k, any);
    }
    __device__ __forceinline__ uint4 eight(global<const u8> line, u32 byte) const {
        return WHOLE || byte < row_bytes ? Cached<T>::eight(line + byte) : uint4{0, 0, 0, 0};
    }
    __device__ __forceinline__ uint4 key(int at, int component) const {
        return eight(keys[at / 16] + at % 16 * row_bytes, sizeof(T) * component);
    }
    __device__ __forceinline__ uint4 value(int at, int component) const {
        bool all_seen = first <= 0 && UNIT<CHUNKS> <= end; // nearly always
        if (!all_seen && (at < first || at >= end)) return {0, 0, 0, 0};
        return eight(keys[at / 16] + to_values + at % 16 * row_bytes, sizeof(T) * component);
    }
};

// What a split leaves: its sums, its maximum and its total, in rows of a multiple of 16 bytes.
__device__ __forceinline__ int partial_len(int head_dim) { return head_dim + 4; }

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
    int row = blockIdx.x, kv_head = blockIdx.y % kv_heads;
    Seen seen = seen_from(positions[row], window);
    int splits = ceil_div(seen.end, KV_SPLIT), first_split = seen.first / KV_SPLIT;
    bool spread = splits - first_split > 1;
    if (!is_alone(positions, row_tables, row, rows) || (!spread && blockIdx.z > 0)) return;

    // The query head of the lane's pair number `half`; of no pair: -1.
    auto head_of = [&](int half) {
        int tile = afresh(blockIdx.y), heads = query_heads / kv_heads;
        int in_group = tile / kv_heads * PAIRS + afresh(threadIdx.x) / 4 + 8 * half;
        return in_group < heads ? tile % kv_heads * heads + in_group : -1;
    };
    Tile<CHUNKS> tile;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int head = max(head_of(half), 0);
        tile.ends[half] = seen.end;
        size_t at = (size_t(row) * (query_heads + 2 * kv_heads) + head) * head_dim;
        put_query<T, CHUNKS>(queries, qkv + at, half, head_dim);
    }

    Pages pages = pages_of<T>(layer, tables + row_tables[row], kv_head, kv_heads, head_dim, block_size);
    for (int split = first_split + blockIdx.z; split < splits; split += gridDim.z) {
        tile.clear();
        int end = min((split + 1) * KV_SPLIT, seen.end);
        int start = max(split * KV_SPLIT, seen.first / UNIT<CHUNKS> * UNIT<CHUNKS>);
        for (; start < end; start += UNIT<CHUNKS>) {
            InCache<T, CHUNKS, WHOLE> unit(pages, start, seen);
            add_unit<T, CHUNKS>(tile, queries, unit, start, scale, window, soft_cap);
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int row = afresh(blockIdx.x), head = head_of(half);
            if (head < 0) continue;
            // Both halves would share the wide split, and keep it in registers that the sums need.
            size_t at = (first_split_of(row_tables, row, block_size) + afresh(split)) * query_heads + head;
            global<float> place =
                spread ? partials + at * partial_len(head_dim) : out + (size_t(row) * query_heads + head) * head_dim;
            float share = spread ? 1.0f : 1.0f / tile.total[half];
            // Added to nothing, as in a merge: that changes a negative zero.
            auto of = [&](float sum) { return (0.0f + sum) * share; };
            for_components<CHUNKS>(tile, half, head_dim, [&](int component, float4 sums) {
                store(place + component, float4{of(sums.x), of(sums.y), of(sums.z), of(sums.w)});
            });
            if (spread && threadIdx.x % 4 == 0) store(place + head_dim, float2{tile.most[half], tile.total[half]});
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
        size_t at = (first_split_of(row_tables, row, block_size) + split) * gridDim.y + head;
        global<const float> partial = partials + at * partial_len(head_dim);
        float keep, add;
        merge(most, total, partial[head_dim], partial[head_dim + 1], keep, add);
        sum = fmaf(partial[component], add, sum * keep);
    }
    out[(size_t(row) * gridDim.y + head) * head_dim + component] = sum * (1.0f / total);
}
