//! Settings of an engine, parameters and options of a call: Python objects with the same names as the Rust fields.

use octavo::engine::Options;
use octavo::engine::config::{Device, EngineConfig};
use octavo::load::WeightDtype;
use octavo::request::{Constraint, MAX_LOGPROBS, SamplingParams, Wanted};
use octavo_kernels::CacheDtype;
use pyo3::prelude::*;

use crate::errors::{DeviceError, invalid, not_set};
use crate::fields::{Fields, Read, TEXT};

/// Reads `octavo._params.EngineConfig`.
pub fn engine_config(settings: &Bound<'_, PyAny>) -> PyResult<EngineConfig> {
    let fields = Fields(settings);
    let device = device(&fields)?;
    let read = || -> Read<EngineConfig> {
        Ok(EngineConfig {
            device,
            dtype: dtype(&fields)?,
            kv_cache_dtype: kv_cache_dtype(&fields)?,
            kv_cache_bytes: fields.number("kv_cache_bytes", "a number of bytes, or None")?,
            block_size: fields.number("block_size", "a multiple of 16 up to 1024")?,
            max_model_len: fields.count_or_none("max_model_len")?,
            max_num_seqs: fields.count("max_num_seqs")?,
            max_num_batched_tokens: fields.count_or_none("max_num_batched_tokens")?,
            max_queue: fields.whole("max_queue")?,
            itl_target_ms: fields.number("itl_target_ms", "a number of milliseconds, or None")?,
            enable_prefix_caching: fields.flag("enable_prefix_caching")?,
            threads: fields.count_or_none("threads")?,
            seed: fields.number("seed", "a whole number from 0 to 2**64 - 1")?,
        })
    };
    read().map_err(not_set)
}

fn device(fields: &Fields<'_, '_>) -> PyResult<Device> {
    let name: String = fields.get("device", "'auto', 'cpu', 'cuda', 'cuda:1' … or 'reference'").map_err(not_set)?;
    match name.as_str() {
        "auto" | "cpu" => return Ok(Device::Cpu),
        "reference" => return Ok(Device::Reference),
        "cuda" => return Ok(Device::Cuda(0)),
        "cuda-shim" => return Ok(Device::CudaShim),
        _ => {}
    }
    let ordinal = name.strip_prefix("cuda:").and_then(|number| number.parse().ok());
    ordinal.map(Device::Cuda).ok_or_else(|| {
        DeviceError::new_err(format!(
            "there is no device {name:?}; there are \"cpu\", \"cuda\", \"cuda:1\", … and \"reference\""
        ))
    })
}

fn dtype(fields: &Fields<'_, '_>) -> Read<WeightDtype> {
    let wanted = "'auto' (weights as they are stored), 'f32', 'bf16', 'f16' or 'q8_0'";
    let name: String = fields.get("dtype", wanted)?;
    WeightDtype::from_name(&name).ok_or_else(|| format!("dtype must be {wanted}, not {name:?}").into())
}

fn kv_cache_dtype(fields: &Fields<'_, '_>) -> Read<Option<CacheDtype>> {
    let wanted = "'auto', 'f32', 'f16', 'bf16', 'int8' (on a CPU) or 'fp8_e4m3' (on a GPU)";
    let name: String = fields.get("kv_cache_dtype", wanted)?;
    let dtype = CacheDtype::ALL.into_iter().find(|dtype| dtype.name() == name);
    if dtype.is_none() && name != "auto" {
        return Err(format!("kv_cache_dtype must be {wanted}, not {name:?}").into());
    }
    Ok(dtype)
}

/// Reads `octavo.SamplingParams`: the parameters, and how many answers are wanted.
pub fn sampling_params(params: &Bound<'_, PyAny>) -> PyResult<(SamplingParams, usize)> {
    read_sampling_params(&Fields(params)).map_err(invalid)
}

