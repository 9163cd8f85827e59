//! The one forward pass. Everything that families differ in is a field of the [`DecoderSpec`].

use octavo_kernels::{
    Activation, Backend, BlockCopy, CacheLayer, CacheShape, DType, DrawnRow, Result, RowDraw, StepInput, Weight,
};

use super::centre::key_centre;
use super::groups::LayerGroups;
use super::spec::{DecoderSpec, Experts, QkNorm};
use super::weights::{ExpertWeights, LayerWeights, Mlp, Weights};

/// Rows whose logits are computed at once, and what is left of the last layer before them. Bounds the logits buffer: a row of
/// a large vocabulary is a megabyte.
pub const LOGIT_ROWS: usize = 32;

/// A model on a backend: weights, the KV cache and every buffer, all taken when it is made.
pub struct Decoder<B: Backend> {
    backend: B,
    parts: Parts<B>,
}

/// What a forward pass is made of.
struct Parts<B: Backend> {
    spec: DecoderSpec,
    weights: Weights<B::Matrix, B::Vector>,
    ropes: Vec<B::Rope>,
    /// Where a step's rows go in sparse layers.
    routing: Option<B::Routing>,
    cache: B::Cache,
    /// Where each layer's keys and values lie.
    places: Vec<CacheLayer>,
    buffers: Buffers<B::Buffer>,
    block_size: usize,
    /// The backend draws.
    draws: bool,
}

/// Activations of one step, `(rows, width)` each.
struct Buffers<T> {
    /// Of all rows.
    stream: Stream<T>,
    /// Of the rows whose logits are computed.
    wanted: Stream<T>,
    work: Work<T>,
}

/// What is left of a row once its keys and values are written.
struct Stream<T> {
    /// The residual stream.
    residual: T,
    /// What attention gave.
    attended: T,
}

/// What one operation leaves to the next.
struct Work<T> {
    /// The residual stream, normed: what a sub-layer reads, and after the last layer what the head reads.
    normed: T,
    /// What a sub-layer gives.
    delta: T,
    qkv: T,
    /// A row per token in dense layers, a row per choice of an expert in sparse ones.
    gate_up: T,
    gated: T,
    router_logits: T,
    /// What experts read, and then what they give: a row per choice.
    expert_rows: T,
    logits: T,
}

/// Rows and width of every buffer.
fn shapes(spec: &DecoderSpec, rows: usize) -> Buffers<(usize, usize)> {
    let (experts, choices, expert_width) = match spec.experts {
        Some(experts) => (experts.count, experts.per_token, experts.per_token * experts.intermediate_size),
        None => (0, 0, 0),
    };
    let dense_width = if spec.layers.iter().all(|layer| layer.sparse) { 0 } else { spec.intermediate_size };
    let gated_width = dense_width.max(expert_width);
    let stream = |rows| Stream { residual: (rows, spec.hidden_size), attended: (rows, spec.heads.query_width()) };
    let work = Work {
        normed: (rows, spec.hidden_size),
        delta: (rows, spec.hidden_size),
        qkv: (rows, spec.heads.qkv_width()),
        gate_up: (rows, 2 * gated_width),
        gated: (rows, gated_width),
        router_logits: (rows, experts),
        expert_rows: (rows * choices, spec.hidden_size),
        logits: (LOGIT_ROWS, spec.vocab_size),
    };
    Buffers { stream: stream(rows), wanted: stream(LOGIT_ROWS), work }
}

impl<T> Stream<T> {
    fn try_map<U>(self, f: &mut impl FnMut(T) -> Result<U>) -> Result<Stream<U>> {
        Ok(Stream { residual: f(self.residual)?, attended: f(self.attended)? })
    }
}

impl<T> Work<T> {
    fn try_map<U>(self, f: &mut impl FnMut(T) -> Result<U>) -> Result<Work<U>> {
        Ok(Work {
            normed: f(self.normed)?,
            delta: f(self.delta)?,
            qkv: f(self.qkv)?,
            gate_up: f(self.gate_up)?,
            gated: f(self.gated)?,
            router_logits: f(self.router_logits)?,
            expert_rows: f(self.expert_rows)?,
            logits: f(self.logits)?,
        })
    }
}

