//! How memory is divided when a model is loaded: weights, working buffers, and what is left for the KV cache. Arithmetic
//! only; the result can be printed.

mod fits; // what would

use std::fmt;

use octavo_kernels::{CacheDtype, CacheShape};

use crate::error::LoadError;
use crate::kv::KvLayout;
use crate::model::decoder::workspace_bytes;
use crate::model::{DecoderSpec, LayerGroups};
use fits::{SMALLER_MODEL, what_fits};

/// Unless told otherwise, the KV cache takes at most this share of what weights and buffers leave …
const DEFAULT_SHARE: u64 = 4;
/// … and no more than this: a laptop's owner did not give the whole machine away.
const DEFAULT_MOST: u64 = 2 << 30;

/// A device's driver is left one part in this many.
const RESERVED_SHARE: u64 = 64;

/// What the division depends on, besides the model.
#[derive(Clone, Copy)]
pub struct MemoryRequest<'a> {
    /// Bytes that may be taken, before the weights are packed; `None`: unknown, nothing is refused.
    pub free_bytes: Option<u64>,
    /// Bytes of the weights, packed.
    pub weights_bytes: u64,
    /// Most token rows in one step.
    pub max_num_batched_tokens: usize,
    /// Most sequences in one step.
    pub max_num_seqs: usize,
    /// Longest prompt and answer together; `None`: what the model was made for, or less if that does not fit.
    pub max_model_len: Option<usize>,
    /// Positions in a block.
    pub block_size: usize,
    /// How keys and values are stored.
    pub kv_cache_dtype: CacheDtype,
    /// Bytes for the KV cache; `None`: sized here.
    pub kv_cache_bytes: Option<u64>,
    /// Of a device with memory of its own. `None`: this machine's memory, of which others want some too.
    pub device_bytes: Option<DeviceBytes<'a>>,
}

/// What a device's backend takes beside weights and cache (see [`super::rehearsal`]) for steps of so many rows, so many
/// sequences, and so many tokens of the longest.
pub type DeviceBytes<'a> = &'a dyn Fn(usize, usize, usize) -> u64;

/// Why memory cannot be divided so.
enum Refusal {
    /// A setting is wrong, however much there is.
    Setting(String),
    /// There is too little; and what would fit, where that is known.
    TooLittle(String, Option<String>),
}

/// How memory is divided.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryPlan {
    /// Bytes that were free before.
    pub free_bytes: Option<u64>,
    /// Packed weights.
    pub weights_bytes: u64,
    /// What is left to a device's driver, which keeps kernels and graphs there.
    pub reserved_bytes: u64,
    /// Buffers of a step, and on a device all else that its backend takes.
    pub workspace_bytes: u64,
    /// The KV cache.
    pub cache: CacheShape,
    /// Which layers share its block tables.
    pub groups: LayerGroups,
    /// Longest prompt and answer together.
    pub max_model_len: usize,
    /// Whether `max_model_len` is below what the model was made for, because the cache holds no more.
    pub shortened: bool,
    /// Whether the cache was sized here rather than by `kv_cache_bytes`.
    pub sized_here: bool,
}

impl MemoryPlan {
    /// Divides memory, or says what does not fit and which setting would.
    pub fn new(spec: &DecoderSpec, request: &MemoryRequest<'_>) -> Result<Self, LoadError> {
        let plan = divide(spec, request).map_err(|refusal| match refusal {
            Refusal::Setting(why) => LoadError::Setting(why),
            Refusal::TooLittle(why, fits) => {
                LoadError::OutOfMemory(format!("{why}; {}", fits.unwrap_or_else(|| what_fits(spec, request))))
            }
        })?;
        if !plan.shortened || request.device_bytes.is_none() {
            return Ok(plan);
        }
        // Shorter sequences need less beside the cache.
        let again = divide(spec, &MemoryRequest { max_model_len: Some(plan.max_model_len), ..*request });
        Ok(again.map_or(plan, |again| Self { shortened: true, ..again }))
    }

    /// How positions lie in the cache's blocks.
    pub fn layout(&self) -> KvLayout {
        KvLayout { block_size: self.cache.block_size, windows: self.groups.windows.clone() }
    }

    /// All that is taken or left to others.
    pub fn total_bytes(&self) -> u64 {
        self.weights_bytes + self.reserved_bytes + self.workspace_bytes + self.cache.bytes() as u64
    }
}

