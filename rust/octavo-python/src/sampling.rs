//! The sampler alone, over logits that the caller brings.

use std::sync::Arc;

use octavo::execute::Draw;
use octavo::sample::{Sampler, TokenHistory};
use pyo3::prelude::*;
use pyo3::types::PyByteArray;

use crate::errors::invalid;
use crate::fields::{number, token_ids};
use crate::params;

/// float32 in, float32 out, little-endian.
#[pyfunction]
pub fn sampling_probabilities<'py>(
    py: Python<'py>,
    logits: &[u8],
    params: &Bound<'py, PyAny>,
    prompt_token_ids: &Bound<'py, PyAny>,
    output_token_ids: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyByteArray>> {
    let (logits, draw) = task(logits, params, prompt_token_ids, output_token_ids)?;
    let found = py.detach(|| Sampler::new(logits.len()).probabilities(&logits, &draw, None)).map_err(invalid)?;
    Ok(PyByteArray::new(py, &found.into_iter().flat_map(f32::to_le_bytes).collect::<Vec<_>>()))
}

/// float32 in, uint32 out, little-endian.
#[pyfunction]
pub fn sample<'py>(
    py: Python<'py>,
    logits: &[u8],
    params: &Bound<'py, PyAny>,
    prompt_token_ids: &Bound<'py, PyAny>,
    output_token_ids: &Bound<'py, PyAny>,
    draws: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyByteArray>> {
    let (logits, mut draw) = task(logits, params, prompt_token_ids, output_token_ids)?;
    let mut left = draws_wanted(draws)?;
    let (mut sampler, mut ids) = (Sampler::new(logits.len()), Vec::new());
    while left > 0 {
        let slice = left.min(SLICE);
        let drawn = py.detach(|| {
            for _ in 0..slice {
                ids.extend(sampler.draw(&logits, &draw, None)?.token_id.to_le_bytes());
                draw.position += 1;
            }
            Ok::<_, String>(())
        });
        drawn.map_err(invalid)?;
        py.check_signals()?;
        left -= slice;
    }
    Ok(PyByteArray::new(py, &ids))
}

/// Draws between two looks at whether Ctrl-C was pressed.
const SLICE: u64 = 64;

/// The most draws at once.
const MOST_DRAWS: u64 = 1 << 24;

fn draws_wanted(draws: &Bound<'_, PyAny>) -> PyResult<u64> {
    let wanted = format!("a whole number from 0 to {MOST_DRAWS}");
    let count = number("draws", &wanted, draws).map_err(invalid)?;
    if count > MOST_DRAWS {
        return Err(invalid(format!("draws must be {wanted}, not {count}")));
    }
    Ok(count)
}

fn task(
    logits: &[u8],
    params: &Bound<'_, PyAny>,
    prompt: &Bound<'_, PyAny>,
    output: &Bound<'_, PyAny>,
) -> PyResult<(Vec<f32>, Draw)> {
    let prompt = token_ids("prompt_token_ids", prompt).map_err(invalid)?;
    let output = token_ids("output_token_ids", output).map_err(invalid)?;
    let logits: Vec<f32> = logits.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    let (params, _) = params::sampling_params(params)?;
    params.validate(logits.len()).map_err(invalid)?;
    if let Some(id) = prompt.iter().chain(&output).find(|&&id| id as usize >= logits.len()) {
        return Err(invalid(format!("token id {id} is outside the vocabulary: there are {} logits", logits.len())));
    }
    let mut history = TokenHistory::new(&prompt);
    output.iter().for_each(|&token| history.push(token));
    let draw = Draw {
        seed: params.seed.unwrap_or(0),
        position: prompt.len() + output.len(),
        history: params.needs_history().then(|| Arc::new(history)),
        banned: Arc::new([]),
        params: Arc::new(params),
    };
    Ok((logits, draw))
}
