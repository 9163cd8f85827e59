//! The sampler alone, over logits that the caller brings.

use std::sync::Arc;

use octavo::execute::Draw;
use octavo::sample::{Sampler, TokenHistory};
use pyo3::prelude::*;
use pyo3::types::PyByteArray;

use crate::errors::invalid;
use crate::params;

/// The probability of every token, as float32.
#[pyfunction]
pub fn sampling_probabilities<'py>(
    py: Python<'py>,
    logits: &[u8],
    params: &Bound<'py, PyAny>,
    prompt_token_ids: Vec<u32>,
    output_token_ids: Vec<u32>,
) -> PyResult<Bound<'py, PyByteArray>> {
    let (logits, draw) = task(logits, params, &prompt_token_ids, &output_token_ids)?;
    let found = py.detach(|| Sampler::new(logits.len()).probabilities(&logits, &draw, None)).map_err(invalid)?;
    Ok(PyByteArray::new(py, &found.into_iter().flat_map(f32::to_le_bytes).collect::<Vec<_>>()))
}

/// Token ids, drawn with the coins of one position after another, as uint32.
#[pyfunction]
pub fn sample<'py>(
    py: Python<'py>,
    logits: &[u8],
    params: &Bound<'py, PyAny>,
    prompt_token_ids: Vec<u32>,
    output_token_ids: Vec<u32>,
    draws: usize,
) -> PyResult<Bound<'py, PyByteArray>> {
    let (logits, mut draw) = task(logits, params, &prompt_token_ids, &output_token_ids)?;
    let found = py.detach(|| {
        let mut sampler = Sampler::new(logits.len());
        let mut ids = Vec::new();
        for _ in 0..draws {
            ids.extend(sampler.draw(&logits, &draw, None)?.token_id.to_le_bytes());
            draw.position += 1;
        }
        Ok::<_, String>(ids)
    });
    Ok(PyByteArray::new(py, &found.map_err(invalid)?))
}

fn task(logits: &[u8], params: &Bound<'_, PyAny>, prompt: &[u32], output: &[u32]) -> PyResult<(Vec<f32>, Draw)> {
    let logits: Vec<f32> = logits.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    let (params, _) = params::sampling_params(params)?;
    params.validate(logits.len()).map_err(invalid)?;
    if let Some(id) = prompt.iter().chain(output).find(|&&id| id as usize >= logits.len()) {
        return Err(invalid(format!("token id {id} is outside the vocabulary: there are {} logits", logits.len())));
    }
    let mut history = TokenHistory::new(prompt);
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
