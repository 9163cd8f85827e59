// What every kernel is written with. The same source is compiled by nvcc for a GPU and by the host's compiler, against
// `shim/shim.hpp`, for tests without one. `README.md` says how a kernel is added.
#pragma once

#ifdef OCTAVO_SHIM
#include "shim/shim.hpp"
#else

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <type_traits>

// KERNEL(name, most threads of a block, parameters …) { … }
// KERNEL_WITH_BLOCKS(name, most threads of a block, blocks, parameters …): one of which so many blocks are meant to be on a
// multiprocessor at a time; the compiler takes as many registers as that leaves, and no fewer.
#define KERNEL(name, max_threads, ...) extern "C" __global__ void __launch_bounds__(max_threads) name(__VA_ARGS__)
#define KERNEL_WITH_BLOCKS(name, max_threads, blocks, ...)                                                             \
    extern "C" __global__ void __launch_bounds__(max_threads, blocks) name(__VA_ARGS__)

// Memory of the device, and of a block. In tests they are checked pointers: take one apart with `cast`, `load` and
// `store`, never with a C++ cast.
template <class T> using global = T *__restrict__;
template <class T> using shared = T *;

// SHARED(type, name, count): an array of the block. DYNAMIC_SHARED(name): the bytes that the launch asked for.
#define SHARED(T, name, count) __shared__ __align__(16) T name[count]
#define DYNAMIC_SHARED(name) extern __shared__ __align__(16) unsigned char name[]

template <class U, class T> __device__ __forceinline__ U *cast(T *pointer) { return reinterpret_cast<U *>(pointer); }

constexpr unsigned FULL_WARP = 0xffffffff;

using bf16 = __nv_bfloat16;
using f16 = __half;

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(f16 x) { return __half2float(x); }
template <class T> __device__ __forceinline__ T from_float(float x);
template <> __device__ __forceinline__ float from_float<float>(float x) { return x; }
template <> __device__ __forceinline__ bf16 from_float<bf16>(float x) { return __float2bfloat16_rn(x); }
template <> __device__ __forceinline__ f16 from_float<f16>(float x) { return __float2half_rn(x); }

// Two values rounded to T (bf16 or f16), `low` in the lower half of the word: as fragments hold them.
template <class T> __device__ __forceinline__ unsigned pack(float low, float high) {
    unsigned word;
    if constexpr (std::is_same_v<T, bf16>) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    } else {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    }
    return word;
}
// The value in the lower half of a word, and in the upper.
template <class T> __device__ __forceinline__ float low_of(unsigned word) {
    if constexpr (std::is_same_v<T, bf16>) return __uint_as_float(word << 16);
    else return __half2float(__ushort_as_half(static_cast<unsigned short>(word)));
}
template <class T> __device__ __forceinline__ float high_of(unsigned word) {
    if constexpr (std::is_same_v<T, bf16>) return __uint_as_float(word & 0xffff0000);
    else return __half2float(__ushort_as_half(static_cast<unsigned short>(word >> 16)));
}

// The same number, of which the compiler does not know that: what is made of it is made where it is needed, and takes no
// register before.
__device__ __forceinline__ int afresh(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

// Both f16 of a word times those of another.
__device__ __forceinline__ unsigned multiply_halves(unsigned a, unsigned b) {
    unsigned product;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}

// Copies BYTES (4, 8 or 16) from device memory into the block's, in the background; zeroes where not `wanted`.
template <int BYTES, class T, class U>
__device__ __forceinline__ void copy_async(T *to, const U *from, bool wanted = true) {
    unsigned shared_address = __cvta_generic_to_shared(to);
    int read = wanted ? BYTES : 0;
    if constexpr (BYTES == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address), "l"(from), "r"(read));
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address), "l"(from), "n"(BYTES),
                     "r"(read));
    }
}
// Ends a group of copies; waits until at most LEFT of this thread's groups are under way. Then `__syncthreads()` for the
// others' copies.
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::); }
template <int LEFT> __device__ __forceinline__ void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// D (16 × 8, f32) += A (16 × 16) · B (16 × 8), both of T: bf16 or f16. Lane `l` holds, with group = l / 4, pair = l % 4 · 2:
// of A rows group and group + 8 at columns pair, pair + 1 (a0, a1) and eight further on (a2, a3); of B rows pair,
// pair + 1 (b0) and eight further on (b1) at column group; of D row group at columns pair, pair + 1, then row group + 8.
template <class T>
__device__ __forceinline__ void mma_16x8x16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    if constexpr (std::is_same_v<T, bf16>) {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                     "{%0,%1,%2,%3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    } else {
        static_assert(std::is_same_v<T, f16>, "bf16 or f16");
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                     "{%0,%1,%2,%3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
}

// D (16 × 8, i32) = start + A (16 × DEPTH) · B (DEPTH × 8), signed bytes; DEPTH is 16 or 32. Lane `l` holds, with group =
// l / 4, quad = l % 4: of A row group at columns 4 quad … 4 quad + 3 (a0), row group + 8 there (a1), and both 16 columns
// further on (a2, a3); of B rows 4 quad … at column group (b0) and 16 rows further on (b1); D as above.
template <int DEPTH>
__device__ __forceinline__ void mma_bytes(int (&d)[4], const unsigned (&a)[DEPTH / 8], const unsigned (&b)[DEPTH / 16],
                                          int start) {
    if constexpr (DEPTH == 32) {
        asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                     "{%10,%10,%10,%10};"
                     : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(start));
    } else {
        static_assert(DEPTH == 16, "what the hardware multiplies");
        asm volatile("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%7,%7,%7};"
                     : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(b[0]), "r"(start));
    }
}

