//! Which products are a layer's: transposed and tied weights are, the factors of an attention are not.

use burn::{
    module::Param,
    nn::{Linear, LinearConfig, LinearLayout},
    optim::{GradientsParams, SgdConfig},
    tensor::{Device, Int, Tensor, activation::softmax, module::embedding},
};
use burn_amp::{
    Autocast, AutocastLease, Fp8Filter, Policy, autocast,
    recipe::{BlockScaling, CurrentScaling, DelayedScaling, Fp8Recipe, RowwiseScaling},
};

use super::fp8::{fp8, noise, values, wave};

fn recipes() -> [Fp8Recipe; 4] {
    [
        CurrentScaling::new().into(),
        RowwiseScaling::new().into(),
        BlockScaling::new().with_size(16).into(),
        DelayedScaling::new().into(),
    ]
}

fn runs(device: &AutocastLease) -> u64 {
    device.device().sync().unwrap();
    device.report().fp8_runs()
}

/// Output, gradient of the input and new weight of each step.
fn steps(mut layer: Linear, device: &Device) -> Vec<[Vec<f32>; 3]> {
    let mut optimizer = SgdConfig::new().init();
    let step = |size: f32| {
        let x = (wave([6, 32], 0.2, device) * size).require_grad();
        let gradient = wave([6, 16], 0.9, device) * (size * 1e-4);
        let output = layer.forward(x.clone());
        let gradients = (output.clone() * gradient).sum().backward();
        let input = x.grad(&gradients).unwrap();
        let gradients = GradientsParams::from_grads(gradients, &layer);
        layer = optimizer.step(1.0, layer.clone(), gradients);
        let weight = layer.weight.val();
        [output, input, weight].map(values)
    };
    [3.0, 50.0, 0.1, 7.0].map(step).to_vec()
}

/// A layer whose weight is stored transposed computes what another of the same weight does, in the same formats.
#[test]
fn a_transposed_weight_is_a_weight() {
    for recipe in recipes() {
        let [columns, rows] = [0, 1].map(|_| fp8(recipe, Device::flex()));
        let on = columns.device().autodiff();
        let config = LinearConfig::new(32, 16).with_bias(false);
        let stored = config.clone().with_layout(LinearLayout::Col).init(&on);
        let mut plain = config.init(&rows.device().autodiff());
        let weight = stored.weight.val().into_data();
        let weight = Tensor::<2>::from_data(weight, &rows.device().autodiff());
        plain.weight = Param::from_tensor(weight.require_grad());
        let expected = steps(plain, &rows.device().autodiff());
        let found = steps(stored, &on);
        for (step, (found, expected)) in found.iter().zip(&expected).enumerate() {
            for (what, bound) in [1e-6, 1e-10, 1e-10].into_iter().enumerate() {
                let noise = noise(&found[what], &expected[what]);
                assert!(noise < bound, "{recipe:?}, {step}, {what}: {noise}");
            }
        }
        assert_eq!((runs(&columns), runs(&rows)), (12, 12));
    }
}

/// With the gradient of the weight in high precision, it is that of an autocast device without fp8, and all else is as in fp8.
#[test]
fn a_weights_gradient_may_stay_in_high_precision() {
    let recipes: [[Fp8Recipe; 2]; 3] = [
        [
            CurrentScaling::new().into(),
            CurrentScaling::new()
                .with_high_precision_weight_gradient(true)
                .into(),
        ],
        [
            RowwiseScaling::new().into(),
            RowwiseScaling::new()
                .with_high_precision_weight_gradient(true)
                .into(),
        ],
        [
            BlockScaling::new().with_size(16).into(),
            BlockScaling::new()
                .with_size(16)
                .with_high_precision_weight_gradient(true)
                .into(),
        ],
    ];
    // The output, and the gradients of input and weight.
    let pass = |device: &Device| {
        let x = wave([6, 32], 0.2, device).require_grad();
        let weight = wave([32, 16], 0.7, device).require_grad();
        let output = x.clone().matmul(weight.clone());
        let gradient = wave([6, 16], 0.9, device) * 1e-4;
        let gradients = (output.clone() * gradient).sum().backward();
        let [x, weight] = [x, weight].map(|of| values(of.grad(&gradients).unwrap()));
        [values(output), x, weight]
    };
    let bf16 = Autocast::bf16().lease(Device::flex()).unwrap();
    let bf16 = pass(&bf16.device().autodiff());
    for recipes in recipes {
        let [(low, low_runs), (high, high_runs)] = recipes.map(|recipe| {
            let device = fp8(recipe, Device::flex());
            (pass(&device.device().autodiff()), runs(&device))
        });
        assert_eq!((low_runs, high_runs), (3, 2), "{recipes:?}");
        assert_eq!(high[..2], low[..2], "{recipes:?}");
        assert_eq!(high[2], bf16[2], "{recipes:?}");
        assert_ne!(low[2], bf16[2], "{recipes:?}");
    }
}

