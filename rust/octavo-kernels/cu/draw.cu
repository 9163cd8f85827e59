// A token from a row of logits: temperature, min-p, top-k, top-p and the pick among what they keep, as `octavo::sample`
// defines them, to the bit. A block takes a row. Every filter keeps the likeliest tokens down to a border, which is found by
// selection; weights are integers, so that no sum depends on its order. Bound by memory: a row is read once for the largest,
// twice more for a pick, and three times for each of top-k and top-p; it lies in the cache by then.
#include "draws.cuh"
#include "select.cuh"

// drawn (rows, DRAWN_WORDS) of x (rows, width), or of `adjusted` where a row's logits were changed.
KERNEL(draw, 1024, global<u32> drawn, global<const float> x, global<const float> adjusted, global<const u32> draws,
       int width) {
    SHARED(u64, bins, SELECT_BINS);
    SHARED(u64, scratch, WARP);
    SHARED(float, values, WARP);
    SHARED(u32, indices, WARP);
    global<const u32> draw = draws + blockIdx.x * DRAW_WORDS;
    global<u32> out = drawn + blockIdx.x * DRAWN_WORDS;
    global<const float> raw = x + size_t(blockIdx.x) * width;
    global<const float> logits = draw[CHANGED] ? adjusted + size_t(blockIdx.x) * width : raw;

    // The largest, and the first that is no logit: neither NaN nor +inf is one.
    Found best = {-INFINITY, NONE}, bad = {-1.0f, NONE};
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        if (!(raw[i] < INFINITY)) bad.meet(0.0f, i);
        best.meet(logits[i], i);
    }
    bad.meet_in_block(values, indices);
    best.meet_in_block(values, indices);
    bool none = bad.index != NONE || best.value == -INFINITY;
    if (threadIdx.x == 0) {
        out[BAD] = bad.index + 1; // NONE + 1 is 0
        out[BAD_LOGIT] = bad.index != NONE ? __float_as_uint(raw[bad.index]) : 0;
        out[TOKEN] = none ? NONE : best.index;
    }
    float temperature = __uint_as_float(draw[TEMPERATURE]);
    if (none || temperature == 0.0f) return;

    // What is below the floor is not drawn. The least f32 is the floor at least, so -inf never is.
    float most = best.value, floor = float(double(most) + double_at(draw + MIN_P));
    floor = fmaxf(floor, -3.4028234663852886e38f);
    u32 top_k = draw[TOP_K];
    if (top_k > 0 && top_k < u32(width)) {
        auto one = [&](int, float logit) { return u64(logit > -INFINITY); };
        auto enough = [&](u64 count) { return count >= top_k; };
        floor = fmaxf(floor, select(logits, width, one, enough, bins, scratch).value);
    }
    auto units = [&](float logit) { return logit >= floor ? units_of(weight_of((logit - most) / temperature)) : 0; };
    u64 sum = 0;
    for (int i = threadIdx.x; i < width; i += blockDim.x) sum += units(logits[i]);
    u64 total = block_sum(sum, scratch);

    // The last one that top-p keeps.
    float border = floor;
    int last = width - 1;
    float top_p = __uint_as_float(draw[TOP_P]);
    if (top_p < 1.0f) {
        auto reaches = [&](u64 sum) { return float(double(sum) / double(total)) >= top_p; };
        Border cut = select(logits, width, [&](int, float logit) { return units(logit); }, reaches, bins, scratch);
        border = cut.value;
        // Of equals the first ones, as many as are needed.
        u64 each = units(border), equals = cut.equal / each, fewest = 1, enough = equals;
        while (fewest < enough) {
            u64 middle = (fewest + enough) / 2;
            if (reaches(cut.above + middle * each)) enough = middle;
            else fewest = middle + 1;
        }
        if (enough < equals) {
            last = locate(width, [&](int i) { return u64(logits[i] == border); }, enough, scratch);
        }
        total = cut.above + enough * each;
    }

    auto kept = [&](int i) {
        float logit = logits[i];
        return logit > border || (logit == border && i <= last) ? units(logit) : 0;
    };
    u64 need = u64(double_at(draw + COIN) * double(total)) + 1;
    int token = locate(width, kept, need < total ? need : total, scratch);
    if (threadIdx.x == 0) out[TOKEN] = token;
}
