// Finding values of a row without sorting it. Everything here is called by all threads of a block, and gives the same to
// all of them. Amounts are integers, so nothing depends on the order in which they are added.
#pragma once
#include "common.cuh"

// A value and where it was found.
struct Found {
    float value;
    u32 index;

    // The larger of two; of equal ones the one with the smaller index.
    __device__ __forceinline__ void meet(float other, u32 other_index) {
        if (other > value || (other == value && other_index < index)) {
            value = other;
            index = other_index;
        }
    }
    __device__ __forceinline__ void meet_in_warp() {
        for (int other = WARP / 2; other > 0; other /= 2) {
            float its_value = __shfl_xor_sync(FULL_WARP, value, other);
            u32 its_index = __shfl_xor_sync(FULL_WARP, index, other);
            meet(its_value, its_index);
        }
    }
    __device__ __forceinline__ void meet_in_block(shared<float> values, shared<u32> indices) {
        meet_in_warp();
        if (threadIdx.x % WARP == 0) {
            values[threadIdx.x / WARP] = value;
            indices[threadIdx.x / WARP] = index;
        }
        __syncthreads();
        for (int i = 0; i < int(blockDim.x / WARP); i++) meet(values[i], indices[i]);
        __syncthreads();
    }
};

__device__ __forceinline__ u64 warp_sum(u64 x) {
    for (int other = WARP / 2; other > 0; other /= 2) x += __shfl_xor_sync(FULL_WARP, x, other);
    return x;
}
__device__ __forceinline__ u64 block_sum(u64 x, shared<u64> scratch) {
    x = warp_sum(x);
    if (threadIdx.x % WARP == 0) scratch[threadIdx.x / WARP] = x;
    __syncthreads();
    u64 sum = 0;
    for (int i = 0; i < int(blockDim.x / WARP); i++) sum += scratch[i];
    __syncthreads();
    return sum;
}
// The sum over this lane and those before it.
__device__ __forceinline__ u64 warp_sum_up_to(u64 x) {
    for (int step = 1; step < WARP; step *= 2) {
        u64 before = __shfl_up_sync(FULL_WARP, x, step);
        if (int(threadIdx.x % WARP) >= step) x += before;
    }
    return x;
}

// A number for every value that rises with it; -0 has that of 0.
__device__ __forceinline__ u32 order_of(float value) {
    u32 bits = __float_as_uint(value + 0.0f);
    return bits >> 31 ? ~bits : bits | 0x80000000;
}
__device__ __forceinline__ float value_of(u32 order) {
    return __uint_as_float(order >> 31 ? order & 0x7fffffff : ~order);
}

constexpr int SELECT_BITS = 11, SELECT_BINS = 1 << SELECT_BITS;
constexpr u64 NOT_REACHED = ~u64(0);

// Where a row was cut: the amounts of the values above `value`, and of those equal to it.
struct Border {
    float value;
    u64 above, equal;
};

// The largest value for which the amounts of all values from there upwards are `enough`; -inf, and everything above, if
// nothing is. `amount(i, x[i])` is 0 for values that do not count. Eleven bits of the value are decided at a time, by the
// amounts in bins; the first warp looks for the bin.
template <class Amount, class Enough>
__device__ __forceinline__ Border select(global<const float> x, int width, Amount amount, Enough enough,
                                         shared<u64> bins, shared<u64> result) {
    int lane = threadIdx.x % WARP;
    u32 decided = 0;
    u64 above = 0, equal = 0;
    for (int shift = 32 - SELECT_BITS; shift > -SELECT_BITS; shift -= SELECT_BITS) {
        // The last digit has a bit less.
        int bits = shift < 0 ? SELECT_BITS + shift : SELECT_BITS, low = shift < 0 ? 0 : shift;
        for (int bin = threadIdx.x; bin < SELECT_BINS; bin += blockDim.x) bins[bin] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < width; i += blockDim.x) {
            u32 order = order_of(x[i]);
            if (u64(order) >> (low + bits) != decided) continue;
            u64 more = amount(i, x[i]);
            if (more) atomicAdd(bins + (order >> low & ((1 << bits) - 1)), more);
        }
        __syncthreads();
        if (threadIdx.x < WARP) {
            // From the top bin downwards: every lane takes a piece, then the piece in which it becomes enough is cut again.
            int top = 1 << bits, left = top;
            bool found = true;
            while (left > 1 && found) {
                int piece = ceil_div(left, WARP);
                u64 sum = 0;
                for (int i = 0; i < piece; i++) {
                    int place = lane * piece + (i + lane) % piece; // lanes in different banks
                    if (place < left) sum += bins[top - 1 - place];
                }
                u64 up_to = warp_sum_up_to(sum);
                unsigned reached = __ballot_sync(FULL_WARP, sum > 0 && enough(above + up_to));
                found = reached != 0;
                int chosen = found ? __ffs(int(reached)) - 1 : WARP - 1;
                above += __shfl_sync(FULL_WARP, found ? up_to - sum : up_to, chosen);
                equal = __shfl_sync(FULL_WARP, sum, chosen);
                top -= chosen * piece;
                left = min(piece, left - chosen * piece);
            }
            if (lane == 0) {
                result[0] = found ? u64(top - 1) : NOT_REACHED;
                result[1] = above;
                result[2] = equal;
            }
        }
        __syncthreads();
        u64 bin = result[0];
        above = result[1];
        equal = result[2];
        __syncthreads();
        if (bin == NOT_REACHED) return {-INFINITY, above, 0};
        decided = decided << bits | u32(bin);
    }
    return {value_of(decided), above, equal};
}

// The smallest index up to which the amounts come to `need`, which is at least 1 and no more than all of them. Warps take
// pieces, again and again, until one warp can walk.
template <class Amount>
__device__ __forceinline__ int locate(int width, Amount amount, u64 need, shared<u64> scratch) {
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    int begin = 0, end = width;
    u64 before = 0;
    while (warps > 1 && end - begin > 4 * WARP) {
        int piece = ceil_div(ceil_div(end - begin, warps), WARP) * WARP;
        int from = min(begin + warp * piece, end), to = min(from + piece, end);
        u64 sum = 0;
        for (int i = from + lane; i < to; i += WARP) sum += amount(i);
        sum = warp_sum(sum);
        if (lane == 0) scratch[warp] = sum;
        __syncthreads();
        int chosen = 0;
        while (chosen + 1 < warps && before + scratch[chosen] < need) before += scratch[chosen++];
        __syncthreads();
        begin = min(begin + chosen * piece, end);
        end = min(begin + piece, end);
    }
    for (; begin < end; begin += WARP) {
        int i = begin + lane;
        u64 up_to = before + warp_sum_up_to(i < end ? amount(i) : 0);
        unsigned reached = __ballot_sync(FULL_WARP, up_to >= need);
        if (reached) return begin + __ffs(int(reached)) - 1;
        before = __shfl_sync(FULL_WARP, up_to, WARP - 1);
    }
    return width - 1;
}
