//! How many kernels does a training step launch where ops are fused, and how much do they read and write? The answer comes from
//! the log of Burn's fusion, for large models on a GPU, or for small ones on the CPU. Arguments choose
//! models by name. With `--kernels`, the kernels that read and write most are listed for each way; `--batch=64` sets
//! the batch, and `--way=fp8` leaves out other ways.

use benches::{FusionLog, KernelTraffic, Precision, Traffic, is_selected, models::model_training};
use burn::tensor::Device;
use std::{collections::HashMap, env, error::Error};

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

/// How many kinds of kernels are listed.
const KINDS: usize = 40;

/// The models and their batches.
const MODELS: &[(&str, usize)] = match cfg!(feature = "cuda") {
    true => &[
        ("resnet50", 64),
        ("vit_b_16", 128),
        ("gpt2", 8),
        ("smollm", 8),
    ],
    false => &[
        ("resnet_tiny", 4),
        ("vit_tiny", 4),
        ("gpt_tiny", 4),
        ("llama_tiny", 4),
    ],
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
    let lists = env::args().any(|argument| argument == "--kernels");
    let option = |name| env::args().find_map(|it| it.strip_prefix(name).map(String::from));
    let of_all = option("--batch=").map(|batch| batch.parse()).transpose()?;
    let only = option("--way=").unwrap_or_default();
    let log = FusionLog::start()?.ok_or("Burn has read its configuration already")?;
    for (model, batch) in MODELS {
        let batch = &of_all.unwrap_or(*batch);
        if !is_selected(&format!("{model}/{batch}")) {
            continue;
        }
        println!("What does a training step read and write? {model}, batch {batch}\n");
        println!("| | kernels | ratio | read and written | ratio |\n|---|---|---|---|---|");
        let mut plain: Option<Traffic> = None;
        let ways = WAYS.into_iter();
        for way in ways.filter(|way| way.to_string().contains(&only)) {
            let mut training = model_training(model, *batch, way, device());
            (0..WARM_UP).for_each(|_| training.step());
            let kernels = log.kernels(|| training.step())?;
            let found: Traffic = kernels.iter().collect();
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
            if lists {
                list(&kernels);
            }
        }
        println!();
    }
    Ok(())
}

/// Lists the kinds of kernels that read and write most, with their number and their part of all bytes.
fn list(kernels: &[KernelTraffic]) {
    let all: u64 = kernels.iter().map(|kernel| kernel.bytes).sum();
    let mut kinds: HashMap<&str, Vec<&KernelTraffic>> = HashMap::new();
    for kernel in kernels {
        kinds.entry(&kernel.name).or_default().push(kernel);
    }
    let bytes = |kernels: &[&KernelTraffic]| kernels.iter().map(|kernel| kernel.bytes).sum::<u64>();
    let mut kinds: Vec<_> = kinds
        .into_iter()
        .map(|(name, kernels)| (bytes(&kernels), kernels.len(), name))
        .collect();
    kinds.sort_unstable_by(|a, b| b.cmp(a));
    for (bytes, count, name) in kinds.into_iter().take(KINDS) {
        let part = 100.0 * bytes as f64 / all as f64;
        println!("{part:5.1} % in {count:3} of {name}");
    }
}
