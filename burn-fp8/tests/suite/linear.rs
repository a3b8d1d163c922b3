//! `Fp8Linear`: its products, its gradients, its state.

use std::sync::{Arc, Mutex};

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{Device, FloatDType, Tensor, TensorData};
use burn_fp8::recipe::{
    AmaxReducer, BlockScaling, CurrentScaling, DelayedScaling, Fp8Recipe, RecipeFormat,
    RowwiseScaling,
};
use burn_fp8::{
    Fp8Cast, Fp8Format, Fp8Linear, Fp8LinearConfig, Fp8Tensor, Granularity, ScalingState,
    scaled_matmul,
};

use super::device::{Random, devices, sqnr, values};

#[track_caller]
pub(crate) fn assert_near(actual: &[f32], expected: &[f32], relative: f32) {
    assert_eq!(actual.len(), expected.len());
    for (actual, expected) in actual.iter().zip(expected) {
        assert!(
            (actual - expected).abs() <= relative * expected.abs(),
            "{actual} is not {expected}"
        );
    }
}

fn recipes() -> [Fp8Recipe; 8] {
    [
        CurrentScaling::new().with_power_of_two(true).into(),
        RowwiseScaling::new().with_power_of_two(false).into(),
        DelayedScaling::new().with_amax_history_len(4).into(),
        CurrentScaling::new().into(),
        CurrentScaling::new().with_format(RecipeFormat::E4M3).into(),
        RowwiseScaling::new().into(),
        RowwiseScaling::new()
            .with_format(RecipeFormat::Hybrid)
            .into(),
        BlockScaling::new().with_size(16).into(),
    ]
}

/// A linear layer with parameters from the test's own generator.
fn linear(random: &mut Random, d_input: usize, d_output: usize, device: &Device) -> Linear {
    let mut linear = LinearConfig::new(d_input, d_output).init(device);
    let weight = random.matrix([d_input, d_output], device) / (d_input as f32).sqrt();
    linear.weight = linear
        .weight
        .map(|_| weight.set_require_grad(device.is_autodiff()));
    let bias = random.matrix([1, d_output], device).reshape([d_output]);
    linear.bias = linear
        .bias
        .map(|param| param.map(|_| bias.set_require_grad(device.is_autodiff())));
    linear
}

/// Output, input gradient, weight gradient, bias gradient.
type Pass = [Vec<f32>; 4];

fn pass(
    forward: impl Fn(Tensor<2>) -> Tensor<2>,
    layer: (&Tensor<2>, &Tensor<1>),
    input: &Tensor<2>,
    gradient: &Tensor<2>,
) -> Pass {
    let input = input.clone().require_grad();
    let output = forward(input.clone());
    let gradients = (output.clone() * gradient.clone()).sum().backward();
    [
        values(output),
        values(input.grad(&gradients).unwrap()),
        values(layer.0.grad(&gradients).unwrap()),
        values(layer.1.grad(&gradients).unwrap()),
    ]
}

fn pass_fp8(layer: &Fp8Linear, input: &Tensor<2>, gradient: &Tensor<2>) -> Pass {
    let bias = layer.bias.as_ref().unwrap().val();
    pass(
        |x| layer.forward(x),
        (&layer.weight.val(), &bias),
        input,
        gradient,
    )
}

#[derive(Clone, Copy, Debug)]
enum Distribution {
    Normal,
    /// All positive, as after a relu or a softmax.
    Uniform,
    /// One in a hundred is thirty times as large.
    Outliers,
}

impl Distribution {
    fn matrix(self, random: &mut Random, shape: [usize; 2], device: &Device) -> Tensor<2> {
        let draw = |random: &mut Random| match self {
            Self::Normal => random.normal(),
            Self::Uniform => random.uniform(),
            Self::Outliers if random.uniform() < 0.01 => 30.0 * random.normal(),
            Self::Outliers => random.normal(),
        };
        let values: Vec<f32> = (0..shape[0] * shape[1]).map(|_| draw(random)).collect();
        Tensor::from_data(TensorData::new(values, shape), device)
    }
}

