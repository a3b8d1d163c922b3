//! Training steps of the models.

use burn::{
    module::Module,
    tensor::{Device, Distribution, FloatDType, Int, Tensor},
};

use super::{Gpt2, Llama, LlamaSizes, ResNet, VisionTransformer};
use crate::{Precision, Training, training_of};

/// The number of classes of the models for images.
const CLASSES: usize = 1000;
/// The number of tokens of a text, and the number of kinds of tokens.
const GPT2: [usize; 2] = [1_024, 50_257];
const SMOLLM: [usize; 2] = [1_024, 49_152];
const TEXT_TINY: [usize; 2] = [32, 256];

/// The [training](Training) of a model that papers report on, over a batch of random images of 224x224 or of
/// texts: `resnet50`, `vit_b_16`, `vit_h_14`, `gpt2` or `smollm`; or of a model that is small enough for tests: `resnet_tiny` (two
/// stages of two bottleneck blocks, from 8 channels on, over images of 32x32), `vit_tiny` (2 layers of width 64 over images of 32x32),
/// `gpt_tiny` (2 layers of width 64 over 32 tokens of 256 kinds) or `llama_tiny` (the same of width 128).
///
/// # Panics
/// If no model has this name.
///
/// ```
/// use benches::{Precision, models::model_training};
/// use burn::tensor::Device;
///
/// let mut training = model_training("vit_tiny", 2, Precision::Plain, Device::flex());
/// training.step();
/// ```
pub fn model_training(model: &str, batch: usize, precision: Precision, device: Device) -> Training {
    let device = &precision.device(device).autodiff();
    match model {
        "resnet50" | "resnet_tiny" => {
            let (resnet, side) = match model {
                "resnet50" => (ResNet::resnet50(CLASSES, device), 224),
                _ => (ResNet::new(&[2, 2], true, 8, CLASSES, device), 32),
            };
            let forward = (ResNet::forward as _, ResNet::forward_by_hand as _);
            on_images(precision, resnet, forward, [batch, 3, side, side], device)
        }
        "vit_b_16" | "vit_h_14" | "vit_tiny" => {
            let (vit, side) = match model {
                "vit_h_14" => (VisionTransformer::huge(CLASSES, device), 224),
                "vit_b_16" => (VisionTransformer::base(CLASSES, device), 224),
                _ => (VisionTransformer::new(2, 64, 8, 32, CLASSES, device), 32),
            };
            let forward = (
                VisionTransformer::forward as _,
                VisionTransformer::forward_by_hand as _,
            );
            on_images(precision, vit, forward, [batch, 3, side, side], device)
        }
        "gpt2" | "gpt_tiny" => {
            let (gpt, [length, vocabulary]) = match model {
                "gpt2" => (Gpt2::small(device), GPT2),
                _ => (
                    Gpt2::new(2, 64, TEXT_TINY[1], TEXT_TINY[0], device),
                    TEXT_TINY,
                ),
            };
            let forward = (Gpt2::forward as _, Gpt2::forward_by_hand as _);
            on_text(precision, gpt, forward, [batch, length], vocabulary)
        }
        "smollm" | "llama_tiny" => {
            let tiny = LlamaSizes {
                layers: 2,
                width: 128,
                inner: 256,
                groups: 1,
                vocabulary: TEXT_TINY[1],
                context: TEXT_TINY[0],
            };
            let (llama, [length, vocabulary]) = match model {
                "smollm" => (Llama::smol(device), SMOLLM),
                _ => (Llama::new(tiny, device), TEXT_TINY),
            };
            let forward = (Llama::forward as _, Llama::forward_by_hand as _);
            on_text(precision, llama, forward, [batch, length], vocabulary)
        }
        _ => panic!("no model is called {model:?}"),
    }
}

/// How a model computes logits from images, and how it does so with casts written by hand.
pub type Forward<M> = (
    fn(&M, Tensor<4>) -> Tensor<2>,
    fn(&M, Tensor<4>, FloatDType) -> Tensor<2>,
);

/// The [training](Training) of a model over a batch of random images of `shape`, `[images, channels, height, width]`. The label
/// of an image is its number modulo 1,000.
///
/// ```
/// use benches::{Precision, models::{VisionTransformer, on_images}};
/// use burn::tensor::Device;
///
/// let device = Device::flex().autodiff();
/// let model = VisionTransformer::new(1, 64, 8, 16, 2, &device);
/// let forward = (VisionTransformer::forward as _, VisionTransformer::forward_by_hand as _);
/// let mut training = on_images(Precision::Plain, model, forward, [2, 3, 16, 16], &device);
/// training.step();
/// ```
pub fn on_images<M: Module + 'static>(
    precision: Precision,
    model: M,
    (forward, by_hand): Forward<M>,
    shape: [usize; 4],
    device: &Device,
) -> Training {
    let images = Tensor::<4>::random(shape, Distribution::Default, device);
    let labels = Tensor::<1, Int>::arange(0..shape[0] as i64, device);
    let labels = labels.remainder_scalar(CLASSES as i64);
    training_of(precision, model, labels, move |model, precision| {
        let images = images.clone();
        match precision {
            precision if precision.is_by_hand() => by_hand(model, images, FloatDType::BF16),
            Precision::AllBf16 => forward(model, images.cast(FloatDType::BF16)),
            _ => forward(model, images),
        }
    })
}

