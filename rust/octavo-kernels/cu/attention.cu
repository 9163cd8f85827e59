// Causal attention over the paged KV cache, decode and prefill rows alike. A block takes one query head of one row and
// walks its positions in splits of KV_SPLIT from the sequence's start: a thread scores positions, then sums components of
// the values in the order of positions; splits are merged in order. So the order of additions depends on the row's position
// alone. Keys and values are read once for every head and row: the plain form.
#include "cache.cuh"

constexpr int THREADS = 128;
constexpr int MOST_COMPONENTS = 2; // of a thread: head_dim is at most 256

// out (rows, query_heads · head_dim), qkv (rows, (query_heads + 2 kv_heads) · head_dim). The block table of a row begins
// at `tables[row_tables[row]]`. No `window`: 0. No `soft_cap`: 0.
template <class T>
__device__ void attention(global<float> out, global<const float> qkv, global<const T> layer,
                          global<const u32> positions, global<const u32> row_tables, global<const u32> tables,
                          int query_heads, int kv_heads, int head_dim, int block_size, float scale, int window,
                          float soft_cap) {
    SHARED(float, query, 256);
    SHARED(float, weights, KV_SPLIT);
    SHARED(float, scratch, WARP);
    int row = blockIdx.x, head = blockIdx.y, kv_head = head / (query_heads / kv_heads);
    int end = int(positions[row]) + 1, first = window > 0 ? max(end - window, 0) : 0;
    global<const u32> table = tables + row_tables[row];
    size_t at = size_t(row) * (query_heads + 2 * kv_heads) * head_dim + size_t(head) * head_dim;
    for (int i = threadIdx.x; i < head_dim; i += THREADS) query[i] = qkv[at + i];
    __syncthreads();

    float most = -INFINITY, total = 0.0f, sums[MOST_COMPONENTS] = {};
    for (int start = first / KV_SPLIT * KV_SPLIT; start < end; start += KV_SPLIT) {
        int from = max(start, first), to = min(start + KV_SPLIT, end);
        float split_most = -INFINITY, split_total = 0.0f;
        for (int position = from + threadIdx.x; position < to; position += THREADS) {
            global<const T> key = layer + cache_at(table[position / block_size], false, kv_head, position % block_size,
                                                   kv_heads, block_size, head_dim);
            float score = 0.0f;
            for (int i = 0; i < head_dim; i++) score = fmaf(to_float(key[i]), query[i], score);
            score *= scale;
            if (soft_cap > 0.0f) score = soft_cap * tanhf(score / soft_cap);
            weights[position - start] = score;
            split_most = fmaxf(split_most, score);
        }
        split_most = block_max(split_most, scratch);
        for (int position = from + threadIdx.x; position < to; position += THREADS) {
            float weight = expf(weights[position - start] - split_most);
            weights[position - start] = weight;
            split_total += weight;
        }
        split_total = block_sum(split_total, scratch);

        float new_most = fmaxf(most, split_most);
        float keep = expf(most - new_most), add = expf(split_most - new_most);
        total = total * keep + split_total * add;
        for (int c = 0; c < MOST_COMPONENTS; c++) {
            int component = threadIdx.x + c * THREADS;
            if (component >= head_dim) continue;
            float sum = 0.0f;
            for (int position = from; position < to; position++) {
                global<const T> value = layer + cache_at(table[position / block_size], true, kv_head,
                                                         position % block_size, kv_heads, block_size, head_dim);
                sum = fmaf(weights[position - start], to_float(value[component]), sum);
            }
            sums[c] = sums[c] * keep + sum * add;
        }
        most = new_most;
        __syncthreads();
    }
    for (int c = 0; c < MOST_COMPONENTS; c++) {
        int component = threadIdx.x + c * THREADS;
        if (component < head_dim) out[(size_t(row) * query_heads + head) * head_dim + component] = sums[c] / total;
    }
}

#define ATTENTION(T, name)                                                                                             \
    KERNEL(attention_##name, THREADS, global<float> out, global<const float> qkv, global<const T> layer,               \
           global<const u32> positions, global<const u32> row_tables, global<const u32> tables, int query_heads,       \
           int kv_heads, int head_dim, int block_size, float scale, int window, float soft_cap) {                      \
        attention<T>(out, qkv, layer, positions, row_tables, tables, query_heads, kv_heads, head_dim, block_size,      \
                     scale, window, soft_cap);                                                                         \
    }
ATTENTION(float, f32)
ATTENTION(f16, f16)
ATTENTION(bf16, bf16)
ATTENTION(e4m3, fp8_e4m3)
