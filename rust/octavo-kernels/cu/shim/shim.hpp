// CUDA C++ on the CPU, for tests: the part that kernels see. `shim.cpp` holds the rest.
//
// A block's threads are fibers of one thread of the host: each runs until it waits (at a barrier or for its warp), so a
// kernel that forgets to wait reads what is not there yet; and whoever touches shared memory is written down, so that a
// missing barrier is an error even where nothing came of it. All memory is checked: a pointer carries the bounds of the
// allocation or of the shared array that it points into. Memory that nobody has written holds 0xff bytes: not a number in
// any float type, and far outside anything as an index.
#pragma once

#include <cmath>
#include <math.h>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#define __device__
#define __forceinline__ inline __attribute__((always_inline))

struct dim3 {
    unsigned x, y, z;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};

namespace shim {

// What a thread of the block that runs can ask about itself.
struct Thread {
    dim3 index;      // threadIdx
    unsigned number; // index, counted through
};
struct Block {
    dim3 index, size, grid; // blockIdx, blockDim, gridDim
};
extern __thread Thread *thread;
extern __thread Block *block;

// Ends the launch with an error that names kernel, block and thread.
[[noreturn]] void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

// Waits for all threads of the block.
void barrier(int line);
// Waits until every lane of the warp has brought its `slot`; the last of them runs `meet` on all 32. Some operations also
// order what the lanes do to memory.
void warp(const char *what, int line, void *slot, void (*meet)(void *const *slots), bool orders_memory = false);
// The shared array that belongs to `site`, the same for every thread of the block.
void *shared_array(const void *site, size_t bytes);
// The launch's dynamic shared memory, and how much of it there is.
void *dynamic_shared(size_t *bytes);
// What a thread does to bytes of shared memory: an error where another one touches them and no barrier is between.
enum class Touch { Read, Write, Atomic, Copy, Copied };
void touch(Touch kind, const void *at, size_t bytes);
// Asynchronous copies of this thread: they take place in `wait`, not before.
void copy_later(void *to, const void *from, size_t bytes);
void commit_copies();
void wait_copies(unsigned groups_left);

enum class Space { Global, Shared };

// A value in shared memory that may be read or written.
template <class T> class Cell {
    T *at_;

  public:
    explicit Cell(T *at) : at_(at) {}
    __forceinline__ operator T() const {
        touch(Touch::Read, at_, sizeof(T));
        return *at_;
    }
    __forceinline__ void operator=(const T &value) const {
        touch(Touch::Write, at_, sizeof(T));
        *at_ = value;
    }
    __forceinline__ void operator=(const Cell &other) const { *this = T(other); }
};

// A checked pointer.
template <class T, Space S> class Pointer {
    using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
    T *at_ = nullptr;
    Byte *begin_ = nullptr, *end_ = nullptr;
    template <class, Space> friend class Pointer;

  public:
    using element = T;
    Pointer() = default;
    Pointer(std::nullptr_t) {}
    Pointer(T *at, Byte *begin, Byte *end) : at_(at), begin_(begin), end_(end) {}
    // To const.
    template <class U, class = std::enable_if_t<std::is_same_v<T, const U>>>
    Pointer(const Pointer<U, S> &other) : at_(other.at_), begin_(other.begin_), end_(other.end_) {}

    // `count` values from number `i` on, all inside.
    __forceinline__ T *check(ptrdiff_t i, size_t count = 1) const {
        T *at = at_ + i;
        auto *from = reinterpret_cast<Byte *>(at), *to = from + count * sizeof(T);
        if (from < begin_ || to > end_) outside(from, count * sizeof(T));
        if (reinterpret_cast<uintptr_t>(at) % alignof(T)) {
            fail("an access of %zu bytes at byte %td of a %s array is not aligned", sizeof(T), from - begin_, name());
        }
        return at;
    }
    __forceinline__ decltype(auto) operator[](ptrdiff_t i) const {
        T *at = check(i);
        if constexpr (S == Space::Global) {
            return static_cast<T &>(*at);
        } else if constexpr (std::is_const_v<T>) {
            touch(Touch::Read, at, sizeof(T));
            return static_cast<T &>(*at);
        } else {
            return Cell<T>(at);
        }
    }
    __forceinline__ decltype(auto) operator*() const { return (*this)[0]; }
    __forceinline__ T &atomic() const {
        T *at = check(0);
        if constexpr (S == Space::Shared) touch(Touch::Atomic, at, sizeof(T));
        return *at;
    }
    __forceinline__ Pointer operator+(ptrdiff_t i) const { return {at_ + i, begin_, end_}; }
    __forceinline__ Pointer operator-(ptrdiff_t i) const { return {at_ - i, begin_, end_}; }
    __forceinline__ Pointer &operator+=(ptrdiff_t i) { return *this = *this + i; }
    __forceinline__ ptrdiff_t operator-(const Pointer &other) const { return at_ - other.at_; }
    explicit operator bool() const { return at_ != nullptr; }
    template <class U> __forceinline__ Pointer<U, S> as() const {
        return {reinterpret_cast<U *>(at_), begin_, end_};
    }

  private:
    static const char *name() { return S == Space::Global ? "global" : "shared"; }
    [[noreturn]] __attribute__((noinline, cold)) void outside(Byte *from, size_t bytes) const {
        if (!at_) fail("a %s access of %zu bytes through a null pointer", name(), bytes);
        fail("a %s access of %zu bytes at byte %td of an array of %td bytes (address %p)", name(), bytes, from - begin_,
             end_ - begin_, static_cast<const void *>(from));
    }
};

// An argument of a launch. Mirrored in Rust.
struct Argument {
    uint64_t bits;
    uint32_t kind; // 0: pointer, 1: i32, 2: f32
    uint32_t unused;
    char *begin, *end; // of a pointer's allocation
};

template <class T> struct Take {
    static_assert(sizeof(T) == 4, "arguments are pointers, i32, u32 and f32");
    static constexpr uint32_t kind = std::is_floating_point_v<T> ? 2 : 1;
    static T from(const Argument &argument) {
        T value;
        std::memcpy(&value, &argument.bits, sizeof value);
        return value;
    }
};
template <class T, Space S> struct Take<Pointer<T, S>> {
    static constexpr uint32_t kind = 0;
    static Pointer<T, S> from(const Argument &argument) {
        return {reinterpret_cast<T *>(argument.bits), argument.begin, argument.end};
    }
};

// A kernel by its name, in a list of all of them.
struct Kernel {
    const char *name;
    unsigned max_threads;
    size_t parameters;
    const uint32_t *kinds;
    void (*run)(const Kernel *, const Argument *);
    void (*function)();
    Kernel *next;
    static Kernel *&all();
};

template <class... P> struct Registered : Kernel {
    static constexpr uint32_t all_kinds[] = {Take<P>::kind..., 0};

    Registered(const char *name, unsigned max_threads, void (*function)(P...)) {
        *static_cast<Kernel *>(this) = {name, max_threads, sizeof...(P), all_kinds, call,
                                        reinterpret_cast<void (*)()>(function), all()};
        all() = this;
    }
    static void call(const Kernel *kernel, const Argument *arguments) {
        call_with(kernel, arguments, std::make_index_sequence<sizeof...(P)>());
    }
    template <size_t... I>
    static void call_with(const Kernel *kernel, const Argument *arguments, std::index_sequence<I...>) {
        reinterpret_cast<void (*)(P...)>(kernel->function)(Take<P>::from(arguments[I])...);
    }
};
template <class... P> Registered(const char *, unsigned, void (*)(P...)) -> Registered<P...>;

} // namespace shim

