// From one step to the next, on the device. A step of decoding is nearly always the one before it with every row one
// position further, so that is what becomes of it here, and only what else is different is uploaded, as a short list.
#include "draws.cuh"

// state: [own | ids (rows) | where block tables begin (rows) | positions (rows) | slots (groups, rows) | …], as
// `src/cuda/step.rs` has it: the positions and slots of the first `own` rows are one more than before. Then the words of
// changes [count | (place, word) (count)] take their places in state, or, where a place has its highest bit, in lists, and
// there are none of them left. Last, ids (rows) are what state says; where the highest bit of an id is set, the rest says
// which of the draws before gave the token.
//
// One block takes everything, since what is listed comes after what is counted. Bound by waiting for memory, a few times.
KERNEL(advance, 1024, global<u32> ids, global<u32> state, global<u32> lists, global<u32> changes,
       global<const u32> drawn, int rows, int groups) {
    global<u32> counted = state + 1 + 2 * rows;
    u32 own = state[0], count = changes[0];
    for (int i = threadIdx.x; i < (1 + groups) * rows; i += blockDim.x) {
        if (i % rows < int(own)) counted[i] += 1;
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < count; i += blockDim.x) {
        u32 place = changes[1 + 2 * i], word = changes[2 + 2 * i];
        if (place >> 31) lists[place & 0x7fffffff] = word;
        else state[place] = word;
    }
    __syncthreads();
    if (threadIdx.x == 0) changes[0] = 0;
    for (int row = threadIdx.x; row < rows; row += blockDim.x) {
        u32 id = state[1 + row];
        if (id >> 31) {
            u32 token = drawn[size_t(id & 0x7fffffff) * DRAWN_WORDS + TOKEN];
            id = token == NONE ? 0 : token; // none was drawn: nobody asks what follows
        }
        ids[row] = id;
    }
}
