//! Temperature, min-p, top-k and top-p, and the pick among what they keep.
//!
//! Every filter keeps the likeliest tokens down to some border, so nothing is ever sorted: min-p and top-k are a floor
//! under the logits, top-p a border found by selection.

use super::{select, softmax};
use crate::request::SamplingParams;

/// The pick sums weights in blocks of this many, then walks inside one.
const BLOCK: usize = 512;
/// So few are sorted rather than halved.
const FEW: usize = 32;

/// The tokens that the filters kept, in order of id. The vectors are as long as the vocabulary, the first `count` of
/// each are in use.
#[derive(Debug)]
pub struct Kept {
    count: usize,
    ids: Vec<u32>,
    logits: Vec<f32>,
    /// Proportional to the probability.
    weights: Vec<f32>,
    total: f64,
    keys: Vec<u64>,
}

impl Kept {
    pub fn new(vocab: usize) -> Self {
        Self {
            count: 0,
            ids: vec![0; vocab],
            logits: vec![0.0; vocab],
            weights: vec![0.0; vocab],
            total: 0.0,
            keys: Vec::with_capacity(vocab),
        }
    }

    /// Applies temperature (not 0), min-p, top-k and top-p. `max` is the largest of `logits` and finite.
    pub fn keep(&mut self, logits: &[f32], max: f32, params: &SamplingParams) {
        assert_eq!(logits.len(), self.ids.len(), "logits of another vocabulary than the sampler's");
        let floor = min_p_floor(max, params).max(self.top_k_floor(logits, params.top_k as usize));
        self.gather(logits, floor);
        self.weigh(max, params.temperature);
        if params.top_p < 1.0 {
            self.keep_top_p(params.top_p);
        }
    }

    /// The token at `coin` · total of the running sum of weights, which is exact. A weight of 0 is never picked.
    pub fn pick(&self, coin: f64) -> u32 {
        let target = coin * self.total;
        let mut sum = 0.0;
        let mut last = 0;
        for (block, ids) in self.weights[..self.count].chunks(BLOCK).zip(self.ids.chunks(BLOCK)) {
            let block_sum = softmax::sum(block);
            if sum + block_sum <= target {
                sum += block_sum;
                continue;
            }
            for (&weight, &id) in block.iter().zip(ids).filter(|(weight, _)| **weight > 0.0) {
                sum += f64::from(weight);
                last = id;
                if sum > target {
                    return id;
                }
            }
            return last;
        }
        // Rounding: coin · total came out as the total.
        let alive = self.weights[..self.count].iter().rposition(|&weight| weight > 0.0);
        self.ids[alive.expect("the likeliest token has a weight")]
    }

    /// Writes the probabilities of the kept tokens.
    pub fn probabilities(&self, out: &mut [f32]) {
        for (&id, &weight) in self.ids.iter().zip(&self.weights[..self.count]) {
            out[id as usize] = (f64::from(weight) / self.total) as f32;
        }
    }

    /// The k-th largest logit: what equals it is kept too.
    fn top_k_floor(&mut self, logits: &[f32], k: usize) -> f32 {
        if k == 0 || k >= logits.len() {
            return f32::NEG_INFINITY;
        }
        select::top(logits, k, &mut self.keys);
        self.keys.get(k - 1).map_or(f32::NEG_INFINITY, |&key| select::value_of(key))
    }

    /// Takes the tokens whose logit is at least `floor` and not −∞.
    fn gather(&mut self, logits: &[f32], floor: f32) {
        let floor = floor.max(f32::MIN);
        let mut count = 0;
        for (id, &logit) in logits.iter().enumerate() {
            // Written always, counted sometimes: no branch to mispredict.
            self.ids[count] = id as u32;
            self.logits[count] = logit;
            count += usize::from(logit >= floor);
        }
        self.count = count;
    }

    fn weigh(&mut self, max: f32, temperature: f32) {
        let logits = &self.logits[..self.count];
        for (weight, &logit) in self.weights.iter_mut().zip(logits) {
            *weight = softmax::round(softmax::weight((logit - max) / temperature));
        }
        self.total = self.weights[..self.count].chunks(BLOCK).map(softmax::sum).sum();
    }

    fn keep_top_p(&mut self, top_p: f32) {
        let border = self.top_p_border(top_p);
        let mut count = 0;
        for i in 0..self.count {
            let stays = select::key(self.logits[i], i as u32) >= border;
            self.ids[count] = self.ids[i];
            self.weights[count] = self.weights[i];
            count += usize::from(stays);
        }
        self.count = count;
        self.total = self.weights[..count].chunks(BLOCK).map(softmax::sum).sum();
    }

    /// The key of the last token of the smallest set of likeliest tokens whose probability reaches `top_p`.
    fn top_p_border(&mut self, top_p: f32) -> u64 {
        let Self { count, logits, weights, total, keys, .. } = self;
        // Compared at the parameter's own precision: ten tokens of 0.1 reach 0.3f32 with the third.
        let reaches = |sum: f64| (sum / *total) as f32 >= top_p;
        // Tokens below this, all of them together, weigh less than what the set may leave out (and a hair less, for
        // rounding). Of a real model's vocabulary that is nearly everything.
        let least = (*total * (1.0 - f64::from(top_p)) / *count as f64 * 0.999) as f32;
        keys.clear();
        let candidates = (0..*count).filter(|&i| weights[i] >= least);
        keys.extend(candidates.map(|i| select::key(logits[i], i as u32)));

        // Halve: the better half is enough, or all of it is needed and the border lies in the other.
        let weight_of = |key: &u64| f64::from(weights[select::index_of(*key) as usize]);
        let mut sum = 0.0;
        let mut open = &mut keys[..];
        while open.len() > FEW {
            let middle = open.len() / 2;
            open.select_nth_unstable_by(middle, |a, b| b.cmp(a));
            let (better, worse) = open.split_at_mut(middle);
            let with_better = sum + better.iter().map(weight_of).sum::<f64>();
            open = if reaches(with_better) {
                better
            } else {
                sum = with_better;
                worse
            };
        }
        open.sort_unstable_by(|a, b| b.cmp(a));
        let reached = open.iter().find(|key| {
            sum += weight_of(key);
            reaches(sum)
        });
        // Never reached only by rounding: then all are needed.
        reached.or(open.last()).copied().unwrap_or(0)
    }
}

/// The logit of `min_p` times the largest probability.
fn min_p_floor(max: f32, params: &SamplingParams) -> f32 {
    (f64::from(max) + min_p_offset(params)) as f32
}

/// How far below the largest logit that is, as a number below 0; −∞ where nothing is too far.
pub fn min_p_offset(params: &SamplingParams) -> f64 {
    if params.min_p == 0.0 {
        return f64::NEG_INFINITY;
    }
    f64::from(params.temperature) * f64::from(params.min_p).ln()
}
