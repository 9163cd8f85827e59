//! What a model file holds, and what this machine offers.

use std::path::PathBuf;

use pyo3::prelude::*;

use crate::errors::not_loaded;

/// What is in a model file.
#[pyclass(module = "octavo._octavo", frozen, get_all)]
pub struct Inspection {
    architecture: String,
    name: Option<String>,
    layers: usize,
    hidden_size: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    /// Experts of a sparse layer, and how many of them a token goes to.
    experts: Option<(usize, usize)>,
    vocab: usize,
    max_positions: usize,
    /// Type, number of tensors, bytes, and the type that they are run as; ``None``: they cannot be run.
    tensor_types: Vec<(String, usize, u64, Option<String>)>,
    tokenizer: String,
    pre_tokenizer: Option<String>,
    chat_template: Option<String>,
    bos: Option<u32>,
    eos: Option<u32>,
    file_bytes: u64,
    kv_bytes_per_token: u64,
}

/// Reads what is in a model file, without loading it.
#[pyfunction]
pub fn inspect(py: Python<'_>, path: PathBuf) -> PyResult<Inspection> {
    let found = py.detach(|| octavo::load::inspect(&path)).map_err(not_loaded)?;
    Ok(Inspection {
        architecture: found.architecture,
        name: found.name,
        layers: found.layers,
        hidden_size: found.hidden,
        heads: found.heads,
        kv_heads: found.kv_heads,
        head_dim: found.head_dim,
        experts: found.experts,
        vocab: found.vocab,
        max_positions: found.max_positions,
        tensor_types: found.tensor_types,
        tokenizer: found.tokenizer,
        pre_tokenizer: found.pre_tokenizer,
        chat_template: found.chat_template,
        bos: found.bos,
        eos: found.eos,
        file_bytes: found.file_bytes,
        kv_bytes_per_token: found.kv_bytes_per_token,
    })
}

/// What octavo found out about this machine.
#[pyclass(module = "octavo._octavo", frozen, get_all)]
pub struct Machine {
    /// The instruction set that would be used; ``None``: see ``isa_error``.
    isa: Option<String>,
    /// Why the one that was asked for cannot be used.
    isa_error: Option<String>,
    isa_available: Vec<String>,
    threads: usize,
    memory_bytes: u64,
    /// What an engine would find free: what the system has available, within this process's limits.
    free_memory_bytes: u64,
    /// Whether this build has kernels for NVIDIA GPUs.
    cuda_kernels: bool,
    /// Name, compute capability and bytes of memory of every GPU that NVIDIA's driver knows.
    gpus: Vec<(String, (u32, u32), u64)>,
    /// Why there is no driver: what was looked for, and where.
    gpu_error: Option<String>,
}

/// What this machine offers, and what octavo would use of it.
#[pyfunction]
pub fn machine(py: Python<'_>) -> Machine {
    // A GPU's driver takes its time.
    let found = py.detach(octavo::observe::machine);
    Machine {
        isa: found.isa.clone().ok(),
        isa_error: found.isa.err(),
        isa_available: found.isa_available.iter().map(ToString::to_string).collect(),
        threads: found.cores,
        memory_bytes: found.memory_bytes,
        free_memory_bytes: found.free_memory_bytes,
        cuda_kernels: found.cuda_kernels,
        gpu_error: found.gpus.as_ref().err().cloned(),
        gpus: found.gpus.into_iter().flatten().map(|gpu| (gpu.name, gpu.capability, gpu.memory_bytes)).collect(),
    }
}
