//! The trait [`Backend`] over plain vectors.

use std::ops::Range;

use half::{bf16, f16};

use super::{attention, dequantise::dequantise, e4m3, experts, gated, int8, linear, norm, rope};
use crate::{
    Activation, Backend, BackendError, BlockCopy, CacheDtype, CacheLayer, CacheShape, DType, Heads, Mask, Result,
    RopeSpec, StepInput, StepLimits, Weight, convert, routing::Routing, step::Step,
};

/// How products see their activations. Weights of f32 always meet them as they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activations {
    /// As they are: the weights' exact values times f32.
    F32,
    /// With weights of two bytes rounded to their type, as tensor cores take them; with all others as they are.
    Rounded,
    /// With quantised weights quantised per row and block of 32, as [`linear::dot_int8`] defines.
    Int8,
}

/// Every operation as its plain loop.
#[derive(Debug)]
pub struct ReferenceBackend {
    activations: Activations,
    step: Step,
}

/// Weights as they came: the parts' bytes, decoded at each use.
#[derive(Debug)]
pub struct Matrix {
    parts: Vec<Part>,
    rows: usize,
    cols: usize,
}

#[derive(Debug)]
struct Part {
    dtype: DType,
    row_bytes: usize,
    bytes: Vec<u8>,
}

/// A vector of f32.
#[derive(Debug)]
pub struct Vector(Vec<f32>);

/// `(rows, width)` of f32.
#[derive(Debug)]
pub struct Buffer {
    values: Vec<f32>,
    width: usize,
}

/// The KV cache in f32, each value rounded to the cache's type: `[layer][block][k|v][kv_head][block_size][head_dim]`.
#[derive(Debug)]
pub struct Cache {
    shape: CacheShape,
    values: Vec<f32>,
    centres: int8::Centres,
}

impl ReferenceBackend {
    /// Opens the backend for steps within `limits`.
    pub fn new(limits: StepLimits, activations: Activations) -> Self {
        Self { activations, step: Step::new(limits) }
    }

    /// Some of a matrix's outputs for some rows: `out[row] = matrix[outputs] · x[row]`, rows of as many values.
    fn product(&self, out: &mut Buffer, x: &Buffer, matrix: &Matrix, outputs: Range<usize>, rows: Range<usize>) {
        let x = &x.values[rows.start * matrix.cols..rows.end * matrix.cols];
        let out = &mut out.values[rows.start * outputs.len()..rows.end * outputs.len()];
        let mut int8 = Vec::new();
        if self.activations == Activations::Int8 && matrix.parts.iter().any(|part| !part.dtype.is_dense()) {
            int8.extend(x.chunks_exact(matrix.cols).map(linear::Int8Row::quantise));
        }
        let rounded = |dtype: DType, round: fn(f32) -> f32| -> Vec<f32> {
            let wanted =
                self.activations == Activations::Rounded && matrix.parts.iter().any(|part| part.dtype == dtype);
            if wanted { x.iter().map(|&x| round(x)).collect() } else { Vec::new() }
        };
        let as_bf16 = rounded(DType::BF16, |x| bf16::from_f32(x).to_f32());
        let as_f16 = rounded(DType::F16, |x| f16::from_f32(x.clamp(-65504.0, 65504.0)).to_f32());
        let mut weight = vec![0.0; matrix.cols];
        for (i, output) in outputs.clone().enumerate() {
            let (dtype, bytes) = matrix.row(output);
            dequantise(dtype, bytes, &mut weight);
            let x = match (self.activations, dtype) {
                (Activations::Rounded, DType::BF16) => &as_bf16,
                (Activations::Rounded, DType::F16) => &as_f16,
                _ => x,
            };
            for (row, x) in x.chunks_exact(matrix.cols).enumerate() {
                out[row * outputs.len() + i] = match self.activations {
                    Activations::Int8 if !dtype.is_dense() => linear::dot_int8(dtype, bytes, &int8[row]),
                    _ => linear::dot(&weight, x),
                };
            }
        }
    }
}

impl Matrix {
    /// The bytes of output `row`.
    fn row(&self, mut row: usize) -> (DType, &[u8]) {
        for part in &self.parts {
            let rows = part.bytes.len() / part.row_bytes;
            if row < rows {
                return (part.dtype, &part.bytes[row * part.row_bytes..][..part.row_bytes]);
            }
            row -= rows;
        }
        panic!("row {row} past the end of a matrix of {} rows", self.rows)
    }
}

