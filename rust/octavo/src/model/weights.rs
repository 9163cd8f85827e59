//! A model's weights, from its files into a backend.
//!
//! One walk over the model says which tensors make up which weight, and of which shape. It is taken twice: once only to
//! check and to count, so that a file that does not fit fails before any of its gigabytes are read, and once to pack.

use std::fmt;
use std::path::Path;

use octavo_kernels::cpu::pack::packed_bytes;
use octavo_kernels::cuda::driver::taken_bytes;
use octavo_kernels::{Backend, BackendError, CacheDtype, DType, Weight};

use super::families::{ExpertNames, Model, WeightNames};
use super::spec::{DecoderSpec, Experts, QkNorm};
use crate::error::LoadError;
use crate::execute::memory::Bytes;
use crate::load::ModelFiles;
use crate::load::tensors::Tensors;

/// Every weight of a model: matrices of type `M` and vectors of type `V`.
#[derive(Debug)]
pub struct Weights<M, V> {
    /// `(vocab, hidden)`.
    pub embedding: M,
    /// `(vocab, hidden)`; `None`: the embedding.
    pub head: Option<M>,
    /// `(hidden)`.
    pub final_norm: V,
    /// First to last.
    pub layers: Vec<LayerWeights<M, V>>,
    /// Bytes of all matrices: as packed by the backend, or as they lie in the files.
    pub matrix_bytes: u64,
}

/// The weights of one layer. Norms that the spec does not have are `None`.
#[derive(Debug)]
#[allow(missing_docs)]
pub struct LayerWeights<M, V> {
    pub attention_norm: Option<V>,
    /// Queries, keys and values, stacked.
    pub qkv: Linear<M, V>,
    /// The bias of keys, if there is one: `(kv heads, head_dim)`.
    pub key_bias: Option<Vec<f32>>,
    pub query_norm: Option<V>,
    pub key_norm: Option<V>,
    pub output: Linear<M, V>,
    pub post_attention_norm: Option<V>,
    pub mlp_norm: Option<V>,
    pub mlp: Mlp<M, V>,
    pub post_mlp_norm: Option<V>,
}

/// The second sub-layer.
#[derive(Debug)]
pub enum Mlp<M, V> {
    /// One gated layer.
    Dense {
        /// Gate and up, stacked.
        gate_up: Linear<M, V>,
        /// Back to the residual stream's width.
        down: Linear<M, V>,
    },
    /// A mixture of experts.
    Sparse(ExpertWeights<M>),
}

/// The weights of a mixture of experts.
#[derive(Debug)]
pub struct ExpertWeights<M> {
    /// `(experts, hidden)`.
    pub router: M,
    /// Gate and up of the first expert, stacked, then those of the second …
    pub gate_up: M,
    /// Down of the first expert, then of the second …
    pub down: M,
}

/// A matrix and its bias.
#[derive(Debug)]
#[allow(missing_docs)]
pub struct Linear<M, V> {
    pub matrix: M,
    pub bias: Option<V>,
}

impl<M, V> Linear<M, V> {
    /// Both, as operations take them.
    pub fn projection(&self) -> (&M, Option<&V>) {
        (&self.matrix, self.bias.as_ref())
    }
}

/// Told of bytes done and bytes in all; `false` stops the load.
pub type Progress<'a> = &'a mut dyn FnMut(u64, u64) -> bool;

/// Parts of a matrix begin at multiples of this on a device.
const ALIGNMENT: u64 = 256;

/// What the matrices of a model take.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MatrixBytes {
    /// In the files.
    pub stored: u64,
    /// Packed for the CPU.
    pub packed: u64,
    /// On a device, as rows of the types that they are run as: what it has less for them, norms and biases.
    pub as_run: u64,
    /// Those that are not run as the type they are stored in.
    pub converted: Vec<Converted>,
    /// The types that they are run as, matrix by matrix.
    pub run_as: Vec<DType>,
    /// Some are run in a type of quantised blocks.
    pub quantised: bool,
    /// Some are run in f16.
    pub halves: bool,
}

