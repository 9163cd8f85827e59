// Mixtures of experts: where rows go, and how what they became is summed. All of it stays on the device, so that nobody
// waits for it. `src/routing.rs` says what slots are.
#include "common.cuh"

// The best `per_row` of a row's logits (rows, experts), best first and the smaller index first among equals, into
// `experts_of` and `weights_of` (rows, per_row). A thread takes a row: the plain form.
KERNEL(route, 128, global<u32> experts_of, global<float> weights_of, global<const float> logits, int rows, int experts,
       int per_row, int renormalise) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    global<const float> of_row = logits + size_t(row) * experts;
    global<u32> chosen = experts_of + size_t(row) * per_row;
    global<float> weights = weights_of + size_t(row) * per_row;
    for (int i = 0; i < per_row; i++) {
        int best = -1;
        for (int expert = 0; expert < experts; expert++) {
            bool free = true;
            for (int j = 0; j < i; j++) free = free && int(chosen[j]) != expert;
            if (free && (best < 0 || of_row[expert] > of_row[best])) best = expert;
        }
        chosen[i] = best;
    }
    float most = -INFINITY, total = 0.0f, kept = 0.0f;
    for (int expert = 0; expert < experts; expert++) most = fmaxf(most, of_row[expert]);
    for (int expert = 0; expert < experts; expert++) total += expf(of_row[expert] - most);
    for (int i = 0; i < per_row; i++) {
        weights[i] = expf(of_row[chosen[i]] - most) / total;
        kept += weights[i];
    }
    for (int i = 0; renormalise && i < per_row; i++) weights[i] /= kept;
}

// Gives each of `choices` choices its slot: slots count the choices by expert, then by row. One block; a thread counts for
// every 256th expert: the plain form.
KERNEL(sort_choices, 256, global<u32> slots, global<u32> slot_rows, global<u32> first_slots,
       global<const u32> experts_of, int choices, int experts, int per_row) {
    for (int expert = threadIdx.x; expert < experts; expert += blockDim.x) {
        u32 count = 0;
        for (int i = 0; i < choices; i++) count += int(experts_of[i]) == expert;
        first_slots[expert + 1] = count;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        first_slots[0] = 0;
        for (int expert = 0; expert < experts; expert++) first_slots[expert + 1] += first_slots[expert];
    }
    __syncthreads();
    for (int expert = threadIdx.x; expert < experts; expert += blockDim.x) {
        u32 next = first_slots[expert];
        for (int i = 0; i < choices; i++) {
            if (int(experts_of[i]) != expert) continue;
            slots[i] = next;
            slot_rows[next++] = i / per_row;
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