/// How a model computes logits from texts, and how it does so with casts written by hand.
pub type ForwardText<M> = (
    fn(&M, Tensor<2, Int>) -> Tensor<3>,
    fn(&M, Tensor<2, Int>, FloatDType) -> Tensor<3>,
);

/// The [training](Training) of a language model over texts of `shape`, `[texts, tokens]`, with `vocabulary` kinds of tokens.
///
/// ```
/// use benches::{Precision, models::{Gpt2, on_text}};
/// use burn::tensor::Device;
///
/// let model = Gpt2::new(1, 64, 16, 8, &Device::flex().autodiff());
/// let forward = (Gpt2::forward as _, Gpt2::forward_by_hand as _);
/// let mut training = on_text(Precision::Plain, model, forward, [2, 8], 16);
/// training.step();
/// ```
pub fn on_text<M: Module + 'static>(
    precision: Precision,
    model: M,
    (forward, by_hand): ForwardText<M>,
    shape: [usize; 2],
    vocabulary: usize,
) -> Training {
    let device = &model.devices()[0];
    let places = Tensor::<1, Int>::arange(0..(shape[0] * shape[1]) as i64, device);
    // Successive tokens are far from one another, as in real texts.
    let labels = (places * 7_919).remainder_scalar(vocabulary as i64);
    let tokens = labels.clone().reshape(shape);
    training_of(precision, model, labels, move |model, precision| {
        let tokens = tokens.clone();
        let logits = match precision {
            precision if precision.is_by_hand() => by_hand(model, tokens, FloatDType::BF16),
            _ => forward(model, tokens),
        };
        logits.flatten(0, 1)
    })
}

#[cfg(test)]
mod tests {
    use burn::{
        module::{ModuleVisitor, Param},
        optim::GradientsParams,
    };

    use super::*;
    use crate::cast_products;

    const SIZES: LlamaSizes = LlamaSizes {
        layers: 2,
        width: 128,
        inner: 96,
        groups: 1,
        vocabulary: 11,
        context: 8,
    };

    #[test]
    fn models_train_in_every_precision() {
        for model in ["resnet_tiny", "vit_tiny", "gpt_tiny", "llama_tiny"] {
            for precision in Precision::ALL {
                let mut training = model_training(model, 2, precision, Device::flex());
                training.step();
                // Before it learns, the loss is about the logarithm of the number of classes.
                let texts = ["gpt_tiny", "llama_tiny"].contains(&model);
                let kinds: f32 = if texts { 256.0 } else { 1000.0 };
                let loss = training.check().unwrap();
                assert!(
                    (loss - kinds.ln()).abs() < 2.0,
                    "{model}, {precision}: {loss}"
                );
            }
        }
    }

    /// Checks that `by_hand` with casts to f32 gives the same as `forward`, and with bf16 the same as `forward` with autocast,
    /// bit for bit, in inference and in training. Returns the gradients of both in mixed precision, by hand first.
    fn compare<M: Module, const D: usize>(
        model: M,
        forward: impl Fn(&M, &Device) -> Tensor<D>,
        by_hand: impl Fn(&M, &Device, FloatDType) -> Tensor<D>,
    ) -> [Vec<f32>; 2] {
        let trained = model.devices().remove(0);
        let [_, gradients] =
            [(model.valid(), trained.clone().inner()), (model, trained)].map(|(model, plain)| {
                let autocast = Precision::Bf16.device(plain.clone());
                let expected = forward(&model, &plain).into_data();
                let same = by_hand(&model, &plain, FloatDType::F32);
                same.into_data().assert_eq(&expected, true);

                let there = model.clone().fork(&autocast);
                let automatic = forward(&there, &autocast);
                let cast = cast_products(model.clone(), FloatDType::BF16);
                let by_hand = by_hand(&cast, &plain, FloatDType::BF16);
                assert_ne!(by_hand.to_data(), expected);
                automatic.to_data().assert_eq(&by_hand.to_data(), true);
                match plain.is_autodiff() {
                    true => [gradients(&model, by_hand), gradients(&there, automatic)],
                    false => Default::default(),
                }
            });
        gradients
    }

