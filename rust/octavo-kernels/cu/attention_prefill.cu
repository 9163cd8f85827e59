// Causal attention over a paged KV cache for rows that are not alone in their sequence: prefill. A block takes neighbouring
// rows of one sequence and up to 16 query heads of one KV head, as tiles of 16 pairs, one for each of its warps. Keys and
// values come to shared memory once for all of them, a unit at a time, the next one under way while this one is multiplied.
// How a tile is computed, and why it gives the bits that decode gives, is said in `attention16.cuh`.
//
// A block takes those tiles that begin within so many rows as it has: where its own begin is fixed by positions, so that
// long runs of rows fill whole tiles. Bound by tensor cores and exponentials.
#include "attention16.cuh"

constexpr int WARPS = 4;

// A unit in shared memory: lines of CHUNKS · 64 components of keys, then of values. Each line is longer than it need be by
// so much that lanes that read at once meet no bank twice: 32 components of neighbouring keys, and 8 of two or four
// groups of every second value.
template <class T, int CHUNKS> struct Staged {
    static constexpr int LINE = CHUNK * CHUNKS * sizeof(T), KEY_LINE = LINE + 32 * sizeof(T), VALUE_LINE = LINE + 16;
    static constexpr int VALUES = UNIT<CHUNKS> * KEY_LINE, BYTES = VALUES + UNIT<CHUNKS> * VALUE_LINE;
    shared<u8> begin;

    __device__ __forceinline__ uint4 key(int at, int component) const {
        return Cached<T>::eight(begin + (at * KEY_LINE + int(sizeof(T)) * component));
    }
    __device__ __forceinline__ uint4 value(int at, int component) const {
        return Cached<T>::eight(begin + (VALUES + at * VALUE_LINE + int(sizeof(T)) * component));
    }
};

// Fetches the unit from `start` on: every warp a part of a run of 16 positions, which lies in one piece. `all`: what some
// row of the block sees.
template <class T, int CHUNKS, bool WHOLE>
__device__ __forceinline__ void fetch(Staged<T, CHUNKS> to, const Pages<T> &pages, int start, Seen all) {
    constexpr int RUNS = UNIT<CHUNKS> / 16, LINES = 16 / (WARPS / (2 * RUNS));
    constexpr int BYTES = WHOLE || sizeof(T) == 2 ? 16 : 8; // of a copy: what divides a row
    int warp = threadIdx.x / WARP, is_value = warp % 2, run = warp / 2 % RUNS, first = warp / (2 * RUNS) * LINES;
    int row_bytes = sizeof(T) * (WHOLE ? CHUNK * CHUNKS : pages.head_dim), copies = row_bytes / BYTES;
    int position = start + 16 * run, line_bytes = is_value ? to.VALUE_LINE : to.KEY_LINE;
    shared<u8> lines = to.begin + (is_value * to.VALUES + 16 * run * line_bytes);
    bool wanted = Pages<T>::has(position, all);
    global<const u8> from = pages.at(position, all) + is_value * pages.to_values();
    for (int i = threadIdx.x % WARP; i < LINES * copies; i += WARP) {
        int line = first + i / copies, byte = i % copies * BYTES;
        copy_async<BYTES>(lines + (line * line_bytes + byte), from + line * row_bytes + byte, wanted);
    }
}

// What a block works on: rows of one sequence from `row` on, `here` of them.
struct Run {
    int row, here, position;
};

// out, qkv and the rest as in `attention_decode.cu`.
struct Task {
    global<float> out;
    global<const float> qkv;
    int query_heads, kv_heads, head_dim, first_head, heads;
    float scale;
    int window;
    float soft_cap;
};