#[test]
fn signal_to_noise_is_as_torchao_asks() {
    // torchao test_base.py: y >= 18 dB, weight gradient >= 17 dB; test_numerics: every one above 20.
    for device in devices() {
        let device = device.autodiff();
        let mut random = Random::new(20);
        // CubeCL's CPU runtime compiles every fused kernel anew: one shape and distribution will do.
        let shapes = [[5, 37, 11], [16, 32, 16], [64, 48, 1], [128, 256, 64]];
        let distributions = [
            Distribution::Normal,
            Distribution::Uniform,
            Distribution::Outliers,
        ];
        let (shapes, distributions) = match device == Device::flex() {
            true => (&shapes[..], &distributions[..]),
            false => (&shapes[..1], &distributions[..1]),
        };
        for recipe in recipes() {
            for &[rows, d_input, d_output] in shapes {
                for &distribution in distributions {
                    let linear = linear(&mut random, d_input, d_output, &device);
                    let input = distribution.matrix(&mut random, [rows, d_input], &device);
                    let gradient =
                        distribution.matrix(&mut random, [rows, d_output], &device) * 1e-5;
                    let layer = Fp8Linear::from_linear(linear.clone(), recipe.clone()).unwrap();
                    let bias = linear.bias.as_ref().unwrap().val();
                    let forward = |x| linear.forward(x);
                    let exact = pass(forward, (&linear.weight.val(), &bias), &input, &gradient);
                    // Delayed scaling knows its scales from the second step on.
                    pass_fp8(&layer, &input, &gradient);
                    let actual = pass_fp8(&layer, &input, &gradient);
                    let without_bias = |x: &[f32]| -> Vec<f32> {
                        let bias = values(bias.clone());
                        x.iter()
                            .enumerate()
                            .map(|(i, x)| x - bias[i % d_output])
                            .collect()
                    };
                    let noise = [
                        sqnr(&without_bias(&exact[0]), &without_bias(&actual[0])),
                        sqnr(&exact[1], &actual[1]),
                        sqnr(&exact[2], &actual[2]),
                    ];
                    assert!(
                        noise.iter().all(|noise| *noise > 20.0),
                        "{recipe:?} {distribution:?} {noise:?}"
                    );
                    // The bias never leaves f32.
                    assert!(sqnr(&exact[3], &actual[3]) > 100.0);
                }
            }
        }
    }
}

#[test]
fn gradients_are_the_products_of_the_quantized_tensors() {
    for device in devices() {
        let device = device.autodiff();
        let mut random = Random::new(21);
        let linear = linear(&mut random, 9, 6, &device);
        let (x, g) = (
            random.matrix([7, 9], &device),
            random.matrix([7, 6], &device),
        );
        let layer = Fp8Linear::from_linear(linear.clone(), CurrentScaling::new()).unwrap();
        let [y, dx, dw, db] = pass_fp8(&layer, &x, &g);

        let [xq, wq] = [x, linear.weight.val()].map(|t| Fp8Tensor::quantize(t, Fp8Format::E4M3));
        let gq = Fp8Tensor::quantize(g.clone(), Fp8Format::E5M2);
        let multiply = |a: &Fp8Tensor<2>, b: &Fp8Tensor<2>| {
            scaled_matmul(a, b, None, FloatDType::F32).unwrap()
        };
        let bias = linear.bias.unwrap().val().without_autodiff();
        assert_eq!(y, values(multiply(&xq, &wq) + bias.unsqueeze()));
        assert_eq!(dx, values(multiply(&gq, &wq.transpose())));
        assert_eq!(dw, values(multiply(&xq.transpose(), &gq)));
        assert_near(&db, &values(g.sum_dim(0)), 1e-5);
    }
}

/// Every product of a granular recipe is that of its own casts.
#[test]
fn granular_gradients_are_the_products_of_their_casts() {
    for power_of_two in [false, true] {
        granular_gradients(power_of_two);
    }
}

