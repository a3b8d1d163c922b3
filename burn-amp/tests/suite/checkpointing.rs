//! Gradient checkpointing: Burn computes activations again in backward, as autocast did at first. (`recompute` is about what autocast
//! computes again by itself.)

use burn::{
    module::{Module, ModuleVisitor, Param},
    nn::{
        BatchNormConfig, PaddingConfig2d,
        conv::Conv2dConfig,
        transformer::{TransformerEncoderConfig, TransformerEncoderInput},
    },
    tensor::{Device, Gradients, Tensor, activation::relu},
};
use burn_amp::Autocast;

struct Collect<'a> {
    gradients: &'a Gradients,
    found: Vec<Vec<f32>>,
}

impl ModuleVisitor for Collect<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        // The state of a norm has none.
        let gradient = param.val().grad(self.gradients);
        let gradient = gradient.map(|it| it.into_data().try_to_vec().unwrap());
        self.found.extend(gradient);
    }
}

/// The loss and all gradients.
pub(super) fn pass<M: Module>(model: &M, output: Tensor<1>) -> (f32, Vec<Vec<f32>>) {
    let loss = output.powf_scalar(2.0).mean();
    let mut collect = Collect {
        gradients: &loss.backward(),
        found: Vec::new(),
    };
    model.visit(&mut collect);
    (loss.into_scalar(), collect.found)
}

fn on_both<M: Module>(build: impl Fn(&Device) -> M, run: impl Fn(&M, &Device) -> Tensor<1>) {
    let bf16 = Autocast::bf16().device(Device::flex()).unwrap().autodiff();
    let record = build(&bf16).into_record();
    let [expected, found] = [bf16.clone(), bf16.gradient_checkpointing()].map(|device| {
        let model = build(&device).load_record(record.clone());
        pass(&model, run(&model, &device))
    });
    assert!(expected.1.iter().flatten().any(|&gradient| gradient != 0.0));
    assert_eq!(found, expected);
}

pub(super) fn wave<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D> {
    let ramp =
        Tensor::<1, burn::tensor::Int>::arange(0..shape.iter().product::<usize>() as i64, device);
    (ramp.float() * 0.37).sin().reshape(shape)
}

#[test]
fn a_transformer_has_the_same_gradients() {
    on_both(
        |device| {
            TransformerEncoderConfig::new(16, 32, 2, 2)
                .with_dropout(0.0)
                .init(device)
        },
        |model, device| {
            let tokens = wave([2, 5, 16], device);
            model
                .forward(TransformerEncoderInput::new(tokens))
                .flatten(0, 2)
        },
    );
}

#[test]
fn a_convolution_has_the_same_gradients() {
    on_both(
        |device| {
            let conv = Conv2dConfig::new([3, 4], [3, 3]).with_padding(PaddingConfig2d::Same);
            (conv.init(device), BatchNormConfig::new(4).init(device))
        },
        |(conv, norm), device| {
            relu(norm.forward(conv.forward(wave([2, 3, 6, 6], device)))).flatten(0, 3)
        },
    );
}
