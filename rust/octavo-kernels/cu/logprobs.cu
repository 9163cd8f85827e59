// What the log-probabilities of a drawn token and of the best ones are made of, from the logits as they were: the host takes
// the logarithms. A block takes a row; rows that want none are left alone. The sum has the order of `softmax::sum_of_weights`:
// chunks of 256 values, in each of them eight lanes of f64, then the chunks in turn. Bound by memory: a row is read seven
// times where best ones are wanted, and lies in the cache by the second.
#include "draws.cuh"
#include "select.cuh"

constexpr int CHUNK = 256, LANES = 8;

// The sum over a row of the weights of x - most; the right one in thread 0 alone. Eight threads take a chunk.
__device__ __forceinline__ double sum_of_weights(global<const float> x, int width, float most, shared<double> sums) {
    int lane = threadIdx.x % LANES, group = threadIdx.x / LANES, groups = blockDim.x / LANES;
    double total = 0.0;
    for (int first = 0; first < width; first += groups * CHUNK) {
        int begin = first + group * CHUNK, count = max(0, min(CHUNK, width - begin)), whole = count / LANES * LANES;
        double sum = 0.0;
        for (int i = lane; i < whole; i += LANES) sum += double(weight_of(x[begin + i] - most));
        sums[threadIdx.x] = sum;
        __syncthreads();
        if (lane == 0) {
            for (int i = 1; i < LANES; i++) sum += sums[threadIdx.x + i];
            double rest = 0.0;
            for (int i = whole; i < count; i++) rest += double(weight_of(x[begin + i] - most));
            sums[threadIdx.x] = sum + rest;
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            for (int i = 0; i < groups && first + i * CHUNK < width; i++) total += sums[i * LANES];
        }
        __syncthreads();
    }
    return total;
}

// drawn (rows, DRAWN_WORDS), which has tokens, gets the rest; tops (rows, MOST_TOPS) gets pairs of a token and its logit, in
// no order, of x (rows, width).
KERNEL(logprobs, 1024, global<u32> drawn, global<u32> tops, global<const float> x, global<const u32> draws, int width) {
    SHARED(u64, bins, SELECT_BINS);
    SHARED(u64, scratch, WARP);
    SHARED(double, sums, 1024);
    SHARED(float, maxima, WARP);
    SHARED(u32, count, 1);
    u32 wanted = draws[blockIdx.x * DRAW_WORDS + LOGPROBS];
    global<u32> out = drawn + blockIdx.x * DRAWN_WORDS;
    u32 token = out[TOKEN];
    if (!wanted || token == NONE) return;
    global<const float> row = x + size_t(blockIdx.x) * width;
    float most = -INFINITY, chosen = row[token];
    u64 above = 0, alive = 0;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        most = fmaxf(most, row[i]);
        above += row[i] > chosen;
        alive += row[i] > -INFINITY;
    }
    most = block_max(most, maxima);
    above = block_sum(above, scratch);
    alive = block_sum(alive, scratch);
    double total = sum_of_weights(row, width, most, sums);
    u64 best = min(u64(wanted - 1), alive);
    if (threadIdx.x == 0) {
        out[RANK] = u32(above) + 1;
        out[BEST_LOGIT] = __float_as_uint(most);
        out[LOGIT] = __float_as_uint(chosen);
        out[TOTAL] = u32(__double2loint(total));
        out[TOTAL + 1] = u32(__double2hiint(total));
        out[TOPS] = u32(best);
        count[0] = 0;
    }
    if (best == 0) return;

    auto one = [&](int, float logit) { return u64(logit > -INFINITY); };
    Border cut = select(row, width, one, [&](u64 sum) { return sum >= best; }, bins, scratch);
    int last = width - 1;
    if (cut.above + cut.equal > best) {
        // Of equals the first ones.
        last = locate(width, [&](int i) { return u64(row[i] == cut.value); }, best - cut.above, scratch);
    }
    global<u32> top = tops + size_t(blockIdx.x) * MOST_TOPS * 2;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        float logit = row[i];
        if (logit > cut.value || (logit == cut.value && i <= last)) {
            u32 place = atomicAdd(count + 0, 1u);
            top[2 * place] = i;
            top[2 * place + 1] = __float_as_uint(logit);
        }
    }
}
