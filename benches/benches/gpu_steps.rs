//! What does a training step on a GPU cost in f32, through the layer alone (`O0`), with bf16 autocast, with bf16 casts
//! written by hand, with linear layers in fp8, and in PyTorch, if it is installed? Time and peak memory.
//!
//! Burn's ways take turns in one process, which tunes its kernels once for all of them. Arguments choose models by name:
//! `vit_b_16`, or with a batch size, `vit_b_16/32`. Each needs more than five minutes, most of them for compiling and tuning
//! Burn's kernels. With less than 40 minutes, name one: in another run it goes on from the kernels that are compiled and tuned.

use benches::{
    Precision, is_selected, log_warnings,
    models::model_training,
    share_of_time,
    steps::{Bench, Findings, Job, Report, Theirs, measure, torch_ways},
    time_left, torch_script,
};
use burn::tensor::Device;
use cubecl::cuda::CudaDevice;
use std::{
    env,
    error::Error,
    io::{self, Write},
    process::Command,
    time::{Duration, Instant},
};

/// The number of rounds in which Burn's ways are timed in turn.
const ROUNDS: usize = 10;

/// The models and their batch sizes. Small ones come first, so that they are measured even if larger ones do not fit.
/// `torch/steps.py` has the same models.
const MODELS: [(&str, usize); 8] = [
    ("resnet50", 64),
    ("vit_b_16", 32),
    ("gpt2", 2),
    ("resnet50", 256),
    ("vit_b_16", 128),
    ("gpt2", 8),
    ("smollm", 8),
    ("vit_h_14", 32),
];

/// The fraction of a model's time for Burn's ways. The rest is for PyTorch's.
const OURS: f64 = 0.7;

/// The ways to measure for a model: first those that have a goal, because there may be no time for all. The largest model is only
/// measured for the gain of fp8 over bf16, and may not fit in f32. Gradient checkpointing is left out, because it is Burn's own.
fn ways(model: &str) -> Vec<Precision> {
    use Precision::{
        AllBf16, Bf16, Bf16ByHand, Bf16ByHandOnO0, Bf16Kept, Fp8Current, Fp8Delayed, O0, Plain,
    };
    match model {
        "vit_h_14" => vec![Bf16, Fp8Delayed, Fp8Current],
        _ => vec![
            Plain,
            Bf16,
            Bf16ByHandOnO0,
            O0,
            Fp8Delayed,
            Bf16Kept,
            Bf16ByHand,
            AllBf16,
            Fp8Current,
        ],
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    log_warnings();
    if let Some(job) = Job::of_this_process() {
        return Ok(work(&job)?);
    }
    // The time limit counts from here.
    time_left();
    let cases = MODELS.map(|(model, batch)| (model, batch, format!("{model}/{batch}")));
    let cases: Vec<_> = cases
        .into_iter()
        .filter(|(_, _, name)| is_selected(name))
        .collect();
    let own = env::current_exe()?;
    for (number, (model, batch, name)) in cases.iter().enumerate() {
        let bench = Bench {
            model: model.to_string(),
            batch: *batch,
            ways: ways(model),
            rounds: ROUNDS,
        };
        let (start, share) = (Instant::now(), share_of_time(cases.len() - number));
        let mut findings = Findings::default();
        let limit = share.map(|share| share.mul_f64(OURS));
        let end = bench.run(&mut findings, || Command::new(&own), limit);
        let mut report = Report {
            bench: &bench,
            findings: &findings,
            theirs: None,
        };
        println!("{report}");
        if let Err(error) = end {
            println!("- {name}, Burn: {error}\n");
        }
        let left = share.map(|share| share.saturating_sub(start.elapsed()));
        let theirs = torch(&bench, left);
        report.theirs = Some(&theirs);
        println!("{report}");
    }
    Ok(())
}

/// The program of a process that was started for a job.
fn work(job: &Job) -> io::Result<()> {
    let client = cubecl::Device::Cuda(CudaDevice::new(0)).client();
    let init = |way| model_training(&job.model, job.batch, way, Device::cuda(0));
    measure(job, &client, init, |event| {
        let mut out = io::stdout().lock();
        writeln!(out, "{}", serde_json::to_string(&event)?)?;
        out.flush()
    })
}

fn torch(bench: &Bench, limit: Option<Duration>) -> Theirs {
    let mut script = torch_script("steps.py");
    script.args([&bench.model, &bench.batch.to_string()]);
    // After this time, the script times no more steps.
    script.arg(
        limit
            .map_or(f64::MAX, |limit| limit.as_secs_f64())
            .to_string(),
    );
    Theirs::of(script.args(torch_ways(&bench.model)), limit)
}
