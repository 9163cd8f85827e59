//! Which layers share block tables.
//!
//! A block of the KV cache holds some positions of one sequence for one group of layers. Layers with a sliding window
//! need fewer positions than those that see everything, so the two go into different groups, and the former give their
//! blocks back when these have left the window. All groups draw on one pool of equal blocks; so they have equally many
//! layers, as nearly as that goes, and a model of local and global layers has several groups of the commoner kind.

use octavo_kernels::{CacheDtype, CacheLayer, CacheShape};

use super::spec::DecoderSpec;

/// How much of the cache may lie unused in the places that the last group of a kind leaves empty: one part in this many.
const WASTE: usize = 8;

/// The groups of a decoder's layers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerGroups {
    /// For each group how many positions its layers see; `None`: all.
    pub windows: Vec<Option<usize>>,
    /// For each layer of the decoder, first to last, its place.
    pub places: Vec<CacheLayer>,
    /// Layers of the largest group.
    pub depth: usize,
}

impl LayerGroups {
    /// For sequences of up to `longest` tokens: a window that holds all of them is none.
    pub fn new(spec: &DecoderSpec, longest: usize) -> Self {
        let window = |layer: usize| spec.layers[layer].window.filter(|&window| window < longest);
        let mut kinds: Vec<(Option<usize>, Vec<usize>)> = Vec::new();
        for layer in 0..spec.layers.len() {
            match kinds.iter_mut().find(|kind| kind.0 == window(layer)) {
                Some(kind) => kind.1.push(layer),
                None => kinds.push((window(layer), vec![layer])),
            }
        }
        let depth = depth(&kinds.iter().map(|kind| kind.1.len()).collect::<Vec<_>>());
        let mut places = vec![CacheLayer { group: 0, layer: 0 }; spec.layers.len()];
        let mut windows = Vec::new();
        for (window, layers) in kinds {
            for group in layers.chunks(depth) {
                for (layer, &of_decoder) in group.iter().enumerate() {
                    places[of_decoder] = CacheLayer { group: windows.len(), layer };
                }
                windows.push(window);
            }
        }
        Self { windows, places, depth }
    }

    /// The KV cache of `spec` in these groups, with `blocks` blocks.
    pub fn cache_shape(&self, spec: &DecoderSpec, blocks: usize, block_size: usize, dtype: CacheDtype) -> CacheShape {
        let (kv_heads, head_dim) = (spec.heads.kv, spec.heads.head_dim);
        CacheShape { layers: self.depth, blocks, block_size, kv_heads, head_dim, dtype }
    }
}

/// The largest group that wastes little. Groups of one layer waste nothing.
fn depth(counts: &[usize]) -> usize {
    let layers: usize = counts.iter().sum();
    let places = |depth: usize| counts.iter().map(|count| count.next_multiple_of(depth)).sum::<usize>();
    let smallest = counts.iter().copied().min().unwrap_or(1).max(1);
    (1..=smallest).rev().find(|&depth| (places(depth) - layers) * WASTE <= layers).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_few_and_waste_little() {
        // One kind of layers; Gemma 2; Gemma 3 of 270M, 1B, 4B, 12B and 27B; one global layer among many.
        for (counts, expected) in [
            (&[30][..], 30),
            (&[13, 13], 13),
            (&[15, 3], 3),
            (&[22, 4], 4),
            (&[29, 5], 5),
            (&[40, 8], 8),
            (&[52, 10], 6),
            (&[31, 1], 1),
        ] {
            assert_eq!(depth(counts), expected, "{counts:?}");
        }
    }
}
