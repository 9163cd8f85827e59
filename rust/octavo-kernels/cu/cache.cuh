// How a layer of the paged KV cache lies in memory: [block][k|v][kv_head][block_size][head_dim].
#pragma once
#include "common.cuh"

// Where a key (`value` false) or a value begins, in elements from the layer's start.
__device__ __forceinline__ size_t cache_at(u32 block, bool value, int kv_head, int offset, int kv_heads, int block_size,
                                           int head_dim) {
    return (((size_t(block) * 2 + value) * kv_heads + kv_head) * block_size + offset) * head_dim;
}

// Attention accumulates over runs of this many positions, counted from a sequence's start, and merges them in order.
constexpr int KV_SPLIT = 256;