/// Divides memory.
fn divide(spec: &DecoderSpec, request: &MemoryRequest<'_>) -> Result<MemoryPlan, Refusal> {
    let MemoryRequest { max_num_batched_tokens: rows, max_num_seqs: seqs, .. } = *request;
    let wanted_len = wanted_len(spec, request)?;
    let workspace_bytes = match request.device_bytes {
        Some(device_bytes) => device_bytes(rows, seqs, wanted_len),
        None => workspace_bytes(spec, rows),
    };
    let reserved_bytes = match request.device_bytes {
        Some(_) => request.free_bytes.unwrap_or_default() / RESERVED_SHARE,
        None => 0,
    };
    let left = left_for_cache(request, workspace_bytes, reserved_bytes)?;
    let groups = LayerGroups::new(spec, wanted_len);
    let layout = KvLayout { block_size: request.block_size, windows: groups.windows.clone() };
    let shape = |blocks| groups.cache_shape(spec, blocks, request.block_size, request.kv_cache_dtype);
    let block_bytes = shape(1).block_bytes() as u64;
    let wanted_blocks = layout.blocks_for(wanted_len) as u64;

    let budget = match request.kv_cache_bytes {
        Some(bytes) if left.is_some_and(|left| bytes > left) => {
            let left = left.unwrap_or_default();
            let why =
                format!("kv_cache_bytes is {bytes} ({}), but weights and buffers leave {}", Bytes(bytes), Bytes(left));
            let fits = divide(spec, &MemoryRequest { kv_cache_bytes: Some(left), ..*request }).is_ok();
            return Err(Refusal::TooLittle(why, fits.then(|| format!("kv_cache_bytes={left} would fit"))));
        }
        Some(bytes) => bytes,
        None if request.device_bytes.is_some() => left.unwrap_or(DEFAULT_MOST),
        None => default_budget(left, wanted_blocks * block_bytes),
    };
    let most = wanted_blocks.saturating_mul(seqs as u64).saturating_add(chunk_blocks(&layout, request));
    // More blocks than every sequence at its longest can fill would only be useful as a memory of prefixes, so a
    // stated budget is used whole and a default one is not.
    let blocks = if request.kv_cache_bytes.is_some() { budget / block_bytes } else { most.min(budget / block_bytes) };
    // Slots are counted in u32.
    let blocks = blocks.min(u64::from(u32::MAX) / request.block_size as u64);
    let max_model_len = fit_len(request, &layout, wanted_len, blocks, block_bytes, left)?;
    Ok(MemoryPlan {
        free_bytes: request.free_bytes,
        weights_bytes: request.weights_bytes,
        reserved_bytes,
        workspace_bytes,
        cache: shape(blocks as usize),
        groups,
        max_model_len,
        shortened: max_model_len < wanted_len,
        sized_here: request.kv_cache_bytes.is_none(),
    })
}

/// Bytes that weights and buffers leave.
fn left_for_cache(
    request: &MemoryRequest<'_>,
    workspace_bytes: u64,
    reserved_bytes: u64,
) -> Result<Option<u64>, Refusal> {
    let Some(free) = request.free_bytes else { return Ok(None) };
    let free = free - reserved_bytes;
    let needed = request.weights_bytes.saturating_add(workspace_bytes);
    match free.checked_sub(needed) {
        Some(left) if left > 0 => Ok(Some(left)),
        _ => {
            let why = format!(
                "the weights need {} and the buffers for max_num_batched_tokens={}{} need {}, but {} is free",
                Bytes(request.weights_bytes),
                request.max_num_batched_tokens,
                if request.device_bytes.is_some() {
                    format!(" and max_num_seqs={}", request.max_num_seqs)
                } else {
                    String::new()
                },
                Bytes(workspace_bytes),
                Bytes(free)
            );
            // Nobody need look for what would fit beside them.
            Err(Refusal::TooLittle(why, (request.weights_bytes >= free).then(|| SMALLER_MODEL.to_owned())))
        }
    }
}

fn wanted_len(spec: &DecoderSpec, request: &MemoryRequest<'_>) -> Result<usize, Refusal> {
    match request.max_model_len {
        Some(len) if len > spec.most_positions() => Err(Refusal::Setting(format!(
            "max_model_len is {len}, but the model was made for {} positions",
            spec.most_positions()
        ))),
        Some(len) => Ok(len),
        None => Ok(spec.max_positions),
    }
}

/// What the longest chunk of a prompt takes in groups with a window, for as long as its step runs.
fn chunk_blocks(layout: &KvLayout, request: &MemoryRequest<'_>) -> u64 {
    let windows = layout.windows.iter().flatten().count();
    (windows * layout.entries(request.max_num_batched_tokens)) as u64
}

