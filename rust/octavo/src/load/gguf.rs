//! The only reader of GGUF files. Every length in the file is checked against the bytes that are left before anything is
//! allocated for it, so a hostile file costs no more memory than its own size.
//!
//! The format: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>, versions 2 and 3, little-endian.

use std::ops::Range;

use super::metadata::{Metadata, Value};

const MAGIC: &[u8; 4] = b"GGUF";
const DEFAULT_ALIGNMENT: u64 = 32;
/// Nobody's tensors have more axes.
const MAX_DIMS: u32 = 4;

/// A parsed header: metadata and where every tensor lies in the file.
#[derive(Clone, Debug)]
pub struct Gguf {
    /// Format version.
    pub version: u32,
    /// Key-value pairs.
    pub metadata: Metadata,
    /// The tensors, in file order.
    pub tensors: Vec<TensorInfo>,
    /// Where tensor data begins, from the start of the file.
    pub data_start: u64,
}

/// One tensor's place and type. `type_id` is ggml's number; a number octavo cannot run is refused by the loader, not here,
/// so that `inspect` can still show the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Its name.
    pub name: String,
    /// Sizes, outermost first (rows, cols): GGUF stores them innermost first.
    pub shape: Vec<usize>,
    /// ggml's type number.
    pub type_id: u32,
    /// Where its bytes begin, from the start of the file.
    pub offset: u64,
}

impl Gguf {
    /// Parses the header of a file whose whole contents are `bytes`. The error says what was wanted, what was found and at
    /// which byte.
    pub fn parse(bytes: &[u8]) -> Result<Self, String> {
        let mut reader = Reader { bytes, at: 0 };
        if reader.take(4).ok() != Some(MAGIC) {
            return Err("not a GGUF file: it does not begin with `GGUF`".into());
        }
        let version = reader.u32()?;
        if version.swap_bytes() < 100 && version > 0xffff {
            return Err("a big-endian GGUF file; only little-endian ones are read".into());
        }
        if !(2..=3).contains(&version) {
            return Err(format!("GGUF version {version}; versions 2 and 3 are read"));
        }
        let tensor_count = reader.u64()?;
        let metadata_count = reader.u64()?;
        let metadata = reader.metadata(metadata_count)?;
        let mut tensors = reader.tensors(tensor_count)?;
        let alignment = metadata.integer("general.alignment")?.unwrap_or(DEFAULT_ALIGNMENT);
        if !alignment.is_power_of_two() || alignment > 1 << 20 {
            return Err(format!("general.alignment is {alignment}, it should be a small power of two"));
        }
        let data_start = (reader.at as u64).next_multiple_of(alignment);
        for tensor in &mut tensors {
            if tensor.offset % alignment != 0 {
                return Err(format!(
                    "tensor `{}` begins at {}, not a multiple of {alignment}",
                    tensor.name, tensor.offset
                ));
            }
            tensor.offset = tensor
                .offset
                .checked_add(data_start)
                .ok_or_else(|| format!("tensor `{}` begins at {}, beyond any file", tensor.name, tensor.offset))?;
        }
        Ok(Self { version, metadata, tensors, data_start })
    }

    /// The tensor of this name.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.iter().find(|tensor| tensor.name == name)
    }
}

impl TensorInfo {
    /// Values in the tensor; `None` if the product overflows.
    pub fn elements(&self) -> Option<usize> {
        self.shape.iter().try_fold(1usize, |product, &size| product.checked_mul(size))
    }

    /// The bytes `[offset, offset + length)` of the file, if the file has them.
    pub fn range(&self, length: usize, file_len: usize) -> Result<Range<usize>, String> {
        let start = usize::try_from(self.offset).ok().filter(|&start| start <= file_len);
        match start.and_then(|start| start.checked_add(length).filter(|&end| end <= file_len).map(|end| start..end)) {
            Some(range) => Ok(range),
            None => Err(format!(
                "tensor `{}` should have {length} bytes from byte {}, the file has {file_len} (is it truncated?)",
                self.name, self.offset
            )),
        }
    }
}

