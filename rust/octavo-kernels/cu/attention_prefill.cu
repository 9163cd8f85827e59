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

// What does not change from one run of rows to the next, apart from parameters as in `attention_decode.cu`.
struct Task {
    global<float> out;
    global<const float> qkv;
    int query_heads, kv_heads, head_dim;
    float scale;
    int window;
    float soft_cap;
};

// A run of rows of one sequence, as one warp has it. It lies in shared memory: registers are for sums.
struct Run {
    Pages pages;
    Seen all, any;                       // what some row of the run sees, and some row of the warp
    int row, position, rows;             // the warp's first row, its position, and how many; there may be none
    int first_head, heads;               // of the tile
};

// Fetches the unit from `start` on, with zeroes for what nobody sees and after the last component: every warp a part of a
// run of 16 positions, which lies in one piece.
template <class T, int CHUNKS, bool WHOLE>
__device__ __forceinline__ void fetch(Staged<T, CHUNKS> to, shared<const Run> run, int start) {
    constexpr int RUNS = UNIT<CHUNKS> / 16, LINES = 16 / (WARPS / (2 * RUNS));
    constexpr int BYTES = WHOLE || sizeof(T) == 2 ? 16 : 8; // of a copy: what divides a row
    constexpr int COPIES = to.LINE / BYTES;
    int thread = afresh(threadIdx.x), warp = thread / WARP, lane = thread % WARP;
    int is_value = warp % 2, part = warp / 2 % RUNS, first = warp / (2 * RUNS) * LINES;
    int position = start + 16 * part, line_bytes = is_value ? to.VALUE_LINE : to.KEY_LINE;
    shared<u8> lines = to.begin + (is_value * to.VALUES + 16 * part * line_bytes);
    Pages pages = run[0].pages;
    Seen all = run[0].all;
    global<const u8> from = pages.at(position, all) + is_value * pages.to_values;
#pragma unroll
    for (int i = 0; i < LINES * COPIES; i += WARP) {
        int line = first + (i + lane) / COPIES;
        u32 byte = (i + lane) % COPIES * BYTES;
        bool seen = u32(position + line - all.first) < u32(all.end - all.first);
        copy_async<BYTES>(lines + (line * line_bytes + byte), from + (line * pages.row_bytes + byte),
                          seen && (WHOLE || byte < pages.row_bytes));
    }
}

// Merges a split into the results of the warp's rows: those of the splits before lie in `out`, but for their maxima and
// totals. `only`: there are none before; `last`: none follow.
template <int CHUNKS>
__device__ __forceinline__ void merge_split(const Task &task, const Tile<CHUNKS> &tile, shared<const Run> run,
                                            shared<float2> splits, bool only, bool last) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int pair = afresh(threadIdx.x) % WARP / 4 + 8 * half, row = pair / run[0].heads;
        if (row >= run[0].rows) continue;
        float2 split = splits[half];
        float keep, add;
        merge(split.x, split.y, tile.most[half], tile.total[half], keep, add);
        splits[half] = split;
        float share = last ? 1.0f / split.y : 1.0f;
        auto of = [&](float sum, float before) { return fmaf(sum, add, before * keep) * share; };
        int head = run[0].first_head + pair % run[0].heads;
        global<float> place = task.out + (size_t(run[0].row + row) * task.query_heads + head) * task.head_dim;
        auto put = [&](int component, float4 s, float4 b) {
            store(place + component, float4{of(s.x, b.x), of(s.y, b.y), of(s.z, b.z), of(s.w, b.w)});
        };
        // Apart, so that loads go out together.
        if (only) {
            for_components<CHUNKS>(tile, half, task.head_dim, [&](int c, float4 sums) { put(c, sums, float4{}); });
        } else {
            for_components<CHUNKS>(tile, half, task.head_dim,
                                   [&](int c, float4 sums) { put(c, sums, load<float4>(place + c)); });
        }
    }
}

