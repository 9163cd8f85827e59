//! ggml's numbers for tensor types. All are named, so that a refusal can name what it found; most can be read.

use octavo_kernels::DType;

/// By ggml's number. Gaps are types that ggml has removed and never reused.
const NAMES: [&str; 42] = [
    "F32",
    "F16",
    "Q4_0",
    "Q4_1",
    "Q4_2",
    "Q4_3",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "Q8_1",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "Q8_K",
    "IQ2_XXS",
    "IQ2_XS",
    "IQ3_XXS",
    "IQ1_S",
    "IQ4_NL",
    "IQ3_S",
    "IQ2_S",
    "IQ4_XS",
    "I8",
    "I16",
    "I32",
    "I64",
    "F64",
    "IQ1_M",
    "BF16",
    "Q4_0_4_4",
    "Q4_0_4_8",
    "Q4_0_8_8",
    "TQ1_0",
    "TQ2_0",
    "IQ4_NL_4_4",
    "IQ4_NL_4_8",
    "IQ4_NL_8_8",
    "MXFP4",
    "NVFP4",
    "Q1_0",
];

/// The name of ggml's type `id`.
pub fn name(id: u32) -> String {
    match NAMES.get(id as usize) {
        Some(name) => (*name).to_owned(),
        None => format!("number {id}"),
    }
}

/// Which type that is here, if octavo can read it.
pub fn dtype(id: u32) -> Option<DType> {
    let name = NAMES.get(id as usize)?;
    DType::ALL.into_iter().find(|dtype| dtype.name() == *name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_ggmls() {
        for (id, dtype_) in [
            (0, DType::F32),
            (1, DType::F16),
            (2, DType::Q4_0),
            (3, DType::Q4_1),
            (6, DType::Q5_0),
            (7, DType::Q5_1),
            (8, DType::Q8_0),
            (12, DType::Q4_K),
            (13, DType::Q5_K),
            (14, DType::Q6_K),
            (30, DType::BF16),
            (10, DType::Q2_K),
            (11, DType::Q3_K),
            (16, DType::IQ2_XXS),
            (17, DType::IQ2_XS),
            (18, DType::IQ3_XXS),
            (19, DType::IQ1_S),
            (20, DType::IQ4_NL),
            (21, DType::IQ3_S),
            (22, DType::IQ2_S),
            (23, DType::IQ4_XS),
            (29, DType::IQ1_M),
            (34, DType::TQ1_0),
            (35, DType::TQ2_0),
            (39, DType::MXFP4),
        ] {
            assert_eq!(dtype(id), Some(dtype_));
        }
        // All but Q8_16, which is in no file.
        assert_eq!((0..200).filter_map(dtype).count(), DType::ALL.len() - 1);
        assert_eq!(
            [name(10), name(11), name(20), name(39), name(77)],
            ["Q2_K", "Q3_K", "IQ4_NL", "MXFP4", "number 77"]
        );
    }
}