impl Buffer {
    fn rows(&self, rows: usize, width: usize) -> std::slice::ChunksExact<'_, f32> {
        self.values[..rows * width].chunks_exact(width)
    }
    fn rows_mut(&mut self, rows: usize, width: usize) -> std::slice::ChunksExactMut<'_, f32> {
        self.values[..rows * width].chunks_exact_mut(width)
    }
}

impl Cache {
    /// Where the key (`which` 0) or value (1) of `slot` begins.
    fn at(&self, layer: usize, slot: usize, which: usize, head: usize) -> usize {
        let CacheShape { layers, blocks, block_size, kv_heads, head_dim, .. } = self.shape;
        let (block, offset) = (slot / block_size, slot % block_size);
        assert!(layer < layers && block < blocks && head < kv_heads, "layer {layer}, slot {slot}, head {head}");
        ((((layer * blocks + block) * 2 + which) * kv_heads + head) * block_size + offset) * head_dim
    }
    fn read(&self, layer: usize, slot: usize, which: usize, head: usize) -> &[f32] {
        &self.values[self.at(layer, slot, which, head)..][..self.shape.head_dim]
    }
    fn write(&mut self, layer: usize, slot: usize, which: usize, head: usize, values: &[f32]) {
        let at = self.at(layer, slot, which, head);
        let kept = &mut self.values[at..][..values.len()];
        kept.copy_from_slice(values);
        match self.shape.dtype {
            CacheDtype::F32 => {}
            CacheDtype::F16 => kept.iter_mut().for_each(|x| *x = f16::from_f32(*x).to_f32()),
            CacheDtype::Bf16 => kept.iter_mut().for_each(|x| *x = bf16::from_f32(*x).to_f32()),
            CacheDtype::Fp8E4m3 => kept.iter_mut().for_each(|x| *x = e4m3::round(*x)),
            CacheDtype::Int8 => int8::round(kept),
        }
    }
}

fn zeroed(what: &'static str, len: Option<usize>) -> Result<Vec<f32>> {
    let bytes = len.map_or(usize::MAX, |len| len.saturating_mul(4));
    let mut values = Vec::new();
    let len = len.ok_or(BackendError::OutOfMemory { what, bytes })?;
    values.try_reserve_exact(len).map_err(|_| BackendError::OutOfMemory { what, bytes })?;
    values.resize(len, 0.0);
    Ok(values)
}

fn check_weight(weight: &Weight<'_>, cols: usize) -> Result<()> {
    if weight.cols != cols {
        return Err(BackendError::BadWeight(format!("parts of one matrix have {cols} and {} inputs", weight.cols)));
    }
    convert::check(weight)
}

impl Backend for ReferenceBackend {
    type Matrix = Matrix;
    type Vector = Vector;
    type Buffer = Buffer;
    type Cache = Cache;
    type Rope = RopeSpec;
    type Routing = Routing;

    fn describe(&self) -> String {
        match self.activations {
            Activations::F32 => "reference, f32 activations, 1 thread".into(),
            Activations::Rounded => "reference, rounded activations, 1 thread".into(),
            Activations::Int8 => "reference, int8 activations, 1 thread".into(),
        }
    }