impl<T> Buffers<T> {
    fn try_map<U>(self, mut f: impl FnMut(T) -> Result<U>) -> Result<Buffers<U>> {
        let (stream, wanted) = (self.stream.try_map(&mut f)?, self.wanted.try_map(&mut f)?);
        Ok(Buffers { stream, wanted, work: self.work.try_map(&mut f)? })
    }
}

/// Bytes of all buffers for steps of up to `rows` rows.
pub fn workspace_bytes(spec: &DecoderSpec, rows: usize) -> u64 {
    let mut bytes = 0u64;
    let count = |(rows, width): (usize, usize)| {
        bytes = bytes.saturating_add((rows as u64).saturating_mul(width as u64).saturating_mul(4));
        Ok(())
    };
    let counted = shapes(spec, rows).try_map(count);
    debug_assert!(counted.is_ok());
    bytes
}

/// What a decoder takes of its backend beside weights.
struct Room<B: Backend> {
    ropes: Vec<B::Rope>,
    routing: Option<B::Routing>,
    buffers: Buffers<B::Buffer>,
    cache: B::Cache,
    draws: bool,
}

impl<B: Backend> Room<B> {
    fn take(backend: &mut B, spec: &DecoderSpec, cache: CacheShape, rows: usize) -> Result<Self> {
        let ropes =
            spec.ropes.iter().map(|rope| backend.rope(&rope.spec(spec.max_positions))).collect::<Result<_>>()?;
        let routing =
            spec.experts.map(|experts| backend.routing(experts.count, experts.per_token, rows)).transpose()?;
        let buffers = shapes(spec, rows).try_map(|(rows, width)| backend.buffer(rows, width))?;
        backend.room_for_attention(spec.heads, cache.block_size)?;
        let cache = backend.cache(cache)?;
        let draws = backend.draws(spec.vocab_size, LOGIT_ROWS)?;
        Ok(Self { ropes, routing, buffers, cache, draws })
    }
}

/// Takes of `backend` what a decoder would take beside weights: for asking one that only counts how much that is. All of it is
/// held until `then` has been asked.
pub fn rehearse<B: Backend, T>(
    backend: &mut B,
    spec: &DecoderSpec,
    cache: CacheShape,
    rows: usize,
    then: impl FnOnce() -> T,
) -> Result<T> {
    // As wide as the widest matrix: backends make room for inputs that they round.
    let experts_width = spec.experts.map_or(0, |experts| experts.intermediate_size);
    let widths = [spec.hidden_size, spec.heads.query_width(), spec.intermediate_size, experts_width];
    let cols = widths.into_iter().max().unwrap_or_default().next_multiple_of(8);
    let (dtype, bytes) = (DType::F16, vec![0; 2 * cols]);
    let _matrix = backend.matrix(&[Weight { dtype, rows: 1, cols, bytes: &bytes, run_as: dtype }])?;
    let _room = Room::take(backend, spec, cache, rows)?;
    Ok(then())
}

/// Sees `(rows, hidden)`: the embeddings as number 0, and number `n` after layer `n`, the last one normed.
pub type Observer<'a> = &'a mut dyn FnMut(usize, &[f32]);