/// A cursor that cannot run past the end.
struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    fn take(&mut self, count: usize) -> Result<&'a [u8], String> {
        if count > self.left() {
            return Err(format!("truncated: {count} bytes wanted at byte {}, {} are left", self.at, self.left()));
        }
        let taken = &self.bytes[self.at..self.at + count];
        self.at += count;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    fn u32(&mut self) -> Result<u32, String> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64, String> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn string(&mut self) -> Result<String, String> {
        let length = usize::try_from(self.u64()?).unwrap_or(usize::MAX);
        let bytes = self.take(length)?;
        // Vocabularies hold raw bytes now and then; what is no text is replaced, like every other reader does.
        Ok(String::from_utf8_lossy(bytes).into_owned())
    }

    /// Refuses a count that the rest of the file cannot hold.
    fn plausible(&self, what: &str, count: u64, least_bytes_each: usize) -> Result<usize, String> {
        let most = self.left() / least_bytes_each;
        match usize::try_from(count) {
            Ok(count) if count <= most => Ok(count),
            _ => Err(format!("{what} should have {count} entries at byte {}, the file has room for {most}", self.at)),
        }
    }

    fn metadata(&mut self, count: u64) -> Result<Metadata, String> {
        let count = self.plausible("the metadata", count, 8 + 4 + 1)?;
        let mut metadata = Metadata::default();
        for _ in 0..count {
            let key = self.string()?;
            let type_id = self.u32()?;
            let value = self.value(&key, type_id)?;
            if metadata.0.insert(key.clone(), value).is_some() {
                return Err(format!("metadata `{key}` appears twice"));
            }
        }
        Ok(metadata)
    }

    fn value(&mut self, key: &str, type_id: u32) -> Result<Value, String> {
        Ok(match type_id {
            0 => Value::Unsigned(self.array::<1>()?[0].into()),
            1 => Value::Signed(i8::from_le_bytes(self.array()?).into()),
            2 => Value::Unsigned(u16::from_le_bytes(self.array()?).into()),
            3 => Value::Signed(i16::from_le_bytes(self.array()?).into()),
            4 => Value::Unsigned(self.u32()?.into()),
            5 => Value::Signed(i32::from_le_bytes(self.array()?).into()),
            6 => Value::Float(f32::from_le_bytes(self.array()?).into()),
            7 => Value::Bool(self.array::<1>()?[0] != 0),
            8 => Value::String(self.string()?),
            9 => self.array_value(key)?,
            10 => Value::Unsigned(self.u64()?),
            11 => Value::Signed(i64::from_le_bytes(self.array()?)),
            12 => Value::Float(f64::from_le_bytes(self.array()?)),
            other => return Err(format!("metadata `{key}` has the unknown type {other} at byte {}", self.at)),
        })
    }

    fn array_value(&mut self, key: &str) -> Result<Value, String> {
        let type_id = self.u32()?;
        let length = self.u64()?;
        let what = format!("metadata `{key}`");
        macro_rules! numbers {
            ($variant:ident, $number:ty, $into:ty) => {{
                const SIZE: usize = size_of::<$number>();
                let length = self.plausible(&what, length, SIZE)?;
                let bytes = self.take(length * SIZE)?.chunks_exact(SIZE);
                Value::$variant(
                    bytes
                        .map(|b| {
                            let mut array = [0; SIZE];
                            array.copy_from_slice(b);
                            <$number>::from_le_bytes(array) as $into
                        })
                        .collect(),
                )
            }};
        }
        Ok(match type_id {
            0 => numbers!(UnsignedArray, u8, u64),
            1 => numbers!(SignedArray, i8, i64),
            2 => numbers!(UnsignedArray, u16, u64),
            3 => numbers!(SignedArray, i16, i64),
            4 => numbers!(UnsignedArray, u32, u64),
            5 => numbers!(SignedArray, i32, i64),
            6 => numbers!(FloatArray, f32, f32),
            7 => {
                let length = self.plausible(&what, length, 1)?;
                Value::BoolArray(self.take(length)?.iter().map(|&b| b != 0).collect())
            }
            8 => {
                let length = self.plausible(&what, length, 8)?;
                Value::StringArray((0..length).map(|_| self.string()).collect::<Result<_, _>>()?)
            }
            10 => numbers!(UnsignedArray, u64, u64),
            11 => numbers!(SignedArray, i64, i64),
            12 => numbers!(FloatArray, f64, f32),
            other => return Err(format!("{what} is an array of the unknown type {other}")),
        })
    }

    fn tensors(&mut self, count: u64) -> Result<Vec<TensorInfo>, String> {
        let count = self.plausible("the tensor list", count, 8 + 4 + 4 + 8)?;
        (0..count).map(|_| self.tensor()).collect()
    }

    fn tensor(&mut self) -> Result<TensorInfo, String> {
        let name = self.string()?;
        let dims = self.u32()?;
        if dims > MAX_DIMS {
            return Err(format!("tensor `{name}` has {dims} axes, at most {MAX_DIMS} are possible"));
        }
        let mut shape = Vec::with_capacity(dims as usize);
        for _ in 0..dims {
            let size = self.u64()?;
            shape.push(usize::try_from(size).map_err(|_| format!("tensor `{name}` has an axis of {size}"))?);
        }
        shape.reverse();
        Ok(TensorInfo { name, shape, type_id: self.u32()?, offset: self.u64()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(tensors: u64, metadata: u64) -> Vec<u8> {
        let mut bytes = b"GGUF".to_vec();
        bytes.extend(3u32.to_le_bytes());
        bytes.extend(tensors.to_le_bytes());
        bytes.extend(metadata.to_le_bytes());
        bytes
    }

    fn key(bytes: &mut Vec<u8>, key: &str, type_id: u32) {
        bytes.extend((key.len() as u64).to_le_bytes());
        bytes.extend(key.as_bytes());
        bytes.extend(type_id.to_le_bytes());
    }

    #[test]
    fn counts_are_checked_before_memory_is_taken() {
        for (tensors, metadata) in [(u64::MAX, 0), (0, u64::MAX), (1 << 40, 0), (0, 1 << 40), (1, 0), (0, 1)] {
            assert!(Gguf::parse(&header(tensors, metadata)).is_err(), "{tensors} {metadata}");
        }
        for type_id in 0..14 {
            let mut bytes = header(0, 1);
            key(&mut bytes, "k", 9);
            bytes.extend((type_id as u32).to_le_bytes());
            bytes.extend((u64::MAX / 2).to_le_bytes());
            assert!(Gguf::parse(&bytes).is_err(), "array of type {type_id}");
        }
    }

    #[test]
    fn every_truncation_is_an_error() {
        let mut bytes = header(1, 2);
        key(&mut bytes, "a", 8);
        bytes.extend(2u64.to_le_bytes());
        bytes.extend(b"hi");
        key(&mut bytes, "b", 9);
        bytes.extend(5u32.to_le_bytes());
        bytes.extend(2u64.to_le_bytes());
        bytes.extend((-1i32).to_le_bytes());
        bytes.extend(7i32.to_le_bytes());
        bytes.extend(1u64.to_le_bytes());
        bytes.extend(b"t");
        bytes.extend(2u32.to_le_bytes());
        bytes.extend(32u64.to_le_bytes());
        bytes.extend(3u64.to_le_bytes());
        bytes.extend(0u32.to_le_bytes());
        bytes.extend(64u64.to_le_bytes());
        let gguf = Gguf::parse(&bytes).unwrap();
        assert_eq!(gguf.metadata.string("a"), Ok(Some("hi")));
        assert_eq!(gguf.metadata.integers("b"), Ok(Some(vec![-1, 7])));
        assert_eq!(gguf.tensors[0].shape, [3, 32]);
        assert_eq!(gguf.tensors[0].offset, gguf.data_start + 64);
        assert!(gguf.tensors[0].range(384, bytes.len()).unwrap_err().contains("truncated"));
        for length in 0..bytes.len() {
            assert!(Gguf::parse(&bytes[..length]).is_err(), "cut at {length}");
        }
    }

    #[test]
    fn wrong_types_name_the_key() {
        let mut bytes = header(0, 1);
        key(&mut bytes, "general.architecture", 4);
        bytes.extend(7u32.to_le_bytes());
        let error = Gguf::parse(&bytes).unwrap().metadata.string("general.architecture").unwrap_err();
        assert_eq!(error, "metadata `general.architecture` should be a string, it is an integer");
    }
}