/// A share of what is left, and no more than [`DEFAULT_MOST`], unless a single sequence at its longest needs more.
fn default_budget(left: Option<u64>, one_sequence: u64) -> u64 {
    let Some(left) = left else { return DEFAULT_MOST.max(one_sequence) };
    let share = left / DEFAULT_SHARE;
    share.min(DEFAULT_MOST.max(one_sequence))
}

/// The longest sequence that the cache holds; an error if that is less than what was asked for, or nothing at all.
fn fit_len(
    request: &MemoryRequest<'_>,
    layout: &KvLayout,
    wanted_len: usize,
    blocks: u64,
    block_bytes: u64,
    left: Option<u64>,
) -> Result<usize, Refusal> {
    let holds = layout.longest(usize::try_from(blocks).unwrap_or(usize::MAX), wanted_len);
    if holds == wanted_len || (request.max_model_len.is_none() && holds > 0) {
        return Ok(holds);
    }
    let needed = layout.blocks_for(wanted_len) as u64 * block_bytes;
    let what = match request.kv_cache_bytes {
        Some(bytes) => format!("kv_cache_bytes={bytes} ({})", Bytes(bytes)),
        None if request.device_bytes.is_some() => {
            format!("what is left of the device, {},", Bytes(left.unwrap_or_default()))
        }
        None => format!("the KV cache's default share of {}", Bytes(left.unwrap_or_default())),
    };
    let fits = match left {
        Some(left) if needed > left => (holds > 0).then(|| format!("max_model_len={holds} would fit")),
        _ => Some(format!("kv_cache_bytes={needed} would fit")),
    };
    let why = format!(
        "one sequence of {wanted_len} tokens needs {} of KV cache ({} per block of {}), but {what} holds {holds} tokens",
        Bytes(needed),
        Bytes(block_bytes),
        request.block_size
    );
    Err(Refusal::TooLittle(why, fits))
}

impl fmt::Display for MemoryPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CacheShape { layers, blocks, block_size, dtype, .. } = self.cache;
        if let Some(free) = self.free_bytes {
            writeln!(f, "free      {:>10}", Bytes(free))?;
        }
        if self.reserved_bytes > 0 {
            writeln!(f, "driver    {:>10}  left to it", Bytes(self.reserved_bytes))?;
        }
        writeln!(f, "weights   {:>10}", Bytes(self.weights_bytes))?;
        writeln!(f, "buffers   {:>10}", Bytes(self.workspace_bytes))?;
        write!(f, "KV cache  {:>10}", Bytes(self.cache.bytes() as u64))?;
        write!(f, "  {}, {blocks} blocks of {block_size} tokens", dtype.name())?;
        if self.groups.windows.len() > 1 {
            write!(f, " for {layers} layers ({} groups of layers)", self.groups.windows.len())?;
        }
        write!(f, ", {} each", Bytes(self.cache.block_bytes() as u64))?;
        writeln!(f, ", {}", if self.sized_here { "sized by default" } else { "as set by kv_cache_bytes" })?;
        write!(f, "longest sequence  {} tokens", self.max_model_len)?;
        if self.shortened {
            write!(f, ", less than the model was made for: kv_cache_bytes holds no more")?;
        }
        Ok(())
    }
}

/// Bytes for people.
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
        let mut value = self.0 as f64;
        let mut unit = "bytes";
        for larger in UNITS {
            // Where rounding would print 1024.0 of a unit, the next one is meant.
            if value < 1023.95 {
                break;
            }
            (value, unit) = (value / 1024.0, larger);
        }
        // Padding applies to the whole.
        f.pad(&if unit == "bytes" { format!("{} {unit}", self.0) } else { format!("{value:.1} {unit}") })
    }
}

#[cfg(test)]
mod tests {
    use octavo_kernels::{Activation, Heads, RopeStyle};

    use super::*;
    use crate::model::rope::{Rope, RopeScaling};
    use crate::model::spec::{Biases, LayerSpec, QkNorm};

