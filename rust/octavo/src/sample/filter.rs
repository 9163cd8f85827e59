//! Temperature, min-p, top-k and top-p, and the pick among what they keep.
//!
//! Every filter keeps the likeliest tokens down to some border, so nothing is ever sorted: min-p and top-k are a floor
//! under the logits, top-p a border found by selection.

use super::select::LANES;
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
    /// All are kept: a token is in the place of its id, and `ids` and `logits` are not in use.
    all: bool,
    ids: Vec<u32>,
    logits: Vec<f32>,
    /// Proportional to the probability, and rounded.
    weights: Vec<f32>,
    /// The weights added up, block by block, and all of them.
    block_sums: Vec<f64>,
    total: f64,
    keys: Vec<u64>,
}

impl Kept {
    pub fn new(vocab: usize) -> Self {
        Self {
            count: 0,
            all: false,
            ids: vec![0; vocab],
            logits: vec![0.0; vocab],
            weights: vec![0.0; vocab],
            block_sums: Vec::with_capacity(vocab.div_ceil(BLOCK)),
            total: 0.0,
            keys: Vec::with_capacity(vocab),
        }
    }

    /// Applies temperature (not 0), min-p, top-k and top-p. `max` is the largest of `logits` and finite.
    #[inline(always)]
    pub fn keep(&mut self, logits: &[f32], max: f32, params: &SamplingParams) {
        assert_eq!(logits.len(), self.ids.len(), "logits of another vocabulary than the sampler's");
        let floor = min_p_floor(max, params).max(self.top_k_floor(logits, params.top_k as usize));
        self.all = floor == f32::NEG_INFINITY;
        self.count = logits.len();
        if !self.all {
            self.gather(logits, floor);
        }
        self.weigh(logits, max, params.temperature);
        if params.top_p < 1.0 {
            self.keep_top_p(logits, params.top_p);
        }
    }

    /// The token at `coin` · total of the running sum of weights, which is exact. A weight of 0 is never picked.
    pub fn pick(&self, coin: f64) -> u32 {
        let target = coin * self.total;
        let mut sum = 0.0;
        for (block, &block_sum) in self.block_sums.iter().enumerate() {
            if sum + block_sum <= target {
                sum += block_sum;
                continue;
            }
            let begin = block * BLOCK;
            let mut last = begin;
            for place in begin..self.count.min(begin + BLOCK) {
                let weight = self.weights[place];
                if weight > 0.0 {
                    sum += f64::from(weight);
                    last = place;
                    if sum > target {
                        break;
                    }
                }
            }
            return self.id(last);
        }
        // Rounding: coin · total came out as the total.
        let alive = self.weights[..self.count].iter().rposition(|&weight| weight > 0.0);
        self.id(alive.expect("the likeliest token has a weight"))
    }

    /// Writes the probabilities of the kept tokens, from what they were weighed by: not rounded.
    pub fn probabilities(&self, logits: &[f32], max: f32, temperature: f32, out: &mut [f32]) {
        let weight_of = |id: u32| softmax::weight((logits[id as usize] - max) / temperature);
        let ids = || (0..self.count).map(|place| self.id(place));
        let total: f64 = ids().map(|id| f64::from(weight_of(id))).sum();
        ids().for_each(|id| out[id as usize] = (f64::from(weight_of(id)) / total) as f32);
    }

    /// The token in a place.
    #[inline(always)]
    fn id(&self, place: usize) -> u32 {
        if self.all { place as u32 } else { self.ids[place] }
    }

    /// The k-th largest logit: what equals it is kept too.
    #[inline(always)]
    fn top_k_floor(&mut self, logits: &[f32], k: usize) -> f32 {
        if k == 0 || k >= logits.len() {
            return f32::NEG_INFINITY;
        }
        select::top(logits, k, &mut self.keys);
        self.keys.get(k - 1).map_or(f32::NEG_INFINITY, |&key| select::value_of(key))
    }

    /// Takes the tokens whose logit is at least `floor`, which is finite.
    #[inline(always)]
    fn gather(&mut self, logits: &[f32], floor: f32) {
        let mut count = 0;
        for (number, chunk) in logits.chunks(LANES).enumerate() {
            if !select::any_reaches(chunk, floor) {
                continue;
            }
            for (offset, &logit) in chunk.iter().enumerate() {
                // Written always, counted sometimes: no branch to mispredict.
                self.ids[count] = (number * LANES + offset) as u32;
                self.logits[count] = logit;
                count += usize::from(logit >= floor);
            }
        }
        self.count = count;
    }

    /// Gives the kept tokens weights.
    #[inline(always)]
    fn weigh(&mut self, logits: &[f32], max: f32, temperature: f32) {
        let Self { count, weights, block_sums, .. } = self;
        let logits = if self.all { logits } else { &self.logits[..*count] };
        block_sums.clear();
        for (weights, logits) in weights[..*count].chunks_mut(BLOCK).zip(logits.chunks(BLOCK)) {
            softmax::weigh(weights, logits, max, temperature);
            weights.iter_mut().for_each(|weight| *weight = softmax::round(*weight));
            block_sums.push(softmax::sum(weights));
        }
        self.total = block_sums.iter().sum();
    }

    #[inline(always)]
    fn keep_top_p(&mut self, logits: &[f32], top_p: f32) {
        let Self { count, all, ids, weights, block_sums, total, keys, .. } = self;
        let logits = if *all { logits } else { &self.logits[..*count] };
        let border = top_p_border(logits, &weights[..*count], *total, top_p, keys);
        let mut kept = 0;
        for (number, chunk) in logits.chunks(LANES).enumerate() {
            if !select::any_reaches(chunk, select::value_of(border)) {
                continue;
            }
            for (offset, &logit) in chunk.iter().enumerate() {
                let place = number * LANES + offset;
                ids[kept] = if *all { place as u32 } else { ids[place] };
                weights[kept] = weights[place];
                kept += usize::from(select::key(logit, place as u32) >= border);
            }
        }
        (*count, *all) = (kept, false);
        block_sums.clear();
        for weights in weights[..kept].chunks(BLOCK) {
            block_sums.push(softmax::sum(weights));
        }
        *total = block_sums.iter().sum();
    }
}

/// The key (of logit and place) of the last token of the smallest set of likeliest tokens whose share of the `total` weight
/// reaches `top_p`.
#[inline(always)]
fn top_p_border(logits: &[f32], weights: &[f32], total: f64, top_p: f32, keys: &mut Vec<u64>) -> u64 {
    // Compared at the parameter's own precision: ten tokens of 0.1 reach 0.3f32 with the third.
    let reaches = |sum: f64| (sum / total) as f32 >= top_p;
    // Tokens below this, all of them together, weigh less than what the set may leave out (and a hair less, for
    // rounding). Of a real model's vocabulary that is nearly everything.
    let least = (total * (1.0 - f64::from(top_p)) / weights.len() as f64 * 0.999) as f32;
    keys.clear();
    for (number, chunk) in weights.chunks(LANES).enumerate() {
        if !select::any_reaches(chunk, least) {
            continue;
        }
        for (place, &weight) in (number * LANES..).zip(chunk) {
            if weight >= least {
                keys.push(select::key(logits[place], place as u32));
            }
        }
    }

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
    reached.or(open.last()).copied().unwrap_or(select::key(f32::NEG_INFINITY, u32::MAX))
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
