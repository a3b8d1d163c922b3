//! What does a training step of two ranks cost, compared with that of one rank with the same batch per rank? The ideal ratio is
//! 1: all communication is hidden. Each rank is a process on this machine, with one thread for its ops.

use benches::{Comparison, models::ResNet};
use burn::{
    nn::loss::CrossEntropyLossConfig,
    optim::{GradientsParams, SgdConfig},
    tensor::{Device, Distribution, Int, Tensor},
};
use burn_ddp::{Ddp, DdpConfig, Overlap, ProcessGroup, is_distributed_env, launch};
use burn_layer::Layers;
use std::{
    cell::RefCell,
    env, error, fs,
    path::Path,
    time::{Duration, Instant},
};

/// The environment variable with the file to which rank 0 writes its results.
const RESULT: &str = "RANKS_BENCH_RESULT";
/// The environment variable that is set if gradients are averaged during backward.
const OVERLAP: &str = "RANKS_BENCH_OVERLAP";

const WARM_UP: usize = 2;
const STEPS: usize = 7;
/// The number of images in a rank's batch, and their height and width.
const BATCH: usize = 8;
const SIDE: usize = 64;

fn main() -> Result<(), Box<dyn error::Error>> {
    if is_distributed_env() {
        return rank();
    }
    let folder = tempfile::tempdir()?;
    let hidden = RefCell::new(Vec::new());
    let step = |ranks, overlap| {
        let (result, hidden) = (folder.path().join("result"), &hidden);
        move || {
            let (step, part) = measure(ranks, overlap, &result).expect("the ranks train");
            if let (Some(part), 2) = (part, ranks) {
                hidden.borrow_mut().push(part);
            }
            step
        }
    };
    let table = Comparison::empty(&format!(
        "What does a second rank cost? ResNet-18, 45 MB of gradients, batch {BATCH} a rank, 3x{SIDE}x{SIDE}"
    ))
    .with_time("1 rank", step(1, false))
    .with_time("2 ranks, averaged after backward", step(2, false))
    .with_time("1 rank, on a layered device", step(1, true))
    .with_time("2 ranks, averaged during backward", step(2, true))
    .run(5);
    println!("{table}");
    let hidden = hidden.into_inner();
    let percent = 100.0 * hidden.iter().sum::<f64>() / hidden.len() as f64;
    println!(
        "Of the communication, backward hid {percent:.0} % (where it is averaged during backward)."
    );
    Ok(())
}

/// The median time of a step, and the fraction of the communication that was hidden, if it is known.
fn measure(
    ranks: usize,
    overlap: bool,
    result: &Path,
) -> Result<(Duration, Option<f64>), Box<dyn error::Error>> {
    let mut options = launch::LaunchOptions::new()
        .variable("RAYON_NUM_THREADS", "1")
        .variable(RESULT, result);
    if overlap {
        options = options.variable(OVERLAP, "1");
    }
    launch::spawn_self(ranks, options)?;
    Ok(serde_json::from_slice(&fs::read(result)?)?)
}

/// The program of a rank.
fn rank() -> Result<(), Box<dyn error::Error>> {
    let group = ProcessGroup::init()?;
    let overlap = match env::var_os(OVERLAP) {
        Some(_) => Some(Overlap::new(&group, DdpConfig::new())?),
        None => None,
    };
    let device = match &overlap {
        Some(overlap) => Layers::on(Device::flex()).layer(overlap.layer()).serve()?,
        None => Device::flex(),
    };
    let device = device.autodiff();
    let model = ResNet::resnet18(10, &device);
    let mut ddp = match overlap {
        Some(overlap) => Ddp::overlapped(&group, overlap, &model)?,
        None => Ddp::new(&group, DdpConfig::new(), &model)?,
    };
    let mut model = ddp.broadcast_parameters(model)?;
    let mut optimizer = SgdConfig::new().init();
    let criterion = CrossEntropyLossConfig::new().init(&device);
    let labels = Tensor::<1, Int>::arange(0..BATCH as i64, &device);
    let images = Tensor::random([BATCH, 3, SIDE, SIDE], Distribution::Default, &device);

    let mut times = Vec::with_capacity(STEPS);
    for step in 0..WARM_UP + STEPS {
        group.barrier()?;
        let start = Instant::now();
        let loss = criterion.forward(model.forward(images.clone()), labels.clone());
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        let gradients = ddp.reduce_gradients(gradients, &model)?;
        model = optimizer.step(0.01, model, gradients);
        device.sync()?;
        if step >= WARM_UP {
            times.push(start.elapsed());
        }
    }
    times.sort_unstable();
    if group.is_main() {
        let hidden = ddp.timeline().map(|timeline| timeline.hidden());
        let result = serde_json::to_vec(&(times[STEPS / 2], hidden))?;
        fs::write(env::var(RESULT)?, result)?;
    }
    Ok(())
}
