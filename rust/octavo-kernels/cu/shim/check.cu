// Kernels that show what the shim does and what it catches; `tests/kernels/shim.rs` runs them. Some are wrong on purpose.
#include "../common.cuh"

KERNEL(check_outside, 64, global<float> out) { out[threadIdx.x] = 1.0f; }

KERNEL(check_unaligned, 32, global<float> out) { store(out + threadIdx.x, float4{}); }

KERNEL(check_shared_outside, 32, global<float> out) {
    SHARED(float, values, 31);
    values[threadIdx.x] = 1.0f;
    out[threadIdx.x] = values[threadIdx.x];
}

KERNEL(check_divergent_barrier, 64, global<float> out) {
    if (threadIdx.x < 48) __syncthreads();
    out[threadIdx.x] = 1.0f;
}

KERNEL(check_two_barriers, 64, global<float> out) {
    if (threadIdx.x < 32) {
        __syncthreads();
    } else {
        __syncthreads();
    }
    out[threadIdx.x] = 1.0f;
}

KERNEL(check_missing_lane, 32, global<float> out) {
    if (threadIdx.x < 31) out[threadIdx.x] = warp_sum(1.0f);
}

// Each thread reads what its neighbour wrote, then writes again: wrong without a barrier (bit 0 of `waits`), and one more
// (bit 1).
KERNEL(check_neighbour, 64, global<float> out, int waits) {
    SHARED(float, values, 64);
    values[threadIdx.x] = threadIdx.x;
    if (waits & 1) __syncthreads();
    out[threadIdx.x] = values[(threadIdx.x + 1) % blockDim.x];
    if (waits & 2) __syncthreads();
    values[threadIdx.x] = 0.0f;
}

// The same among lanes. They meet in a shuffle, too, but that says nothing about memory.
KERNEL(check_lanes, 32, global<float> out, int waits) {
    SHARED(float, values, 32);
    values[threadIdx.x] = threadIdx.x;
    warp_sum(1.0f);
    if (waits) __syncwarp();
    out[threadIdx.x] = values[threadIdx.x ^ 1];
}

// Counts threads: right with atomics, wrong where one of them does without.
KERNEL(check_count, 64, global<u32> out, int all_atomic) {
    SHARED(u32, count, 1);
    if (threadIdx.x == 0) count[0] = 0;
    __syncthreads();
    if (threadIdx.x < 63 || all_atomic) atomicAdd(count + 0, 1u);
    else count[0] = count[0] + 1;
    __syncthreads();
    out[threadIdx.x] = count[0];
}

// out = x by way of shared memory; waits for all groups of copies but the last `left`, of two.
template <int LEFT> __device__ void copy_through(global<float> out, global<const float> x) {
    SHARED(float, values, 64);
    for (int half = 0; half < 2; half++) {
        copy_async<4>(values + half * 32 + threadIdx.x, x + half * 32 + threadIdx.x);
        copy_async_commit();
    }
    copy_async_wait<LEFT>();
    __syncthreads();
    for (int half = 0; half < 2; half++) out[half * 32 + threadIdx.x] = values[half * 32 + threadIdx.x];
    copy_async_wait<0>();
}
KERNEL(check_copies, 32, global<float> out, global<const float> x) { copy_through<0>(out, x); }
KERNEL(check_half_of_copies, 32, global<float> out, global<const float> x) { copy_through<1>(out, x); }
KERNEL(check_forgotten_copies, 32, global<const float> x) {
    SHARED(float, values, 32);
    copy_async<4>(values + threadIdx.x, x + threadIdx.x);
    copy_async_commit();
}

// d (16, 8) = a (16, 16) · b (16, 8), all through `ldmatrix`: b lies by rows, so it is loaded transposed.
template <class T> __device__ void multiply(global<float> d, global<const T> a, global<const T> b) {
    SHARED(T, a_tile, 16 * 16);
    SHARED(T, b_tile, 16 * 8);
    int lane = threadIdx.x;
    for (int i = lane; i < 16 * 16; i += WARP) a_tile[i] = a[i];
    for (int i = lane; i < 16 * 8; i += WARP) b_tile[i] = b[i];
    __syncwarp();
    unsigned a_words[4], b_words[2];
    // Matrices 0 and 1 are the upper and lower rows of the left half, 2 and 3 of the right.
    ldmatrix(a_words, a_tile + (lane % 16) * 16 + lane / 16 * 8);
    ldmatrix<true>(b_words, b_tile + (lane % 16) * 8);
    float sums[4] = {};
    mma_16x8x16<T>(sums, a_words, b_words);
    for (int i = 0; i < 4; i++) d[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = sums[i];
}
KERNEL(check_mma_bf16, 32, global<float> d, global<const bf16> a, global<const bf16> b) { multiply<bf16>(d, a, b); }
KERNEL(check_mma_f16, 32, global<float> d, global<const f16> a, global<const f16> b) { multiply<f16>(d, a, b); }

// The value of byte i % 256 of e4m3, once by way of f16 and once of f32; and x as e4m3, in both ways.
KERNEL(check_e4m3, 32, global<float> out, global<const float> x, int count) {
    for (int i = threadIdx.x; i < count; i += WARP) {
        u8 byte = from_float<e4m3>(x[i]).bits;
        out[4 * i] = to_float(e4m3{u8(i)}), out[4 * i + 1] = to_float(e4m3{byte});
        out[4 * i + 2] = high_of<f16>(two_halves<0>((i & 0xff) << 8));
        out[4 * i + 3] = low_of<f16>(two_halves<1>(byte << 16));
    }
}

KERNEL(check_votes, 32, global<float> out) {
    unsigned odd = __ballot_sync(FULL_WARP, threadIdx.x % 2 == 1);
    out[threadIdx.x] = odd == 0xaaaaaaaau ? __shfl_up_sync(FULL_WARP, float(threadIdx.x), 1) : -1.0f;
}