impl MatrixBytes {
    /// How keys and values are stored on a CPU that reads two-byte ones fastest as `half`, unless told otherwise. Where
    /// products are rounded to 8 bits anyway, half precision adds nothing that shows, and attention has half as much to
    /// read.
    pub fn cache_dtype(&self, half: CacheDtype) -> CacheDtype {
        if self.quantised { half } else { CacheDtype::F32 }
    }

    /// The same on a GPU, where what attention reads decides how long a step takes: two bytes, those of the type that the
    /// weights are at home in. Blocks count from f16.
    pub fn gpu_cache_dtype(&self) -> CacheDtype {
        if self.quantised || self.halves { CacheDtype::F16 } else { CacheDtype::Bf16 }
    }
}

/// Matrices that are stored in one type and run as another.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Converted {
    pub stored_as: DType,
    pub run_as: DType,
    pub count: usize,
    pub stored: u64,
    pub packed: u64,
}

impl fmt::Display for Converted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { stored_as, run_as, count, stored, packed } = self;
        let (stored, packed) = (Bytes(*stored), Bytes(*packed));
        write!(f, "{} as {}: {count} matrices, {stored} in the file, {packed} here", stored_as.name(), run_as.name())
    }
}

/// Checks that the files hold every weight of the model, in the right shape and a type that can be run.
pub fn check(files: &ModelFiles, model: &Model) -> Result<MatrixBytes, LoadError> {
    let mut count = Count::default();
    walk(files, model, &mut count)?;
    Ok(count.0)
}

impl<M, V> Weights<M, V> {
    /// Packs all weights into `backend`. Pages of the files are given back as it goes, so that the weights are not held
    /// twice.
    pub fn load<B>(
        files: &ModelFiles,
        model: &Model,
        backend: &mut B,
        progress: Progress<'_>,
    ) -> Result<Self, LoadError>
    where
        B: Backend<Matrix = M, Vector = V>,
    {
        let total = check(files, model)?.stored;
        walk(files, model, &mut Pack { backend, progress, done: 0, total })
    }
}

