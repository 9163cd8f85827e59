//! How much of a device's memory a model takes beside its weights and its KV cache, asked of the backend itself over a device
//! that only counts. So nothing is forgotten, and nothing is taken later.

use octavo_kernels::cuda::driver::PAGE_BYTES;
use octavo_kernels::cuda::{CudaBackend, Device};
use octavo_kernels::{CacheDtype, Result, StepLimits};

use crate::kv::KvLayout;
use crate::model::decoder::rehearse;
use crate::model::{DecoderSpec, LayerGroups};

/// The largest steps of an engine whose sequences have up to `max_model_len` tokens in blocks of that layout.
pub fn step_limits(
    max_num_batched_tokens: usize,
    max_num_seqs: usize,
    layout: &KvLayout,
    max_model_len: usize,
) -> StepLimits {
    StepLimits {
        rows: max_num_batched_tokens,
        segments: max_num_seqs,
        groups: layout.groups(),
        table_entries: layout.entries(max_model_len),
    }
}

/// What the backend takes: a step's input, activations, attention's splits, what drawing tokens needs, the blocks of the
/// cache that are no sequence's, and what is left over of its last page.
pub fn device_bytes(
    spec: &DecoderSpec,
    (max_num_batched_tokens, max_num_seqs): (usize, usize),
    (block_size, dtype): (usize, CacheDtype),
    max_model_len: usize,
) -> Result<u64> {
    let groups = LayerGroups::new(spec, max_model_len);
    let layout = KvLayout { block_size, windows: groups.windows.clone() };
    let (device, count) = Device::null();
    let limits = step_limits(max_num_batched_tokens, max_num_seqs, &layout, max_model_len);
    let mut backend = CudaBackend::open(device, limits)?;
    let cache = groups.cache_shape(spec, 0, block_size, dtype);
    rehearse(&mut backend, spec, cache, max_num_batched_tokens, || count.held_bytes() + PAGE_BYTES)
}
