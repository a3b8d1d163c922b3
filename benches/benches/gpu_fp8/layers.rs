//! Compares training steps of a layer.

use benches::{Comparison, Goal, Goals, Precision, Training, time_left};
use burn::{
    module::Module,
    nn::{Linear, LinearConfig},
    optim::{GradientsParams, ModuleOptimizer, SgdConfig},
    tensor::{Device, Distribution, Tensor},
};
use burn_fp8::{Fp8Linear, recipe::DelayedScaling};
use std::cell::RefCell;

use super::sync;

/// The numbers of rows, and of columns of input and output.
pub(crate) const SHAPES: [[usize; 3]; 2] = [[8_192, 4_096, 14_336], [8_192, 1_280, 5_120]];

const BF16: &str = "Linear, autocast bf16";
const FP8: &str = "Fp8Linear, delayed scaling";

/// Training steps of one layer with SGD, so that its weight changes in each step and must be cast again.
fn steps<M: Module + 'static>(
    model: M,
    device: Device,
    [rows, from, _]: [usize; 3],
    forward: impl Fn(&M, Tensor<2>) -> Tensor<2> + 'static,
) -> Training {
    let x = Tensor::<2>::random([rows, from], Distribution::Default, &device).require_grad();
    let mut optimizer: ModuleOptimizer = SgdConfig::new().init();
    let mut model = Some(model);
    // The gradient of a mean is small, so the learning rate is large enough to change the loss.
    Training::new(move || {
        let before = model.take().expect("the model is put back");
        // A new tensor in each step, like real inputs.
        let loss = forward(&before, x.clone() * 1.0).mean();
        let gradients = GradientsParams::from_grads(loss.backward(), &before);
        model = Some(optimizer.step(1.0, before, gradients));
        sync(&device);
        loss.detach()
    })
}

pub(crate) fn compare(shape: [usize; 3], device: &Device) {
    let [rows, from, to] = shape;
    let config = LinearConfig::new(from, to).with_bias(false);
    let linear = |precision: Precision| {
        let device = precision.device(device.clone()).autodiff();
        let layer = config.init(&device);
        let forward = |layer: &Linear, x| layer.forward(x);
        (
            format!("Linear, {precision}"),
            steps(layer, device, shape, forward),
        )
    };
    let own = || {
        let device = Precision::Bf16.device(device.clone()).autodiff();
        let layer = Fp8Linear::from_linear(config.init(&device), DelayedScaling::new());
        let layer = layer.expect("the recipe is valid");
        let forward = |layer: &Fp8Linear, x| layer.forward(x);
        (FP8.to_owned(), steps(layer, device, shape, forward))
    };
    let question =
        format!("What does a training step of a layer cost? linear, [{rows}, {from}] to {to}");
    let mut ways = vec![
        linear(Precision::Bf16),
        linear(Precision::Plain),
        linear(Precision::Fp8Current),
        linear(Precision::Fp8Delayed),
        own(),
    ];
    ways.retain_mut(|(name, training)| {
        training.step();
        let loss = training.check();
        if let Err(why) = &loss {
            println!("- {name} is left out: {why}\n");
        }
        loss.is_ok()
    });
    let ways: Vec<_> = ways
        .into_iter()
        .map(|(name, training)| (name, RefCell::new(training)))
        .collect();
    let mut table = Comparison::empty(&question).within(time_left());
    for (name, training) in &ways {
        table = table.with(name, || training.borrow_mut().step());
    }
    let table = table.run(20);
    println!("{table}");
    let mut goals = Goals::new(&question);
    for (name, training) in &ways {
        match training.borrow_mut().check() {
            Err(why) => println!("- {name} is none: {why}"),
            Ok(_) if name == FP8 => {
                let ratio = table.ratio(FP8, BF16);
                goals.add_timed(
                    &format!("{FP8}: time, of {BF16}'s"),
                    ratio,
                    table.rounds,
                    Goal::AtMost(1.0 / 1.2),
                );
            }
            Ok(_) => {}
        }
    }
    println!("{goals}");
}
