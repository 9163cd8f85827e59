// Who touched which byte of a block's shared memory, and since which barrier: two threads of which one writes need a barrier
// between them, whatever the order in which they happened to run here. Barriers are `__syncthreads`, and `__syncwarp` among
// the lanes of a warp; shuffles and votes promise nothing about memory. Part of `shim.cpp`.
#pragma once
#include "shim.hpp"

#include <algorithm>
#include <cstdio>
#include <vector>

namespace shim {

class Races {
    // Of a byte, who wrote it last and who read it: since when (how many barriers there have been), and who.
    using Tag = uint32_t;
    static constexpr unsigned WHO_BITS = 12;
    enum Who : Tag { LANES = 1024, ATOMICS = LANES + 32, WARPS, NOBODY }; // from LANES on: several of a warp's
    static constexpr Tag COPY = ~Tag(0);                                  // under way, until it is waited for

    std::vector<Tag> written, read;
    const char *begin = nullptr;
    Tag barriers = 1, since_block = 1, since_warp[32] = {};

    static Tag who(Tag tag) { return tag & ((1 << WHO_BITS) - 1); }
    static Tag warp_of(Tag who) { return who < LANES ? who / 32 : who < ATOMICS ? who - LANES : NOBODY; }
    Tag tag(Tag who) const { return barriers << WHO_BITS | who; }
    // Whether what left `tag` is over for what `thread` does now.
    bool is_before(Tag tag, Tag thread) const {
        if (tag == COPY) return false;
        Tag since = tag >> WHO_BITS, by = who(tag);
        return since < since_block || by == thread || (warp_of(by) == thread / 32 && since < since_warp[thread / 32]);
    }

  public:
    void watch(const char *from, size_t bytes) { begin = from, written.assign(bytes, 0), read.assign(bytes, 0); }
    // All threads of the block have met; a block begins.
    void at_barrier() {
        if (++barriers >> (32 - WHO_BITS - 1)) forget(), barriers = 1, std::memset(since_warp, 0, sizeof since_warp);
        since_block = barriers;
    }
    void at_warp_barrier(unsigned warp) { since_warp[warp] = ++barriers; }
    void forget() { watch(begin, written.size()); }

    // What `thread` does to `bytes` bytes. Those that somebody else is not done with are `found`, and who left what tag.
    template <class Found> void touch(Touch kind, Tag thread, const void *at, size_t bytes, Found found) {
        size_t first = static_cast<const char *>(at) - begin;
        // Sizes that are known make the loops short: this is most of what the shim does.
        if (bytes == 16) touch(kind, thread, first, std::integral_constant<size_t, 16>(), found);
        else if (bytes == 4) touch(kind, thread, first, std::integral_constant<size_t, 4>(), found);
        else touch(kind, thread, first, bytes, found);
    }
    // Who left a tag, in words.
    static const char *words(Tag tag, char *text, size_t bytes) {
        Tag by = who(tag);
        if (tag == COPY) return "an asynchronous copy";
        if (by < LANES) snprintf(text, bytes, "thread %u", by);
        else if (by < ATOMICS) snprintf(text, bytes, "warp %u", by - LANES);
        else snprintf(text, bytes, by == ATOMICS ? "an atomic operation" : "more than one warp");
        return text;
    }

  private:
    template <class Size, class Found> void touch(Touch kind, Tag thread, size_t first, Size bytes, Found found) {
        Tag *wrote = &written[first], *has_read = &read[first], mine = tag(thread), limit = since_block << WHO_BITS;
        bool is_new = kind != Touch::Copied; // else what is written here is this thread's copy
        Tag busy = 0;                        // whether anything was done here since the barrier, but by this thread
        for (size_t i = 0; i < bytes; i++) {
            busy |= (is_new & (wrote[i] >= limit) & (wrote[i] != mine)) | ((has_read[i] >= limit) & (has_read[i] != mine));
        }
        for (size_t i = 0; i < bytes && busy; i++) {
            bool both_atomic = kind == Touch::Atomic && wrote[i] != COPY && who(wrote[i]) == ATOMICS;
            if (is_new && !both_atomic && !is_before(wrote[i], thread)) found(first + i, "writes", wrote[i]);
            if (kind != Touch::Read && !is_before(has_read[i], thread)) found(first + i, "reads", has_read[i]);
            if (kind == Touch::Read) has_read[i] = joined(has_read[i], thread);
        }
        Tag left = kind == Touch::Copy ? COPY : kind == Touch::Atomic ? tag(ATOMICS) : mine;
        if (kind != Touch::Read) std::fill_n(wrote, size_t(bytes), left);
        else if (!busy) std::fill_n(has_read, size_t(bytes), mine);
    }
    // `thread` beside those that have read before.
    Tag joined(Tag before, Tag thread) const {
        Tag since = before >> WHO_BITS, by = who(before), warp = thread / 32;
        if (since < since_block || by == thread) return tag(thread);
        if (warp_of(by) != warp) return tag(WARPS);
        return tag(since < since_warp[warp] ? thread : LANES + warp);
    }
};

} // namespace shim
