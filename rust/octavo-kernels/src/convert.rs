//! Rows of one type as rows of another, at load. Converting to a type's [`DType::native`] loses nothing; to others, values
//! are decoded and rounded.

use half::{bf16, f16};

use crate::reference::codebooks::{IQ4_VALUES, Nested};
use crate::reference::dequantise::dequantise;
use crate::{BackendError, DType, Result, Weight};

/// Values that share a scale in Q8_0.
const Q8_0_LEN: usize = 32;

/// A value that the wanted type cannot hold: beyond its range, or no number where there is no way to say so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutOfRange;

/// Whether rows of `from` can be made rows of `to`: they are equal, or `to` is the native type or one of F32, F16, BF16
/// and Q8_0.
pub fn is_possible(from: DType, to: DType) -> bool {
    from == to || from.native() == to || matches!(to, DType::F32 | DType::F16 | DType::BF16 | DType::Q8_0)
}

/// Converts a row. Floats round to the nearest, ties to even. Q8_0 rounds as ggml does: blocks of 32, the scale
/// `max |x| / 127`, codes to the nearest, ties away from zero.
///
/// # Panics
/// When the conversion is not [possible](is_possible), or the lengths are not those of rows of `cols` values.
pub fn convert_row(from: DType, row: &[u8], to: DType, out: &mut [u8], cols: usize) -> Result<(), OutOfRange> {
    assert_eq!((from.row_bytes(cols), to.row_bytes(cols)), (Some(row.len()), Some(out.len())), "a row of {cols}");
    if from == to {
        out.copy_from_slice(row);
        return Ok(());
    }
    match (from, to) {
        (DType::IQ4_NL, DType::Q8_0) => iq4_nl_to_q8_0(row, out),
        (_, DType::Q8_16) if from.native() == to => {
            for (block, out) in row.chunks_exact(from.block_bytes()).zip(out.chunks_exact_mut(to.block_bytes())) {
                Nested::decode(from, block).encode(out);
            }
        }
        _ => {
            let mut values = vec![0.0; cols];
            dequantise(from, row, &mut values);
            return encode(to, &values, out);
        }
    }
    Ok(())
}

/// A weight's rows from `first` on, at most `count` of them, as rows of the type that it is run as. The error is the number
/// of the row that cannot be.
pub(crate) fn rows_to_run(weight: &Weight<'_>, first: usize, count: usize) -> Result<Vec<u8>, usize> {
    let Weight { dtype, rows, cols, run_as, .. } = *weight;
    let row_bytes = [dtype, run_as].map(|dtype| dtype.row_bytes(cols).expect("whole blocks"));
    let rows = first..rows.min(first + count);
    let mut out = vec![0; rows.len() * row_bytes[1]];
    for (row, out) in rows.zip(out.chunks_exact_mut(row_bytes[1])) {
        let bytes = &weight.bytes[row * row_bytes[0]..][..row_bytes[0]];
        convert_row(dtype, bytes, run_as, out, cols).map_err(|OutOfRange| row)?;
    }
    Ok(out)
}

/// Checks a weight that a file may have got wrong, or a setting.
pub(crate) fn check(weight: &Weight<'_>) -> Result<()> {
    let Weight { dtype, rows, cols, bytes, run_as } = *weight;
    let bad = |what| Err(BackendError::BadWeight(what));
    let want = dtype.row_bytes(cols).and_then(|row| row.checked_mul(rows));
    if want != Some(bytes.len()) || rows == 0 || cols == 0 {
        let (name, got, block) = (dtype.name(), bytes.len(), dtype.block_len());
        return bad(match want {
            Some(want) => format!("a {rows} × {cols} weight of {name} has {want} bytes, not {got}"),
            None => format!("a {rows} × {cols} weight of {name}: {cols} is not a multiple of {block}"),
        });
    }
    if !run_as.is_native() || !is_possible(dtype, run_as) || run_as.row_bytes(cols).is_none() {
        return bad(format!("a {rows} × {cols} weight of {} cannot be run as {}", dtype.name(), run_as.name()));
    }
    Ok(())
}

/// The codes become what they number; the scale stays, so nothing is rounded.
fn iq4_nl_to_q8_0(row: &[u8], out: &mut [u8]) {
    for (block, out) in row.chunks_exact(18).zip(out.chunks_exact_mut(34)) {
        out[..2].copy_from_slice(&block[..2]);
        for (i, byte) in block[2..].iter().enumerate() {
            out[2 + i] = IQ4_VALUES[usize::from(byte & 15)] as u8;
            out[2 + i + 16] = IQ4_VALUES[usize::from(byte >> 4)] as u8;
        }
    }
}

fn encode(to: DType, values: &[f32], out: &mut [u8]) -> Result<(), OutOfRange> {
    match to {
        DType::F32 => encode_dense(values, out, |x| Ok(x.to_le_bytes())),
        DType::F16 => encode_dense(values, out, |x| {
            let half = f16::from_f32(x);
            if half.is_infinite() && x.is_finite() { Err(OutOfRange) } else { Ok(half.to_le_bytes()) }
        }),
        DType::BF16 => encode_dense(values, out, |x| {
            let half = bf16::from_f32(x);
            if half.is_infinite() && x.is_finite() { Err(OutOfRange) } else { Ok(half.to_le_bytes()) }
        }),
        DType::Q8_0 => {
            let blocks = values.chunks_exact(Q8_0_LEN).zip(out.chunks_exact_mut(DType::Q8_0.block_bytes()));
            blocks.into_iter().try_for_each(|(values, block)| encode_q8_0(values, block))
        }
        other => panic!("values are not encoded as {}", other.name()),
    }
}

