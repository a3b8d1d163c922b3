//! What does a training step on a GPU cost in f32, through the layer alone (`O0`), with bf16 autocast, with bf16 casts
//! written by hand, with linear layers in fp8, and in PyTorch where it is installed? Time and peak memory.
//!
//! Each way is a process of its own, so that its memory is its own. Arguments choose models by name: `vit_b_16`, or with a
//! batch, `vit_b_16/32`.

use benches::{
    Precision, cast_by_hand, is_selected,
    models::{Gpt2, ResNet, VisionTransformer},
    torch_script,
};
use burn::{
    module::Module,
    nn::loss::CrossEntropyLossConfig,
    optim::{GradientsParams, ModuleOptimizer, SgdConfig},
    tensor::{Device, Distribution, FloatDType, Int, Tensor},
};
use std::{
    env, error,
    io::Read,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

const WARM_UP: usize = 8;
const STEPS: usize = 30;
const CLASSES: usize = 1000;
/// Tokens of a text, and how many kinds there are.
const CONTEXT: usize = 1_024;
const VOCABULARY: usize = 50_257;

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

/// How a step is computed.
const WAYS: [&str; 6] = [
    "f32",
    "O0",
    BF16,
    "bf16 by hand",
    "fp8 autocast, current scaling",
    "fp8 autocast, delayed scaling",
];
const BF16: &str = "bf16 autocast";
const TORCH_WAYS: [&str; 2] = ["f32", BF16];

/// The model, the batch and the way that a process is to measure.
const CASE: &str = "GPU_STEPS_CASE";

fn main() -> Result<(), Box<dyn error::Error>> {
    if let Ok(case) = env::var(CASE) {
        let parts: Vec<_> = case.splitn(3, '/').collect();
        let [model, batch, way] = parts[..] else {
            return Err("a model, a batch and a way".into());
        };
        let times = measure(model, batch.parse()?, way);
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
        for way in WAYS {
            let mut command = Command::new(env::current_exe()?);
            burn.measure(way, way, command.env(CASE, format!("{case}/{way}")));
        }
        let mut torch = Rows::default();
        for way in TORCH_WAYS {
            let mut command = torch_script("steps.py");
            command.args([model, way, &batch.to_string()]);
            torch.measure(way, &format!("PyTorch {way}"), &mut command);
        }
        println!();
        for way in TORCH_WAYS {
            if let (Some(ours), Some(theirs)) = (burn.get(way), torch.get(way)) {
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
struct Rows(Vec<(&'static str, (f64, f64))>);

impl Rows {
    fn get(&self, way: &str) -> Option<(f64, f64)> {
        let row = self.0.iter().find(|row| row.0 == way);
        row.map(|row| row.1)
    }

    /// Runs a process that prints its steps' seconds as a JSON list, and prints a row.
    fn measure(&mut self, way: &'static str, name: &str, command: &mut Command) {
        let (mut times, memory) = match run(command) {
            Ok(measured) => measured,
            Err(error) => return println!("| {name} | failed: {error} | | | | |"),
        };
        times.sort_unstable_by(f64::total_cmp);
        let part = |part: usize| times[(times.len() - 1) * part / 4] * 1e3;
        let (time, low, high) = (part(2), part(1), part(3));
        self.0.push((way, (time, memory)));
        let ratios = match self.get(TORCH_WAYS[0]) {
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
fn measure(model: &str, batch: usize, way: &str) -> Vec<f64> {
    let precision = match way {
        "O0" => Precision::O0,
        BF16 => Precision::Bf16,
        "fp8 autocast, current scaling" => Precision::Fp8Current,
        "fp8 autocast, delayed scaling" => Precision::Fp8Delayed,
        _ => Precision::Plain,
    };
    let device = precision.device(Device::cuda(0)).autodiff();
    let by_hand = way == "bf16 by hand";
    if model == "gpt2" {
        let places = Tensor::<1, Int>::arange(0..(batch * CONTEXT) as i64, &device);
        // Far from one another, as those of a text are.
        let labels = (places * 7_919).remainder_scalar(VOCABULARY as i64);
        let tokens = labels.clone().reshape([batch, CONTEXT]);
        return steps(
            Gpt2::small(&device),
            labels,
            by_hand,
            &device,
            |model, _| model.forward(tokens.clone()).flatten(0, 1),
        );
    }
    let images = Tensor::<4>::random([batch, 3, 224, 224], Distribution::Default, &device);
    let labels =
        Tensor::<1, Int>::arange(0..batch as i64, &device).remainder_scalar(CLASSES as i64);
    let input = |cast: bool| match cast {
        true => images.clone().cast(FloatDType::BF16),
        false => images.clone(),
    };
    match model {
        "resnet50" => {
            let model = ResNet::resnet50(CLASSES, &device);
            steps(model, labels, by_hand, &device, |model, cast| {
                model.forward(input(cast))
            })
        }
        _ => {
            let model = match model {
                "vit_h_14" => VisionTransformer::huge(CLASSES, &device),
                _ => VisionTransformer::base(CLASSES, &device),
            };
            steps(model, labels, by_hand, &device, |model, cast| {
                model.forward(input(cast))
            })
        }
    }
}

/// Steps of SGD; `forward` gets a model and whether its input is to be cast to bf16.
fn steps<M: Module>(
    mut model: M,
    labels: Tensor<1, Int>,
    by_hand: bool,
    device: &Device,
    forward: impl Fn(&M, bool) -> Tensor<2>,
) -> Vec<f64> {
    let mut optimizer: ModuleOptimizer = SgdConfig::new().init();
    let criterion = CrossEntropyLossConfig::new().init(device);
    let mut times = Vec::with_capacity(STEPS);
    for step in 0..WARM_UP + STEPS {
        let start = Instant::now();
        let logits = match by_hand {
            true => {
                let low = cast_by_hand(model.clone(), FloatDType::BF16);
                forward(&low, true).cast(FloatDType::F32)
            }
            false => forward(&model, false),
        };
        let loss = criterion.forward(logits, labels.clone());
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(1e-3, model, gradients);
        device.sync().expect("the device computes");
        if step >= WARM_UP {
            times.push(start.elapsed().as_secs_f64());
        }
    }
    times
}