fn granular_gradients(power_of_two: bool) {
    let cast = |t: &Tensor<2>, granularity| {
        let cast = Fp8Cast::new(granularity, Fp8Format::E4M3).with_power_of_two(power_of_two);
        Fp8Tensor::quantize_as(t.clone(), cast).unwrap()
    };
    let rows = |t: &Tensor<2>| cast(t, Granularity::Row);
    let columns = |t: &Tensor<2>| cast(t, Granularity::Column);
    let blocks =
        |t: &Tensor<2>, [rows, columns]: [usize; 2]| cast(t, Granularity::Block { rows, columns });
    let rowwise = RowwiseScaling::new().with_power_of_two(power_of_two);
    let block = BlockScaling::new()
        .with_size(4)
        .with_power_of_two(power_of_two);
    let multiply = |a: Fp8Tensor<2>, b: Fp8Tensor<2>| {
        values(scaled_matmul(&a, &b, None, FloatDType::F32).unwrap())
    };
    for device in devices() {
        let device = device.autodiff();
        let mut random = Random::new(29);
        let mut linear = linear(&mut random, 9, 6, &device);
        let (x, g) = (
            random.matrix([7, 9], &device),
            random.matrix([7, 6], &device),
        );
        let w = linear.weight.val();
        linear.bias = linear
            .bias
            .map(|bias| bias.map(|bias| bias.zeros_like().require_grad()));

        let layer = Fp8Linear::from_linear(linear.clone(), rowwise.clone()).unwrap();
        let [y, dx, dw, _] = pass_fp8(&layer, &x, &g);
        assert_eq!(y, multiply(rows(&x), columns(&w)));
        assert_eq!(dx, multiply(rows(&g), rows(&w).transpose()));
        assert_eq!(dw, multiply(columns(&x).transpose(), columns(&g)));

        let layer = Fp8Linear::from_linear(linear, block.clone()).unwrap();
        let [y, dx, dw, _] = pass_fp8(&layer, &x, &g);
        let square = blocks(&w, [4, 4]);
        assert_eq!(y, multiply(blocks(&x, [1, 4]), square.clone()));
        assert_eq!(dx, multiply(blocks(&g, [1, 4]), square.transpose()));
        assert_eq!(
            dw,
            multiply(blocks(&x, [4, 1]).transpose(), blocks(&g, [4, 1]))
        );
    }
}

#[test]
fn gradients_of_a_sum_are_sums_of_inputs() {
    let device = Device::flex().autodiff();
    let mut random = Random::new(22);
    let linear = linear(&mut random, 8, 4, &device);
    let x = random.matrix([6, 8], &device);
    let layer = Fp8Linear::from_linear(linear, CurrentScaling::new()).unwrap();
    let loss = layer.forward(x.clone()).sum();
    let gradient = values(layer.weight.val().grad(&loss.backward()).unwrap());
    // With a gradient of ones everywhere, each weight's gradient is the sum of its inputs.
    let sums = values(
        Fp8Tensor::quantize(x, Fp8Format::E4M3)
            .dequantize(FloatDType::F32)
            .sum_dim(0),
    );
    for (index, gradient) in gradient.iter().enumerate() {
        assert!(
            (gradient - sums[index / 4]).abs() < 1e-4,
            "{gradient} {}",
            sums[index / 4]
        );
    }
}

/// What is trained beside it does not change a gradient.
#[test]
fn a_frozen_weight_passes_the_gradient_on() {
    for device in devices() {
        let mut random = Random::new(33);
        let device = device.autodiff();
        let layer = Fp8Linear::from(linear(&mut random, 20, 9, &device));
        let frozen = layer.clone().no_grad();
        let gradient = |layer: &Fp8Linear| {
            let x = Random::new(34).matrix([7, 20], &device).require_grad();
            let loss = layer.forward(x.clone()).powf_scalar(2.0).sum();
            let gradients = loss.backward();
            let weight = layer.weight.val().grad(&gradients).is_some();
            (values(x.grad(&gradients).unwrap()), weight)
        };
        let (trained, wanted) = gradient(&layer);
        assert!(wanted && trained.iter().any(|&x| x != 0.0));
        assert_eq!(gradient(&frozen), (trained, false));
    }
}

