// Rows on the move: embeddings, the rows that need logits, the rows that experts read. A block takes one row.
#include "formats.cuh"

// out (rows, width) = table[ids] · scale.
#define EMBED(F)                                                                                                       \
    KERNEL(embed_##F, 256, global<float> out, global<const u8> table, global<const u32> ids, int width, float scale) { \
        size_t row_bytes = size_t(width / F::LEN) * F::BYTES;                                                          \
        global<const u8> row = table + ids[blockIdx.x] * row_bytes;                                                    \
        for (int i = threadIdx.x; i < width; i += blockDim.x) {                                                        \
            out[size_t(blockIdx.x) * width + i] = weight_at<F>(row, i) * scale;                                        \
        }                                                                                                              \
    }
FOR_EVERY_FORMAT(EMBED)

// out (n, width) = x[rows], or the n rows from `first` on where `rows` is null.
KERNEL(gather, 256, global<float> out, global<const float> x, global<const u32> rows, int first, int width) {
    size_t row = rows ? rows[blockIdx.x] : first + blockIdx.x, from = row * width, to = size_t(blockIdx.x) * width;
    for (int i = threadIdx.x; i < width; i += blockDim.x) out[to + i] = x[from + i];
}
