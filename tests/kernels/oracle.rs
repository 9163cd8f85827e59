//! candle's opinion of the reference.

use std::borrow::Cow;

use candle_core::{
    D, Device, Tensor,
    quantized::{GgmlDType, QStorage, QTensor},
};
use octavo_kernels::{
    DType, Mask,
    reference::{attention::attention, dequantise::dequantise, linear::dot, norm::rms_norm},
};

use crate::harness::*;

fn tensor(values: &[f32], shape: (usize, usize)) -> Tensor {
    Tensor::from_slice(values, shape, &Device::Cpu).unwrap()
}

fn values(tensor: candle_core::Result<Tensor>) -> Vec<f32> {
    tensor.unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

#[test]
fn rms_norm_agrees() {
    let (random, width) = (&mut Random::new(1), 576);
    let (x, weight) = (random.normals(width), random.normals(width));
    let mut got = vec![0.0; width];
    rms_norm(&mut got, &x, &weight, 1e-5);
    let x = tensor(&x, (1, width));
    let want = || {
        let mean_square = x.sqr()?.mean_keepdim(D::Minus1)?;
        let scale = (mean_square + 1e-5)?.sqrt()?;
        x.broadcast_div(&scale)?.mul(&tensor(&weight, (1, width)))
    };
    assert_near("rms_norm", &got, &values(want()), Tolerance::ROUNDING);
}

#[test]
fn attention_agrees() {
    let (random, head_dim, context) = (&mut Random::new(2), 64, 100);
    let (query, keys) = (random.normals(head_dim), random.normals(context * head_dim));
    let cached = random.normals(context * head_dim);
    let mask = Mask { scale: 0.125, window: None, soft_cap: Some(30.0) };
    let mut got = vec![0.0; head_dim];
    attention(&mut got, &query, keys.chunks(head_dim), cached.chunks(head_dim), &mask);
    let want = || {
        let scores = tensor(&query, (1, head_dim)).matmul(&tensor(&keys, (context, head_dim)).t()?)?;
        let scores = ((scores * (0.125 / 30.0))?.tanh()? * 30.0)?;
        let weights = scores.broadcast_sub(&scores.max_keepdim(D::Minus1)?)?.exp()?;
        let weights = weights.broadcast_div(&weights.sum_keepdim(D::Minus1)?)?;
        weights.matmul(&tensor(&cached, (context, head_dim)))
    };
    assert_near("attention", &got, &values(want()), Tolerance { absolute: 1e-5, relative: 1e-5 });
}

#[test]
fn products_agree() {
    let (random, rows, inputs) = (&mut Random::new(3), 7, 300);
    let (w, x) = (random.normals(rows * inputs), random.normals(inputs));
    let got: Vec<f32> = w.chunks(inputs).map(|w| dot(w, &x)).collect();
    let want = tensor(&w, (rows, inputs)).matmul(&tensor(&x, (inputs, 1)));
    assert_near("dot", &got, &values(want), Tolerance { absolute: 1e-4, relative: 1e-5 });
}

#[test]
fn dequantisation_agrees() {
    let random = &mut Random::new(4);
    for dtype in DType::ALL {
        let theirs = match dtype {
            DType::F32 => GgmlDType::F32,
            DType::F16 => GgmlDType::F16,
            DType::BF16 => GgmlDType::BF16,
            DType::Q4_0 => GgmlDType::Q4_0,
            DType::Q4_1 => GgmlDType::Q4_1,
            DType::Q5_0 => GgmlDType::Q5_0,
            DType::Q5_1 => GgmlDType::Q5_1,
            DType::Q8_0 => GgmlDType::Q8_0,
            DType::Q4_K => GgmlDType::Q4K,
            DType::Q5_K => GgmlDType::Q5K,
            DType::Q6_K => GgmlDType::Q6K,
            DType::Q2_K => GgmlDType::Q2K,
            DType::Q3_K => GgmlDType::Q3K,
            // Not known to candle: the published values of tests/fixtures/dequant speak for these.
            _ => continue,
        };
        let bytes = weight_bytes(random, dtype, 5, 512);
        let mut got = vec![0.0; 5 * 512];
        dequantise(dtype, &bytes, &mut got);
        let storage = QStorage::from_data(Cow::Owned(bytes), &Device::Cpu, theirs).unwrap();
        let want = QTensor::new(storage, (5, 512)).unwrap().dequantize(&Device::Cpu);
        assert_near(dtype.name(), &got, &values(want), Tolerance { absolute: 0.0, relative: 1e-6 });
    }
}