/// Its numbers of inputs and outputs are those of the product.
#[test]
fn a_filter_knows_the_size_of_a_transposed_weight() {
    let run = |filter: Fp8Filter| {
        let autocast = Autocast::fp8(CurrentScaling::new()).unwrap();
        let device = autocast.fp8_filter(filter).lease(Device::flex());
        let device = device.unwrap();
        let on = device.device().autodiff();
        let weight = wave([16, 32], 0.7, &on).require_grad();
        let x = wave([6, 32], 0.2, &on).require_grad();
        let gradients = x
            .clone()
            .matmul(weight.clone().transpose())
            .sum()
            .backward();
        values(x.grad(&gradients).unwrap());
        values(weight.grad(&gradients).unwrap());
        runs(&device)
    };
    assert_eq!(run(Fp8Filter::new()), 3);
    assert_eq!(run(Fp8Filter::new().except_size([32, 16])), 0);
    assert_eq!(run(Fp8Filter::new().except_size([16, 32])), 3);
    assert_eq!(run(Fp8Filter::new().min_size([32, 16])), 3);
    assert_eq!(run(Fp8Filter::new().min_size([16, 32])), 0);
}

/// A head tied to the embedding, beside one of the same weight that is not.
#[test]
fn a_tied_head_is_a_layer() {
    for recipe in recipes() {
        let run = |tied: bool| {
            let device = fp8(recipe, Device::flex());
            let on = device.device().autodiff();
            let table = || wave([32, 16], 0.7, &on).require_grad();
            let embedded = table();
            let head = if tied { embedded.clone() } else { table() };
            let body = wave([16, 16], 0.3, &on).require_grad();
            let mut passes = Vec::new();
            for size in [1.0, 20.0, 0.3] {
                let tokens = Tensor::<2, Int>::from_ints([[3, 1, 4], [1, 5, 9]], &on);
                let x = embedding(embedded.clone(), tokens) * size;
                let hidden = x.matmul(body.clone().unsqueeze());
                let logits = hidden.matmul(head.clone().transpose().unsqueeze());
                let gradient = wave([2, 3, 32], 0.9, &on) * (size * 1e-4);
                let gradients = (logits.clone() * gradient).sum().backward();
                let mut table = embedded.grad(&gradients).unwrap();
                if !tied {
                    table = table + head.grad(&gradients).unwrap();
                }
                let body = body.grad(&gradients).unwrap();
                passes.push([values(logits), values(table), values(body)]);
            }
            assert_eq!(runs(&device), 3 * 6);
            passes
        };
        for (found, expected) in run(true).iter().zip(&run(false)) {
            for (what, bound) in [1e-6, 1e-10, 1e-10].into_iter().enumerate() {
                let noise = noise(&found[what], &expected[what]);
                assert!(noise < bound, "{recipe:?}, {what}: {noise}");
            }
        }
    }
}

/// A square weight that is used both as it is and transposed is two layers', each with its own histories.
#[test]
fn both_uses_of_a_tied_weight_have_their_own_scales() {
    let run = |tied: bool| {
        let device = fp8(DelayedScaling::new(), Device::flex());
        let on = device.device().autodiff();
        let encoder = wave([16, 16], 0.7, &on).require_grad();
        let decoder = match tied {
            true => encoder.clone(),
            false => wave([16, 16], 0.7, &on).require_grad(),
        };
        let mut passes = Vec::new();
        for size in [1.0, 20.0, 0.3] {
            let x = wave([6, 16], 0.2, &on) * size;
            // The code is far smaller than the input.
            let code = x.matmul(encoder.clone()) * 1e-5;
            let decoded = code.matmul(decoder.clone().transpose());
            let loss = (decoded.clone() * wave([6, 16], 0.9, &on)).sum();
            let gradients = loss.backward();
            let gradient = encoder.grad(&gradients).unwrap();
            let gradient = match tied {
                true => gradient,
                false => gradient + decoder.grad(&gradients).unwrap(),
            };
            passes.push([values(decoded), values(gradient)]);
        }
        let layers = device.fp8_state().unwrap().layers();
        assert_eq!(layers, 2, "tied: {tied}");
        passes
    };
    for (found, expected) in run(true).iter().zip(&run(false)) {
        for (what, bound) in [1e-6, 1e-10].into_iter().enumerate() {
            let noise = noise(&found[what], &expected[what]);
            assert!(noise < bound, "{what}: {noise}");
        }
    }
}

