//! `tests/fixtures/sampler`: probability vectors from numpy in f64, checked there against transformers' processors. octavo's
//! order of steps is the profile `vllm`.

use std::path::Path;

use octavo::request::SamplingParams;
use octavo::sample::Sampler;
use safetensors::SafeTensors;
use serde_json::Value;

struct Case {
    name: String,
    params: SamplingParams,
    prompt: Vec<u32>,
    output: Vec<u32>,
    logits: Vec<f32>,
    probabilities: Vec<f32>,
    /// The cut falls among equal logits: any choice is right.
    ties: bool,
}

fn cases() -> Vec<Case> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/sampler");
    let read = |name: &str| std::fs::read(folder.join(name)).unwrap_or_else(|e| panic!("{name}: {e}"));
    let json: Value = serde_json::from_slice(&read("sampler.json")).expect("JSON");
    let bytes = read("sampler.safetensors");
    let arrays = SafeTensors::deserialize(&bytes).expect("safetensors");
    let array = |name: String| -> Vec<f32> {
        let data = arrays.tensor(&name).unwrap_or_else(|e| panic!("{name}: {e}")).data();
        data.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    };
    let case = |case: &Value| {
        let id = case["id"].as_str().expect("an id");
        let profile = if case["profiles"] == "any" { "" } else { ".vllm" };
        Case {
            name: format!("{id} {} {}", case["logits_kind"], case["params"]),
            params: params(&case["params"]),
            prompt: serde_json::from_value(case["prompt_ids"].clone()).expect("ids"),
            output: serde_json::from_value(case["output_ids"].clone()).expect("ids"),
            logits: array(format!("{id}.logits")),
            probabilities: array(format!("{id}.probs{profile}")),
            ties: case.get("ties").is_some(),
        }
    };
    json["cases"].as_array().expect("cases").iter().map(case).collect()
}

fn params(json: &Value) -> SamplingParams {
    let mut params = SamplingParams::default();
    for (name, value) in json.as_object().expect("an object") {
        let number = || value.as_f64().expect("a number") as f32;
        match name.as_str() {
            "temperature" => params.temperature = number(),
            "top_p" => params.top_p = number(),
            "top_k" => params.top_k = number() as u32,
            "min_p" => params.min_p = number(),
            "presence_penalty" => params.presence_penalty = number(),
            "frequency_penalty" => params.frequency_penalty = number(),
            "repetition_penalty" => params.repetition_penalty = number(),
            "logit_bias" => {
                let pairs = value.as_object().expect("an object").iter();
                params.logit_bias = pairs
                    .map(|(id, bias)| (id.parse().expect("an id"), bias.as_f64().expect("a number") as f32))
                    .collect();
            }
            _ => panic!("a parameter that this test does not know: {name}"),
        }
    }
    params
}

#[test]
fn probabilities_match() {
    let cases = cases();
    assert!(cases.len() > 200);
    for case in cases {
        let draw = crate::draw(case.params, &case.prompt, &case.output);
        let mut got = Sampler::new(case.logits.len()).probabilities(&case.logits, &draw, None).expect("tokens");
        let mut want = case.probabilities;
        let kept = |p: &[f32]| p.iter().filter(|&&p| p > 0.0).count();
        assert_eq!(kept(&got), kept(&want), "{}: kept", case.name);
        if case.ties {
            got.sort_by(f32::total_cmp);
            want.sort_by(f32::total_cmp);
        }
        for (id, (got, want)) in got.iter().zip(&want).enumerate() {
            assert!((got - want).abs() <= 1e-6, "{}: token {id}: {got}, not {want}", case.name);
            assert_eq!(*got > 0.0, *want > 0.0, "{}: token {id}", case.name);
        }
    }
}

#[test]
fn draws_are_distributed_as_the_probabilities() {
    for case in cases().iter().filter(|case| !case.ties).step_by(7) {
        let draw = crate::draw(case.params.clone(), &case.prompt, &case.output);
        let probabilities: Vec<f64> = case.probabilities.iter().map(|&p| f64::from(p)).collect();
        let mut sampler = Sampler::new(case.logits.len());
        let z = crate::improbability(&mut sampler, &case.logits, draw, &probabilities, 20_000);
        assert!(z < 4.75, "{}: {z} standard deviations", case.name);
    }
}