impl<B: Backend> Decoder<B> {
    /// Takes the KV cache, whose layers lie in `groups`, and buffers for steps of up to `rows` rows. No sequence may be
    /// longer than `spec` says.
    pub fn new(
        mut backend: B,
        spec: DecoderSpec,
        weights: Weights<B::Matrix, B::Vector>,
        groups: &LayerGroups,
        cache: CacheShape,
        rows: usize,
    ) -> Result<Self> {
        let (block_size, places) = (cache.block_size, groups.places.clone());
        let Room { ropes, routing, buffers, mut cache, draws } = Room::take(&mut backend, &spec, cache, rows)?;
        // What is normed, or capped, is not moved by a bias alone.
        if spec.qk_norm == QkNorm::None && spec.attention_soft_cap.is_none() {
            for ((weights, layer), &place) in weights.layers.iter().zip(&spec.layers).zip(&places) {
                let Some(bias) = &weights.key_bias else { continue };
                let rope = spec.ropes[layer.rope].spec(spec.max_positions);
                backend.centre_keys(&mut cache, place, key_centre(bias, spec.heads.head_dim, &rope));
            }
        }
        Ok(Self { backend, parts: Parts { spec, weights, ropes, routing, cache, places, buffers, block_size, draws } })
    }

    /// What it runs.
    pub fn spec(&self) -> &DecoderSpec {
        &self.parts.spec
    }

    /// What it runs on.
    pub fn backend(&self) -> &B {
        &self.backend
    }

    /// Positions in a block of the KV cache.
    pub fn block_size(&self) -> usize {
        self.parts.block_size
    }

    /// Copies blocks of the KV cache, before the step that reads the copies.
    pub fn copy_blocks(&mut self, copies: &[BlockCopy]) {
        self.backend.copy_blocks(&mut self.parts.cache, copies);
    }

    /// Writes the keys and values of every row of a step, so that [`Decoder::head`] can be asked for logits of it. What the
    /// last layer does after that is left to it: of a prompt, hardly any row has its logits asked for.
    pub fn forward(&mut self, input: &StepInput<'_>) {
        let Self { backend, parts } = self;
        backend.run(input, &[], |backend, rows| parts.run(backend, rows, &mut |_, _, _| ()));
    }

    /// Runs a step of one row for each sequence, and draws a token after each: see [`Decoder::drawn`].
    pub fn forward_and_draw(&mut self, input: &StepInput<'_>, draws: &[RowDraw<'_>]) {
        assert_eq!(draws.len(), input.ids.len(), "a draw for each row");
        let Self { backend, parts } = self;
        backend.run(input, draws, |backend, rows| {
            parts.run(backend, rows, &mut |_, _, _| ());
            for first in (0..rows).step_by(LOGIT_ROWS) {
                let numbers: [u32; LOGIT_ROWS] = std::array::from_fn(|i| (first + i) as u32);
                let count = LOGIT_ROWS.min(rows - first);
                parts.head(backend, &numbers[..count]);
                backend.draw(&parts.buffers.work.logits, first, count);
            }
        });
        backend.send_drawn(draws.len());
    }

    /// [`Decoder::forward`], showing the residual stream between layers. For tests.
    pub fn forward_observed(&mut self, input: &StepInput<'_>, observer: Observer<'_>) {
        let Self { backend, parts } = self;
        let (rows, width) = (input.ids.len(), parts.spec.hidden_size);
        backend.begin(input);
        parts.run(backend, rows, &mut |backend, number, seen| observer(number, backend.read(seen, rows, width)));
        let numbers: Vec<u32> = (0..rows as u32).collect();
        let mut last = Vec::new();
        for some in numbers.chunks(LOGIT_ROWS) {
            parts.finish(backend, some);
            last.extend_from_slice(backend.read(&parts.buffers.work.normed, some.len(), width));
        }
        observer(parts.spec.layers.len(), &last);
    }

    /// Computes the logits of these rows of the step that ran last; at most [`LOGIT_ROWS`] rows.
    pub fn head(&mut self, rows: &[u32]) {
        self.parts.head(&mut self.backend, rows);
    }

    /// The first `rows` of the logits that were computed last, `vocab` values each.
    pub fn logits(&mut self, rows: usize) -> &[f32] {
        self.backend.read(&self.parts.buffers.work.logits, rows, self.parts.spec.vocab_size)
    }

    /// Shows `look` each of them, see [`Backend::look`].
    pub fn look(&mut self, rows: usize, look: &(dyn Fn(usize, &[f32]) + Sync)) {
        self.backend.look(&self.parts.buffers.work.logits, rows, self.parts.spec.vocab_size, look);
    }

    /// Whether the backend draws tokens where their logits are.
    pub fn draws(&self) -> bool {
        self.parts.draws
    }

    /// Whether it can as `draw` says.
    pub fn draws_from(&self, draw: &RowDraw<'_>) -> bool {
        self.parts.draws && self.backend.draws_from(draw)
    }

    /// Draws from the first of the logits that were computed last; what became of it.
    pub fn draw(&mut self, draws: &[RowDraw<'_>]) -> &[DrawnRow] {
        self.backend.set_draws(draws);
        self.backend.draw(&self.parts.buffers.work.logits, 0, draws.len());
        self.backend.send_drawn(draws.len());
        self.backend.drawn()
    }

    /// What became of the draws of the oldest step with draws that has not been asked. Waits for it.
    pub fn drawn(&mut self) -> &[DrawnRow] {
        self.backend.drawn()
    }
}