/// What is made of the tensors that a walk finds.
trait Sink {
    type Matrix;
    type Vector;
    fn matrix(&mut self, at: &Path, parts: &[Weight<'_>]) -> Result<(Self::Matrix, u64), LoadError>;
    fn vector(&mut self, at: &Path, values: &[f32]) -> Result<Self::Vector, LoadError>;
    /// Whether tensors' pages are to be read ahead and given back.
    const READS: bool;
}

/// Counts matrices without reading them; norms and biases are small, and are read.
#[derive(Default)]
struct Count(MatrixBytes);

impl Sink for Count {
    type Matrix = ();
    type Vector = ();
    const READS: bool = false;

    fn matrix(&mut self, at: &Path, parts: &[Weight<'_>]) -> Result<((), u64), LoadError> {
        let before = self.0.packed;
        let mut as_run = 0;
        for part in parts {
            let Weight { dtype, rows, cols, bytes, run_as } = *part;
            let packed = packed_bytes(run_as, rows, cols).ok_or_else(|| {
                LoadError::malformed(at, format!("a matrix of {rows} × {cols} is larger than any memory"))
            })?;
            self.0.add(dtype, run_as, bytes.len() as u64, packed as u64);
            let bytes = run_as.row_bytes(cols).unwrap_or_default() as u64 * rows as u64;
            as_run += bytes.next_multiple_of(ALIGNMENT);
        }
        self.0.as_run += taken_bytes(as_run);
        Ok(((), self.0.packed - before))
    }
    fn vector(&mut self, _: &Path, values: &[f32]) -> Result<(), LoadError> {
        self.0.as_run += taken_bytes(size_of_val(values) as u64);
        Ok(())
    }
}

impl MatrixBytes {
    fn add(&mut self, stored_as: DType, run_as: DType, stored: u64, packed: u64) {
        self.stored += stored;
        self.packed += packed;
        self.run_as.push(run_as);
        self.quantised |= !run_as.is_dense();
        self.halves |= run_as == DType::F16;
        if stored_as == run_as {
            return;
        }
        let same = |converted: &&mut Converted| (converted.stored_as, converted.run_as) == (stored_as, run_as);
        match self.converted.iter_mut().find(same) {
            Some(converted) => {
                converted.count += 1;
                converted.stored += stored;
                converted.packed += packed;
            }
            None => self.converted.push(Converted { stored_as, run_as, count: 1, stored, packed }),
        }
    }
}

/// Packs.
struct Pack<'a, B> {
    backend: &'a mut B,
    progress: Progress<'a>,
    done: u64,
    total: u64,
}

impl<B: Backend> Sink for Pack<'_, B> {
    type Matrix = B::Matrix;
    type Vector = B::Vector;
    const READS: bool = true;

    fn matrix(&mut self, at: &Path, parts: &[Weight<'_>]) -> Result<(B::Matrix, u64), LoadError> {
        let matrix = self.backend.matrix(parts).map_err(|source| refused(at, source))?;
        let bytes = self.backend.matrix_bytes(&matrix) as u64;
        self.done += file_bytes(parts);
        if !(self.progress)(self.done, self.total) {
            return Err(LoadError::Interrupted);
        }
        Ok((matrix, bytes))
    }
    fn vector(&mut self, at: &Path, values: &[f32]) -> Result<B::Vector, LoadError> {
        self.backend.vector(values).map_err(|source| refused(at, source))
    }
}

fn file_bytes(parts: &[Weight<'_>]) -> u64 {
    parts.iter().map(|part| part.bytes.len() as u64).sum()
}

fn refused(at: &Path, source: BackendError) -> LoadError {
    LoadError::Backend { path: at.to_owned(), source }
}

fn walk<S: Sink>(files: &ModelFiles, model: &Model, sink: &mut S) -> Result<Weights<S::Matrix, S::Vector>, LoadError> {
    let Model { spec, names, .. } = model;
    let mut walk = Walk { tensors: &files.tensors, at: files.path(), spec, names, sink, matrix_bytes: 0 };
    let table = [(names.embedding.to_owned(), spec.vocab_size)];
    let head = [(names.head.to_owned(), spec.vocab_size)];
    Ok(Weights {
        embedding: walk.matrix(&table, spec.hidden_size)?,
        layers: (0..spec.layers.len()).map(|layer| walk.layer(layer)).collect::<Result<_, _>>()?,
        final_norm: walk.norm(names.final_norm, spec.hidden_size)?,
        head: if spec.tied_embeddings { None } else { Some(walk.matrix(&head, spec.hidden_size)?) },
        matrix_bytes: walk.matrix_bytes,
    })
}

struct Walk<'a, S> {
    tensors: &'a Tensors,
    at: &'a Path,
    spec: &'a DecoderSpec,
    names: &'static WeightNames,
    sink: &'a mut S,
    matrix_bytes: u64,
}

impl<S: Sink> Walk<'_, S> {
    fn layer(&mut self, layer: usize) -> Result<LayerWeights<S::Matrix, S::Vector>, LoadError> {
        let Self { spec, names, .. } = *self;
        let (hidden, heads) = (spec.hidden_size, spec.heads);
        let name = |part: &str| format!("{}.{layer}.{part}", names.layers);
        let kv = heads.kv * heads.head_dim;
        let qkv = parts(names.qkv, &[heads.query_width(), kv, kv], name);
        let [query_norm, key_norm] = match spec.qk_norm {
            QkNorm::None => [0, 0],
            QkNorm::PerHead => [heads.head_dim; 2],
            QkNorm::WholeRow => [heads.query_width(), kv],
        };
        let key_bias = if spec.biases.qkv { Some(self.bias(&qkv)?) } else { None };
        let key_bias = key_bias.map(|bias| bias[heads.query_width()..][..kv].to_vec());
        Ok(LayerWeights {
            key_bias,
            attention_norm: self.norm_if(spec.pre_norms, &name(names.attention_norm), hidden)?,
            qkv: self.linear(&qkv, hidden, spec.biases.qkv)?,
            query_norm: self.norm_if(query_norm > 0, &name(names.query_norm), query_norm)?,
            key_norm: self.norm_if(key_norm > 0, &name(names.key_norm), key_norm)?,
            output: self.linear(&[(name(names.output), hidden)], heads.query_width(), spec.biases.output)?,
            post_attention_norm: self.norm_if(spec.post_norms, &name(names.post_attention_norm), hidden)?,
            mlp_norm: self.norm_if(spec.pre_norms, &name(names.mlp_norm), hidden)?,
            mlp: match spec.experts.filter(|_| spec.layers[layer].sparse) {
                None => self.dense(name)?,
                Some(experts) => self.sparse(experts, name)?,
            },
            post_mlp_norm: self.norm_if(spec.post_norms, &name(names.post_mlp_norm), hidden)?,
        })
    }

    fn dense(&mut self, name: impl Fn(&str) -> String) -> Result<Mlp<S::Matrix, S::Vector>, LoadError> {
        let Self { spec, names, .. } = *self;
        let (hidden, width, bias) = (spec.hidden_size, spec.intermediate_size, spec.biases.mlp);
        let gate_up = parts(names.gate_up, &[width; 2], &name);
        Ok(Mlp::Dense {
            gate_up: self.linear(&gate_up, hidden, bias)?,
            down: self.linear(&[(name(names.down), hidden)], width, bias)?,
        })
    }

    fn sparse(
        &mut self,
        experts: Experts,
        name: impl Fn(&str) -> String,
    ) -> Result<Mlp<S::Matrix, S::Vector>, LoadError> {
        let Self { spec, tensors, .. } = *self;
        let names = ExpertNames::of(self.names, |part| tensors.get(&name(part)).is_some());
        let (hidden, width) = (spec.hidden_size, experts.intermediate_size);
        Ok(Mlp::Sparse(ExpertWeights {
            router: self.router(name(names.router), [experts.count, hidden])?,
            gate_up: self.experts(names.gate_up, [experts.count, 2 * width / names.gate_up.len(), hidden], &name)?,
            down: self.experts(&[names.down], [experts.count, hidden, width], &name)?,
        }))
    }

    /// One matrix of all experts' parts: of the first all that are named, then of the second … `shape` is that of one part
    /// of all experts.
    fn experts(
        &mut self,
        parts: &[&str],
        shape @ [count, rows, cols]: [usize; 3],
        name: impl Fn(&str) -> String,
    ) -> Result<S::Matrix, LoadError> {
        let mut stacks = Vec::with_capacity(parts.len());
        for part in parts {
            stacks.push(if part.contains(ExpertNames::NUMBER) {
                let one = |expert: usize| {
                    let name = name(&part.replace(ExpertNames::NUMBER, &expert.to_string()));
                    let weight = self.tensors.matrix(self.at, &name, [rows, cols])?;
                    Ok((name, weight))
                };
                (0..count).map(one).collect::<Result<Vec<_>, LoadError>>()?
            } else {
                let stack = self.tensors.stack(self.at, &name(part), shape)?;
                stack.into_iter().map(|weight| (name(part), weight)).collect()
            });
        }
        let of_expert = |expert: usize| stacks.iter().map(move |stack| stack[expert].clone());
        self.pack(&(0..count).flat_map(of_expert).collect::<Vec<_>>())
    }

    /// Never quantised here: it would send rows to other experts.
    fn router(&mut self, name: String, shape: [usize; 2]) -> Result<S::Matrix, LoadError> {
        let name = format!("{name}.weight");
        let mut weight = self.tensors.matrix(self.at, &name, shape)?;
        if !weight.run_as.is_dense() {
            weight.run_as = weight.dtype.native();
        }
        self.pack(&[(name, weight)])
    }

    fn linear(
        &mut self,
        parts: &[(String, usize)],
        cols: usize,
        bias: bool,
    ) -> Result<Linear<S::Matrix, S::Vector>, LoadError> {
        let matrix = self.matrix(parts, cols)?;
        let bias = if bias { Some(self.bias(parts)?) } else { None };
        let bias = bias.map(|values| self.sink.vector(self.at, &values)).transpose()?;
        Ok(Linear { matrix, bias })
    }

    /// The named parts, each with its number of outputs, as one matrix.
    fn matrix(&mut self, parts: &[(String, usize)], cols: usize) -> Result<S::Matrix, LoadError> {
        let part = |(name, rows): &(String, usize)| {
            let name = format!("{name}.weight");
            let weight = self.tensors.matrix(self.at, &name, [*rows, cols])?;
            Ok((name, weight))
        };
        let parts: Vec<_> = parts.iter().map(part).collect::<Result<_, LoadError>>()?;
        self.pack(&parts)
    }

    /// These parts, with the names of the tensors that they lie in, as one matrix.
    fn pack(&mut self, parts: &[(String, Weight<'_>)]) -> Result<S::Matrix, LoadError> {
        let mut names: Vec<_> = parts.iter().map(|(name, _)| name.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        let each = |act: fn(&Tensors, &str)| {
            if S::READS {
                names.iter().for_each(|name| act(self.tensors, name));
            }
        };
        let weights: Vec<_> = parts.iter().map(|(_, weight)| *weight).collect();
        each(Tensors::will_need);
        let (matrix, bytes) = self.sink.matrix(self.at, &weights).map_err(|error| named(error, parts))?;
        each(Tensors::forget);
        self.matrix_bytes += bytes;
        Ok(matrix)
    }

    fn bias(&self, parts: &[(String, usize)]) -> Result<Vec<f32>, LoadError> {
        let mut values = Vec::new();
        for (name, rows) in parts {
            values.extend(self.tensors.vector(self.at, &format!("{name}.bias"), *rows)?);
        }
        Ok(values)
    }

    fn norm_if(&mut self, wanted: bool, name: &str, length: usize) -> Result<Option<S::Vector>, LoadError> {
        if wanted { self.norm(name, length).map(Some) } else { Ok(None) }
    }

    fn norm(&mut self, name: &str, length: usize) -> Result<S::Vector, LoadError> {
        let mut values = self.tensors.vector(self.at, &format!("{name}.weight"), length)?;
        values.iter_mut().for_each(|value| *value += self.spec.norm_weight_offset);
        self.sink.vector(self.at, &values)
    }
}

/// A value that the wanted type cannot hold, with the name of its tensor.
fn named(error: LoadError, parts: &[(String, Weight<'_>)]) -> LoadError {
    match error {
        LoadError::Backend { path, source: BackendError::OutOfRange { part, row, run_as } } => {
            let (path, name, run_as) = (path.display(), &parts[part].0, run_as.name());
            LoadError::Setting(format!(
                "{path}: row {row} of tensor `{name}` holds a value that {run_as} cannot; dtype=\"f32\" holds them all"
            ))
        }
        other => other,
    }
}

/// Full names of the parts of a matrix with their outputs. One name for several parts: the file holds them stacked already.
fn parts(names: &[&str], rows: &[usize], full: impl Fn(&str) -> String) -> Vec<(String, usize)> {
    match names {
        [one] => vec![(full(one), rows.iter().sum())],
        _ => names.iter().zip(rows).map(|(name, &rows)| (full(name), rows)).collect(),
    }
}
