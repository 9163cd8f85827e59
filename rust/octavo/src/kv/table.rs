//! A sequence's blocks, in the order of its positions.

use octavo_kernels::prefetch::prefetch;

use super::BlockId;

/// In every group of layers, block `i` holds positions `[i · block_size, (i + 1) · block_size)`. Where a sliding window has
/// left a block behind, [`BlockId::NONE`] stands in its place.
#[derive(Clone, Debug)]
pub struct BlockTable {
    groups: Vec<Group>,
}

#[derive(Clone, Debug, Default)]
struct Group {
    blocks: Vec<BlockId>,
    /// What each block's rent stood at when it was taken.
    rents: Vec<u64>,
    /// How many of the first blocks were given back.
    outside: usize,
}

impl BlockTable {
    pub(super) fn new(groups: usize) -> Self {
        Self { groups: vec![Group::default(); groups] }
    }

    /// Asks the memory for the groups.
    pub fn prefetch_groups(&self) {
        prefetch(&self.groups[..]);
    }

    /// Asks the memory for their blocks.
    pub fn prefetch_blocks(&self) {
        for group in &self.groups {
            prefetch(&group.blocks[..]);
        }
    }

    /// Groups of layers.
    pub(super) fn groups(&self) -> usize {
        self.groups.len()
    }

    /// Entries in each group.
    pub fn len(&self) -> usize {
        self.groups[0].blocks.len()
    }

    /// No block is held.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Blocks held, over all groups.
    pub fn held(&self) -> usize {
        self.groups.iter().map(|group| group.blocks.len() - group.outside).sum()
    }

    /// The blocks of a group.
    pub fn blocks(&self, group: usize) -> &[BlockId] {
        &self.groups[group].blocks
    }

    /// How many of a group's first blocks were given back.
    pub fn outside(&self, group: usize) -> usize {
        self.groups[group].outside
    }

    /// `block · block_size + offset` of a position.
    pub fn slot(&self, group: usize, position: usize, block_size: usize) -> u32 {
        self.groups[group].blocks[position / block_size].0 * block_size as u32 + (position % block_size) as u32
    }

    pub(super) fn push(&mut self, group: usize, block: BlockId, rent: u64) {
        let group = &mut self.groups[group];
        group.outside += usize::from(block == BlockId::NONE);
        assert!(block != BlockId::NONE || group.outside > group.blocks.len(), "what is outside comes first");
        group.blocks.push(block);
        group.rents.push(rent);
    }

    /// The blocks that a group holds, each with what its rent stood at.
    pub(super) fn held_mut(&mut self, group: usize) -> impl Iterator<Item = (BlockId, &mut u64)> {
        let group = &mut self.groups[group];
        group.blocks.iter().copied().zip(&mut group.rents).skip(group.outside)
    }

    /// The last block of a group, if any is held.
    pub(super) fn pop(&mut self, group: usize) -> Option<(BlockId, u64)> {
        let group = &mut self.groups[group];
        if group.outside == group.blocks.len() {
            group.blocks.clear();
            group.rents.clear();
            group.outside = 0;
        }
        group.blocks.pop().zip(group.rents.pop())
    }

    /// The first block that a group still holds; from now on it is outside.
    pub(super) fn leave_behind(&mut self, group: usize) -> (BlockId, u64) {
        let group = &mut self.groups[group];
        let index = group.outside;
        group.outside += 1;
        (std::mem::replace(&mut group.blocks[index], BlockId::NONE), group.rents[index])
    }
}
