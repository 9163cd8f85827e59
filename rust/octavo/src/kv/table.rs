//! A sequence's blocks, in the order of its positions.

use super::BlockId;

/// Block `i` holds positions `[i · block_size, (i + 1) · block_size)`.
#[derive(Debug, Default)]
pub struct BlockTable {
    blocks: Vec<BlockId>,
    /// What each block's rent stood at when it was taken.
    rents: Vec<u64>,
}

impl BlockTable {
    /// Blocks held.
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// No block is held.
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// The blocks.
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// `block · block_size + offset` of a position.
    pub fn slot(&self, position: usize, block_size: usize) -> u32 {
        self.blocks[position / block_size].0 * block_size as u32 + (position % block_size) as u32
    }

    pub(super) fn push(&mut self, block: BlockId, rent: u64) {
        self.blocks.push(block);
        self.rents.push(rent);
    }

    pub(super) fn pop(&mut self) -> Option<(BlockId, u64)> {
        self.blocks.pop().zip(self.rents.pop())
    }
}
