//! Attention's launches.

use super::{Buffer, Cache, CudaBackend, of_cache};
use crate::cuda::device::{LaunchOf, Memory};
use crate::{CacheDtype, CacheLayer, Heads, KV_SPLIT, Mask, Result};

/// Rows times query heads of a tile of `attention16.cuh`, and tiles of a block of prefill.
const PAIRS: usize = 16;
const PREFILL_WARPS: usize = 4;
/// As many warps as keep a multiprocessor's memory busy, and as many as share a row's splits.
const WARPS_OF_PROCESSOR: usize = 16;
const MOST_SHARING: usize = 128;

impl CudaBackend {
    /// [`Backend::attention`].
    pub(super) fn attend(
        &mut self,
        out: &mut Buffer,
        qkv: &Buffer,
        cache: &Cache,
        place: CacheLayer,
        heads: Heads,
        mask: Mask,
    ) {
        cache.check(heads);
        for segment in &self.step.segments {
            // For its check.
            self.step.block_table(segment, place.group, cache.shape.block_size);
        }
        if cache.shape.dtype != CacheDtype::F32 && heads.head_dim.is_multiple_of(8) {
            // Nothing, unless nobody asked for room.
            let taken = self.take_partials(heads, cache.shape.block_size);
            self.device.attempt(|_| taken);
            return self.attention16(out, qkv, cache, place, heads, mask);
        }
        let rows = self.step.rows();
        self.device
            .launch(of_cache("attention", cache.shape.dtype), [rows, heads.query], 128)
            .pointer(out.rows(rows, heads.query_width()))
            .pointer(qkv.rows(rows, heads.qkv_width()))
            .pointer(cache.layer(place))
            .pointer(self.on_device.positions())
            .pointer(self.on_device.row_tables())
            .pointer(self.on_device.tables(place.group))
            .int(heads.query)
            .int(heads.kv)
            .int(heads.head_dim)
            .int(cache.shape.block_size)
            .float(mask.scale)
            .int(mask.window.unwrap_or(0))
            .float(mask.soft_cap.unwrap_or(0.0))
            .go();
    }

    /// Attention with tensor cores: one form for the rows that are alone in their sequence, one for all others.
    fn attention16(
        &mut self,
        out: &mut Buffer,
        qkv: &Buffer,
        cache: &Cache,
        place: CacheLayer,
        heads: Heads,
        mask: Mask,
    ) {
        let (rows, dtype) = (self.step.rows(), cache.shape.dtype);
        let most = heads.head_dim.next_power_of_two().max(64);
        let to = if heads.head_dim == most { "" } else { "to_" };
        let form = |phase: &str| format!("attention_{phase}_{}_{to}{most}", dtype.name());
        let tiles = heads.kv * (heads.query / heads.kv).div_ceil(PAIRS);
        let (out, qkv) = (out.rows(rows, heads.query_width()), qkv.rows(rows, heads.qkv_width()));
        let with_arguments = |launch: LaunchOf<'_>| {
            launch
                .pointer(qkv)
                .pointer(cache.layer(place))
                .pointer(self.on_device.positions())
                .pointer(self.on_device.row_tables())
                .pointer(self.on_device.tables(place.group))
                .int(rows)
                .int(heads.query)
                .int(heads.kv)
                .int(heads.head_dim)
                .int(cache.shape.block_size)
                .float(mask.scale)
                .int(mask.window.unwrap_or(0))
                .float(mask.soft_cap.unwrap_or(0.0))
                .go();
        };
        if self.step.segments.iter().any(|segment| segment.rows > 1) {
            // Of the tile with the most heads.
            let rows_of_block = PREFILL_WARPS * (PAIRS / (heads.query / heads.kv).min(PAIRS));
            let blocks = [rows.div_ceil(rows_of_block), tiles];
            let shared_bytes = prefill_shared_bytes(most, dtype);
            let launch = self.device.launch(form("prefill"), blocks, 32 * PREFILL_WARPS).shared(shared_bytes);
            with_arguments(launch.pointer(out));
        }
        if self.step.segments.iter().all(|segment| segment.rows > 1) {
            return;
        }
        let partials = self.partials.as_ref().map_or(0, Memory::at);
        let processors = self.device.driver().info().processors as usize;
        // How many share a row's splits changes no bit, and does not depend on contexts: a graph is for all of them.
        let sharing = (WARPS_OF_PROCESSOR * processors).div_ceil(rows * tiles).clamp(2, MOST_SHARING);
        let launch = self.device.launch(form("decode"), [rows, tiles, sharing], 32);
        with_arguments(launch.pointer(out).pointer(partials));
        self.device
            .launch("merge_splits", [rows, heads.query], heads.head_dim.next_multiple_of(32))
            .pointer(out)
            .pointer(partials)
            .pointer(self.on_device.positions())
            .pointer(self.on_device.row_tables())
            .int(rows)
            .int(heads.head_dim)
            .int(cache.shape.block_size)
            .int(mask.window.unwrap_or(0))
            .go();
    }

    /// Takes the place where attention leaves the splits of rows that are alone in their sequence.
    pub(super) fn take_partials(&mut self, heads: Heads, block_size: usize) -> Result<()> {
        let splits = (self.on_device.table_entries() * block_size).div_ceil(KV_SPLIT);
        let lens = [splits, heads.query, heads.head_dim + 4];
        if self.partials.as_ref().map_or(0, Memory::bytes) < 4 * lens.iter().product::<usize>() {
            self.partials = None;
            self.partials = Some(self.device.take_array("attention's splits", 4, &lens)?);
        }
        Ok(())
    }
}

/// Shared memory of a block of prefill over heads of up to `most` components: every warp's queries, and two units of keys and
/// values.
fn prefill_shared_bytes(most: usize, dtype: CacheDtype) -> usize {
    let positions = if most > 128 { 16 } else { 32 };
    // Lines of keys and of values are longer than they need be.
    let unit_bytes = positions * (2 * most * dtype.bytes() + 32 * dtype.bytes() + 16);
    PREFILL_WARPS * PAIRS * most * 2 + 2 * unit_bytes
}
