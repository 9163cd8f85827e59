//! The type that weights are run as.

use octavo_kernels::DType;

/// How weights are held in memory. Norms and biases are always float32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WeightDtype {
    /// As they are stored; types without kernels become ones that hold the same values (see [`DType::native`]).
    #[default]
    Auto,
    /// Decoded.
    F32,
    /// Decoded and rounded to the nearest.
    Bf16,
    /// Decoded and rounded to the nearest. A value beyond ±65504 is an error.
    F16,
    /// Quantised in blocks of 32 as ggml does. Matrices whose rows are no multiple of 32 stay as they are stored.
    Q8_0,
}

impl WeightDtype {
    /// Every setting, by the name that users write.
    pub const NAMES: [(&'static str, Self); 5] =
        [("auto", Self::Auto), ("f32", Self::F32), ("bf16", Self::Bf16), ("f16", Self::F16), ("q8_0", Self::Q8_0)];

    /// The setting of this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::NAMES.into_iter().find_map(|(known, dtype)| (known == name).then_some(dtype))
    }

    /// The name that users write.
    pub fn name(self) -> &'static str {
        Self::NAMES.into_iter().find_map(|(name, dtype)| (dtype == self).then_some(name)).unwrap_or("auto")
    }

    /// What a matrix that is stored as `stored`, in rows of `cols`, is run as.
    pub fn run_as(self, stored: DType, cols: usize) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::Bf16 => DType::BF16,
            Self::F16 => DType::F16,
            Self::Q8_0 if cols.is_multiple_of(DType::Q8_0.block_len()) => DType::Q8_0,
            Self::Auto | Self::Q8_0 => stored.native(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_that_cannot_be_quantised_stay_as_they_are() {
        assert_eq!(WeightDtype::Q8_0.run_as(DType::BF16, 96), DType::Q8_0);
        assert_eq!(WeightDtype::Q8_0.run_as(DType::BF16, 40), DType::BF16);
        assert_eq!(WeightDtype::Q8_0.run_as(DType::Q4_K, 256), DType::Q8_0);
        assert_eq!(WeightDtype::Auto.run_as(DType::Q4_K, 256), DType::Q4_K);
        assert_eq!(WeightDtype::Auto.run_as(DType::TQ2_0, 256), DType::Q8_16);
        assert_eq!(WeightDtype::F16.run_as(DType::MXFP4, 32), DType::F16);
    }

    #[test]
    fn names_are_read_back() {
        for (name, dtype) in WeightDtype::NAMES {
            assert_eq!((WeightDtype::from_name(name), dtype.name()), (Some(dtype), name));
        }
        assert_eq!(WeightDtype::from_name("F32"), None);
    }
}
