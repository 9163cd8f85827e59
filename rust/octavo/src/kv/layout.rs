//! How positions lie in blocks, and how many blocks that takes.

/// What the cache's bookkeeping knows of a model: sizes, and how far back its layers see.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvLayout {
    /// Positions in a block.
    pub block_size: usize,
    /// For each group of layers how many positions they see, the row's own included; `None`: all. A sequence has blocks of
    /// its own in every group.
    pub windows: Vec<Option<usize>>,
}

impl KvLayout {
    /// One group of layers that see everything.
    pub fn new(block_size: usize) -> Self {
        Self { block_size, windows: vec![None] }
    }

    /// Groups of layers.
    pub fn groups(&self) -> usize {
        self.windows.len()
    }

    /// Entries of a block table for `tokens`, in every group.
    pub fn entries(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.block_size)
    }

    /// How many of the first blocks no row from position `computed` on sees, through this window.
    pub fn outside(&self, window: Option<usize>, computed: usize) -> usize {
        window.map_or(0, |window| (computed + 1).saturating_sub(window) / self.block_size)
    }

    /// Blocks, over all groups, with which a sequence of `tokens` gets to its end. Between two steps it holds no more: what
    /// a window covers is at most one block more than would hold it, and the block that is being written is among them.
    pub fn blocks_for(&self, tokens: usize) -> usize {
        let entries = self.entries(tokens);
        let seen = |window: &Option<usize>| match window {
            Some(window) => entries.min((window - 1).div_ceil(self.block_size) + 1),
            None => entries,
        };
        self.windows.iter().map(seen).sum()
    }

    /// The longest sequence that gets to its end with `blocks` blocks, if it is no longer than `most`.
    pub fn longest(&self, blocks: usize, most: usize) -> usize {
        let (mut fits, mut too_long) = (0, most + 1);
        while too_long - fits > 1 {
            let middle = fits + (too_long - fits) / 2;
            if self.blocks_for(middle) <= blocks { fits = middle } else { too_long = middle }
        }
        fits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_bounds_what_a_sequence_holds() {
        for (block_size, window) in [(16, 1), (16, 2), (16, 16), (16, 17), (16, 18), (4, 7), (1, 3), (16, 4096)] {
            let layout = KvLayout { block_size, windows: vec![Some(window), None] };
            let mut most = 0;
            for computed in 0..3 * (window + block_size) {
                let outside = layout.outside(Some(window), computed);
                // The next row's window begins in the first block that is kept.
                let first_seen = (computed + 1).saturating_sub(window);
                assert!((outside * block_size..(outside + 1) * block_size).contains(&first_seen));
                // Held once the next row is written.
                let held = layout.entries(computed + 1) - outside;
                assert!(
                    held + layout.entries(computed + 1) <= layout.blocks_for(computed + 1),
                    "{layout:?} {computed}"
                );
                most = most.max(held);
            }
            assert_eq!(most, (window - 1).div_ceil(block_size) + 1, "{layout:?}: the bound is reached");
        }
    }

    #[test]
    fn the_longest_is_the_longest() {
        let layout = KvLayout { block_size: 4, windows: vec![Some(6), None, Some(6)] };
        for blocks in 0..40 {
            let longest = layout.longest(blocks, 100);
            assert!(layout.blocks_for(longest) <= blocks && longest <= 100);
            assert!(longest == 100 || layout.blocks_for(longest + 1) > blocks);
        }
        let local = KvLayout { block_size: 4, windows: vec![Some(6)] };
        assert_eq!([local.longest(2, 1000), local.longest(3, 1000)], [8, 1000]);
    }
}