// Loads COUNT (1, 2 or 4) matrices of 8 × 8 values of two bytes: lane 8 i + r brings the address of row r of matrix i, 16
// bytes; word i of lane `l` becomes row l / 4, columns l % 4 · 2 and the next of matrix i, or of its transpose.
template <bool TRANSPOSED = false, int COUNT, class T>
__device__ __forceinline__ void ldmatrix(unsigned (&result)[COUNT], T *row) {
    static_assert(sizeof(T) == 2 && (COUNT == 1 || COUNT == 2 || COUNT == 4), "what the hardware loads");
    unsigned from = __cvta_generic_to_shared(row);
    if constexpr (COUNT == 4 && TRANSPOSED) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(result[0]), "=r"(result[1]), "=r"(result[2]), "=r"(result[3])
                     : "r"(from));
    } else if constexpr (COUNT == 4) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(result[0]), "=r"(result[1]), "=r"(result[2]), "=r"(result[3])
                     : "r"(from));
    } else if constexpr (COUNT == 2 && TRANSPOSED) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                     : "=r"(result[0]), "=r"(result[1])
                     : "r"(from));
    } else if constexpr (COUNT == 2) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
                     : "=r"(result[0]), "=r"(result[1])
                     : "r"(from));
    } else if constexpr (TRANSPOSED) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];" : "=r"(result[0]) : "r"(from));
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(result[0]) : "r"(from));
    }
}

#endif // OCTAVO_SHIM

using u8 = unsigned char;
using i8 = signed char;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = unsigned long long;

// Eight bits: the sign, four of exponent, three of mantissa. Up to 448; no infinity; all ones is not a number.
struct e4m3 {
    u8 bits;
};
__device__ __forceinline__ float to_float(e4m3 x) {
    u32 sign = u32(x.bits & 0x80) << 24, magnitude = x.bits & 0x7f;
    // The exponent's bias is 120 less; subnormals come out right because the product is exact.
    float value = magnitude == 0x7f ? NAN : __uint_as_float(magnitude << 20) * __uint_as_float((127 + 120) << 23);
    return __uint_as_float(__float_as_uint(value) | sign);
}
// The nearest, the even one of two; the largest where that is too small.
template <> __device__ __forceinline__ e4m3 from_float<e4m3>(float x) {
    u32 bits = __float_as_uint(x), sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return {u8(sign | 0x7f)};
    if (magnitude >= 0x43e00000) return {u8(sign | 0x7e)};
    // Subnormal: adding 2^14 leaves the rounded multiple of 2^-9 in the lowest bits.
    if (magnitude < 0x3c800000) {
        return {u8(sign | (__float_as_uint(__uint_as_float(magnitude) + 16384.0f) - 0x46800000))};
    }
    return {u8(sign | ((magnitude + 0x7ffff + (magnitude >> 20 & 1) - 0x3c000000) >> 20))};
}
// Bytes 2 · PAIR and the next of four e4m3 as f16, which holds them exactly.
template <int PAIR> __device__ __forceinline__ unsigned two_halves(unsigned four) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    unsigned halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<unsigned short>(four >> 16 * PAIR)));
    return halves;
#else
    // As the upper bytes of halves, exponent and mantissa one bit further down; the exponent's bias is eight less.
    unsigned spread = __byte_perm(four, 0, PAIR ? 0x3424 : 0x1404), magnitude = (spread & 0x7f007f00) >> 1;
    unsigned halves = multiply_halves((spread & 0x80008000) | magnitude, 0x5c005c00);
    unsigned none = (magnitude + 0x00800080) & 0x40004000; // a bit for each that is not a number
    return halves | (2 * none - (none >> 4));
#endif
}

// One access of a vector type, as float4 or uint4. The address must be a multiple of its size.
template <class V, class P> __device__ __forceinline__ V load(P from) { return *cast<const V>(from); }
template <class V, class P> __device__ __forceinline__ void store(P to, V value) { *cast<V>(to) = value; }

__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

constexpr int WARP = 32;

// Sums and maxima over the lanes of a warp, the same in all of them. The order of additions is that of a butterfly.
__device__ __forceinline__ float warp_sum(float x) {
    for (int other = WARP / 2; other > 0; other /= 2) x += __shfl_xor_sync(FULL_WARP, x, other);
    return x;
}
__device__ __forceinline__ float warp_max(float x) {
    for (int other = WARP / 2; other > 0; other /= 2) x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, other));
    return x;
}

// The same over the threads of a block (whole warps, in order), through `scratch` of 32 values; ends with a barrier, so
// that `scratch` can be used again.
__device__ __forceinline__ float block_sum(float x, shared<float> scratch) {
    int warps = blockDim.x / WARP;
    x = warp_sum(x);
    if (threadIdx.x % WARP == 0) scratch[threadIdx.x / WARP] = x;
    __syncthreads();
    float sum = 0.0f;
    for (int i = 0; i < warps; i++) sum += scratch[i];
    __syncthreads();
    return sum;
}
__device__ __forceinline__ float block_max(float x, shared<float> scratch) {
    int warps = blockDim.x / WARP;
    x = warp_max(x);
    if (threadIdx.x % WARP == 0) scratch[threadIdx.x / WARP] = x;
    __syncthreads();
    float most = scratch[0];
    for (int i = 1; i < warps; i++) most = fmaxf(most, scratch[i]);
    __syncthreads();
    return most;
}
