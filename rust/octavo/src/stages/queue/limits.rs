//! What can run here at all. A request that never could is told so at once, with the numbers.

use crate::request::{Rejection, Request, Wanted};
use crate::schedule::SchedulerConfig;

/// Why a request cannot be taken, if so. `living` requests run or wait. Engines count at their [`door`](super::door), so that
/// theirs are never too many.
///
/// The bound is on both together: a burst that arrives before anything could be scheduled is not refused as long as the
/// free places and the queue hold it.
pub fn refusal(
    config: &SchedulerConfig,
    request: &Request,
    living: usize,
    retry_after_ns: impl FnOnce() -> u64,
) -> Option<Rejection> {
    if let Err(why) = fits(config, request.prompt.len(), request.wanted) {
        return Some(Rejection::Impossible(why));
    }
    let most = most_living(config);
    (living >= most).then(|| Rejection::QueueFull { living, most, retry_after_ns: retry_after_ns() })
}

/// Most requests that run or wait.
pub fn most_living(config: &SchedulerConfig) -> usize {
    config.max_num_seqs + config.max_queue
}

/// Most tokens of prompt and answer together.
pub fn longest(config: &SchedulerConfig) -> usize {
    config.layout.longest(config.blocks, config.max_model_len)
}

/// Most tokens that the request may generate: what it asks, cut to what there is room for.
pub fn most_new_tokens(config: &SchedulerConfig, request: &Request) -> usize {
    request.params.max_tokens.min(longest(config).saturating_sub(request.prompt.len()))
}

/// Whether a prompt of `prompt` tokens could ever run here; if not, the numbers and the setting that would fit it.
pub fn fits(config: &SchedulerConfig, prompt: usize, wanted: Wanted) -> Result<(), String> {
    if prompt == 0 {
        return Err("the prompt is empty; it needs at least one token".into());
    }
    let (needed, purpose) = match wanted {
        Wanted::Tokens => (prompt + 1, "with room for one new token"),
        Wanted::LastLogits | Wanted::AllLogits => (prompt, "whose logits are wanted"),
        Wanted::Scores { .. } => (prompt, "to be scored"),
    };
    if needed > config.max_model_len {
        return Err(format!(
            "a prompt of {prompt} tokens {purpose} needs a max_model_len of at least {needed}, it is {}",
            config.max_model_len
        ));
    }
    let blocks = config.layout.blocks_for(needed);
    if blocks > config.blocks {
        let percent = (blocks * 100).div_ceil(config.blocks);
        return Err(format!(
            "a prompt of {prompt} tokens {purpose} needs {blocks} KV cache blocks of {} tokens, the cache has {}: raise \
             kv_cache_bytes to at least {}.{:02} times what it is",
            config.layout.block_size,
            config.blocks,
            percent / 100,
            percent % 100
        ));
    }
    Ok(())
}
