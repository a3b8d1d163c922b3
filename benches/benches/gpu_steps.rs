//! What does a training step on a GPU cost in f32, through the layer alone (`O0`), with bf16 autocast, with bf16 casts
//! written by hand, and in PyTorch where it is installed? Time and peak memory.
//!
//! Each way is a process of its own, so that its memory is its own. Arguments choose models by name.

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

/// The models and their batches; `torch/steps.py` has the same.
const MODELS: [(&str, usize); 3] = [("resnet50", 256), ("vit_b_16", 128), ("gpt2", 8)];

/// How a step is computed.
const WAYS: [&str; 4] = ["f32", "O0", "bf16 autocast", "bf16 by hand"];
const TORCH_WAYS: [&str; 2] = ["f32", "bf16 autocast"];

/// The model and the way that a process is to measure.
const CASE: &str = "GPU_STEPS_CASE";

fn main() -> Result<(), Box<dyn error::Error>> {
    if let Ok(case) = env::var(CASE) {
        let (model, way) = case.split_once('/').ok_or("a model and a way")?;
        let times = measure(model, way);
        println!("{}", serde_json::to_string(&times)?);
        return Ok(());
    }
    for (model, batch) in MODELS.into_iter().filter(|(model, _)| is_selected(model)) {
        println!("What does a training step cost? {model}, batch {batch} ({STEPS} steps)\n");
        println!("| | median | middle half | peak memory | time, of f32 | memory, of f32 |");
        println!("|---|---|---|---|---|---|");
        let mut burn = Rows::default();
        for way in WAYS {
            let mut command = Command::new(env::current_exe()?);
            burn.measure(way, command.env(CASE, format!("{model}/{way}")));
        }
        let mut torch = Rows::default();
        for way in TORCH_WAYS {
            let mut command = torch_script("steps.py");
            command.args([model, way, &batch.to_string()]);
            torch.measure(&format!("PyTorch {way}"), &mut command);
        }
        println!();
    }
    Ok(())
}

/// Rows of a table; the first is what the others are compared with.
#[derive(Default)]
struct Rows {
    first: Option<(f64, f64)>,
}

impl Rows {
    /// Runs a process that prints its steps' seconds as a JSON list, and prints a row.
    fn measure(&mut self, name: &str, command: &mut Command) {
        match run(command) {
            Ok((mut times, memory)) => {
                times.sort_unstable_by(f64::total_cmp);
                let part = |part: usize| times[(times.len() - 1) * part / 4] * 1e3;
                let (time, low, high) = (part(2), part(1), part(3));
                let (first_time, first_memory) = *self.first.get_or_insert((time, memory));
                println!(
                    "| {name} | {time:.2} ms | {low:.2} to {high:.2} ms | {memory:.0} MiB | {:.3} | {:.3} |",
                    time / first_time,
                    memory / first_memory
                );
            }
            Err(error) => println!("| {name} | failed: {error} | | | | |"),
        }
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
fn measure(model: &str, way: &str) -> Vec<f64> {
    let precision = match way {
        "O0" => Precision::O0,
        "bf16 autocast" => Precision::Bf16,
        _ => Precision::Plain,
    };
    let device = precision.device(Device::cuda(0)).autodiff();
    let by_hand = way == "bf16 by hand";
    let (_, batch) = MODELS[MODELS.iter().position(|m| m.0 == model).expect("a model")];
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
            let model = VisionTransformer::base(CLASSES, &device);
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