/// Sees [`Observer`]'s states where they lie.
type Between<'a, B> = &'a mut dyn FnMut(&mut B, usize, &<B as Backend>::Buffer);

impl<B: Backend> Parts<B> {
    /// Logits of rows of the step that has run.
    fn head(&mut self, backend: &mut B, rows: &[u32]) {
        self.finish(backend, rows);
        let Self { spec, weights, buffers: Buffers { work, .. }, .. } = self;
        let head = weights.head.as_ref().unwrap_or(&weights.embedding);
        backend.linear(&mut work.logits, &work.normed, head, None, rows.len());
        if spec.logits_scale != 1.0 || spec.logits_soft_cap.is_some() {
            let (width, rows) = (spec.vocab_size, rows.len());
            backend.scale_and_cap(&mut work.logits, spec.logits_scale, spec.logits_soft_cap, width, rows);
        }
    }

    /// The rest of the last layer for rows of the step that has run: leaves in `normed` what the head reads.
    fn finish(&mut self, backend: &mut B, rows: &[u32]) {
        assert!(rows.len() <= LOGIT_ROWS, "{} rows of logits at once", rows.len());
        let Buffers { stream, wanted, .. } = &mut self.buffers;
        backend.gather(&mut wanted.residual, &stream.residual, rows);
        backend.gather(&mut wanted.attended, &stream.attended, rows);
        self.rest_of(backend, self.spec.layers.len() - 1, rows.len());
    }

    /// The operations of a step, which has begun.
    fn run(&mut self, backend: &mut B, rows: usize, between: Between<'_, B>) {
        self.embed(backend, rows);
        between(backend, 0, &self.buffers.stream.residual);
        for layer in 0..self.spec.layers.len() {
            self.attention(backend, layer, rows);
            if layer + 1 < self.spec.layers.len() {
                self.rest_of(backend, layer, rows);
                between(backend, layer + 1, &self.buffers.stream.residual);
            }
        }
    }

    /// Fills `residual`, and `normed` with what the first layer reads.
    fn embed(&mut self, backend: &mut B, rows: usize) {
        let Self { spec, weights, buffers: Buffers { stream, work, .. }, .. } = self;
        backend.embed(&mut stream.residual, &weights.embedding, spec.embedding_scale);
        match weights.layers.first().and_then(|layer| layer.attention_norm.as_ref()) {
            Some(norm) => backend.rms_norm(&mut work.normed, &stream.residual, norm, spec.norm_eps, rows),
            None => backend.embed(&mut work.normed, &weights.embedding, spec.embedding_scale),
        }
    }

