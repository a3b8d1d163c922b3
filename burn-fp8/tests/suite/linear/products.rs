//! The products of a layer and their gradients.

use burn::module::Module;
use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData, activation::relu};
use burn_fp8::recipe::{
    BlockScaling, CurrentScaling, DelayedScaling, Fp8Recipe, RecipeFormat, RowwiseScaling,
};
use burn_fp8::{Fp8Cast, Fp8Format, Fp8Linear, Fp8Tensor, Granularity, scaled_matmul};

use super::super::device::{Random, compiles_for_long, devices, float_dtypes, sqnr, values};
use super::{assert_near, linear, pass, pass_fp8};

/// All recipes with their defaults, and then the same with other settings.
pub(in crate::suite) fn recipes() -> [Fp8Recipe; 8] {
    [
        DelayedScaling::new().with_amax_history_len(4).into(),
        CurrentScaling::new().into(),
        RowwiseScaling::new().into(),
        BlockScaling::new().with_size(16).into(),
        CurrentScaling::new().with_power_of_two(true).into(),
        CurrentScaling::new().with_format(RecipeFormat::E4M3).into(),
        RowwiseScaling::new().with_power_of_two(false).into(),
        RowwiseScaling::new()
            .with_format(RecipeFormat::Hybrid)
            .into(),
    ]
}

#[derive(Clone, Copy, Debug)]
pub(in crate::suite) enum Distribution {
    Normal,
    /// All positive, as after a relu or a softmax.
    Uniform,
    /// One number in a hundred is thirty times as large.
    Outliers,
}