template <class T, int CHUNKS, bool WHOLE>
__device__ __forceinline__ void attend(const Task &task, const Pages<T> &pages, Run run, int warp_rows) {
    constexpr int POSITIONS = UNIT<CHUNKS>;
    DYNAMIC_SHARED(bytes); // a warp's queries for each, then two units
    int warp = threadIdx.x / WARP, group = threadIdx.x % WARP / 4, head_dim = task.head_dim;
    shared<uint4> queries = cast<uint4>(bytes) + warp * QUERIES<CHUNKS>;
    shared<u8> units = bytes + 16 * WARPS * QUERIES<CHUNKS>;
    auto stage = [&](int number) { return Staged<T, CHUNKS>{units + number % 2 * Staged<T, CHUNKS>::BYTES}; };

    // The warp's rows; there may be none.
    int aligned = run.position / (WARPS * warp_rows) * WARPS * warp_rows + warp * warp_rows;
    int first = max(aligned, run.position), rows = min(aligned + warp_rows, run.position + run.here) - first;
    int row = run.row + first - run.position;
    Tile<CHUNKS> tile;
    auto place_of = [&](int half) { // the row from the warp's first on; of no pair: -1
        int of_row = (group + 8 * half) / task.heads;
        return of_row < rows ? of_row : -1;
    };
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int of_row = max(place_of(half), 0), head = task.first_head + (group + 8 * half) % task.heads;
        tile.ends[half] = first + of_row + 1;
        size_t at = (size_t(row + of_row) * (task.query_heads + 2 * task.kv_heads) + head) * head_dim;
        if (rows > 0) put_query<T, CHUNKS>(queries, task.qkv + at, half, head_dim);
    }

    Seen all = {seen_from(run.position, task.window).first, run.position + run.here};
    Seen any = {seen_from(first, task.window).first, first + max(rows, 0)};
    int begin = all.first / POSITIONS * POSITIONS, count = ceil_div(all.end - begin, POSITIONS);
    float most[2] = {-INFINITY, -INFINITY}, total[2] = {}; // of the splits before
    tile.clear();
    __syncthreads(); // of those that read the last run's units
    fetch<T, CHUNKS, WHOLE>(stage(0), pages, begin, all);
    copy_async_commit();
    for (int number = 0; number < count; number++) {
        int start = begin + number * POSITIONS, end = start + POSITIONS;
        copy_async_wait<0>();
        __syncthreads();
        if (number + 1 < count) fetch<T, CHUNKS, WHOLE>(stage(number + 1), pages, end, all);
        copy_async_commit();
        if (rows <= 0 || start >= any.end || end <= any.first) continue;
        add_unit<T, CHUNKS, WHOLE>(tile, queries, stage(number), start, any, head_dim, task.scale, task.window,
                                   task.soft_cap);
        bool last = end >= any.end;
        if (!last && end % KV_SPLIT != 0) continue;
        bool only = start / KV_SPLIT == any.first / KV_SPLIT;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int of_row = place_of(half), head = task.first_head + (group + 8 * half) % task.heads;
            if (of_row < 0) continue;
            float keep, add;
            merge(most[half], total[half], tile.most[half], tile.total[half], keep, add);
            float share = last ? 1.0f / total[half] : 1.0f;
            global<float> place = task.out + (size_t(row + of_row) * task.query_heads + head) * head_dim;
            for_components<CHUNKS>(head_dim, [&](int component, int n, int column) {
                float before = only ? 0.0f : place[component];
                place[component] = (before * keep + tile.sums[n][2 * half + column] * add) * share;
            });
        }
        tile.clear();
    }
    copy_async_wait<0>();
}

// Blocks: so many rows as a block has; a KV head and a tile of query heads.
template <class T, int CHUNKS, bool WHOLE>
__device__ __forceinline__ void prefill(global<float> out, global<const float> qkv, global<const u8> layer,
                                        global<const u32> positions, global<const u32> row_tables,
                                        global<const u32> tables, int rows, int query_heads, int kv_heads, int head_dim,
                                        int block_size, float scale, int window, float soft_cap) {
    if constexpr (WHOLE) head_dim = CHUNK * CHUNKS;
    int lane = threadIdx.x % WARP, heads = query_heads / kv_heads;
    int kv_head = blockIdx.y % kv_heads, head = blockIdx.y / kv_heads * PAIRS, heads_here = min(heads - head, PAIRS);
    int warp_rows = PAIRS / heads_here, most_rows = WARPS * warp_rows;
    // The last first: they see most.
    int first = (gridDim.x - 1 - blockIdx.x) * most_rows, end = min(first + most_rows, rows);
    Task task = {out, qkv, query_heads, kv_heads, head_dim, kv_head * heads + head, heads_here, scale, window, soft_cap};

    for (int from = first; from < end; from += WARP) {
        auto goes_on = [&](int row) {
            return row > 0 && positions[row] % most_rows != 0 && follows(positions, row_tables, row);
        };
        unsigned starts = __ballot_sync(FULL_WARP, from + lane < end && !goes_on(from + lane));
        for (; starts; starts &= starts - 1) {
            int row = from + __ffs(starts) - 1, here = 1, more = WARP;
            if (is_alone(positions, row_tables, row, rows)) continue; // decode's
            for (int next = row + 1; more == WARP; next += WARP, here += more) {
                unsigned ends = __ballot_sync(FULL_WARP, next + lane >= rows || !goes_on(next + lane));
                more = ends ? __ffs(ends) - 1 : WARP;
            }
            Pages<T> pages = {layer, tables + row_tables[row], kv_head, kv_heads, head_dim, block_size};
            attend<T, CHUNKS, WHOLE>(task, pages, {row, here, int(positions[row])}, warp_rows);
        }
    }
}

#define PREFILL(T, name, chunks, whole)                                                                                \
    KERNEL_WITH_BLOCKS(attention_prefill_##name, WARPS *WARP, 2, global<float> out, global<const float> qkv,           \
                       global<const u8> layer, global<const u32> positions, global<const u32> row_tables,              \
                       global<const u32> tables, int rows, int query_heads, int kv_heads, int head_dim,                \
                       int block_size, float scale, int window, float soft_cap) {                                      \
        prefill<T, chunks, whole>(out, qkv, layer, positions, row_tables, tables, rows, query_heads, kv_heads,         \
                                  head_dim, block_size, scale, window, soft_cap);                                      \
    }
FOR_EVERY_CACHE(PREFILL)
