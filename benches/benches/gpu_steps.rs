//! What does a training step on a GPU cost in f32, through the layer alone (`O0`), with bf16 autocast, with bf16 casts
//! written by hand, with linear layers in fp8, and in PyTorch where it is installed? Time and peak memory.
//!
//! Burn's ways take turns in one process, which tunes its kernels once for all of them. Arguments choose models by name:
//! `vit_b_16`, or with a batch, `vit_b_16/32`.

use benches::{Comparison, Precision, is_selected, model_step, peak_memory, torch_script};
use burn::tensor::Device;
use cubecl::cuda::CudaDevice;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::{
    env, error,
    process::{Command, Stdio},
};

/// Before the memory is looked at: steps in which kernels are compiled and tuned.
const WARM_UP: usize = 5;
const ROUNDS: usize = 20;

/// The models and their batches, small ones first, which are there if others do not fit; `torch/steps.py` has the same
/// models.
const MODELS: [(&str, usize); 7] = [
    ("resnet50", 64),
    ("vit_b_16", 32),
    ("gpt2", 2),
    ("resnet50", 256),
    ("vit_b_16", 128),
    ("gpt2", 8),
    ("vit_h_14", 32),
];

/// The largest model is there for what fp8 gains over bf16; in f32, and side by side with it, it may not fit.
fn ways(model: &str) -> &'static [Precision] {
    use Precision::{Bf16, Fp8Current, Fp8Delayed};
    match model {
        "vit_h_14" => &[Bf16, Fp8Current, Fp8Delayed],
        _ => &Precision::ALL,
    }
}

/// PyTorch's ways, as `torch/steps.py` calls them, with ours.
const TORCH_WAYS: [(&str, Precision); 3] = [
    ("f32", Precision::Plain),
    ("TF32", Precision::Plain),
    ("bf16 autocast", Precision::Bf16),
];

/// The model and the batch that a process is to measure.
const CASE: &str = "GPU_STEPS_CASE";

/// What a way takes.
#[derive(Serialize, Deserialize)]
struct Cost {
    way: String,
    /// Median.
    seconds: f64,
    /// In use at most.
    bytes: f64,
}

fn main() -> Result<(), Box<dyn error::Error>> {
    if let Ok(case) = env::var(CASE) {
        let (model, batch) = case.split_once('/').ok_or("a model and a batch")?;
        let costs = measure(model, batch.parse()?);
        println!("{}", serde_json::to_string(&costs)?);
        return Ok(());
    }
    for (model, batch) in MODELS {
        let case = format!("{model}/{batch}");
        if !is_selected(&case) {
            continue;
        }
        println!("What does a training step cost? {model}, batch {batch} ({ROUNDS} steps each)\n");
        println!("| | median | peak memory | time, of f32 | memory, of f32 | time, of bf16 |");
        println!("|---|---|---|---|---|---|");
        let mut command = Command::new(env::current_exe()?);
        let ours: Vec<Cost> = match run(command.env(CASE, &case)) {
            Ok(costs) => costs,
            Err(error) => {
                println!("| Burn failed: {error} | | | | | |\n");
                continue;
            }
        };
        rows(
            &ours,
            &Precision::Plain.to_string(),
            &Precision::Bf16.to_string(),
        );
        let mut theirs: Vec<Cost> = Vec::new();
        for (way, _) in TORCH_WAYS {
            let mut command = torch_script("steps.py");
            match run(command.args([model, way, &batch.to_string()])) {
                Ok(cost) => theirs.push(cost),
                Err(error) => println!("| PyTorch {way} failed: {error} | | | | | |"),
            }
        }
        rows(&theirs, "PyTorch f32", "PyTorch bf16 autocast");
        println!();
        for (way, precision) in TORCH_WAYS {
            let own = find(&ours, &precision.to_string());
            if let (Some(ours), Some(theirs)) = (own, find(&theirs, &format!("PyTorch {way}"))) {
                let ratio = ours.seconds / theirs.seconds;
                println!("- {precision}, of PyTorch's {way}: {ratio:.3}");
            }
        }
        println!();
    }
    Ok(())
}

fn find<'a>(costs: &'a [Cost], way: &str) -> Option<&'a Cost> {
    costs.iter().find(|cost| cost.way == way)
}

fn rows(costs: &[Cost], f32: &str, bf16: &str) {
    for cost in costs {
        let of = |base: Option<&Cost>, value: fn(&Cost) -> f64| {
            base.map_or(String::new(), |base| {
                format!("{:.3}", value(cost) / value(base))
            })
        };
        let (f32, bf16) = (find(costs, f32), find(costs, bf16));
        println!(
            "| {} | {:.2} ms | {:.0} MiB | {} | {} | {} |",
            cost.way,
            cost.seconds * 1e3,
            cost.bytes / (1 << 20) as f64,
            of(f32, |cost| cost.seconds),
            of(f32, |cost| cost.bytes),
            of(bf16, |cost| cost.seconds),
        );
    }
}

/// What a process prints last, in JSON.
fn run<T: DeserializeOwned>(command: &mut Command) -> Result<T, Box<dyn error::Error>> {
    let output = command.stdout(Stdio::piped()).spawn()?.wait_with_output()?;
    if !output.status.success() {
        return Err(output.status.to_string().into());
    }
    let printed = String::from_utf8(output.stdout)?;
    let last = printed.lines().last().ok_or("nothing was printed")?;
    Ok(serde_json::from_str(last)?)
}

/// Memory first, one way at a time, which also tunes; then times, in turn.
fn measure(model: &str, batch: usize) -> Vec<Cost> {
    let device = Device::cuda(0);
    let step = |precision: Precision| model_step(model, batch, precision, device.clone());
    let ways = ways(model);
    let client = cubecl::Device::Cuda(CudaDevice::new(0)).client();
    let bytes: Vec<u64> = ways
        .iter()
        .map(|way| peak_memory(&client, &device, WARM_UP, || step(*way)))
        .collect();
    let mut comparison = Comparison::empty(model);
    for way in ways {
        comparison = comparison.with(&way.to_string(), step(*way));
    }
    let table = comparison.run(ROUNDS);
    eprintln!("{table}");
    let costs = table.rows.iter().zip(bytes).map(|(row, bytes)| Cost {
        way: row.name.clone(),
        seconds: row.median.as_secs_f64(),
        bytes: bytes as f64,
    });
    costs.collect()
}
