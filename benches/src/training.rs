//! Training steps.

use burn::{
    module::Module,
    nn::loss::CrossEntropyLossConfig,
    optim::{GradientsParams, ModuleOptimizer, SgdConfig},
    tensor::{Device, Distribution, FloatDType, Int, Tensor},
};

use crate::{
    Precision, cast_by_hand,
    models::{Gpt2, ResNet, VisionTransformer},
};

/// What the models for images tell apart.
const CLASSES: usize = 1000;
/// The tokens of a text, and how many kinds there are.
const GPT2: [usize; 2] = [1_024, 50_257];
const GPT_TINY: [usize; 2] = [32, 256];

/// A step of SGD as often as it is called; each call waits until everything is computed. `forward` computes logits
/// `[labels, classes]` from inputs that it casts to the dtype that it is given: bf16 where the program is to make its casts
/// itself, else f32.
///
/// ```
/// use benches::{Precision, training_step};
/// use burn::nn::LinearConfig;
/// use burn::tensor::{Device, Tensor};
///
/// let device = Precision::Bf16.device(Device::flex()).autodiff();
/// let model = LinearConfig::new(4, 3).init(&device);
/// let (x, labels) = (Tensor::<2>::ones([2, 4], &device), Tensor::from_ints([0, 2], &device));
/// let mut step = training_step(Precision::Bf16, model, labels, move |model, dtype| {
///     model.forward(x.clone().cast(dtype))
/// });
/// step();
/// ```
pub fn training_step<M: Module>(
    precision: Precision,
    model: M,
    labels: Tensor<1, Int>,
    forward: impl Fn(&M, FloatDType) -> Tensor<2>,
) -> impl FnMut() {
    let device = labels.device();
    let criterion = CrossEntropyLossConfig::new().init(&device);
    let mut training: Option<(M, ModuleOptimizer)> = Some((model, SgdConfig::new().init()));
    move || {
        let (model, mut optimizer) = training.take().expect("it is put back below");
        let logits = match precision {
            Precision::Bf16ByHand => {
                let low = cast_by_hand(model.clone(), FloatDType::BF16);
                forward(&low, FloatDType::BF16).cast(FloatDType::F32)
            }
            _ => forward(&model, FloatDType::F32),
        };
        let loss = criterion.forward(logits, labels.clone());
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        let model = optimizer.step(1e-3, model, gradients);
        device.sync().expect("the device computes");
        training = Some((model, optimizer));
    }
}

/// The [training step](training_step) of a model that papers report on, over a batch of random images of 224x224 or of
/// texts: `resnet50`, `vit_b_16`, `vit_h_14` or `gpt2`; or of one that is small enough for tests: `vit_tiny` (2 layers of width
/// 64 over images of 32x32) or `gpt_tiny` (2 layers of width 64 over 32 tokens of 256 kinds).
///
/// # Panics
/// If no model is called so.
///
/// ```
/// use benches::{Precision, model_step};
/// use burn::tensor::Device;
///
/// let mut step = model_step("vit_tiny", 2, Precision::Plain, Device::flex());
/// step();
/// ```
pub fn model_step(
    model: &str,
    batch: usize,
    precision: Precision,
    device: Device,
) -> Box<dyn FnMut()> {
    let device = &precision.device(device).autodiff();
    match model {
        "resnet50" => on_images(
            precision,
            ResNet::resnet50(CLASSES, device),
            ResNet::forward,
            [batch, 3, 224, 224],
            device,
        ),
        "vit_b_16" | "vit_h_14" | "vit_tiny" => {
            let (vit, side) = match model {
                "vit_h_14" => (VisionTransformer::huge(CLASSES, device), 224),
                "vit_b_16" => (VisionTransformer::base(CLASSES, device), 224),
                _ => (VisionTransformer::new(2, 64, 8, 32, CLASSES, device), 32),
            };
            let images = [batch, 3, side, side];
            on_images(precision, vit, VisionTransformer::forward, images, device)
        }
        "gpt2" => on_text(precision, Gpt2::small(device), [batch, GPT2[0]], GPT2[1]),
        "gpt_tiny" => {
            let [length, vocabulary] = GPT_TINY;
            let gpt = Gpt2::new(2, 64, vocabulary, length, device);
            on_text(precision, gpt, [batch, length], vocabulary)
        }
        _ => panic!("no model is called {model:?}"),
    }
}

fn on_images<M: Module + 'static>(
    precision: Precision,
    model: M,
    forward: fn(&M, Tensor<4>) -> Tensor<2>,
    shape: [usize; 4],
    device: &Device,
) -> Box<dyn FnMut()> {
    let images = Tensor::<4>::random(shape, Distribution::Default, device);
    let labels = Tensor::<1, Int>::arange(0..shape[0] as i64, device);
    let labels = labels.remainder_scalar(CLASSES as i64);
    let step = training_step(precision, model, labels, move |model, dtype| {
        forward(model, images.clone().cast(dtype))
    });
    Box::new(step)
}

fn on_text(
    precision: Precision,
    model: Gpt2,
    shape: [usize; 2],
    vocabulary: usize,
) -> Box<dyn FnMut()> {
    let device = &model.devices()[0];
    let places = Tensor::<1, Int>::arange(0..(shape[0] * shape[1]) as i64, device);
    // Far from one another, as those of a text are.
    let labels = (places * 7_919).remainder_scalar(vocabulary as i64);
    let tokens = labels.clone().reshape(shape);
    let step = training_step(precision, model, labels, move |model, _| {
        model.forward(tokens.clone()).flatten(0, 1)
    });
    Box::new(step)
}

#[cfg(test)]
mod tests {
    use std::{cell::RefCell, rc::Rc};

    use burn::nn::LinearConfig;

    use super::*;

    /// Autocast gets the same program as f32; only casts by hand are the program's own.
    #[test]
    fn the_program_casts_by_hand_alone() {
        for precision in Precision::ALL {
            let device = precision.device(Device::flex()).autodiff();
            let model = LinearConfig::new(32, 16).init(&device);
            let x = Tensor::<2>::ones([16, 32], &device);
            let labels = Tensor::arange(0..16, &device);
            let seen = Rc::new(RefCell::new(Vec::new()));
            let notes = seen.clone();
            let mut step = training_step(precision, model, labels, move |model, dtype| {
                let weight = model.weight.val();
                let values = weight.clone().cast(FloatDType::F32).into_data();
                notes.borrow_mut().push((weight.dtype(), values));
                model.forward(x.clone().cast(dtype))
            });
            step();
            step();
            let low = precision == Precision::Bf16ByHand;
            let expected = if low {
                FloatDType::BF16
            } else {
                FloatDType::F32
            };
            let seen = seen.borrow();
            assert_eq!(seen[0].0, expected.into(), "{precision}");
            assert_ne!(seen[0].1, seen[1].1, "{precision}: nothing was learned");
        }
    }

    #[test]
    fn models_step_in_every_precision() {
        for model in ["vit_tiny", "gpt_tiny"] {
            for precision in Precision::ALL {
                model_step(model, 2, precision, Device::flex())();
            }
        }
    }
}
