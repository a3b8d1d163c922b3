//! Layers whose parameters are of 16 bits.

use burn::module::Param;
use burn::nn::Linear;
use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use burn_fp8::Fp8Linear;
use burn_fp8::recipe::{BlockScaling, CurrentScaling, DelayedScaling, Fp8Recipe, RowwiseScaling};

use super::super::device::{Random, compiles_for_long, devices, float_dtypes, values};

const ROWS: usize = 150;
const D_INPUT: usize = 100;
const D_OUTPUT: usize = 60;

/// Integers from -2 to 7, which both formats hold exactly by any scale that is a power of two.
fn integers(random: &mut Random, count: usize) -> Vec<f32> {
    let mut values: Vec<f32> = (0..count)
        .map(|_| (random.bits() % 10) as f32 - 2.0)
        .collect();
    // So that the scale is one of these.
    values[0] = 7.0;
    values
}

/// A matrix of sums, each of so many terms.
fn sums([rows, columns, terms]: [usize; 3], term: impl Fn(usize, usize, usize) -> f32) -> Vec<f64> {
    let places = (0..rows * columns).map(|place| (place / columns, place % columns));
    let sum = |(row, column)| (0..terms).map(|i| f64::from(term(row, column, i))).sum();
    places.map(sum).collect()
}

fn rounded(sums: &[f64], dtype: FloatDType) -> Vec<f32> {
    let round = |&sum: &f64| match dtype {
        FloatDType::BF16 => half::bf16::from_f64(sum).to_f32(),
        FloatDType::F16 => half::f16::from_f64(sum).to_f32(),
        _ => sum as f32,
    };
    sums.iter().map(round).collect()
}

/// Where tensors are made, and of which dtype.
struct Set<'a>(&'a Device, FloatDType);

impl Set<'_> {
    fn tensor<const D: usize>(&self, values: &[f32], shape: [usize; D]) -> Tensor<D> {
        let data = TensorData::new(values.to_vec(), shape);
        Tensor::from_data(data, (self.0, DType::from(self.1)))
    }
}

/// The output has the input's dtype, and a gradient that of its tensor. Each is its formula, rounded once: all products and sums
/// are exact, and many need more bits than bf16 has.
#[test]
fn output_and_gradients_are_rounded_once_to_their_dtypes() {
    let mut random = Random::new(44);
    let [x, w, g] = [ROWS * D_INPUT, D_INPUT * D_OUTPUT, ROWS * D_OUTPUT]
        .map(|count| integers(&mut random, count));
    let b = integers(&mut random, D_OUTPUT);
    let output = sums([ROWS, D_OUTPUT, D_INPUT + 1], |row, column, i| match i {
        D_INPUT => b[column],
        _ => x[row * D_INPUT + i] * w[i * D_OUTPUT + column],
    });
    let input_gradient = sums([ROWS, D_INPUT, D_OUTPUT], |row, column, i| {
        g[row * D_OUTPUT + i] * w[column * D_OUTPUT + i]
    });
    let weight_gradient = sums([D_INPUT, D_OUTPUT, ROWS], |row, column, i| {
        x[i * D_INPUT + row] * g[i * D_OUTPUT + column]
    });
    let bias_gradient = sums([1, D_OUTPUT, ROWS], |_, column, i| g[i * D_OUTPUT + column]);
    let recipes: [Fp8Recipe; 4] = [
        CurrentScaling::new().with_power_of_two(true).into(),
        RowwiseScaling::new().into(),
        BlockScaling::new().with_size(16).into(),
        DelayedScaling::new().into(),
    ];
    for device in devices() {
        let dtypes = float_dtypes(&device);
        let narrow = &dtypes[1..];
        // Where every pass is compiled anew, f16 and the default recipe are enough. (Burn's casts to bf16 give zeros on CubeCL's CPU
        // runtime, where the processor has no instruction for it.)
        let (parameters, inputs, recipes) = match compiles_for_long(&device) {
            false => (narrow, &dtypes[..], &recipes[..]),
            true => {
                let f16 = &narrow[..1];
                (f16, f16, &recipes[3..])
            }
        };
        let device = device.autodiff();
        for &parameters in parameters {
            for &own in inputs {
                for &recipe in recipes {
                    let set = Set(&device, parameters);
                    let weight = set.tensor(&w, [D_INPUT, D_OUTPUT]).require_grad();
                    let bias = set.tensor(&b, [D_OUTPUT]).require_grad();
                    let linear = Linear {
                        weight: Param::from_tensor(weight.clone()),
                        bias: Some(Param::from_tensor(bias.clone())),
                    };
                    let layer = Fp8Linear::from_linear(linear, recipe).unwrap();

                    let set = Set(&device, own);
                    let input = set.tensor(&x, [ROWS, D_INPUT]).require_grad();
                    let found = layer.forward(input.clone());
                    // Without a sum, which CubeCL would tune for seconds; backward begins with ones all the same.
                    let losses = found.clone() * set.tensor(&g, [ROWS, D_OUTPUT]);
                    let gradients = losses.backward();
                    let [input, weight] =
                        [input, weight].map(|leaf| leaf.grad(&gradients).unwrap());
                    let bias = bias.grad(&gradients).unwrap();
                    for (name, found, dtype, expected) in [
                        ("output", found, own, &output),
                        ("input", input, own, &input_gradient),
                        ("weight", weight, parameters, &weight_gradient),
                        ("bias", bias.unsqueeze(), parameters, &bias_gradient),
                    ] {
                        let case = format!("{name}, {recipe:?}, {parameters:?} by {own:?}");
                        assert_eq!(found.dtype(), DType::from(dtype), "{case}");
                        assert_eq!(values(found), rounded(expected, dtype), "{case}");
                    }
                }
            }
        }
    }
}
