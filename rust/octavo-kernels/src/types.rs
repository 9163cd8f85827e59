//! Element and block types of weights: how many bytes, how many values, and their names.

use half::{bf16, f16};

/// A type of weight, by its GGUF name. Block types hold `block_len` values in `block_bytes` bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, non_camel_case_types)]
pub enum DType {
    F32,
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    /// In no file: eight-bit codes with a scale for every 16, which hold the values of most other types exactly. A block is
    /// `d: f32 | 16 signed scales | 256 signed codes`, and a value `d · scale · code`.
    Q8_16,
    IQ4_NL,
    IQ4_XS,
    IQ2_XXS,
    IQ2_XS,
    IQ2_S,
    IQ3_XXS,
    IQ3_S,
    IQ1_S,
    IQ1_M,
    TQ1_0,
    TQ2_0,
    MXFP4,
}

impl DType {
    /// All of them, for error messages and sweeps.
    pub const ALL: [Self; 26] = [
        Self::F32,
        Self::F16,
        Self::BF16,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q2_K,
        Self::Q3_K,
        Self::Q4_K,
        Self::Q5_K,
        Self::Q6_K,
        Self::Q8_16,
        Self::IQ4_NL,
        Self::IQ4_XS,
        Self::IQ2_XXS,
        Self::IQ2_XS,
        Self::IQ2_S,
        Self::IQ3_XXS,
        Self::IQ3_S,
        Self::IQ1_S,
        Self::IQ1_M,
        Self::TQ1_0,
        Self::TQ2_0,
        Self::MXFP4,
    ];

    /// The type that this one is run as: itself, where backends have a product for it; otherwise the smallest such type that
    /// holds every one of its values exactly.
    pub const fn native(self) -> Self {
        match self {
            // The codes become their values; the scale stays.
            Self::IQ4_NL => Self::Q8_0,
            // Powers of two beyond the range of half floats.
            Self::MXFP4 => Self::BF16,
            Self::IQ4_XS
            | Self::IQ2_XXS
            | Self::IQ2_XS
            | Self::IQ2_S
            | Self::IQ3_XXS
            | Self::IQ3_S
            | Self::IQ1_S
            | Self::IQ1_M
            | Self::TQ1_0
            | Self::TQ2_0 => Self::Q8_16,
            native => native,
        }
    }

    /// Whether backends have a product for it.
    pub fn is_native(self) -> bool {
        self.native() == self
    }

    /// Name, values in a block, bytes of a block.
    const fn layout(self) -> (&'static str, usize, usize) {
        match self {
            Self::F32 => ("F32", 1, 4),
            Self::F16 => ("F16", 1, 2),
            Self::BF16 => ("BF16", 1, 2),
            Self::Q4_0 => ("Q4_0", 32, 18),
            Self::Q4_1 => ("Q4_1", 32, 20),
            Self::Q5_0 => ("Q5_0", 32, 22),
            Self::Q5_1 => ("Q5_1", 32, 24),
            Self::Q8_0 => ("Q8_0", 32, 34),
            Self::Q2_K => ("Q2_K", 256, 84),
            Self::Q3_K => ("Q3_K", 256, 110),
            Self::Q4_K => ("Q4_K", 256, 144),
            Self::Q5_K => ("Q5_K", 256, 176),
            Self::Q6_K => ("Q6_K", 256, 210),
            Self::Q8_16 => ("Q8_16", 256, 276),
            Self::IQ4_NL => ("IQ4_NL", 32, 18),
            Self::IQ4_XS => ("IQ4_XS", 256, 136),
            Self::IQ2_XXS => ("IQ2_XXS", 256, 66),
            Self::IQ2_XS => ("IQ2_XS", 256, 74),
            Self::IQ2_S => ("IQ2_S", 256, 82),
            Self::IQ3_XXS => ("IQ3_XXS", 256, 98),
            Self::IQ3_S => ("IQ3_S", 256, 110),
            Self::IQ1_S => ("IQ1_S", 256, 50),
            Self::IQ1_M => ("IQ1_M", 256, 56),
            Self::TQ1_0 => ("TQ1_0", 256, 54),
            Self::TQ2_0 => ("TQ2_0", 256, 66),
            Self::MXFP4 => ("MXFP4", 32, 17),
        }
    }

    /// The GGUF name.
    pub const fn name(self) -> &'static str {
        self.layout().0
    }

    /// Values in one block.
    pub const fn block_len(self) -> usize {
        self.layout().1
    }

    /// Bytes of one block.
    pub const fn block_bytes(self) -> usize {
        self.layout().2
    }

    /// Bytes of a row of `cols` values; `None` when `cols` is no multiple of the block or the product overflows.
    pub fn row_bytes(self, cols: usize) -> Option<usize> {
        if !cols.is_multiple_of(self.block_len()) {
            return None;
        }
        (cols / self.block_len()).checked_mul(self.block_bytes())
    }

    /// Whether values are stored one by one rather than in scaled blocks.
    pub const fn is_dense(self) -> bool {
        self.block_len() == 1
    }
}

/// Decodes `bytes` of dense little-endian values into `out`. Block types are decoded in [`crate::reference::dequantise`].
///
/// # Panics
/// When `dtype` is a block type or the lengths differ.
pub fn decode_dense(dtype: DType, bytes: &[u8], out: &mut [f32]) {
    assert!(dtype.is_dense(), "{} is a block type", dtype.name());
    assert_eq!(bytes.len(), out.len() * dtype.block_bytes());
    match dtype {
        DType::F32 => {
            for (out, b) in out.iter_mut().zip(bytes.chunks_exact(4)) {
                *out = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
            }
        }
        DType::F16 => {
            for (out, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                *out = f16::from_le_bytes([b[0], b[1]]).to_f32();
            }
        }
        _ => {
            for (out, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                *out = bf16::from_le_bytes([b[0], b[1]]).to_f32();
            }
        }
    }
}
