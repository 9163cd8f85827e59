//! What lies on the device: weights' companions, activations, the KV cache, and where rows go.

use crate::cuda::device::Memory;
use crate::cuda::driver::Address;
use crate::{CacheLayer, CacheShape, Heads, RopeStyle};

/// A vector of f32.
pub struct Vector {
    pub(super) memory: Memory,
    pub(super) len: usize,
}

/// `(rows, width)` of f32.
pub struct Buffer {
    pub(super) memory: Memory,
    pub(super) width: usize,
}

/// The KV cache: `[layer][block][k|v][kv_head][block_size][head_dim]`, after the shape's blocks with one that is nobody's,
/// and with spare ones.
pub struct Cache {
    pub(super) memory: Memory,
    pub(super) shape: CacheShape,
    /// All of them.
    pub(super) blocks: usize,
}

/// The number of a registered rotary embedding.
#[derive(Clone, Copy, Debug)]
pub struct Rope(pub(super) usize);

/// A rotary embedding, and its angles for the step's rows.
pub(super) struct RopeTable {
    pub(super) inv_freq: Memory,
    /// `(rows, [cos | sin])`.
    pub(super) angles: Memory,
    pub(super) pairs: usize,
    pub(super) scale: f32,
    pub(super) style: RopeStyle,
}

/// Where a step's rows go in a mixture of experts; what each array holds is said in [`crate::routing`].
pub struct Routing {
    pub(super) experts: usize,
    pub(super) per_row: usize,
    /// Of the step that runs.
    pub(super) rows: usize,
    pub(super) most_rows: usize,
    /// `(rows, per_row)`: expert, weight and slot of every choice.
    pub(super) experts_of: Memory,
    pub(super) weights_of: Memory,
    pub(super) slots: Memory,
    pub(super) slot_rows: Memory,
    pub(super) first_slots: Memory,
}

impl Buffer {
    /// Where it begins. Panics unless it holds `(rows, width)`.
    pub(super) fn rows(&self, rows: usize, width: usize) -> Address {
        assert!(4 * rows * width <= self.memory.bytes(), "{rows} × {width} of {} bytes", self.memory.bytes());
        self.memory.at()
    }
}

impl Vector {
    /// Where it begins. Panics unless it has `len` values.
    pub(super) fn of(&self, len: usize) -> Address {
        assert_eq!(self.len, len);
        self.memory.at()
    }
}

impl Cache {
    /// Where a layer begins.
    pub(super) fn layer(&self, place: CacheLayer) -> Address {
        let layer_bytes = self.blocks() * self.shape.block_bytes() / self.shape.layers;
        assert!(place.layer < self.shape.layers, "{place:?} of {:?}", self.shape);
        self.memory.offset(place.layer * layer_bytes)
    }
    /// With nobody's and spare ones.
    pub(super) fn blocks(&self) -> usize {
        self.blocks
    }
    pub(super) fn check(&self, heads: Heads) {
        let shape = self.shape;
        assert!(heads.kv == shape.kv_heads && heads.head_dim == shape.head_dim, "{heads:?} over {shape:?}");
    }
}
