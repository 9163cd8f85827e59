//! Rotary embeddings as configurations describe them, against frequencies that were computed with numpy from transformers'
//! definitions (rope_theta 1e4 unless it is said, 16 rotated components, 128 positions).

use octavo::load::ModelFiles;
use octavo::model::{DecoderSpec, Model};
use octavo_kernels::RopeSpec;
use serde_json::{Value, json};

use crate::files::Scratch;
use crate::oracle::max_abs;

/// The spec of a Llama with these parameters, in both styles of configuration.
fn spec(parameters: &Value) -> DecoderSpec {
    let both = ["rope_scaling", "rope_parameters"].map(|key| {
        let folder = Scratch::copy_of("rope", "tiny/llama-tied-rope3/f32");
        folder.edit("config.json", |config| {
            let config = config.as_object_mut().unwrap();
            config.remove("rope_scaling");
            config.insert("max_position_embeddings".into(), json!(128));
            config.insert("rope_theta".into(), json!(10_000.0));
            if let Some(theta) = parameters.get("rope_theta") {
                config.insert("rope_theta".into(), theta.clone());
            }
            config.insert(key.into(), parameters.clone());
        });
        Model::of(&ModelFiles::open(&folder.0).unwrap()).unwrap().spec
    });
    assert_eq!(both[0], both[1]);
    both.into_iter().next().unwrap()
}

/// The rotary embedding with these parameters, for sequences of up to so many positions.
fn rope(parameters: &Value, positions: usize) -> RopeSpec {
    spec(parameters).ropes[0].spec(positions)
}

fn assert_near(got: &RopeSpec, scale: f32, inv_freq: [f32; 8]) {
    assert!((got.scale - scale).abs() < 1e-6, "{} times, wanted {scale}", got.scale);
    let ratios: Vec<f32> = got.inv_freq.iter().zip(inv_freq).map(|(got, wanted)| got / wanted).collect();
    assert!(max_abs(&ratios, &[1.0; 8]) < 2e-6, "{:?}, wanted {inv_freq:?}", got.inv_freq);
}

const PLAIN: [f32; 8] = [1.0, 0.3162278, 0.1, 0.03162278, 0.01, 3.162278e-3, 1e-3, 3.162278e-4];

#[test]
fn plain_and_linear() {
    assert_near(&rope(&json!({"rope_type": "default"}), 1), 1.0, PLAIN);
    assert_near(&rope(&json!({"type": "linear", "factor": 4.0}), 1), 1.0, PLAIN.map(|frequency| frequency / 4.0));
}

/// Right up to the length it was made for; beyond it, the length that the engine was opened for decides.
#[test]
fn dynamic_is_chosen_by_the_longest_sequence() {
    let parameters = json!({"rope_type": "dynamic", "factor": 2.0});
    assert_near(&rope(&parameters, 128), 1.0, PLAIN);
    let stretched = [1.0, 0.262445, 0.06887737, 0.01807652, 4.744092e-3, 1.245063e-3, 3.267606e-4, 8.575668e-5];
    assert_near(&rope(&parameters, 300), 1.0, stretched);
    let spec = spec(&parameters);
    assert_eq!((spec.max_positions, spec.most_positions()), (128, 256));
    assert_eq!(spec.up_to(200).max_positions, 200);
}

#[test]
fn yarn() {
    let parameters = json!({
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "rope_theta": 1e6,
    });
    let wanted = [1.0, 0.1778279, 0.03162278, 4.21756e-3, 5e-4, 4.445698e-5, 7.905694e-6, 1.405853e-6];
    assert_near(&rope(&parameters, 1), 1.138_629_4, wanted);
    let parameters = json!({
        "type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512, "beta_fast": 16, "beta_slow": 2,
        "mscale": 1.0, "mscale_all_dim": 0.7, "truncate": false,
    });
    let wanted = [1.0, 0.3162278, 0.07160846, 7.324998e-3, 1.25e-3, 3.952847e-4, 1.25e-4, 3.952847e-5];
    assert_near(&rope(&parameters, 1), 1.054_456_5, wanted);
    let parameters = json!({"type": "yarn", "factor": 8.0, "attention_factor": 0.5});
    assert_eq!(rope(&parameters, 1).scale, 0.5);
    assert_eq!(
        rope(&json!({"type": "yarn", "factor": null, "original_max_position_embeddings": 32}), 1).scale,
        1.138_629_4
    );
}

/// By its older name, and with what is left unsaid.
#[test]
fn longrope() {
    let divisors = |by: f32| vec![by; 8];
    let parameters = json!({
        "type": "su", "short_factor": divisors(1.0), "long_factor": divisors(2.0),
        "original_max_position_embeddings": 16,
    });
    let scale = (1.0 + 8f32.ln() / 16f32.ln()).sqrt();
    assert_near(&rope(&parameters, 16), scale, PLAIN);
    assert_near(&rope(&parameters, 17), scale, PLAIN.map(|frequency| frequency / 2.0));
}
