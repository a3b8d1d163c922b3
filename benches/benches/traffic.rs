//! How many kernels does a training step launch where ops are fused, and how much do they read and write? The answer comes from
//! the log of Burn's fusion, for large models on a GPU, or for small ones on the CPU. Arguments choose
//! models by name.

use benches::{FusionLog, Precision, Traffic, is_selected, models::model_training};
use burn::tensor::Device;
use std::error::Error;

/// Warm-up steps, in which fusion decides what to fuse.
const WARM_UP: usize = 3;

const WAYS: [Precision; 6] = [
    Precision::Plain,
    Precision::O0,
    Precision::Bf16,
    Precision::Bf16Kept,
    Precision::Bf16ByHand,
    Precision::Fp8Delayed,
];

/// The models and their batches.
const MODELS: &[(&str, usize)] = match cfg!(feature = "cuda") {
    true => &[("resnet50", 64), ("vit_b_16", 128), ("gpt2", 8)],
    false => &[("resnet_tiny", 4), ("vit_tiny", 4), ("gpt_tiny", 4)],
};

#[cfg(feature = "cuda")]
fn device() -> Device {
    Device::cuda(0)
}

#[cfg(all(feature = "cpu", not(feature = "cuda")))]
fn device() -> Device {
    Device::cpu()
}

#[cfg(not(any(feature = "cpu", feature = "cuda")))]
fn device() -> Device {
    Device::default()
}

fn main() -> Result<(), Box<dyn Error>> {
    let log = FusionLog::start()?.ok_or("Burn has read its configuration already")?;
    for (model, batch) in MODELS {
        if !is_selected(&format!("{model}/{batch}")) {
            continue;
        }
        println!("What does a training step read and write? {model}, batch {batch}\n");
        println!("| | kernels | ratio | read and written | ratio |\n|---|---|---|---|---|");
        let mut plain: Option<Traffic> = None;
        for way in WAYS {
            let mut training = model_training(model, *batch, way, device());
            (0..WARM_UP).for_each(|_| training.step());
            let found = log.of(|| training.step())?;
            training.check()?;
            if found == Traffic::default() {
                return Err("no ops are fused here: enable the feature cpu or cuda".into());
            }
            let of = plain.get_or_insert(found);
            println!(
                "| {way} | {} | {:.3} | {:.1} MB | {:.3} |",
                found.kernels,
                found.kernels as f64 / of.kernels as f64,
                found.bytes as f64 / 1e6,
                found.bytes as f64 / of.bytes as f64,
            );
        }
        println!();
    }
    Ok(())
}