fn read_sampling_params(fields: &Fields<'_, '_>) -> Read<(SamplingParams, usize)> {
    let alternatives = format!("a whole number from 0 to {MAX_LOGPROBS}, or None");
    let params = SamplingParams {
        temperature: fields.number("temperature", "a number from 0 to 100")?,
        top_p: fields.number("top_p", "a number above 0, and at most 1")?,
        top_k: fields.number("top_k", "a whole number from 0 to 2**32 - 1")?,
        min_p: fields.number("min_p", "a number from 0 to 1")?,
        max_tokens: fields.count("max_tokens")?,
        min_tokens: fields.whole("min_tokens")?,
        stop: fields.text_or_texts("stop")?,
        stop_token_ids: fields.token_ids("stop_token_ids")?.unwrap_or_default(),
        include_stop_str_in_output: fields.flag("include_stop_str_in_output")?,
        ignore_eos: fields.flag("ignore_eos")?,
        seed: fields.number("seed", "a whole number from 0 to 2**64 - 1, or None")?,
        presence_penalty: fields.number("presence_penalty", "a number from -100 to 100")?,
        frequency_penalty: fields.number("frequency_penalty", "a number from -100 to 100")?,
        repetition_penalty: fields.number("repetition_penalty", "a number above 0, and at most 100")?,
        logit_bias: fields.bias("logit_bias")?,
        bad_words: fields.words("bad_words")?,
        allowed_token_ids: fields.token_ids("allowed_token_ids")?,
        logprobs: fields.number("logprobs", &alternatives)?,
        prompt_logprobs: fields.number("prompt_logprobs", &alternatives)?,
        skip_special_tokens: fields.flag("skip_special_tokens")?,
        constraint: constraint(fields)?,
    };
    Ok((params, fields.count("n")?))
}

fn constraint(fields: &Fields<'_, '_>) -> Read<Option<Constraint>> {
    let text = |name| fields.get::<Option<String>>(name, "a str that is valid Unicode, or None");
    let given = [
        text("json_schema")?.map(Constraint::JsonSchema),
        text("regex")?.map(Constraint::Regex),
        text("grammar")?.map(Constraint::Lark),
        fields.texts("choice", "a sequence of str, or None")?.map(Constraint::Choice),
    ];
    let mut given: Vec<Constraint> = given.into_iter().flatten().collect();
    if given.len() > 1 {
        let names: Vec<_> = given.iter().map(Constraint::name).collect();
        return Err(format!(
            "at most one of json_schema, regex, grammar and choice may be given, not {}",
            names.join(" and ")
        )
        .into());
    }
    Ok(given.pop())
}

/// What a call wants back: `score_from` is the first token of the prompt to be scored.
pub fn wanted(name: &str, score_from: Option<usize>) -> PyResult<Wanted> {
    match (name, score_from) {
        ("tokens", None) => Ok(Wanted::Tokens),
        ("last_logits", None) => Ok(Wanted::LastLogits),
        ("all_logits", None) => Ok(Wanted::AllLogits),
        ("scores", Some(from)) if from > 0 => Ok(Wanted::Scores { from }),
        _ => Err(invalid(format!("a call cannot want {name:?} from token {score_from:?} on"))),
    }
}

/// Reads `octavo._params.CallOptions`.
pub fn options(call: &Bound<'_, PyAny>, choices: usize, wanted: Wanted) -> PyResult<Options> {
    read_options(&Fields(call), choices, wanted).map_err(invalid)
}

fn read_options(fields: &Fields<'_, '_>, choices: usize, wanted: Wanted) -> Read<Options> {
    Ok(Options {
        choices,
        wanted,
        priority: fields.number("priority", "a whole number of at most 32 bits")?,
        deadline: fields.seconds_or_none("deadline_s")?,
        cache_salt: fields.get("cache_salt", TEXT)?,
        user: fields.get::<Option<String>>("user", "a str that is valid Unicode, or None")?.unwrap_or_default(),
        ..Options::default()
    })
}