impl Distribution {
    pub(in crate::suite) fn matrix(
        self,
        random: &mut Random,
        shape: [usize; 2],
        device: &Device,
    ) -> Tensor<2> {
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
    // torchao test_base.py: y >= 18 dB, weight gradient >= 17 dB; test_numerics: all above 20.
    for device in devices() {
        let device = device.autodiff();
        let mut random = Random::new(20);
        // Where every fused kernel is compiled anew, one shape and distribution, and the defaults of each recipe, are enough.
        let shapes = [[5, 37, 11], [16, 32, 16], [64, 48, 1], [128, 256, 64]];
        let distributions = [
            Distribution::Normal,
            Distribution::Uniform,
            Distribution::Outliers,
        ];
        let recipes = recipes();
        let (shapes, distributions, recipes) = match compiles_for_long(&device) {
            false => (&shapes[..], &distributions[..], &recipes[..]),
            true => (&shapes[..1], &distributions[..1], &recipes[..4]),
        };
        for recipe in recipes {
            for &[rows, d_input, d_output] in shapes {
                for &distribution in distributions {
                    let linear = linear(&mut random, d_input, d_output, &device);
                    let input = distribution.matrix(&mut random, [rows, d_input], &device);
                    let gradient =
                        distribution.matrix(&mut random, [rows, d_output], &device) * 1e-5;
                    let layer = Fp8Linear::from_linear(linear.clone(), *recipe).unwrap();
                    let bias = linear.bias.as_ref().unwrap().val();
                    let forward = |x| linear.forward(x);
                    let exact = pass(forward, (&linear.weight.val(), &bias), &input, &gradient);
                    // Delayed scaling has its scales from the second step on.
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
                    // The bias always stays in f32.
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

/// Every product of a recipe with several scales per tensor is the product of its own casts.
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

        let layer = Fp8Linear::from_linear(linear.clone(), rowwise).unwrap();
        let [y, dx, dw, _] = pass_fp8(&layer, &x, &g);
        assert_eq!(y, multiply(rows(&x), columns(&w)));
        assert_eq!(dx, multiply(rows(&g), rows(&w).transpose()));
        assert_eq!(dw, multiply(columns(&x).transpose(), columns(&g)));

        let layer = Fp8Linear::from_linear(linear, block).unwrap();
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

/// f64 tensors are rounded to f32 first. The products are those of f32, and the program sees f64 again.
#[test]
fn wide_floats_are_rounded_to_f32_first() {
    let mut random = Random::new(41);
    // Thirds, which f32 cannot hold exactly.
    let mut thirds = |count: usize| -> Vec<f64> {
        let normals = random.normals(count).into_iter();
        normals.map(|value| f64::from(value) / 3.0).collect()
    };
    let [weight, bias, x, g] = [9 * 6, 6, 7 * 9, 7 * 6].map(&mut thirds);
    for device in devices() {
        if !device.supports_dtype(DType::F64) {
            continue;
        }
        let device = device.autodiff();
        for recipe in recipes().into_iter().take(4) {
            let [wide, narrow] = [DType::F64, DType::F32].map(|dtype| {
                let tensor = |values: &[f64], shape: [usize; 2]| {
                    let data = TensorData::new(values.to_vec(), shape).convert_dtype(dtype);
                    Tensor::<2>::from_data(data, (&device, dtype))
                };
                let mut linear = linear(&mut Random::new(42), 9, 6, &device);
                let set = tensor(&weight, [9, 6]).require_grad();
                linear.weight = linear.weight.map(|_| set);
                let set = tensor(&bias, [1, 6]).reshape([6]).require_grad();
                linear.bias = linear.bias.map(|bias| bias.map(|_| set));
                let layer = Fp8Linear::from_linear(linear, recipe).unwrap();
                let (x, g) = (tensor(&x, [7, 9]), tensor(&g, [7, 6]));
                assert_eq!(layer.forward(x.clone()).dtype(), dtype);
                // Delayed scaling has its scales from the second step on.
                let passes = [(); 2].map(|()| pass_fp8(&layer, &x, &g));
                (passes, layer.scaling_state())
            });
            let products = |passes: &[super::Pass; 2]| {
                let of = |pass: &super::Pass| pass[..3].to_vec();
                [of(&passes[0]), of(&passes[1])]
            };
            assert_eq!(
                products(&wide.0),
                products(&narrow.0),
                "{recipe:?} {device:?}"
            );
            assert_eq!(wide.1, narrow.1);
            // Summed in its own dtype.
            assert_near(&wide.0[1][3], &narrow.0[1][3], 1e-4);
        }
    }
}

/// A gradient does not depend on which other parameters are trained.
#[test]
fn a_frozen_weight_passes_the_gradient_on() {
    for device in devices() {
        let mut random = Random::new(33);
        let device = device.autodiff();
        let linear = linear(&mut random, 20, 9, &device);
        for recipe in recipes().into_iter().take(4) {
            let layer = Fp8Linear::from_linear(linear.clone(), recipe).unwrap();
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
            assert_eq!(gradient(&frozen), (trained, false), "{recipe:?}");
        }
    }
}

/// The bias is added before the output is rounded, whether the layer is trained or not.
#[test]
fn training_and_evaluation_give_the_same_numbers() {
    for device in devices() {
        let mut random = Random::new(38);
        let linear = linear(&mut random, 24, 40, &device.clone().autodiff());
        let x = random.matrix([30, 24], &device);
        for dtype in float_dtypes(&device) {
            let x = x.clone().cast(dtype);
            for recipe in recipes().into_iter().take(4) {
                let layer = Fp8Linear::from_linear(linear.clone(), recipe).unwrap();
                // With scales of 1, and then with those of a step.
                for _ in 0..2 {
                    let evaluated = layer.valid().forward(x.clone());
                    let trained = layer.forward(x.clone().to_device(&device.clone().autodiff()));
                    assert_eq!(trained.dtype(), evaluated.dtype());
                    assert_eq!(values(trained), values(evaluated), "{recipe:?} {dtype:?}");
                }
            }
        }
    }
}

/// What is computed again for backward is the same, and the layer itself is not computed again.
#[test]
fn gradient_checkpointing_changes_nothing() {
    let mut random = Random::new(39);
    let [x, g] = [[7, 12], [7, 5]].map(|shape| random.normals(shape[0] * shape[1]));
    for recipe in recipes() {
        let [plain, checkpointed] = [
            Device::flex().autodiff(),
            Device::flex().autodiff().gradient_checkpointing(),
        ]
        .map(|device| {
            let linear = linear(&mut Random::new(40), 12, 5, &device);
            let layer = Fp8Linear::from_linear(linear, recipe).unwrap();
            let tensor = |values: &[f32], width| {
                let data = TensorData::new(values.to_vec(), [7, width]);
                Tensor::<2>::from_data(data, &device)
            };
            let run = |x: Tensor<2>| relu(layer.forward(relu(x) * 2.0));
            let bias = layer.bias.as_ref().unwrap().val();
            let parameters = (&layer.weight.val(), &bias);
            let gradients =
                [(); 2].map(|()| pass(run, parameters, &tensor(&x, 12), &tensor(&g, 5)));
            (gradients, layer.scaling_state())
        });
        assert_eq!(plain, checkpointed, "{recipe:?}");
    }
}