    /// Writes the rows' keys and values, and leaves in `attended` what attention gives.
    fn attention(&mut self, backend: &mut B, layer: usize, rows: usize) {
        let Self { spec, weights, ropes, cache, places, buffers: Buffers { stream, work, .. }, .. } = self;
        let LayerWeights { qkv, query_norm, key_norm, .. } = &weights.layers[layer];
        let (layer_spec, heads, eps) = (&spec.layers[layer], spec.heads, spec.norm_eps);
        let (rope, place) = (&ropes[layer_spec.rope], places[layer]);

        backend.linear(&mut work.qkv, &work.normed, &qkv.matrix, qkv.bias.as_ref(), rows);
        let mut norms = (query_norm.as_ref(), key_norm.as_ref());
        if spec.qk_norm == QkNorm::WholeRow {
            let width = heads.qkv_width();
            for (norm, first) in [(norms.0, 0), (norms.1, heads.query_width())] {
                let Some(norm) = norm else { continue };
                backend.rms_norm_columns(&mut work.qkv, width, first, norm, eps, rows);
            }
            norms = (None, None);
        }
        backend.rope_and_cache(&mut work.qkv, cache, place, heads, norms.0, norms.1, eps, rope);
        backend.attention(&mut stream.attended, &work.qkv, cache, place, heads, spec.mask(layer_spec));
    }

    /// Adds attention and the gated layer to `residual`, and leaves in `normed` what the next layer or the head reads.
    fn rest_of(&mut self, backend: &mut B, layer: usize, rows: usize) {
        let Self { spec, weights, routing, buffers: Buffers { stream, wanted, work }, .. } = self;
        let LayerWeights { output, post_attention_norm, mlp_norm, mlp, post_mlp_norm, .. } = &weights.layers[layer];
        let next = weights.layers.get(layer + 1);
        let stream = if next.is_some() { stream } else { wanted };
        let next_norm = next.map_or(Some(&weights.final_norm), |next| next.attention_norm.as_ref());

        backend.linear(&mut work.delta, &stream.attended, &output.matrix, output.bias.as_ref(), rows);
        backend.residual_norm(
            &mut stream.residual,
            &work.delta,
            post_attention_norm.as_ref(),
            spec.residual_scale,
            &mut work.normed,
            mlp_norm.as_ref(),
            spec.norm_eps,
            rows,
        );
        match mlp {
            Mlp::Dense { gate_up, down } => {
                let between = (&mut work.gate_up, &mut work.gated);
                let (gate_up, down) = (gate_up.projection(), down.projection());
                let (width, activation) = (spec.intermediate_size, spec.activation);
                backend.gated_mlp(&mut work.delta, &work.normed, gate_up, activation, down, between, width, rows);
            }
            Mlp::Sparse(weights) => {
                let (Some(routing), Some(experts)) = (routing, spec.experts) else {
                    unreachable!("weights of experts in a decoder without")
                };
                mix(backend, work, routing, weights, experts, spec.activation, rows);
            }
        }
        backend.residual_norm(
            &mut stream.residual,
            &work.delta,
            post_mlp_norm.as_ref(),
            spec.residual_scale,
            &mut work.normed,
            next_norm,
            spec.norm_eps,
            rows,
        );
    }
}

/// A mixture of experts: fills `delta` from `normed`. Every choice of an expert is a row of its own in between.
fn mix<B: Backend>(
    backend: &mut B,
    work: &mut Work<B::Buffer>,
    routing: &mut B::Routing,
    weights: &ExpertWeights<B::Matrix>,
    experts: Experts,
    activation: Activation,
    rows: usize,
) {
    let choices = rows * experts.per_token;
    backend.linear(&mut work.router_logits, &work.normed, &weights.router, None, rows);
    backend.route(routing, &work.router_logits, experts.renormalise, rows);
    backend.dispatch(&mut work.expert_rows, &work.normed, routing);
    backend.expert_linear(&mut work.gate_up, &work.expert_rows, &weights.gate_up, routing);
    backend.gated(&mut work.gated, &work.gate_up, activation, experts.intermediate_size, choices);
    backend.expert_linear(&mut work.expert_rows, &work.gated, &weights.down, routing);
    backend.combine(&mut work.delta, &work.expert_rows, routing);
}