fn encode_dense<const N: usize>(
    values: &[f32],
    out: &mut [u8],
    encode: impl Fn(f32) -> Result<[u8; N], OutOfRange>,
) -> Result<(), OutOfRange> {
    for (&value, out) in values.iter().zip(out.as_chunks_mut().0) {
        *out = encode(value)?;
    }
    Ok(())
}

fn encode_q8_0(values: &[f32], block: &mut [u8]) -> Result<(), OutOfRange> {
    let largest = values.iter().fold(0.0f32, |most, x| most.max(x.abs()));
    let scale = largest / 127.0;
    let stored = f16::from_f32(scale);
    if !stored.is_finite() || values.iter().any(|x| x.is_nan()) {
        return Err(OutOfRange);
    }
    // The exact scale divides, though the rounded one is stored: ggml's choice, and theirs are the files to agree with.
    let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
    block[..2].copy_from_slice(&stored.to_le_bytes());
    for (&x, byte) in values.iter().zip(&mut block[2..]) {
        // For the smallest numbers the inverse is infinite; such a block's scale is stored as zero, so the code is free.
        *byte = (x * inverse).round().clamp(-127.0, 127.0) as i8 as u8;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|x| x.to_le_bytes()).collect()
    }

    fn converted(values: &[f32], to: DType) -> Result<Vec<f32>, OutOfRange> {
        let mut out = vec![0; to.row_bytes(values.len()).unwrap()];
        convert_row(DType::F32, &bytes(values), to, &mut out, values.len())?;
        let mut back = vec![0.0; values.len()];
        dequantise(to, &out, &mut back);
        Ok(back)
    }

    #[test]
    fn floats_round_to_the_nearest_even() {
        // Half way between neighbours of 8 and of 11 bits.
        let values = [1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0, 1.0 + 1.0 / 2048.0, 1.0 + 3.0 / 2048.0, -0.0];
        assert_eq!(converted(&values, DType::BF16).unwrap()[..2], [1.0, 1.0 + 4.0 / 256.0]);
        assert_eq!(converted(&values, DType::F16).unwrap()[2..4], [1.0, 1.0 + 4.0 / 2048.0]);
        assert!(converted(&values, DType::F16).unwrap()[4].is_sign_negative());
    }

    #[test]
    fn what_does_not_fit_is_told_and_what_was_infinite_stays_so() {
        assert_eq!(converted(&[65519.0], DType::F16), Ok(vec![65504.0]));
        assert_eq!(converted(&[65520.0], DType::F16), Err(OutOfRange));
        assert_eq!(converted(&[f32::MAX], DType::BF16), Err(OutOfRange));
        assert_eq!(converted(&[f32::NEG_INFINITY], DType::F16), Ok(vec![f32::NEG_INFINITY]));
        for bad in [f32::NAN, f32::INFINITY, 1e7] {
            let mut values = [1.0; 64];
            values[40] = bad;
            assert_eq!(converted(&values, DType::Q8_0), Err(OutOfRange), "{bad}");
        }
    }

    #[test]
    fn q8_0_rounds_as_ggml_does() {
        let mut values = [0.0f32; 64];
        // The scale is 1, and halves go away from zero.
        values[..5].copy_from_slice(&[127.0, 0.5, -0.5, 1.5, -2.5]);
        let got = converted(&values, DType::Q8_0).unwrap();
        assert_eq!(got[..5], [127.0, 1.0, -1.0, 2.0, -3.0]);
        assert!(got[5..].iter().all(|&x| x == 0.0));
        assert_eq!(converted(&[1e-45; 32], DType::Q8_0).unwrap(), [0.0; 32]);
    }

    /// The smallest number that is not zero, in every type that has one, is nothing to stumble over either.
    #[test]
    fn native_types_hold_every_value() {
        let mut state = 1u64;
        for from in DType::ALL.into_iter().filter(|dtype| !dtype.is_native()) {
            for _ in 0..200 {
                let mut block = vec![0u8; from.block_bytes()];
                for byte in &mut block {
                    state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    *byte = (state >> 33) as u8;
                }
                let (cols, to) = (from.block_len(), from.native());
                let mut out = vec![0; to.row_bytes(cols).unwrap()];
                convert_row(from, &block, to, &mut out, cols).unwrap();
                let mut values = [vec![0.0f32; cols], vec![0.0f32; cols]];
                dequantise(from, &block, &mut values[0]);
                dequantise(to, &out, &mut values[1]);
                for (want, got) in values[0].iter().zip(&values[1]) {
                    let same = want.to_bits() == got.to_bits() || want.is_nan() && got.is_nan();
                    assert!(same, "{}: {want:e} became {got:e}", from.name());
                }
            }
        }
    }
}