    /// A block of 16 is 64 KiB, the buffers of 512 rows are a few MiB.
    fn spec() -> DecoderSpec {
        DecoderSpec {
            vocab_size: 1000,
            hidden_size: 128,
            intermediate_size: 256,
            heads: Heads { query: 4, kv: 2, head_dim: 32 },
            layers: vec![LayerSpec { window: None, rope: 0, sparse: false }; 8],
            ropes: vec![Rope { style: RopeStyle::Halves, theta: 1e4, rotary_dim: 32, scaling: RopeScaling::Default }],
            experts: None,
            max_positions: 4096,
            norm_eps: 1e-6,
            norm_weight_offset: 0.0,
            pre_norms: true,
            post_norms: false,
            qk_norm: QkNorm::None,
            biases: Biases::default(),
            tied_embeddings: true,
            activation: Activation::Silu,
            embedding_scale: 1.0,
            residual_scale: 1.0,
            attention_scale: 1.0,
            attention_soft_cap: None,
            logits_scale: 1.0,
            logits_soft_cap: None,
        }
    }

    const BLOCK: u64 = 64 << 10;

    fn request(free_bytes: Option<u64>) -> MemoryRequest<'static> {
        MemoryRequest {
            free_bytes,
            weights_bytes: 100 << 20,
            max_num_batched_tokens: 512,
            max_num_seqs: 4,
            max_model_len: None,
            block_size: 16,
            kv_cache_dtype: CacheDtype::F32,
            kv_cache_bytes: None,
            device_bytes: None,
        }
    }

    fn error(request: &MemoryRequest<'_>) -> String {
        MemoryPlan::new(&spec(), request).unwrap_err().to_string()
    }

    #[test]
    fn by_default_no_more_than_every_sequence_can_fill() {
        let plan = MemoryPlan::new(&spec(), &request(Some(64 << 30))).unwrap();
        assert_eq!(plan.cache.block_bytes() as u64, BLOCK);
        assert_eq!((plan.cache.blocks, plan.max_model_len, plan.shortened), (4 * 256, 4096, false));
        let many = MemoryRequest { max_num_seqs: 10_000, ..request(Some(64 << 30)) };
        assert_eq!(MemoryPlan::new(&spec(), &many).unwrap().cache.bytes() as u64, DEFAULT_MOST);
        let unknown = MemoryRequest { free_bytes: None, ..many };
        assert_eq!(MemoryPlan::new(&spec(), &unknown).unwrap().cache.bytes() as u64, DEFAULT_MOST);
    }

    #[test]
    fn by_default_no_more_than_a_share_and_the_longest_sequence_follows() {
        let plan = MemoryPlan::new(&spec(), &request(Some(120 << 20))).unwrap();
        let left = (20 << 20) - plan.workspace_bytes;
        assert_eq!(plan.cache.blocks as u64, left / 4 / BLOCK);
        assert_eq!(plan.max_model_len, 16 * plan.cache.blocks);
        assert!(plan.shortened && plan.to_string().contains("less than the model was made for"), "{plan}");
        assert!(plan.total_bytes() <= 120 << 20);
    }

    #[test]
    fn a_stated_budget_is_used_whole_or_refused() {
        for blocks in [1, 255, 256, 5000] {
            let stated = MemoryRequest { kv_cache_bytes: Some(blocks * BLOCK + BLOCK / 2), ..request(Some(1 << 30)) };
            let plan = MemoryPlan::new(&spec(), &stated).unwrap();
            assert_eq!((plan.cache.blocks as u64, plan.max_model_len as u64), (blocks, (16 * blocks).min(4096)));
        }
        let stated = MemoryRequest { kv_cache_bytes: Some(BLOCK - 1), ..request(Some(1 << 30)) };
        assert!(error(&stated).contains("holds 0 tokens; kv_cache_bytes=16777216 would fit"), "{}", error(&stated));
        let stated = MemoryRequest { kv_cache_bytes: Some(2 << 30), ..request(Some(1 << 30)) };
        let message = error(&stated);
        let fits = message.split("kv_cache_bytes=").nth(1).and_then(|rest| rest.split(' ').next()).unwrap();
        let stated = MemoryRequest { kv_cache_bytes: Some(fits.parse().unwrap()), ..stated };
        assert!(MemoryPlan::new(&spec(), &stated).unwrap().total_bytes() <= 1 << 30, "{message}");
    }

    #[test]
    fn a_stated_length_is_kept_or_refused() {
        let asked = MemoryRequest { max_model_len: Some(100), ..request(Some(1 << 30)) };
        let plan = MemoryPlan::new(&spec(), &asked).unwrap();
        assert_eq!((plan.max_model_len, plan.cache.blocks), (100, 4 * 7));
        assert!(error(&MemoryRequest { max_model_len: Some(4097), ..asked }).contains("4096 positions"));
        let tight = MemoryRequest { max_model_len: Some(4096), ..request(Some(120 << 20)) };
        let message = error(&tight);
        assert!(message.contains("one sequence of 4096 tokens needs 16.0 MiB"), "{message}");
        assert!(message.contains("would fit"), "{message}");
    }

    #[test]
    fn of_a_device_all_that_is_left_is_for_the_cache() {
        let plenty =
            MemoryRequest { device_bytes: Some(&|_, _, _| 3 << 20), max_num_seqs: 1 << 12, ..request(Some(256 << 20)) };
        let plan = MemoryPlan::new(&spec(), &plenty).unwrap();
        assert_eq!((plan.reserved_bytes, plan.workspace_bytes), (4 << 20, 3 << 20));
        assert_eq!(plan.cache.bytes(), (256 - 100 - 4 - 3) << 20);
        assert_eq!(plan.total_bytes(), 256 << 20);
        assert!(plan.to_string().contains("left to it"), "{plan}");
        let asked = MemoryRequest { kv_cache_bytes: Some(150 << 20), ..plenty };
        assert!(error(&asked).contains(&format!("kv_cache_bytes={} would fit", 149 << 20)), "{}", error(&asked));
        let long = MemoryRequest { max_model_len: Some(4096), device_bytes: Some(&|_, _, _| 140 << 20), ..plenty };
        assert!(error(&long).contains("max_model_len=3072 would fit"), "{}", error(&long));
    }

    /// Whoever takes the advice has a plan, and whoever asks for one more has none.
    #[test]
    fn what_leaves_nothing_says_what_would_fit() {
        assert!(error(&request(Some(50 << 20))).contains("a smaller or more strongly quantised model"));
        let value = |message: &str, name: &str| -> usize {
            let value = message.split(&format!("{name}=")).last().and_then(|rest| rest.split([' ', ',']).next());
            value.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("{message}: {name}"))
        };
        let check = |request: MemoryRequest<'_>, name: &str, set: &dyn Fn(&mut MemoryRequest<'_>, usize)| {
            let message = error(&request);
            let value = value(&message, name);
            let planned = |value| {
                let mut other = request;
                set(&mut other, value);
                MemoryPlan::new(&spec(), &other)
            };
            assert!(message.ends_with(" would fit") && planned(value).is_ok(), "{message}");
            assert!(planned(value + 1).is_err(), "{message}: so would {name}={}", value + 1);
        };
        check(request(Some(101 << 20)), "max_num_batched_tokens", &|request, rows| {
            request.max_num_batched_tokens = rows
        });

        let bytes = |rows: usize, seqs: usize, len: usize| ((rows * 4 + seqs * len / 16) as u64) << 10;
        let device = MemoryRequest {
            device_bytes: Some(&bytes),
            max_num_seqs: 256,
            max_num_batched_tokens: 2048,
            ..request(Some(256 << 20))
        };
        let tight = MemoryRequest { free_bytes: Some(170 << 20), ..device };
        check(tight, "max_num_seqs", &|request, seqs| request.max_num_seqs = seqs);
        check(tight, "max_model_len", &|request, len| request.max_model_len = Some(len));
        check(
            MemoryRequest { max_num_seqs: 16, max_num_batched_tokens: 1 << 15, ..tight },
            "max_num_batched_tokens",
            &|request, rows| request.max_num_batched_tokens = rows,
        );
        let together = MemoryRequest { free_bytes: Some(106 << 20), max_num_batched_tokens: 1 << 14, ..device };
        let message = error(&together);
        let [rows, seqs, len] =
            ["max_num_batched_tokens", "max_num_seqs", "max_model_len"].map(|name| value(&message, name));
        assert!(message.contains("together would fit"), "{message}");
        let taken =
            MemoryRequest { max_num_batched_tokens: rows, max_num_seqs: seqs, max_model_len: Some(len), ..together };
        assert!(MemoryPlan::new(&spec(), &taken).is_ok(), "{message}");
        let none = MemoryRequest { device_bytes: Some(&|_, _, _| 160 << 20), ..device };
        assert!(error(&none).ends_with("a smaller or more strongly quantised model would fit"), "{}", error(&none));
    }

    #[test]
    fn bytes_read_well() {
        let shown = [0, 1023, 1024, (1 << 20) - 1, 1 << 20, 3 << 29].map(|bytes| Bytes(bytes).to_string());
        assert_eq!(shown, ["0 bytes", "1023 bytes", "1.0 KiB", "1.0 MiB", "1.0 MiB", "1.5 GiB"]);
        assert_eq!(format!("{:>8}|", Bytes(2048)), " 2.0 KiB|");
    }
}
