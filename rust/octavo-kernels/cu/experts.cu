// Mixtures of experts: where rows go, and how what they became is summed. All of it stays on the device, so that nobody
// waits for it. `src/routing.rs` says what slots are. Bound by latency: a few short steps, one after another.
#include "select.cuh"

// The best `per_row` of a row's logits (rows, experts), best first and the smaller index first among equals, into
// `experts_of` and `weights_of` (rows, per_row). A warp takes a row: each time the best of those after the last one.
KERNEL(route, 128, global<u32> experts_of, global<float> weights_of, global<const float> logits, int rows, int experts,
       int per_row, int renormalise) {
    int lane = threadIdx.x % WARP, row = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (row >= rows) return;
    global<const float> of_row = logits + size_t(row) * experts;
    global<u32> chosen = experts_of + size_t(row) * per_row;
    global<float> weights = weights_of + size_t(row) * per_row;
    float most = -INFINITY, total = 0.0f, kept = 0.0f;
    for (int expert = lane; expert < experts; expert += WARP) most = fmaxf(most, of_row[expert]);
    most = warp_max(most);
    // In the order of experts, as the reference does.
    for (int first = 0; first < experts; first += WARP) {
        float term = first + lane < experts ? expf(of_row[first + lane] - most) : 0.0f;
        for (int i = 0; i < WARP; i++) total += __shfl_sync(FULL_WARP, term, i);
    }

    Found last = {INFINITY, 0xffffffff};
    for (int i = 0; i < per_row; i++) {
        Found best = {-INFINITY, 0xffffffff};
        for (int expert = lane; expert < experts; expert += WARP) {
            float logit = of_row[expert] > -INFINITY ? of_row[expert] : -INFINITY; // what is not a number goes last
            bool comes = logit < last.value || (logit == last.value && int(last.index) < expert);
            if (comes) best.meet(logit, expert);
        }
        best.meet_in_warp();
        float weight = expf(of_row[best.index] - most) / total;
        kept += weight;
        if (lane == 0) chosen[i] = best.index, weights[i] = weight;
        last = best;
    }
    // The lane that wrote them reads them.
    for (int i = 0; renormalise && lane == 0 && i < per_row; i++) weights[i] /= kept;
}

// Gives each of `choices` choices its slot: slots count the choices by expert, then by row. One block; a warp goes through
// all choices for one expert after another, 32 at a time.
KERNEL(sort_choices, 1024, global<u32> slots, global<u32> slot_rows, global<u32> first_slots,
       global<const u32> experts_of, int choices, int experts, int per_row) {
    int warp = threadIdx.x / WARP, warps = blockDim.x / WARP, lane = threadIdx.x % WARP;
    // Which of 32 choices are the expert's.
    auto of_expert = [&](int expert, int first) {
        return __ballot_sync(FULL_WARP, first + lane < choices && int(experts_of[first + lane]) == expert);
    };
    for (int expert = warp; expert < experts; expert += warps) {
        int count = 0;
        for (int first = 0; first < choices; first += WARP) count += __popc(of_expert(expert, first));
        if (lane == 0) first_slots[expert + 1] = count;
    }
    __syncthreads();
    if (warp == 0) {
        u32 before = 0;
        for (int first = 0; first < experts; first += WARP) {
            u64 count = first + lane < experts ? first_slots[first + lane + 1] : 0;
            u32 up_to = before + u32(warp_sum_up_to(count));
            if (first + lane < experts) first_slots[first + lane + 1] = up_to;
            before = __shfl_sync(FULL_WARP, up_to, WARP - 1);
        }
        if (lane == 0) first_slots[0] = 0;
    }
    __syncthreads();
    for (int expert = warp; expert < experts; expert += warps) {
        u32 next = first_slots[expert];
        for (int first = 0; first < choices; first += WARP) {
            unsigned found = of_expert(expert, first);
            u32 slot = next + __popc(found & ((1u << lane) - 1));
            if (found >> lane & 1) {
                slots[first + lane] = slot;
                slot_rows[slot] = (first + lane) / per_row;
            }
            next += __popc(found);
        }
    }
}

// out[row] = Σ weight · x[slot] over the row's choices, in their order. A thread computes one value; blockIdx.x is the row.
KERNEL(combine, 256, global<float> out, global<const float> x, global<const u32> slots, global<const float> weights_of,
       int width, int per_row) {
    int i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i >= width) return;
    float sum = 0.0f;
    for (int choice = 0; choice < per_row; choice++) {
        size_t at = size_t(blockIdx.x) * per_row + choice;
        sum += weights_of[at] * x[size_t(slots[at]) * width + i];
    }
    out[size_t(blockIdx.x) * width + i] = sum;
}