#[test]
fn state_follows_the_steps() {
    for device in devices() {
        let device = device.autodiff();
        let mut random = Random::new(23);
        let recipe = DelayedScaling::new().with_amax_history_len(3);
        let linear = linear(&mut random, 5, 4, &device);
        let weight_amax = values(linear.weight.val())
            .iter()
            .fold(0f32, |max, w| max.max(w.abs()));
        let layer = Fp8Linear::from_linear(linear, recipe).unwrap();
        let mut inputs = vec![];
        let mut gradients = vec![];
        for _ in 0..5 {
            let (x, g) = (
                random.matrix([3, 5], &device),
                random.matrix([3, 4], &device),
            );
            let amax = |t: &Tensor<2>| {
                values(t.clone())
                    .iter()
                    .fold(0f32, |max, x| max.max(x.abs()))
            };
            inputs.push(amax(&x));
            gradients.push(amax(&g));
            pass_fp8(&layer, &x, &g);
        }
        let [input, weight, gradient] = layer.scaling_state().unwrap();
        // Four steps are in: two fit the history beside its free slot, the fifth waits.
        let expected = |seen: &[f32], max: f32| ScalingState {
            history: vec![0.0, seen[2], seen[3]],
            scale: max / seen[1..4].iter().copied().fold(0.0, f32::max),
            amax: seen[4],
        };
        assert_eq!(input, expected(&inputs, 448.0));
        assert_eq!(weight, expected(&[weight_amax; 5], 448.0));
        assert_eq!(gradient, expected(&gradients, 57344.0));
    }
}

#[test]
fn an_interval_holds_the_scales() {
    let device = Device::flex().autodiff();
    let mut random = Random::new(24);
    let recipe = DelayedScaling::new()
        .with_amax_history_len(2)
        .with_interval(3);
    let layer = Fp8Linear::from_linear(linear(&mut random, 4, 4, &device), recipe).unwrap();
    let mut scales = vec![];
    for step in 0..9 {
        let x = random.matrix([2, 4], &device) * (step + 1) as f32;
        pass_fp8(&layer, &x, &random.matrix([2, 4], &device));
        scales.push(layer.scaling_state().unwrap()[0].scale);
    }
    // The first update is before the second step, then every third.
    for (step, pair) in scales.windows(2).enumerate() {
        assert_eq!(pair[0] != pair[1], step % 3 == 0, "step {step}: {scales:?}");
    }
}

#[test]
fn only_training_moves_the_state() {
    let device = Device::flex().autodiff();
    let mut random = Random::new(25);
    let layer = Fp8Linear::from(linear(&mut random, 4, 4, &device));
    let x = random.matrix([2, 4], &device);
    pass_fp8(&layer, &x, &x);
    let before = layer.scaling_state();

    let valid = layer.valid();
    let inner = x.clone().without_autodiff();
    let first = values(valid.forward(inner.clone()));
    assert_eq!(first, values(valid.forward(inner)));
    assert_eq!(valid.scaling_state(), before);

    let copy = layer.clone();
    pass_fp8(&copy, &(x.clone() * 9.0), &x);
    assert_ne!(copy.scaling_state(), before);
    assert_eq!(layer.scaling_state(), before);
}

#[test]
fn a_resumed_run_continues_bit_for_bit() {
    for device in devices() {
        let device = device.autodiff();
        for interval in [1, 2] {
            let recipe = DelayedScaling::new()
                .with_amax_history_len(3)
                .with_interval(interval);
            let mut random = Random::new(26);
            let start =
                Fp8Linear::from_linear(linear(&mut random, 6, 3, &device), recipe.clone()).unwrap();
            let batches: Vec<_> = (0..6).map(|_| random.matrix([4, 6], &device)).collect();
            let step = |layer: Fp8Linear, batch: &Tensor<2>| {
                let mut optim = SgdConfig::new().init();
                let loss = layer.forward(batch.clone()).powf_scalar(2.0).mean();
                let gradients = GradientsParams::from_grads(loss.backward(), &layer);
                optim.step(0.05, layer, gradients)
            };
            let mut layer = start;
            for batch in &batches[..3] {
                layer = step(layer, batch);
            }
            let file = tempfile::tempdir().unwrap();
            let path = file.path().join("layer");
            layer.clone().save_file(&path).unwrap();
            let mut resumed = Fp8LinearConfig::new(6, 3)
                .with_recipe(recipe.into())
                .init(&device)
                .load_file(&path);
            assert_eq!(resumed.scaling_state(), layer.scaling_state());
            for batch in &batches[3..] {
                layer = step(layer, batch);
                resumed = step(resumed, batch);
            }
            assert_eq!(resumed.scaling_state(), layer.scaling_state());
            assert_eq!(values(resumed.weight.val()), values(layer.weight.val()));
        }
    }
}

