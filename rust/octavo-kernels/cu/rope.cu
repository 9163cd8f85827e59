// Rotary embedding, head norms, and the way of keys and values into the cache.
#include "common.cuh"
#include "cache.cuh"

// Cosines, then sines, of the angles of every row: out (rows, [pairs | pairs]). The angle is rounded to f32 before its
// cosine is taken, as in `src/reference/rope.rs`; whole turns are taken off in f64, where `cosf` of a large angle would go
// through memory. A thread computes one pair; blockIdx.x is the row.
KERNEL(rope_angles, 256, global<float> out, global<const u32> positions, global<const float> inv_freq, int pairs,
       float scale) {
    int i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i >= pairs) return;
    float angle = float(positions[blockIdx.x]) * inv_freq[i];
    global<float> row = out + size_t(blockIdx.x) * 2 * pairs;
    double turns = double(angle) * (0.5 / 3.14159265358979323846);
    float half_turns = float(2.0 * (turns - rint(turns)));
    row[i] = cospif(half_turns) * scale;
    row[pairs + i] = sinpif(half_turns) * scale;
}

// For every row of qkv (rows, [query heads | kv_heads keys | kv_heads values] · head_dim): norms query and key heads where
// there is a norm, rotates them in place, and writes keys and values to the row's slot of a layer of the cache. A warp
// takes one head of one row, a block four; blockIdx.x is the row. Needs 4 · head_dim floats of shared memory.
template <class T>
__device__ void rope_and_cache(global<float> qkv, global<T> layer, global<const u32> slots, global<const float> angles,
                               global<const float> query_norm, global<const float> key_norm, int query_heads,
                               int kv_heads, int head_dim, int block_size, int pairs, int interleaved, float eps) {
    DYNAMIC_SHARED(bytes);
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    int head = blockIdx.y * (blockDim.x / WARP) + warp, heads = query_heads + 2 * kv_heads;
    if (head >= heads) return;
    shared<float> values = cast<float>(bytes) + warp * head_dim;
    global<float> place = qkv + (size_t(blockIdx.x) * heads + head) * head_dim;
    for (int i = lane; i < head_dim; i += WARP) values[i] = place[i];

    bool is_value = head >= query_heads + kv_heads;
    if (!is_value) {
        global<const float> norm = head < query_heads ? query_norm : key_norm;
        if (norm) {
            float sum = 0.0f;
            for (int i = lane; i < head_dim; i += WARP) sum = fmaf(values[i], values[i], sum);
            float scale = 1.0f / sqrtf(warp_sum(sum) / head_dim + eps);
            for (int i = lane; i < head_dim; i += WARP) values[i] = values[i] * scale * norm[i];
        }
        __syncwarp();
        global<const float> row = angles + size_t(blockIdx.x) * 2 * pairs;
        for (int i = lane; i < pairs; i += WARP) {
            int a = interleaved ? 2 * i : i, b = interleaved ? 2 * i + 1 : i + pairs;
            float x = values[a], y = values[b], cosine = row[i], sine = row[pairs + i];
            values[a] = x * cosine - y * sine;
            values[b] = y * cosine + x * sine;
        }
        __syncwarp();
        for (int i = lane; i < head_dim; i += WARP) place[i] = values[i];
    }
    if (head >= query_heads) {
        int kv_head = (head - query_heads) % kv_heads;
        u32 slot = slots[blockIdx.x];
        global<T> cached = layer + cache_at(slot / block_size, is_value, kv_head, slot % block_size, kv_heads,
                                            block_size, head_dim);
        for (int i = lane; i < head_dim; i += WARP) cached[i] = from_float<T>(values[i]);
    }
}

#define ROPE_AND_CACHE(T, name)                                                                                        \
    KERNEL(rope_and_cache_##name, 128, global<float> qkv, global<T> layer, global<const u32> slots,                    \
           global<const float> angles, global<const float> query_norm, global<const float> key_norm, int query_heads,  \
           int kv_heads, int head_dim, int block_size, int pairs, int interleaved, float eps) {                        \
        rope_and_cache<T>(qkv, layer, slots, angles, query_norm, key_norm, query_heads, kv_heads, head_dim,            \
                          block_size, pairs, interleaved, eps);                                                        \
    }
ROPE_AND_CACHE(float, f32)
ROPE_AND_CACHE(f16, f16)
ROPE_AND_CACHE(bf16, bf16)
ROPE_AND_CACHE(e4m3, fp8_e4m3)

// Copies a block of the cache, all layers: blockIdx.x is the layer. Sizes count uint4.
KERNEL(copy_block, 256, global<uint4> cache, int layer_size_in_blocks, int block_size, int from, int to) {
    global<uint4> layer = cache + size_t(blockIdx.x) * layer_size_in_blocks * block_size;
    for (int i = threadIdx.x; i < block_size; i += blockDim.x) {
        layer[size_t(to) * block_size + i] = layer[size_t(from) * block_size + i];
    }
}