#define threadIdx (shim::thread->index)
#define blockIdx (shim::block->index)
#define blockDim (shim::block->size)
#define gridDim (shim::block->grid)

#define KERNEL(name, max_threads, ...)                                                                                 \
    static void name(__VA_ARGS__);                                                                                     \
    static shim::Registered name##_registered(#name, max_threads, name);                                               \
    static void name(__VA_ARGS__)

#define KERNEL_WITH_BLOCKS(name, max_threads, blocks, ...) KERNEL(name, max_threads, __VA_ARGS__)

template <class T> using global = shim::Pointer<T, shim::Space::Global>;
template <class T> using shared = shim::Pointer<T, shim::Space::Shared>;

#define SHARED(T, name, count)                                                                                         \
    static const char name##_site = 0;                                                                                 \
    const shared<T> name = shim_shared<T>(&name##_site, count)
#define DYNAMIC_SHARED(name) const shared<unsigned char> name = shim_dynamic_shared()

template <class T> inline shared<T> shim_shared(const void *site, size_t count) {
    char *begin = static_cast<char *>(shim::shared_array(site, count * sizeof(T)));
    return {reinterpret_cast<T *>(begin), begin, begin + count * sizeof(T)};
}
inline shared<unsigned char> shim_dynamic_shared() {
    size_t bytes;
    char *begin = static_cast<char *>(shim::dynamic_shared(&bytes));
    return {reinterpret_cast<unsigned char *>(begin), begin, begin + bytes};
}

template <class U, class T, shim::Space S> __forceinline__ auto cast(const shim::Pointer<T, S> &pointer) {
    return pointer.template as<U>();
}

// --- barriers and warps

#define __syncthreads() shim::barrier(__LINE__)

constexpr unsigned FULL_WARP = 0xffffffff;

// What every lane brings to `warp_gather`, and what it gets.
template <class T> struct ShimLane {
    T value, result;
    unsigned source;
};
template <class T> inline T shim_shuffle(T value, unsigned source, int line) {
    ShimLane<T> lane{value, value, source};
    shim::warp("a shuffle", line, &lane, [](void *const *slots) {
        auto lanes = reinterpret_cast<ShimLane<T> *const *>(slots);
        for (int i = 0; i < 32; i++) lanes[i]->result = lanes[lanes[i]->source]->value;
    });
    return lane.result;
}
inline void shim_full(unsigned mask) {
    if (mask != FULL_WARP) shim::fail("a warp operation of lanes %08x: here they are all of the warp", mask);
}
inline unsigned shim_lane() { return shim::thread->number % 32; }

template <class T> T __shfl_sync(unsigned mask, T value, int source, int line = __builtin_LINE()) {
    shim_full(mask);
    return shim_shuffle(value, unsigned(source) % 32, line);
}
template <class T> T __shfl_xor_sync(unsigned mask, T value, int other, int line = __builtin_LINE()) {
    shim_full(mask);
    return shim_shuffle(value, (shim_lane() ^ other) % 32, line);
}
template <class T> T __shfl_down_sync(unsigned mask, T value, unsigned delta, int line = __builtin_LINE()) {
    shim_full(mask);
    return shim_shuffle(value, shim_lane() + delta < 32 ? shim_lane() + delta : shim_lane(), line);
}
template <class T> T __shfl_up_sync(unsigned mask, T value, unsigned delta, int line = __builtin_LINE()) {
    shim_full(mask);
    return shim_shuffle(value, shim_lane() >= delta ? shim_lane() - delta : shim_lane(), line);
}
inline unsigned __ballot_sync(unsigned mask, bool vote, int line = __builtin_LINE()) {
    shim_full(mask);
    struct Lane {
        bool vote;
        unsigned votes;
    } lane{vote, 0};
    shim::warp("a vote", line, &lane, [](void *const *slots) {
        auto lanes = reinterpret_cast<Lane *const *>(slots);
        unsigned votes = 0;
        for (int i = 0; i < 32; i++) votes |= unsigned(lanes[i]->vote) << i;
        for (int i = 0; i < 32; i++) lanes[i]->votes = votes;
    });
    return lane.votes;
}
inline bool __any_sync(unsigned mask, bool vote, int line = __builtin_LINE()) {
    return __ballot_sync(mask, vote, line) != 0;
}
inline bool __all_sync(unsigned mask, bool vote, int line = __builtin_LINE()) {
    return __ballot_sync(mask, vote, line) == FULL_WARP;
}
inline void __syncwarp(unsigned mask = FULL_WARP, int line = __builtin_LINE()) {
    shim_full(mask);
    int nothing;
    shim::warp("__syncwarp", line, &nothing, [](void *const *) {}, true);
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }

// --- atomics: nothing runs at the same time

template <class P, class T> T atomicAdd(P at, T value) {
    T &cell = at.atomic(), before = cell;
    cell = before + value;
    return before;
}
template <class P, class T> T atomicMax(P at, T value) {
    T &cell = at.atomic(), before = cell;
    if (value > before) cell = value;
    return before;
}
inline void __threadfence() {}

// --- numbers

inline float __uint_as_float(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline unsigned __float_as_uint(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}
inline double __hiloint2double(int high, int low) {
    uint64_t bits = uint64_t(uint32_t(high)) << 32 | uint32_t(low);
    double value;
    std::memcpy(&value, &bits, 8);
    return value;
}
inline int __double2hiint(double value) {
    uint64_t bits;
    std::memcpy(&bits, &value, 8);
    return int(bits >> 32);
}
inline int __double2loint(double value) {
    uint64_t bits;
    std::memcpy(&bits, &value, 8);
    return int(bits);
}
inline float cospif(float x) { return float(cos(M_PI * double(x))); }
inline float sinpif(float x) { return float(sin(M_PI * double(x))); }
template <class T> inline T min(T a, T b) { return b < a ? b : a; }
template <class T> inline T max(T a, T b) { return a < b ? b : a; }

struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) { return __uint_as_float(unsigned(x.bits) << 16); }
inline float to_float(f16 x) {
    unsigned sign = unsigned(x.bits & 0x8000) << 16, magnitude = x.bits & 0x7fff;
    if (magnitude >= 0x7c00) return __uint_as_float(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
    // The exponent's bias is 112 less; subnormals come out right because the product is exact.
    float value = __uint_as_float(magnitude << 13) * __uint_as_float((127 + 112) << 23);
    return __uint_as_float(__float_as_uint(value) | sign);
}
template <class T> inline T from_float(float x);
template <> inline float from_float<float>(float x) { return x; }
template <> inline bf16 from_float<bf16>(float x) {
    unsigned bits = __float_as_uint(x);
    if ((bits & 0x7fffffff) > 0x7f800000) return {0x7fff};
    return {uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
template <> inline f16 from_float<f16>(float x) {
    unsigned bits = __float_as_uint(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return {0x7fff};
    if (magnitude >= 0x477ff000) return {uint16_t(sign | 0x7c00)};
    if (magnitude < 0x38800000) {
        // Subnormal: adding this constant leaves the rounded multiple of 2^-24 in the lowest bits.
        float sum = __uint_as_float(magnitude) + 0.5f;
        return {uint16_t(sign | (__float_as_uint(sum) - 0x3f000000))};
    }
    return {uint16_t(sign | ((magnitude + 0xfff + (magnitude >> 13 & 1) - 0x38000000) >> 13))};
}

inline int afresh(int x) { return x; }

template <class T> inline unsigned pack(float low, float high) {
    return from_float<T>(low).bits | unsigned(from_float<T>(high).bits) << 16;
}
template <class T> inline float low_of(unsigned word) { return to_float(T{uint16_t(word)}); }
template <class T> inline float high_of(unsigned word) { return to_float(T{uint16_t(word >> 16)}); }

inline unsigned multiply_halves(unsigned a, unsigned b) {
    return pack<f16>(low_of<f16>(a) * low_of<f16>(b), high_of<f16>(a) * high_of<f16>(b));
}

// --- integers

// Four bytes of the eight of `b:a`, one for each nibble of `selector`.
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    uint64_t bytes = uint64_t(b) << 32 | a;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) result |= unsigned(bytes >> (selector >> (4 * i) & 7) * 8 & 0xff) << (8 * i);
    return result;
}
// The product of four pairs of signed bytes, added to `sum`.
inline int __dp4a(int a, int b, int sum) {
    for (int i = 0; i < 32; i += 8) sum += int(int8_t(a >> i)) * int(int8_t(b >> i));
    return sum;
}

// --- asynchronous copies of 4, 8 or 16 bytes

template <int BYTES, class T, class U>
inline void copy_async(const shared<T> &to, const global<U> &from, bool wanted = true) {
    static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "what the hardware copies");
    struct alignas(BYTES) Bytes {
        char bytes[BYTES];
    };
    // Like the hardware, not wanted means zeroes, and no look at the source.
    const Bytes *source = wanted ? cast<const Bytes>(from).check(0) : nullptr;
    shim::copy_later(cast<Bytes>(to).check(0), source, BYTES);
}
inline void copy_async_commit() { shim::commit_copies(); }
template <int LEFT> inline void copy_async_wait() { shim::wait_copies(LEFT); }

// --- tensor cores, at the level of the fragments that each lane holds

template <class T> inline float shim_half(unsigned word, int which) {
    return to_float(T{uint16_t(word >> (16 * which))});
}

// D (16 × 8) += A (16 × 16) · B (16 × 8).
template <class T> inline void mma_16x8x16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    struct Lane {
        float *d;
        const unsigned *a, *b;
    } lane{d, a, b};
    shim::warp("mma", __LINE__, &lane, [](void *const *slots) {
        auto lanes = reinterpret_cast<Lane *const *>(slots);
        float a[16][16], b[16][8];
        for (int lane = 0; lane < 32; lane++) {
            int group = lane / 4, pair = lane % 4 * 2;
            for (int half = 0; half < 2; half++) {
                for (int i = 0; i < 4; i++) {
                    a[group + i % 2 * 8][pair + i / 2 * 8 + half] = shim_half<T>(lanes[lane]->a[i], half);
                }
                for (int i = 0; i < 2; i++) b[pair + i * 8 + half][group] = shim_half<T>(lanes[lane]->b[i], half);
            }
        }
        for (int lane = 0; lane < 32; lane++) {
            for (int i = 0; i < 4; i++) {
                int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
                float sum = lanes[lane]->d[i];
                for (int k = 0; k < 16; k++) sum = fmaf(a[row][k], b[k][column], sum);
                lanes[lane]->d[i] = sum;
            }
        }
    });
}

// D (16 × 8) = start + A (16 × DEPTH) · B (DEPTH × 8), signed bytes.
template <int DEPTH>
inline void mma_bytes(int (&d)[4], const unsigned (&a)[DEPTH / 8], const unsigned (&b)[DEPTH / 16], int start) {
    struct Lane {
        int *d;
        const unsigned *a, *b;
        int start;
    } lane{d, a, b, start};
    shim::warp("mma", __LINE__, &lane, [](void *const *slots) {
        auto lanes = reinterpret_cast<Lane *const *>(slots);
        int8_t a[16][DEPTH], b[8][DEPTH];
        for (int lane = 0; lane < 32; lane++) {
            int group = lane / 4, quad = lane % 4;
            for (int byte = 0; byte < 4; byte++) {
                for (int i = 0; i < DEPTH / 8; i++) {
                    a[group + i % 2 * 8][4 * quad + i / 2 * 16 + byte] = int8_t(lanes[lane]->a[i] >> (8 * byte));
                }
                for (int i = 0; i < DEPTH / 16; i++) {
                    b[group][4 * quad + 16 * i + byte] = int8_t(lanes[lane]->b[i] >> (8 * byte));
                }
            }
        }
        for (int lane = 0; lane < 32; lane++) {
            for (int i = 0; i < 4; i++) {
                int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2, sum = lanes[lane]->start;
                for (int k = 0; k < DEPTH; k++) sum += a[row][k] * b[column][k];
                lanes[lane]->d[i] = sum;
            }
        }
    });
}

struct ShimMatrices {
    unsigned *result;
    const uint16_t *row;
};
template <int COUNT, bool TRANSPOSED> inline void shim_ldmatrix(unsigned *result, const uint16_t *row) {
    ShimMatrices lane{result, row};
    shim::warp("ldmatrix", COUNT, &lane, [](void *const *slots) {
        auto lanes = reinterpret_cast<ShimMatrices *const *>(slots);
        for (int lane = 0; lane < 32; lane++) {
            for (int i = 0; i < COUNT; i++) {
                auto value = [&](int row, int column) { return unsigned(lanes[8 * i + row]->row[column]); };
                int row = lane / 4, pair = lane % 4 * 2;
                lanes[lane]->result[i] = TRANSPOSED ? value(pair, row) | value(pair + 1, row) << 16
                                                    : value(row, pair) | value(row, pair + 1) << 16;
            }
        }
    });
}
// Eight bytes of eight rows each, COUNT times: lane 8 i + r brings the address of row r of matrix i.
template <bool TRANSPOSED = false, int COUNT, class T>
inline void ldmatrix(unsigned (&result)[COUNT], const shared<T> &row) {
    static_assert(sizeof(T) == 2 && (COUNT == 1 || COUNT == 2 || COUNT == 4), "what the hardware loads");
    struct alignas(16) Row {
        uint16_t values[8];
    };
    const uint16_t *values = shim_lane() < 8 * COUNT ? cast<const Row>(row)[0].values : nullptr;
    shim_ldmatrix<COUNT, TRANSPOSED>(result, values);
}
