//! What kernels read and write, on CubeCL's CPU runtime, as a GPU's would.

use benches::{FusionLog, Partner, Precision, Traffic, tcp_groups};
use burn::{
    nn::{
        BatchNorm, BatchNormConfig, LayerNorm, LayerNormConfig, LinearConfig, RmsNormConfig,
        RotaryEncodingConfig, conv::Conv2dConfig, loss::CrossEntropyLossConfig,
    },
    optim::{GradientsParams, SgdConfig},
    tensor::{
        Bool, Device, Distribution, Int, Tensor,
        activation::{relu, silu, softmax},
    },
};
use burn_amp::Autocast;
use burn_ddp::{Norm, SyncBatchNorm, with_custom_ops};
use std::{
    cell::RefCell,
    sync::{Mutex, MutexGuard, OnceLock},
};

/// The log of this process, for one test at a time. `None` where no ops are fused.
fn log() -> Option<MutexGuard<'static, FusionLog>> {
    static LOG: OnceLock<Mutex<FusionLog>> = OnceLock::new();
    if cfg!(not(all(feature = "cpu", feature = "fusion"))) {
        println!("SKIPPED: no ops are fused without the features cpu and fusion");
        return None;
    }
    let start = || {
        tune_little();
        FusionLog::start().unwrap().expect("nothing ran before")
    };
    let log = LOG.get_or_init(|| Mutex::new(start()));
    Some(log.lock().unwrap_or_else(|poisoned| poisoned.into_inner()))
}

/// Has CubeCL's tuner compile few kernels: which one computes a product is not counted.
#[cfg(feature = "cpu")]
fn tune_little() {
    use cubecl::config::{CubeClRuntimeConfig, RuntimeConfig, autotune::AutotuneLevel};
    let mut config = CubeClRuntimeConfig::from_current_dir().override_from_env();
    config.autotune.level = AutotuneLevel::Minimal;
    CubeClRuntimeConfig::set(config);
}

#[cfg(not(feature = "cpu"))]
fn tune_little() {}

#[cfg(feature = "cpu")]
fn cpu() -> Device {
    Device::cpu()
}

#[cfg(not(feature = "cpu"))]
fn cpu() -> Device {
    unreachable!("there is no log either")
}

/// The traffic of `step`, whose kernels were found in the runs before.
fn of(log: &FusionLog, step: impl Fn()) -> Traffic {
    (0..3).for_each(|_| step());
    log.of(step).unwrap()
}

/// Forward and backward of four convolutions, each with a norm.
fn network<N: Norm + Send + 'static>(
    device: &Device,
    norm: impl Fn(BatchNorm) -> N,
) -> Box<dyn Fn() + Send> {
    let device = device.clone().autodiff();
    let image = Tensor::<4>::random([1, 16, 16, 16], Distribution::Default, &device);
    let layers = [(); 4].map(|_| {
        let conv = Conv2dConfig::new([16, 16], [1, 1]).with_bias(false);
        let norm = norm(BatchNormConfig::new(16).init(&device));
        (conv.init(&device), norm)
    });
    device.sync().unwrap();
    Box::new(move || {
        let layers = layers.iter();
        let last = layers.fold(image.clone(), |x, (conv, norm)| {
            relu(norm.forward(conv.forward(x)))
        });
        let _gradients = last.mean().backward();
        device.sync().unwrap();
    })
}

/// Burn takes the norms apart, and writes and copies what they sum. On an autocast device, a norm of an input in bf16 reads it
/// three times and writes its output in forward, and in backward reads it twice, and the output's gradient three times.
#[test]
fn norms_read_their_input_and_write_little() {
    let Some(log) = log() else { return };
    let [plain, o0, low] = [Precision::Plain, Precision::O0, Precision::Bf16].map(|precision| {
        let step = network(&precision.device(cpu()), |norm| norm);
        of(&log, step).bytes as f64
    });
    println!(
        "of the bytes in f32: {} in O0, {} in bf16",
        o0 / plain,
        low / plain
    );
    assert!(o0 < 0.7 * plain && low < 0.4 * plain);
}

/// A device of its own, which runs `SyncBatchNorm`.
fn autocast() -> Device {
    let layers = Autocast::bf16()
        .reduced_precision_reduction(true)
        .layers(cpu());
    with_custom_ops(layers.unwrap()).serve().unwrap()
}

/// So do norms over the batches of several ranks, on plain devices too.
#[test]
fn synchronized_norms_read_and_write_as_little() {
    let Some(log) = log() else { return };
    let each = of(&log, network(&cpu(), |norm| norm)).bytes as f64;
    for (name, most) in [("f32", 0.7), ("bf16", 0.45)] {
        let [own, theirs] = tcp_groups().map(|group| {
            let device = match name {
                "f32" => cpu(),
                _ => autocast(),
            };
            network(&device, |norm| SyncBatchNorm::new(&norm, &group))
        });
        let partner = Partner::new(theirs);
        let both = of(&log, || partner.join_in(&own)).bytes as f64;
        let ratio = both / (2.0 * each);
        println!("of the bytes of BatchNorm in f32: {ratio} of SyncBatchNorm in {name}");
        assert!(ratio < most, "{name}");
    }
}

