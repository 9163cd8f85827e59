//! A model's weights, from its files into a backend.
//!
//! One walk over the model says which tensors make up which weight, and of which shape. It is taken twice: once only to
//! check and to count, so that a file that does not fit fails before any of its gigabytes are read, and once to pack.

use std::path::Path;

use octavo_kernels::{Backend, BackendError, Weight};

use super::families::{ExpertNames, Model, WeightNames};
use super::spec::{DecoderSpec, Experts, QkNorm};
use crate::error::LoadError;
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

/// Told of bytes done and bytes in all; `false` stops the load.
pub type Progress<'a> = &'a mut dyn FnMut(u64, u64) -> bool;

/// Checks that the files hold every weight of the model, in the right shape and a type that can be run. Returns the bytes
/// of their matrices.
pub fn check(files: &ModelFiles, model: &Model) -> Result<u64, LoadError> {
    Ok(walk(files, model, &mut Count)?.matrix_bytes)
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
        let total = check(files, model)?;
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
struct Count;

impl Sink for Count {
    type Matrix = ();
    type Vector = ();
    const READS: bool = false;

    fn matrix(&mut self, _: &Path, parts: &[Weight<'_>]) -> Result<((), u64), LoadError> {
        Ok(((), file_bytes(parts)))
    }
    fn vector(&mut self, _: &Path, _: &[f32]) -> Result<(), LoadError> {
        Ok(())
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
        Ok(LayerWeights {
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
            router: self.matrix(&[(name(names.router), experts.count)], hidden)?,
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
        let mut names = Vec::new();
        let mut stacks = Vec::with_capacity(parts.len());
        for part in parts {
            let mut stack = Vec::new();
            if part.contains(ExpertNames::NUMBER) {
                for expert in 0..count {
                    names.push(name(&part.replace(ExpertNames::NUMBER, &expert.to_string())));
                    stack.push(self.tensors.matrix(self.at, &names[names.len() - 1], [rows, cols])?);
                }
            } else {
                names.push(name(part));
                stack = self.tensors.stack(self.at, &names[names.len() - 1], shape)?;
            }
            stacks.push(stack);
        }
        let weights: Vec<_> = (0..count).flat_map(|expert| stacks.iter().map(move |stack| stack[expert])).collect();
        self.pack(&names, &weights)
    }

    fn linear(
        &mut self,
        parts: &[(String, usize)],
        cols: usize,
        bias: bool,
    ) -> Result<Linear<S::Matrix, S::Vector>, LoadError> {
        let matrix = self.matrix(parts, cols)?;
        let bias = if bias { Some(self.bias(parts)?) } else { None };
        Ok(Linear { matrix, bias })
    }

    /// The named parts, each with its number of outputs, as one matrix.
    fn matrix(&mut self, parts: &[(String, usize)], cols: usize) -> Result<S::Matrix, LoadError> {
        let names: Vec<_> = parts.iter().map(|(name, _)| format!("{name}.weight")).collect();
        let mut weights = Vec::with_capacity(parts.len());
        for (name, (_, rows)) in names.iter().zip(parts) {
            weights.push(self.tensors.matrix(self.at, name, [*rows, cols])?);
        }
        self.pack(&names, &weights)
    }

    /// These parts, which lie in the tensors of these names, as one matrix.
    fn pack(&mut self, names: &[String], parts: &[Weight<'_>]) -> Result<S::Matrix, LoadError> {
        let each = |act: fn(&Tensors, &str)| {
            if S::READS {
                names.iter().for_each(|name| act(self.tensors, name));
            }
        };
        each(Tensors::will_need);
        let (matrix, bytes) = self.sink.matrix(self.at, parts)?;
        each(Tensors::forget);
        self.matrix_bytes += bytes;
        Ok(matrix)
    }

    fn bias(&mut self, parts: &[(String, usize)]) -> Result<S::Vector, LoadError> {
        let mut values = Vec::new();
        for (name, rows) in parts {
            values.extend(self.tensors.vector(self.at, &format!("{name}.bias"), *rows)?);
        }
        self.sink.vector(self.at, &values)
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

/// Full names of the parts of a matrix with their outputs. One name for several parts: the file holds them stacked already.
fn parts(names: &[&str], rows: &[usize], full: impl Fn(&str) -> String) -> Vec<(String, usize)> {
    match names {
        [one] => vec![(full(one), rows.iter().sum())],
        _ => names.iter().zip(rows).map(|(name, &rows)| (full(name), rows)).collect(),
    }
}
