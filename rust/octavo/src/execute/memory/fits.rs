//! What would fit where memory is too small, found by trying.

use super::{MemoryRequest, divide};
use crate::model::DecoderSpec;

/// For a model that would fit if less were asked for beside its weights: the largest value of each setting that is small
/// enough on its own; or values that are small enough together.
pub(super) fn what_fits(spec: &DecoderSpec, request: &MemoryRequest<'_>) -> String {
    let fits = |request: &MemoryRequest<'_>| divide(spec, request).is_ok();
    let longest = request.max_model_len.unwrap_or(spec.max_positions);
    let MemoryRequest { max_num_batched_tokens: rows, max_num_seqs: seqs, block_size, .. } = *request;
    let with_rows = |rows| MemoryRequest { max_num_batched_tokens: rows, ..*request };
    let with_seqs = |seqs| MemoryRequest { max_num_seqs: seqs, ..*request };
    let with_len = |len| MemoryRequest { max_model_len: Some(len), ..*request };
    let alone = [
        ("max_num_batched_tokens", largest(seqs, rows, |rows| fits(&with_rows(rows)))),
        ("max_num_seqs", largest(1, seqs, |seqs| fits(&with_seqs(seqs)))),
        ("max_model_len", largest(1, longest, |len| fits(&with_len(len)))),
    ];
    let alone: Vec<String> =
        alone.into_iter().filter_map(|(name, value)| value.map(|value| format!("{name}={value}"))).collect();
    if !alone.is_empty() {
        return format!("{} would fit", alone.join(" or "));
    }
    let halves = (1..usize::BITS).map(|times| {
        let seqs = (seqs >> times).max(1);
        let len = (longest >> times).max(block_size.min(longest));
        MemoryRequest {
            max_num_seqs: seqs,
            ..MemoryRequest { max_model_len: Some(len), ..with_rows((rows >> times).max(seqs)) }
        }
    });
    match halves.into_iter().take(16).find(fits) {
        Some(MemoryRequest { max_num_batched_tokens, max_num_seqs, max_model_len, .. }) => format!(
            "max_num_batched_tokens={max_num_batched_tokens}, max_num_seqs={max_num_seqs} and max_model_len={} together \
             would fit",
            max_model_len.unwrap_or(longest)
        ),
        None => SMALLER_MODEL.to_owned(),
    }
}

pub(super) const SMALLER_MODEL: &str = "a smaller or more strongly quantised model would fit";

/// The largest value from `least` up to below `most` that fits, given that all below one that fits do too.
fn largest(least: usize, most: usize, fits: impl Fn(usize) -> bool) -> Option<usize> {
    if least >= most || !fits(least) {
        return None;
    }
    let (mut good, mut bad) = (least, most);
    while bad - good > 1 {
        let middle = good + (bad - good) / 2;
        if fits(middle) { good = middle } else { bad = middle }
    }
    Some(good)
}