/// What a sum in f32 of a tensor in bf16 reads is that tensor.
#[test]
fn a_cast_and_a_sum_are_one_kernel() {
    let Some(log) = log() else { return };
    let device = Precision::Bf16.device(cpu());
    let x = Tensor::<2>::random([64, 64], Distribution::Default, &device);
    let product = x.clone().matmul(x);
    device.sync().unwrap();
    let step = || {
        let sum = product.clone().sum_dim(1);
        assert_eq!(sum.into_data().shape().as_slice(), [64, 1]);
    };
    let found = of(&log, step);
    // That the sums are read by the program, and so written, the log does not tell.
    assert_eq!((found.kernels, found.bytes), (1, 64 * 64 * 2));
}

/// Burn's linear layer writes its product, reads it, and writes it with the bias. On an autocast device, it writes the sum alone; and
/// the norm before it writes what the product reads, in bf16.
#[test]
fn linear_layers_write_once() {
    let Some(log) = log() else { return };
    let network = |precision: Precision| {
        let device = precision.device(cpu()).autodiff();
        let x = Tensor::<3>::random([4, 32, 32], Distribution::Default, &device);
        let layers = [(); 4].map(|_| {
            let norm = LayerNormConfig::new(32).init(&device);
            (norm, LinearConfig::new(32, 32).init(&device))
        });
        device.sync().unwrap();
        let step = || {
            let layers = layers.iter();
            let last = layers.fold(x.clone(), |x, (norm, linear)| {
                x.clone() + linear.forward(norm.forward(x))
            });
            let _gradients = last.mean().backward();
            device.sync().unwrap();
        };
        of(&log, step)
    };
    let [plain, o0, low] = [Precision::Plain, Precision::O0, Precision::Bf16].map(network);
    println!("f32 {plain:?}, O0 {o0:?}, bf16 {low:?}");
    let part = |of: Traffic| of.bytes as f64 / plain.bytes as f64;
    assert!(part(o0) < 0.55 && part(low) < 0.5);
}

/// An optimizer reads the gradient of a weight as the product computed it.
#[test]
fn gradients_of_weights_stay_in_16_bits() {
    let Some(log) = log() else { return };
    let training = |precision: Precision| {
        let device = precision.device(cpu()).autodiff();
        let x = Tensor::<2>::random([4, 128], Distribution::Default, &device);
        let model = LinearConfig::new(128, 128).with_bias(false).init(&device);
        let training = RefCell::new((SgdConfig::new().init(), Some(model)));
        device.sync().unwrap();
        let step = || {
            let (optimizer, model) = &mut *training.borrow_mut();
            let before = model.take().expect("it is put back");
            let gradients = before.forward(x.clone()).sum().backward();
            let gradients = GradientsParams::from_grads(gradients, &before);
            *model = Some(optimizer.step(1e-3, before, gradients));
            device.sync().unwrap();
        };
        of(&log, step)
    };
    let [plain, low] = [Precision::Plain, Precision::Bf16].map(training);
    println!("f32 {plain:?}, bf16 {low:?}");
    assert!((low.bytes as f64) < 0.8 * plain.bytes as f64);
}

/// A softmax between products, and the loss of a language model: in forward both read what a product makes for their statistics, and
/// the softmax once more; in backward they read it, and the softmax its gradient, and write a gradient each.
#[test]
fn softmaxes_read_their_input_and_write_little() {
    let Some(log) = log() else { return };
    let network = |precision: Precision| {
        let device = precision.device(cpu()).autodiff();
        let random = || Tensor::<2>::random([64, 64], Distribution::Default, &device);
        let (x, weight) = (random(), random().require_grad());
        let targets = Tensor::<1, Int>::arange(0..64, &device);
        let loss = CrossEntropyLossConfig::new().init(&device);
        device.sync().unwrap();
        let step = || {
            let weights = softmax(x.clone().matmul(weight.clone()), 1);
            let logits = weights.matmul(weight.clone());
            let _gradients = loss.forward(logits, targets.clone()).backward();
            device.sync().unwrap();
        };
        of(&log, step)
    };
    let [plain, low] = [Precision::Plain, Precision::Bf16].map(network);
    println!("f32 {plain:?}, bf16 {low:?}");
    assert!((low.bytes as f64) < 0.4 * plain.bytes as f64);
}

