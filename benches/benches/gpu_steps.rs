//! What does a training step on a GPU cost in f32, through the layer alone (`O0`), with bf16 autocast, with bf16 casts
//! written by hand, with linear layers in fp8, and in PyTorch where it is installed? Time and peak memory.
//!
//! Each way is a process of its own, so that its memory is its own. Arguments choose models by name: `vit_b_16`, or with a
//! batch, `vit_b_16/32`.

use benches::{Precision, is_selected, model_step, torch_script};
use burn::tensor::Device;
use std::{
    env, error,
    io::Read,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

const WARM_UP: usize = 8;
const STEPS: usize = 30;

/// The models and their batches; `torch/steps.py` has the same models.
const MODELS: [(&str, usize); 7] = [
    ("resnet50", 256),
    ("resnet50", 64),
    ("vit_b_16", 128),
    ("vit_b_16", 32),
    ("vit_h_14", 32),
    ("gpt2", 8),
    ("gpt2", 2),
];

/// The ways that PyTorch has too, as `torch/steps.py` calls them.
const TORCH_WAYS: [(Precision, &str); 2] = [
    (Precision::Plain, "f32"),
    (Precision::Bf16, "bf16 autocast"),
];

/// The model, the batch and the way that a process is to measure.
const CASE: &str = "GPU_STEPS_CASE";

fn main() -> Result<(), Box<dyn error::Error>> {
    if let Ok(case) = env::var(CASE) {
        let parts: Vec<_> = case.splitn(3, '/').collect();
        let [model, batch, way] = parts[..] else {
            return Err("a model, a batch and a way".into());
        };
        let precision = Precision::ALL.into_iter().find(|p| p.to_string() == way);
        let precision = precision.ok_or("no such way")?;
        let times = measure(model, batch.parse()?, precision);
        println!("{}", serde_json::to_string(&times)?);
        return Ok(());
    }
    for (model, batch) in MODELS {
        let case = format!("{model}/{batch}");
        if !is_selected(&case) {
            continue;
        }
        println!("What does a training step cost? {model}, batch {batch} ({STEPS} steps)\n");
        println!("| | median | middle half | peak memory | time, of f32 | memory, of f32 |");
        println!("|---|---|---|---|---|---|");
        let mut burn = Rows::default();
        for precision in Precision::ALL {
            let mut command = Command::new(env::current_exe()?);
            command.env(CASE, format!("{case}/{precision}"));
            burn.measure(precision, &precision.to_string(), &mut command);
        }
        let mut torch = Rows::default();
        for (precision, way) in TORCH_WAYS {
            let mut command = torch_script("steps.py");
            command.args([model, way, &batch.to_string()]);
            torch.measure(precision, &format!("PyTorch {way}"), &mut command);
        }
        println!();
        for (precision, way) in TORCH_WAYS {
            if let (Some(ours), Some(theirs)) = (burn.get(precision), torch.get(precision)) {
                println!(
                    "- {way}, Burn's time of PyTorch's: {:.3}",
                    ours.0 / theirs.0
                );
            }
        }
        println!();
    }
    Ok(())
}

/// The rows of a table: way, milliseconds, MiB. They are compared with f32.
#[derive(Default)]
struct Rows(Vec<(Precision, (f64, f64))>);

impl Rows {
    fn get(&self, way: Precision) -> Option<(f64, f64)> {
        let row = self.0.iter().find(|row| row.0 == way);
        row.map(|row| row.1)
    }

    /// Runs a process that prints its steps' seconds as a JSON list, and prints a row.
    fn measure(&mut self, way: Precision, name: &str, command: &mut Command) {
        let (mut times, memory) = match run(command) {
            Ok(measured) => measured,
            Err(error) => return println!("| {name} | failed: {error} | | | | |"),
        };
        times.sort_unstable_by(f64::total_cmp);
        let part = |part: usize| times[(times.len() - 1) * part / 4] * 1e3;
        let (time, low, high) = (part(2), part(1), part(3));
        self.0.push((way, (time, memory)));
        let ratios = match self.get(Precision::Plain) {
            Some(f32) => format!("{:.3} | {:.3}", time / f32.0, memory / f32.1),
            None => "| ".into(),
        };
        println!(
            "| {name} | {time:.2} ms | {low:.2} to {high:.2} ms | {memory:.0} MiB | {ratios} |"
        );
    }
}

/// The seconds that a process prints, and the most MiB of GPU memory that were in use while it ran.
fn run(command: &mut Command) -> Result<(Vec<f64>, f64), Box<dyn error::Error>> {
    let before = memory_in_use()?;
    let mut child = command.stdout(Stdio::piped()).spawn()?;
    let mut peak = before;
    let status = loop {
        peak = peak.max(memory_in_use()?);
        match child.try_wait()? {
            Some(status) => break status,
            None => thread::sleep(Duration::from_millis(100)),
        }
    };
    let mut output = String::new();
    let mut stdout = child.stdout.take().ok_or("the process has no output")?;
    stdout.read_to_string(&mut output)?;
    if !status.success() {
        return Err(status.to_string().into());
    }
    let last = output.lines().last().ok_or("nothing was printed")?;
    Ok((serde_json::from_str(last)?, peak - before))
}

/// MiB of the first GPU.
fn memory_in_use() -> Result<f64, Box<dyn error::Error>> {
    let query = [
        "--id=0",
        "--query-gpu=memory.used",
        "--format=csv,noheader,nounits",
    ];
    let output = Command::new("nvidia-smi").args(query).output()?;
    Ok(String::from_utf8(output.stdout)?.trim().parse()?)
}

/// Seconds of each step.
fn measure(model: &str, batch: usize, precision: Precision) -> Vec<f64> {
    let mut step = model_step(model, batch, precision, Device::cuda(0));
    (0..WARM_UP).for_each(|_| step());
    let times = (0..STEPS).map(|_| {
        let start = Instant::now();
        step();
        start.elapsed().as_secs_f64()
    });
    times.collect()
}