/// Queries, keys and values to what becomes of them.
type Mix = fn([Tensor<3>; 3]) -> Tensor<3>;

fn attend<const D: usize>([query, key, value]: [Tensor<D>; 3]) -> Tensor<D> {
    softmax(query.matmul(key.transpose()), D - 1).matmul(value)
}

/// Products of what layers computed run as the policy says, whatever the numbers of heads and sequences are.
#[test]
fn attention_is_no_layer() {
    let cases: [(&str, usize, Mix); 5] = [
        ("one head, one sequence", 16, |qkv| {
            attend(qkv.map(|x| x.reshape([1, 1, 32, 16]))).reshape([1, 32, 16])
        }),
        ("one head without a dimension", 16, attend),
        (
            "one head of keys and values for two of queries",
            32,
            |[query, key, value]| {
                let query = query.reshape([1, 32, 2, 16]).swap_dims(1, 2);
                let [key, value] = [key, value].map(|x| x.reshape([1, 1, 32, 16]));
                let attended = attend([query, key, value]);
                attended.swap_dims(1, 2).reshape([1, 32, 32])
            },
        ),
        ("two sequences as one matrix", 16, |qkv| {
            attend(qkv.map(|x| x.flatten::<2>(0, 1))).unsqueeze()
        }),
        (
            "logits of a contrastive loss",
            16,
            |[image, text, value]| {
                let [image, text] = [image, text].map(|x| x.flatten::<2>(0, 1));
                image
                    .matmul(text.transpose())
                    .unsqueeze::<3>()
                    .matmul(value)
            },
        ),
    ];
    for (name, queries, mix) in cases {
        let run = |in_region: bool| {
            let device = fp8(CurrentScaling::new(), Device::flex());
            let on = device.device().autodiff();
            let linear = |outputs: usize, step: f32| wave([16, outputs], step, &on).require_grad();
            let weights = [linear(queries, 0.1), linear(16, 0.2), linear(16, 0.3)];
            let x = wave([1, 32, 16], 0.4, &on).require_grad();
            let projected = weights
                .clone()
                .map(|weight| x.clone().matmul(weight.unsqueeze()) * 1e-2);
            let mixed = match in_region {
                true => autocast(&Policy::bf16(), || mix(projected)),
                false => mix(projected),
            };
            let gradients = (mixed.clone() * mixed.clone().detach()).sum().backward();
            let mut found = vec![values(mixed), values(x.grad(&gradients).unwrap())];
            found.extend(weights.map(|weight| values(weight.grad(&gradients).unwrap())));
            assert_eq!(runs(&device), 9, "{name}");
            found
        };
        assert_eq!(run(false), run(true), "{name}");
    }
}

/// A mixer multiplies along the tokens: by the transposition of its input, at any batch size.
#[test]
fn a_transposed_input_is_an_input() {
    for batch in [1, 2] {
        let device = fp8(CurrentScaling::new(), Device::flex());
        let on = device.device().autodiff();
        let weight = wave([32, 16], 0.7, &on).require_grad();
        let x = wave([batch, 32, 16], 0.2, &on).require_grad();
        let mixed = x.clone().swap_dims(1, 2).matmul(weight.clone().unsqueeze());
        let gradients = mixed.sum().backward();
        values(x.grad(&gradients).unwrap());
        values(weight.grad(&gradients).unwrap());
        assert_eq!(runs(&device), 3, "{batch}");
    }
}

/// As a backward pass does, a parameter begins as a single 1.
#[test]
fn layers_after_a_factor_of_one_are_in_fp8() {
    let device = fp8(CurrentScaling::new(), Device::flex());
    let on = device.device().autodiff();
    let gamma = Tensor::<1>::ones([1], &on).require_grad();
    let weights = [0.1, 0.2].map(|step| wave([16, 16], step, &on).require_grad());
    let x = wave([4, 16], 0.4, &on).require_grad();
    for pass in 1..3 {
        let scaled = x.clone() * gamma.clone().unsqueeze();
        let hidden = softmax(scaled.matmul(weights[0].clone()), 1);
        let gradients = hidden.matmul(weights[1].clone()).sum().backward();
        values(gamma.grad(&gradients).unwrap());
        for weight in &weights {
            values(weight.grad(&gradients).unwrap());
        }
        assert_eq!(runs(&device), pass * 6);
    }
}