// `run`: the warp's own.
template <class T, int CHUNKS, bool WHOLE>
__device__ __forceinline__ void attend(const Task &task, shared<const Run> run) {
    constexpr int POSITIONS = UNIT<CHUNKS>;
    DYNAMIC_SHARED(bytes); // a warp's queries for each, then two units
    SHARED(float2, all_splits, 2 * WARPS *WARP); // every lane's own: maximum and total of the splits before
    shared<float2> splits = all_splits + 2 * threadIdx.x;
    shared<uint4> queries = cast<uint4>(bytes) + threadIdx.x / WARP * QUERIES<CHUNKS>;
    shared<u8> units = bytes + 16 * WARPS * QUERIES<CHUNKS>;
    auto stage = [&](int start) { return Staged<T, CHUNKS>{units + start / POSITIONS % 2 * Staged<T, CHUNKS>::BYTES}; };

    int rows = run[0].rows;
    Tile<CHUNKS> tile;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        // Of no row: any.
        int pair = threadIdx.x % WARP / 4 + 8 * half, row = max(min(pair / run[0].heads, rows - 1), 0);
        int head = run[0].first_head + pair % run[0].heads;
        tile.ends[half] = run[0].position + row + 1;
        splits[half] = {-INFINITY, 0.0f};
        size_t at = (size_t(run[0].row + row) * (task.query_heads + 2 * task.kv_heads) + head) * task.head_dim;
        if (rows > 0) put_query<T, CHUNKS>(queries, task.qkv + at, half, task.head_dim);
    }
    tile.clear();
    int start = run[0].all.first / POSITIONS * POSITIONS;
    fetch<T, CHUNKS, WHOLE>(stage(start), run, start);
    copy_async_commit();
    for (; start < run[0].all.end; start += POSITIONS) {
        int end = start + POSITIONS;
        copy_async_wait<0>();
        __syncthreads();
        if (end < run[0].all.end) fetch<T, CHUNKS, WHOLE>(stage(end), run, end);
        copy_async_commit();
        Seen any = run[0].any;
        if (start >= any.end || end <= any.first) continue;
        add_unit<T, CHUNKS>(tile, queries, stage(start), start, task.scale, task.window, task.soft_cap);
        bool last = end >= any.end;
        if (!last && end % KV_SPLIT != 0) continue;
        merge_split<CHUNKS>(task, tile, run, splits, start / KV_SPLIT == any.first / KV_SPLIT, last);
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
    SHARED(Run, runs, WARPS);
    if constexpr (WHOLE) head_dim = CHUNK * CHUNKS;
    // Nothing but the next row to look at is kept while a run is worked on.
    for (int next = 0;;) {
        int warp = afresh(threadIdx.x) / WARP, lane = afresh(threadIdx.x) % WARP, tile = afresh(blockIdx.y);
        int heads = query_heads / kv_heads, kv_head = tile % kv_heads, head = tile / kv_heads * PAIRS;
        int heads_here = min(heads - head, PAIRS), warp_rows = PAIRS / heads_here, most_rows = WARPS * warp_rows;
        // The last first: they see most.
        int first = (gridDim.x - 1 - afresh(blockIdx.x)) * most_rows, end = min(first + most_rows, rows);
        auto goes_on = [&](int row) {
            return row > 0 && positions[row] % most_rows != 0 && follows(positions, row_tables, row);
        };
        int row = first + next;
        if (row >= end) return;
        unsigned starts = __ballot_sync(FULL_WARP, row + lane < end && !goes_on(row + lane));
        next += starts ? __ffs(starts) - 1 : WARP;
        if (!starts) continue;
        row = first + next;
        int here = 1, more = WARP;
        for (; more == WARP; here += more) {
            unsigned ends = __ballot_sync(FULL_WARP, row + here + lane >= rows || !goes_on(row + here + lane));
            more = ends ? __ffs(ends) - 1 : WARP;
        }
        next += here;
        if (is_alone(positions, row_tables, row, rows)) continue; // decode's
        __syncthreads();                                          // of those that read the last run and its units
        if (lane == 0) {
            int position = positions[row], place = position / most_rows * most_rows + warp * warp_rows;
            int from = max(place, position), count = min(place + warp_rows, position + here) - from;
            Seen all = {seen_from(position, window).first, position + here}, none = {0, 0};
            Seen any = {seen_from(from, window).first, from + count};
            runs[warp] = Run{pages_of<T>(layer, tables + row_tables[row], kv_head, kv_heads, head_dim, block_size),
                             all,
                             count > 0 ? any : none,
                             row + from - position,
                             from,
                             max(count, 0),
                             kv_head * heads + head,
                             heads_here};
        }
        __syncwarp();
        attend<T, CHUNKS, WHOLE>({out, qkv, query_heads, kv_heads, head_dim, scale, window, soft_cap}, runs + warp);
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
