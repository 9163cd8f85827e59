// Where a mixture's products are made: slots (rows that went to an expert) are sorted by expert, those of expert e being
// first_slots[e] … first_slots[e + 1], and go in tiles that begin at an expert's first. How many slots an expert has is
// known on the device alone, so a launch has as many blocks as there can be tiles, and each finds its own.
#pragma once
#include "common.cuh"

struct ExpertTile {
    int expert; // counted from the first; -1: there is no such tile
    int slot, rows;
};

// Tile number `number`, of up to `most_rows` slots each, of `experts` experts from `first_expert` on. All lanes come.
__device__ __forceinline__ ExpertTile find_tile(global<const u32> first_slots, int first_expert, int experts,
                                                int most_rows, int number) {
    int lane = threadIdx.x % WARP;
    for (int base = 0; base < experts; base += WARP) {
        int slot = 0, end = 0;
        if (base + lane < experts) {
            slot = first_slots[first_expert + base + lane];
            end = first_slots[first_expert + base + lane + 1];
        }
        int tiles = ceil_div(end - slot, most_rows), to_here = tiles;
        for (int other = 1; other < WARP; other *= 2) {
            int before = __shfl_up_sync(FULL_WARP, to_here, other);
            if (lane >= other) to_here += before;
        }
        unsigned found = __ballot_sync(FULL_WARP, number < to_here);
        slot += (number - to_here + tiles) * most_rows;
        if (found) {
            int source = __ffs(found) - 1;
            int rows = __shfl_sync(FULL_WARP, min(end - slot, most_rows), source);
            return {base + source, __shfl_sync(FULL_WARP, slot, source), rows};
        }
        number -= __shfl_sync(FULL_WARP, to_here, WARP - 1);
    }
    return {-1, 0, 0};
}