#[test]
fn linear_there_and_back() {
    let device = Device::flex();
    let linear = LinearConfig::new(3, 2).init(&device);
    let weight = values(linear.weight.val());
    let id = linear.weight.id;
    let back: Linear = Fp8Linear::from(linear).into();
    assert_eq!((values(back.weight.val()), back.weight.id), (weight, id));
    let layer = Fp8LinearConfig::new(3, 2).with_bias(false).init(&device);
    assert!(layer.bias.is_none());
    assert_eq!(layer.recipe(), &Fp8Recipe::default());
    assert!(format!("{layer}").contains("d_output: 2"), "{layer}");
}

#[test]
fn the_record_of_a_linear_loads() {
    let device = Device::flex();
    let linear = LinearConfig::new(3, 2).init(&device);
    let record = linear.clone().into_record().allow_partial(true);
    let layer = Fp8LinearConfig::new(3, 2).init(&device).load_record(record);
    assert_eq!(values(layer.weight.val()), values(linear.weight.val()));
}

#[test]
fn any_leading_dimensions_and_dtypes() {
    for device in devices() {
        let mut random = Random::new(27);
        let layer =
            Fp8Linear::from_linear(linear(&mut random, 6, 5, &device), CurrentScaling::new());
        let layer = layer.unwrap();
        let x = random.matrix([12, 6], &device);
        let flat = values(layer.forward(x.clone()));
        let deep = layer.forward(x.clone().reshape([2, 3, 2, 6]));
        assert_eq!(deep.dims(), [2, 3, 2, 5]);
        assert_eq!(values(deep), flat);
        let row = layer.forward(x.clone().slice_dim(0, 0..1).reshape([6]));
        assert_eq!(row.dims(), [5]);
        let half = layer.forward(x.cast(FloatDType::F16));
        assert_eq!(half.dtype(), burn::tensor::DType::F16);
        assert!(sqnr(&flat, &values(half)) > 20.0);
        let none = layer.forward(Tensor::<2>::zeros([0, 6], &device));
        assert_eq!(none.dims(), [0, 5]);
    }
}

/// Two ranks that take turns: the first offers its amaxes, the second sees the maximum of both.
#[derive(Debug, Default)]
struct Recorder(Mutex<Vec<Vec<f32>>>);

impl AmaxReducer for Recorder {
    fn max(
        &self,
        amaxes: Tensor<1>,
    ) -> Result<Tensor<1>, Box<dyn std::error::Error + Send + Sync>> {
        self.0.lock().unwrap().push(values(amaxes.clone()));
        Ok(amaxes * 2.0)
    }
}

#[test]
fn a_reducer_sees_every_amax_once() {
    let device = Device::flex().autodiff();
    let mut random = Random::new(28);
    let reducer = Arc::new(Recorder::default());
    let layer =
        Fp8Linear::from(linear(&mut random, 4, 3, &device)).with_amax_reducer(reducer.clone());
    let (x, g) = (
        random.matrix([5, 4], &device),
        random.matrix([5, 3], &device),
    );
    pass_fp8(&layer, &x, &g);
    let staged = layer.scaling_state().unwrap().map(|state| state.amax);
    assert!(staged.iter().all(|amax| *amax > 0.0));
    pass_fp8(&layer, &x, &g);
    let seen = reducer.0.lock().unwrap().clone();
    assert_eq!(seen, [vec![0.0; 3], staged.to_vec()]);
    let [input, ..] = layer.scaling_state().unwrap();
    assert_eq!(input.scale, 448.0 / (2.0 * staged[0]));
}

#[test]
#[should_panic(expected = "the second rank is gone")]
fn a_reducer_that_fails_is_heard() {
    #[derive(Debug)]
    struct Broken;
    impl AmaxReducer for Broken {
        fn max(&self, _: Tensor<1>) -> Result<Tensor<1>, Box<dyn std::error::Error + Send + Sync>> {
            Err("the second rank is gone".into())
        }
    }
    let device = Device::flex().autodiff();
    let layer = Fp8LinearConfig::new(2, 2)
        .init(&device)
        .with_amax_reducer(Arc::new(Broken));
    layer.forward(Tensor::<2>::ones([1, 2], &device));
}

#[test]
#[should_panic(expected = "Fp8LinearConfig: E5M2 alone")]
fn a_bad_recipe_panics_in_init() {
    let recipe = DelayedScaling::new().with_format(RecipeFormat::E5M2).into();
    Fp8LinearConfig::new(2, 2)
        .with_recipe(recipe)
        .init(&Device::flex());
}