    /// The gradients of the mean square of `logits` with respect to all parameters.
    fn gradients<M: Module, const D: usize>(model: &M, logits: Tensor<D>) -> Vec<f32> {
        struct Flat(GradientsParams, Vec<f32>);
        impl ModuleVisitor for Flat {
            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
                let gradient = self.0.get::<D>(param.id).into_iter();
                self.1.extend(
                    gradient.flat_map(|gradient| gradient.into_data().try_to_vec::<f32>().unwrap()),
                );
            }
        }
        let gradients = logits.square().mean().backward();
        let mut flat = Flat(GradientsParams::from_grads(gradients, model), Vec::new());
        model.visit(&mut flat);
        flat.1
    }

    /// The norm of the difference, of the norm of `right`.
    fn distance(left: &[f32], right: &[f32]) -> f32 {
        let norm = |values: &mut dyn Iterator<Item = f32>| values.map(|x| x * x).sum::<f32>();
        let difference = norm(&mut left.iter().zip(right).map(|(a, b)| a - b));
        (difference / norm(&mut right.iter().copied())).sqrt()
    }

    /// Two sums in backward are in f32 with autocast and in bf16 by hand: the gradient of a bias, and the gradient of an input
    /// that queries, keys and values share. Other gradients only differ as a consequence, by a few roundings of 2^-9 each.
    #[test]
    fn casts_by_hand_are_those_of_autocast() {
        let device = &Device::flex().autodiff();
        let images = Tensor::<4>::random([2, 3, 32, 32], Distribution::Default, &Device::flex());
        let images = images.into_data();
        let images = |device: &Device| Tensor::from_data(images.clone(), device);
        let tokens = |device: &Device| Tensor::<2, Int>::from_data([[1, 5, 3, 9, 0, 2]], device);

        let vit = compare(
            VisionTransformer::new(2, 64, 8, 32, 7, device),
            |vit, device| vit.forward(images(device)),
            |vit, device, low| vit.forward_by_hand(images(device), low),
        );
        let gpt = compare(
            Gpt2::new(2, 64, 11, 8, device),
            |gpt, device| gpt.forward(tokens(device)),
            |gpt, device, low| gpt.forward_by_hand(tokens(device), low),
        );
        for [by_hand, automatic] in [vit, gpt] {
            let distance = distance(&by_hand, &automatic);
            assert!(distance < 4.0 / 512.0, "{distance}");
        }

        let [by_hand, automatic] = compare(
            ResNet::resnet18(7, device),
            |resnet, device| resnet.forward(images(device)),
            |resnet, device, low| resnet.forward_by_hand(images(device), low),
        );
        let bias = by_hand.len() - 7;
        assert!(by_hand[..bias] == automatic[..bias]);
    }

    /// By hand, the gate of a feed-forward layer is rounded to bf16 where autocast goes on in f32. So both are only near each other.
    #[test]
    fn a_llama_by_hand_is_near_that_of_autocast() {
        let device = &Device::flex().autodiff();
        let model = Llama::new(SIZES, device);
        let autocast = Precision::Bf16.device(device.clone());
        let there = model.clone().fork(&autocast);
        let cast = cast_products(model.clone(), FloatDType::BF16);
        let tokens = |device: &Device| Tensor::<2, Int>::from_data([[1, 5, 3, 9, 0, 2]], device);
        let plain = model.forward(tokens(device));
        let same = model.forward_by_hand(tokens(device), FloatDType::F32);
        same.into_data().assert_eq(&plain.to_data(), true);
        let automatic = there.forward(tokens(&autocast));
        let by_hand = cast.forward_by_hand(tokens(device), FloatDType::BF16);

        let values = |tensor: &Tensor<3>| tensor.to_data().try_to_vec::<f32>().unwrap();
        let [plain_logits, ours, theirs] = [&plain, &automatic, &by_hand].map(values);
        let gradients = [
            gradients(&model, plain),
            gradients(&there, automatic),
            gradients(&model, by_hand),
        ];
        let [plain_gradients, our_gradients, their_gradients] = &gradients;
        for (plain, ours, theirs) in [
            (&plain_logits, &ours, &theirs),
            (plain_gradients, our_gradients, their_gradients),
        ] {
            let [ours, theirs] = [ours, theirs].map(|it| distance(it, plain));
            assert!(ours > 0.0 && ours < 1.25 * theirs, "{ours} {theirs}");
            assert!(theirs < 0.02, "{theirs}");
        }
    }

    /// Where ops are fused, burn-layer computes norms, rotations, softmaxes and gates in other ways than Burn's ops say.
    #[test]
    #[cfg(feature = "cpu")]
    fn a_llama_on_fused_layers_is_as_on_a_plain_device() {
        let plain = Device::flex().autodiff();
        let model = Llama::new(SIZES, &plain);
        let run = |model: &Llama, device: &Device| {
            let tokens = Tensor::<2, Int>::from_data([[1, 5, 3, 9, 0, 2], [7; 6]], device);
            let logits = model.forward(tokens);
            let values = logits.to_data().try_to_vec::<f32>().unwrap();
            [values, gradients(model, logits)]
        };
        let expected = run(&model, &plain);
        for (precision, most) in [(Precision::O0, 1e-5), (Precision::Bf16, 0.02)] {
            let device = precision.device(Device::cpu()).autodiff();
            let found = run(&model.clone().fork(&device), &device);
            for (found, expected) in found.iter().zip(&expected) {
                let distance = distance(found, expected);
                assert!(distance < most, "{precision}: {distance}");
            }
        }
    }
}
