//! Where every tensor of a model lies. Sizes are checked against the file when it is opened; types and shapes when a tensor
//! is asked for, because only then is it known what they should be.

use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use octavo_kernels::file::MappedFile;
use octavo_kernels::{DType, Weight};

use super::dtype::WeightDtype;
use super::gguf::Gguf;
use super::{ggml_type, safetensors};
use crate::error::LoadError;

/// One tensor of a model.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// Sizes, outermost first.
    pub shape: Vec<usize>,
    /// Element or block type, as its format names it.
    pub type_name: String,
    /// Its type and its bytes in the file; `None` for a type that octavo cannot read.
    stored: Option<(DType, Range<usize>)>,
    file: usize,
}

impl Tensor {
    /// Its type, if octavo can read it.
    pub fn dtype(&self) -> Option<DType> {
        self.stored.as_ref().map(|(dtype, _)| *dtype)
    }

    /// Its bytes in the file; 0 for a type that octavo does not know.
    pub fn stored_bytes(&self) -> u64 {
        self.stored.as_ref().map_or(0, |(_, range)| range.len() as u64)
    }
}

/// All tensors of a model, over one file or several.
#[derive(Debug, Default)]
pub struct Tensors {
    files: Vec<(PathBuf, MappedFile)>,
    by_name: HashMap<String, Tensor>,
    /// What matrices are run as.
    pub run_as: WeightDtype,
}

impl Tensors {
    /// The tensors of a GGUF file, and the rest of its header.
    pub fn open_gguf(path: &Path) -> Result<(Self, Gguf), LoadError> {
        let file = map(path)?;
        let malformed = |what| LoadError::malformed(path, what);
        let gguf = Gguf::parse(file.bytes()).map_err(malformed)?;
        let mut tensors = Self::default();
        for info in &gguf.tensors {
            let stored = match ggml_type::dtype(info.type_id) {
                None => None,
                Some(dtype) => {
                    let length = bytes_of(&info.name, &info.shape, dtype).map_err(malformed)?;
                    Some((dtype, info.range(length, file.bytes().len()).map_err(malformed)?))
                }
            };
            let type_name = ggml_type::name(info.type_id);
            let tensor = Tensor { shape: info.shape.clone(), type_name, stored, file: 0 };
            tensors.insert(path, &info.name, tensor)?;
        }
        tensors.files.push((path.to_owned(), file));
        Ok((tensors, gguf))
    }

    /// The tensors of safetensors files.
    pub fn open_safetensors(paths: &[PathBuf]) -> Result<Self, LoadError> {
        let mut tensors = Self::default();
        for (number, path) in paths.iter().enumerate() {
            let file = map(path)?;
            for info in safetensors::parse(file.bytes()).map_err(|what| LoadError::malformed(path, what))? {
                let stored = info.dtype.map(|dtype| (dtype, info.range));
                let tensor = Tensor { shape: info.shape, type_name: info.type_name, stored, file: number };
                tensors.insert(path, &info.name, tensor)?;
            }
            tensors.files.push((path.clone(), file));
        }
        Ok(tensors)
    }

    fn insert(&mut self, path: &Path, name: &str, tensor: Tensor) -> Result<(), LoadError> {
        match self.by_name.insert(name.to_owned(), tensor) {
            None => Ok(()),
            Some(_) => Err(LoadError::malformed(path, format!("tensor `{name}` appears twice"))),
        }
    }

    /// The tensor of this name, if the model has it.
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.by_name.get(name)
    }

    /// All of them, in no particular order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.by_name.iter().map(|(name, tensor)| (name.as_str(), tensor))
    }

    /// Bytes of all files together.
    pub fn file_bytes(&self) -> u64 {
        self.files.iter().map(|(_, file)| file.bytes().len() as u64).sum()
    }

    /// A matrix of exactly this shape, as it lies in its file, and what to run it as. `at` is where to say that it is missing.
    pub fn matrix(&self, at: &Path, name: &str, shape: [usize; 2]) -> Result<Weight<'_>, LoadError> {
        let (dtype, bytes) = self.find(at, name, &shape)?;
        let run_as = self.run_as.run_as(dtype, shape[1]);
        Ok(Weight { dtype, rows: shape[0], cols: shape[1], bytes, run_as })
    }

    /// The values of a vector of exactly this length.
    pub fn vector(&self, at: &Path, name: &str, length: usize) -> Result<Vec<f32>, LoadError> {
        let (dtype, bytes) = self.find(at, name, &[length])?;
        if !dtype.is_dense() {
            return Err(self.unsupported(at, name, dtype.name(), "F32, F16, BF16 (for a vector)".into()));
        }
        let mut values = vec![0.0; length];
        octavo_kernels::types::decode_dense(dtype, bytes, &mut values);
        Ok(values)
    }

    /// Says that this tensor will be read next.
    pub fn will_need(&self, name: &str) {
        if let Some((file, range)) = self.place(name) {
            file.will_need(range);
        }
    }

    /// Says that this tensor has been copied elsewhere, so that its pages need not stay in memory.
    pub fn forget(&self, name: &str) {
        if let Some((file, range)) = self.place(name) {
            file.forget(range);
        }
    }

    fn place(&self, name: &str) -> Option<(&MappedFile, Range<usize>)> {
        let tensor = self.get(name)?;
        let (_, range) = tensor.stored.as_ref()?;
        Some((&self.files[tensor.file].1, range.clone()))
    }

    fn find(&self, at: &Path, name: &str, shape: &[usize]) -> Result<(DType, &[u8]), LoadError> {
        let Some(tensor) = self.get(name) else {
            return Err(LoadError::malformed(at, format!("tensor `{name}` is missing")));
        };
        let (path, file) = &self.files[tensor.file];
        if tensor.shape != shape {
            let what = format!("tensor `{name}` has shape {:?}, the configuration asks for {shape:?}", tensor.shape);
            return Err(LoadError::malformed(path, what));
        }
        match &tensor.stored {
            Some((dtype, range)) => Ok((*dtype, &file.bytes()[range.clone()])),
            None => {
                let in_files = DType::ALL.into_iter().filter(|&dtype| dtype != DType::Q8_16);
                let supported = in_files.map(DType::name).collect::<Vec<_>>().join(", ");
                Err(self.unsupported(path, name, &tensor.type_name, supported))
            }
        }
    }

    fn unsupported(&self, path: &Path, name: &str, type_name: &str, supported: String) -> LoadError {
        let found = format!("{type_name}` of `{name}");
        LoadError::Unsupported { path: path.to_owned(), what: "tensor type", found, supported }
    }
}

fn map(path: &Path) -> Result<MappedFile, LoadError> {
    MappedFile::open(path).map_err(|source| LoadError::Read { path: path.to_owned(), source })
}

/// Bytes of a tensor of this shape: the innermost axis is cut into blocks.
fn bytes_of(name: &str, shape: &[usize], dtype: DType) -> Result<usize, String> {
    let (cols, outer) = shape.split_last().map_or((1, shape), |(cols, outer)| (*cols, outer));
    let row = dtype.row_bytes(cols).ok_or_else(|| {
        format!(
            "tensor `{name}` has rows of {cols} values, no multiple of a {} block of {}",
            dtype.name(),
            dtype.block_len()
        )
    })?;
    let bytes = outer.iter().try_fold(row, |product, &size| product.checked_mul(size));
    bytes.ok_or_else(|| format!("tensor `{name}` of shape {shape:?} is larger than any memory"))
}
