// The tokens that the step before has drawn become the ids of the step that follows, before the host has seen them.
#include "draws.cuh"

// ids (rows): where the highest bit is set, the rest says which draw's token it is. A thread takes a row.
KERNEL(take_drawn, 256, global<u32> ids, global<const u32> drawn, int rows) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows || !(ids[row] >> 31)) return;
    u32 token = drawn[(ids[row] & 0x7fffffff) * DRAWN_WORDS + TOKEN];
    ids[row] = token == NONE ? 0 : token; // none was drawn: nobody asks what follows
}
