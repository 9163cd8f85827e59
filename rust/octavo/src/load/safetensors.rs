//! Headers of safetensors files: <https://github.com/huggingface/safetensors#format>.

use std::ops::Range;

use octavo_kernels::DType;
use safetensors::Dtype;
use safetensors::tensor::Metadata;

/// Bytes before the header: its length.
const LENGTH_BYTES: usize = 8;

/// One tensor of a file.
#[derive(Clone, Debug)]
pub struct TensorInfo {
    /// Its name.
    pub name: String,
    /// Sizes, outermost first.
    pub shape: Vec<usize>,
    /// Element type, as the format names it.
    pub type_name: String,
    /// The type to run it as, if octavo can.
    pub dtype: Option<DType>,
    /// Its bytes in the file.
    pub range: Range<usize>,
}

/// The tensors of the file whose whole contents are `bytes`, in file order.
pub fn parse(bytes: &[u8]) -> Result<Vec<TensorInfo>, String> {
    let Some((length, rest)) = bytes.split_first_chunk::<LENGTH_BYTES>() else {
        return Err(format!("not a safetensors file: it has {} bytes", bytes.len()));
    };
    let length = u64::from_le_bytes(*length);
    let header = usize::try_from(length).ok().and_then(|length| rest.get(..length)).ok_or_else(|| {
        format!("the header should have {length} bytes, {} are left (truncated, or not a safetensors file)", rest.len())
    })?;
    // The crate checks that the tensors' sizes fit their shapes and follow one another without gap or overlap. Its own
    // comparison with the file's length can overflow, so that one is made here.
    let metadata: Metadata = serde_json::from_slice(header).map_err(|error| format!("the header: {error}"))?;
    let data = rest.len() - header.len();
    if metadata.data_len() != data {
        return Err(format!("the tensors should have {} bytes, the file has {data} (is it truncated?)", metadata.data_len()));
    }
    let data_start = LENGTH_BYTES + header.len();
    let tensor = |name: String| {
        let info = metadata.info(&name)?;
        let range = data_start + info.data_offsets.0..data_start + info.data_offsets.1;
        let type_name = format!("{:?}", info.dtype);
        Some(TensorInfo { shape: info.shape.clone(), dtype: dtype(info.dtype), name, type_name, range })
    };
    Ok(metadata.offset_keys().into_iter().filter_map(tensor).collect())
}

fn dtype(dtype: Dtype) -> Option<DType> {
    match dtype {
        Dtype::F32 => Some(DType::F32),
        Dtype::F16 => Some(DType::F16),
        Dtype::BF16 => Some(DType::BF16),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(header: &str, data: usize) -> Vec<u8> {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.extend(vec![0; data]);
        bytes
    }

    #[test]
    fn sizes_are_checked_against_the_file() {
        let good = r#"{"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"b":{"dtype":"I64","shape":[1],"data_offsets":[24,32]}}"#;
        let tensors = parse(&file(good, 32)).unwrap();
        assert_eq!((tensors[0].name.as_str(), tensors[0].dtype, tensors[0].range.len()), ("a", Some(DType::F32), 24));
        assert_eq!((tensors[1].type_name.as_str(), tensors[1].dtype), ("I64", None));
        let whole = file(good, 32);
        for length in 0..whole.len() {
            assert!(parse(&whole[..length]).is_err(), "cut at {length}");
        }
        assert!(parse(&file(good, 33)).is_err());
    }

    #[test]
    fn sizes_near_the_end_of_the_address_space_are_errors() {
        for (shape, end) in [("[2305843009213693951]", u64::MAX - 7), ("[4611686018427387904,4]", 16), ("[1]", u64::MAX)] {
            let header = format!(r#"{{"a":{{"dtype":"U64","shape":{shape},"data_offsets":[0,{end}]}}}}"#);
            assert!(parse(&file(&header, 8)).is_err(), "{header}");
        }
        let mut huge = u64::MAX.to_le_bytes().to_vec();
        huge.extend(b"{}");
        assert!(parse(&huge).unwrap_err().contains("truncated"));
    }
}