/// Scores of attention, scaled and masked: forward and backward read what the product made of them, and write nothing but the softmax
/// and the gradient.
#[test]
fn attention_scales_and_masks_in_its_softmax() {
    let Some(log) = log() else { return };
    let network = |precision: Precision| {
        let device = precision.device(cpu()).autodiff();
        let random = || Tensor::<4>::random([1, 2, 32, 16], Distribution::Default, &device);
        let [q, k, v] = [random(), random(), random()].map(|leaf| leaf.require_grad());
        let mask = Tensor::<4, Bool>::tril_mask([1, 1, 32, 32], 0, &device);
        device.sync().unwrap();
        let step = || {
            let scores = q.clone().matmul(k.clone().swap_dims(2, 3)) / 4.0;
            let weights = softmax(scores.mask_fill(mask.clone(), f32::NEG_INFINITY), 3);
            let _gradients = weights.matmul(v.clone()).sum().backward();
            device.sync().unwrap();
        };
        of(&log, step)
    };
    let [plain, o0, low] = [Precision::Plain, Precision::O0, Precision::Bf16].map(network);
    println!("f32 {plain:?}, O0 {o0:?}, bf16 {low:?}");
    let part = |of: Traffic| of.bytes as f64 / plain.bytes as f64;
    assert!(part(o0) < 0.73 && part(low) < 0.47);
}

/// Two residual blocks of a norm and a product, in forward and backward: the bytes in f32, and what O0 and bf16 take of these.
fn residual_blocks<N: Fn(Tensor<2>) -> Tensor<2>>(
    log: &FusionLog,
    norm: impl Fn(&Device) -> N,
) -> [f64; 2] {
    let network = |precision: Precision| {
        let device = precision.device(cpu()).autodiff();
        let random = |dims: [usize; 2]| Tensor::<2>::random(dims, Distribution::Default, &device);
        let [x, weight] = [[128, 64], [64, 64]].map(|dims| random(dims).require_grad());
        let norm = norm(&device);
        device.sync().unwrap();
        let step = || {
            let block = |x: Tensor<2>| x.clone() + norm(x).matmul(weight.clone());
            let x = x.clone().matmul(weight.clone());
            let _gradients = block(block(x)).sum().backward();
            device.sync().unwrap();
        };
        of(log, step)
    };
    let [plain, o0, low] = [Precision::Plain, Precision::O0, Precision::Bf16].map(network);
    println!("f32 {plain:?}, O0 {o0:?}, bf16 {low:?}");
    [o0, low].map(|of| of.bytes as f64 / plain.bytes as f64)
}

/// Layer normalizations of residual sums: backward reads the input and the gradient for the gradient of the input, with that of the
/// residual sum, and once more for that of the scale.
#[test]
fn layer_norms_read_their_input_and_write_little() {
    let Some(log) = log() else { return };
    let [o0, low] = residual_blocks(&log, |device| {
        let norm: LayerNorm = LayerNormConfig::new(64).init(device);
        move |x| norm.forward(x)
    });
    assert!(o0 < 0.66 && low < 0.5);
}

/// RMS normalizations of residual sums: as [layer normalizations](layer_norms_read_their_input_and_write_little), and in forward the
/// input's squares are not written.
#[test]
fn rms_norms_read_their_input_and_write_little() {
    let Some(log) = log() else { return };
    let [o0, low] = residual_blocks(&log, |device| {
        let norm = RmsNormConfig::new(64).init(device);
        move |x| norm.forward(x)
    });
    assert!(o0 < 0.84 && low < 0.6);
}

/// A gated feed-forward layer: forward reads what two products made, and writes what the third takes; backward reads both and the
/// gradient, and writes two gradients, all in 16 bits.
#[test]
fn gates_are_not_written() {
    let Some(log) = log() else { return };
    let network = |precision: Precision| {
        let device = precision.device(cpu()).autodiff();
        let random = || Tensor::<2>::random([64, 64], Distribution::Default, &device);
        let [x, gate, up, down] = [(); 4].map(|()| random().require_grad());
        device.sync().unwrap();
        let step = || {
            let by = |weight: &Tensor<2>| x.clone().matmul(weight.clone());
            let inner = silu(by(&gate)) * by(&up);
            let _gradients = inner.matmul(down.clone()).sum().backward();
            device.sync().unwrap();
        };
        of(&log, step)
    };
    let [plain, low] = [Precision::Plain, Precision::Bf16].map(network);
    println!("f32 {plain:?}, bf16 {low:?}");
    assert!((low.bytes as f64) < 0.66 * plain.bytes as f64);
}

/// A rotary position encoding before a product: forward and backward read what is turned, with the cosines and sines, and write it.
#[test]
fn rotations_read_their_input_and_write_little() {
    let Some(log) = log() else { return };
    let network = |precision: Precision| {
        let device = precision.device(cpu()).autodiff();
        let random = || Tensor::<3>::random([4, 32, 32], Distribution::Default, &device);
        let [x, weight] = [random(), random()].map(|leaf| leaf.require_grad());
        let encoding = RotaryEncodingConfig::new(32, 32).init(&device);
        device.sync().unwrap();
        let step = || {
            let turned = encoding.forward(x.clone().matmul(weight.clone()));
            let _gradients = turned.matmul(weight.clone()).sum().backward();
            device.sync().unwrap();
        };
        of(&log, step)
    };
    let [plain, o0, low] = [Precision::Plain, Precision::O0, Precision::Bf16].map(network);
    println!("f32 {plain:?}, O0 {o0:?}, bf16 {low:?}");
    let part = |of: Traffic| of.bytes as f64 / plain.bytes as f64;
    assert!(part(o0) < 0.65 && part(low) < 0.45);
}