    fn matrix(&mut self, parts: &[Weight<'_>]) -> Result<Matrix> {
        let cols = parts.first().map_or(0, |part| part.cols);
        let mut matrix = Matrix { parts: Vec::new(), rows: 0, cols };
        for part in parts {
            check_weight(part, cols)?;
            let number = matrix.parts.len();
            let bytes = convert::rows_to_run(part, 0, part.rows).map_err(|row| BackendError::OutOfRange {
                part: number,
                row,
                run_as: part.run_as,
            })?;
            matrix.parts.push(Part { dtype: part.run_as, row_bytes: bytes.len() / part.rows, bytes });
            matrix.rows += part.rows;
        }
        if matrix.rows == 0 {
            return Err(BackendError::BadWeight("a matrix without outputs".into()));
        }
        Ok(matrix)
    }

    fn matrix_bytes(&self, matrix: &Matrix) -> usize {
        matrix.parts.iter().map(|part| part.bytes.len()).sum()
    }

    fn vector(&mut self, values: &[f32]) -> Result<Vector> {
        Ok(Vector(values.to_vec()))
    }

    fn buffer(&mut self, rows: usize, width: usize) -> Result<Buffer> {
        Ok(Buffer { values: zeroed("a buffer", rows.checked_mul(width))?, width })
    }

    fn cache(&mut self, shape: CacheShape) -> Result<Cache> {
        let lens = [shape.layers, shape.blocks, 2, shape.kv_heads, shape.block_size, shape.head_dim];
        let len = lens.into_iter().try_fold(1usize, |product, len| product.checked_mul(len));
        Ok(Cache { shape, values: zeroed("the KV cache", len)?, centres: Default::default() })
    }

    fn centre_keys(&mut self, cache: &mut Cache, place: CacheLayer, centre: Vec<f32>) {
        cache.centres.set(place, centre);
    }

    fn rope(&mut self, spec: &RopeSpec) -> Result<RopeSpec> {
        Ok(spec.clone())
    }

    fn routing(&mut self, experts: usize, per_row: usize, rows: usize) -> Result<Routing> {
        Routing::new(experts, per_row, rows)
    }

    fn copy_blocks(&mut self, cache: &mut Cache, copies: &[BlockCopy]) {
        let len = 2 * cache.shape.kv_heads * cache.shape.block_size * cache.shape.head_dim;
        for layer in 0..cache.shape.layers {
            for copy in copies {
                let [from, to] =
                    [copy.from, copy.to].map(|block| cache.at(layer, block as usize * cache.shape.block_size, 0, 0));
                cache.values.copy_within(from..from + len, to);
            }
        }
    }

    fn begin(&mut self, input: &StepInput<'_>) {
        self.step.begin(input);
    }

    fn embed(&mut self, out: &mut Buffer, table: &Matrix, scale: f32) {
        for (out, &id) in out.rows_mut(self.step.rows(), table.cols).zip(&self.step.ids) {
            let (dtype, bytes) = table.row(id as usize);
            dequantise(dtype, bytes, out);
            out.iter_mut().for_each(|x| *x *= scale);
        }
    }

    fn rms_norm(&mut self, out: &mut Buffer, x: &Buffer, weight: &Vector, eps: f32, rows: usize) {
        let width = weight.0.len();
        for (out, x) in out.rows_mut(rows, width).zip(x.rows(rows, width)) {
            norm::rms_norm(out, x, &weight.0, eps);
        }
    }

    fn rms_norm_columns(&mut self, x: &mut Buffer, width: usize, first: usize, weight: &Vector, eps: f32, rows: usize) {
        for x in x.rows_mut(rows, width) {
            norm::rms_norm_in_place(&mut x[first..][..weight.0.len()], &weight.0, eps);
        }
    }

    fn residual_norm(
        &mut self,
        residual: &mut Buffer,
        delta: &Buffer,
        post: Option<&Vector>,
        scale: f32,
        out: &mut Buffer,
        next: Option<&Vector>,
        eps: f32,
        rows: usize,
    ) {
        let width = residual.width;
        let (post, next) = (post.map(|v| v.0.as_slice()), next.map(|v| v.0.as_slice()));
        let buffers = residual.rows_mut(rows, width).zip(delta.rows(rows, width)).zip(out.rows_mut(rows, width));
        for ((residual, delta), out) in buffers {
            norm::residual_norm(residual, delta, post, scale, out, next, eps);
        }
    }

    fn linear(&mut self, out: &mut Buffer, x: &Buffer, matrix: &Matrix, bias: Option<&Vector>, rows: usize) {
        assert!(bias.is_none_or(|bias| bias.0.len() == matrix.rows));
        self.product(out, x, matrix, 0..matrix.rows, 0..rows);
        let Some(bias) = bias else { return };
        for out in out.rows_mut(rows, matrix.rows) {
            out.iter_mut().zip(&bias.0).for_each(|(out, bias)| *out += bias);
        }
    }

    fn rope_and_cache(
        &mut self,
        qkv: &mut Buffer,
        cache: &mut Cache,
        place: CacheLayer,
        heads: Heads,
        query_norm: Option<&Vector>,
        key_norm: Option<&Vector>,
        eps: f32,
        rope: &RopeSpec,
    ) {
        assert!(heads.kv == cache.shape.kv_heads && heads.head_dim == cache.shape.head_dim);
        for (row, qkv) in qkv.rows_mut(self.step.rows(), heads.qkv_width()).enumerate() {
            let slot = self.step.slots(place.group)[row] as usize;
            let (cos, sin) = rope::angles(rope, self.step.positions[row]);
            for (i, head) in qkv.chunks_exact_mut(heads.head_dim).enumerate() {
                let is_value = i >= heads.query + heads.kv;
                if !is_value {
                    if let Some(weight) = if i < heads.query { query_norm } else { key_norm } {
                        norm::rms_norm_in_place(head, &weight.0, eps);
                    }
                    rope::rotate(head, &cos, &sin, rope.style);
                    if cache.shape.dtype == CacheDtype::Int8 {
                        if let (Some(key), Some(centre)) = (i.checked_sub(heads.query), cache.centres.get(place)) {
                            let centre = &centre[key * heads.head_dim..];
                            head.iter_mut().zip(centre).for_each(|(x, centre)| *x -= centre);
                        }
                        int8::mix(head);
                    }
                }
                if let Some(kv) = i.checked_sub(heads.query) {
                    cache.write(place.layer, slot, usize::from(is_value), kv % heads.kv, head);
                }
            }
        }
    }

    fn attention(
        &mut self,
        out: &mut Buffer,
        qkv: &Buffer,
        cache: &Cache,
        place: CacheLayer,
        heads: Heads,
        mask: Mask,
    ) {
        assert!(heads.kv == cache.shape.kv_heads && heads.head_dim == cache.shape.head_dim);
        let block_size = cache.shape.block_size;
        for segment in &self.step.segments {
            let table = self.step.block_table(segment, place.group, block_size);
            let slot = |position: usize| table[position / block_size] as usize * block_size + position % block_size;
            for row in segment.first_row..segment.first_row + segment.rows {
                let visible = attention::visible(self.step.positions[row] as usize, mask.window);
                for head in 0..heads.query {
                    let kv_head = head / (heads.query / heads.kv);
                    let query = &qkv.values[row * heads.qkv_width() + head * heads.head_dim..][..heads.head_dim];
                    let mut query = query.to_vec();
                    if cache.shape.dtype == CacheDtype::Int8 {
                        int8::round(&mut query);
                    }
                    let out = &mut out.values[row * heads.query_width() + head * heads.head_dim..][..heads.head_dim];
                    let keys = visible.clone().map(|p| cache.read(place.layer, slot(p), 0, kv_head));
                    let values = visible.clone().map(|p| cache.read(place.layer, slot(p), 1, kv_head));
                    attention::attention(out, &query, keys, values, &mask);
                }
            }
        }
    }

    fn gated(&mut self, out: &mut Buffer, gate_up: &Buffer, activation: Activation, width: usize, rows: usize) {
        for (out, gate_up) in out.rows_mut(rows, width).zip(gate_up.rows(rows, 2 * width)) {
            gated::gated(out, gate_up, activation);
        }
    }

    fn route(&mut self, routing: &mut Routing, logits: &Buffer, renormalise: bool, rows: usize) {
        let (experts, per_row) = (routing.experts(), routing.per_row());
        for (choices, logits) in routing.begin(rows).chunks_exact_mut(per_row).zip(logits.rows(rows, experts)) {
            experts::route(choices, logits, renormalise);
        }
        routing.sort();
    }

    fn dispatch(&mut self, out: &mut Buffer, x: &Buffer, routing: &Routing) {
        for (out, &row) in out.rows_mut(routing.slots(), x.width).zip(routing.slot_rows()) {
            out.copy_from_slice(&x.values[row as usize * x.width..][..x.width]);
        }
    }

    fn expert_linear(&mut self, out: &mut Buffer, x: &Buffer, matrix: &Matrix, routing: &Routing) {
        let outputs = matrix.rows / routing.experts();
        for &expert in routing.busy() {
            let expert = expert as usize;
            self.product(out, x, matrix, expert * outputs..(expert + 1) * outputs, routing.slots_of(expert));
        }
    }

    fn combine(&mut self, out: &mut Buffer, x: &Buffer, routing: &Routing) {
        let width = out.width;
        for (row, out) in out.rows_mut(routing.slots() / routing.per_row(), width).enumerate() {
            let outputs = routing.of_row(row).map(|(choice, slot)| (choice.weight, &x.values[slot * width..][..width]));
            experts::combine(out, outputs);
        }
    }

    fn gather(&mut self, out: &mut Buffer, x: &Buffer, rows: &[u32]) {
        let width = x.width;
        assert_eq!(width, out.width);
        for (out, &row) in out.rows_mut(rows.len(), width).zip(rows) {
            out.copy_from_slice(&x.values[row as usize * width..][..width]);
        }
    }

    fn scale_and_cap(&mut self, x: &mut Buffer, scale: f32, soft_cap: Option<f32>, width: usize, rows: usize) {
        for x in &mut x.values[..rows * width] {
            *x = gated::soft_cap(*x * scale, soft_cap);
        }
    }

    fn read<'a>(&'a mut self, buffer: &'a Buffer, rows: usize, width: usize) -> &'a [f32] {
        &buffer.values[..rows * width]
    }
}
