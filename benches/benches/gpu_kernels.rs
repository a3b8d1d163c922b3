//! Which kernels does a training step on a GPU launch, how many, and how long do they take? In every precision, among them f32,
//! the layer alone (`O0`), autocast, and bf16 casts written by hand. This shows, kernel by kernel, what autocast adds to the
//! casts by hand. Arguments choose models by name.

use std::{cmp::Reverse, collections::BTreeSet, time::Duration};

use benches::{Launches, Precision, is_selected, log_warnings, models::model_training, time_left};
use burn::tensor::Device;

const MODELS: [(&str, usize); 3] = [("resnet50", 64), ("vit_b_16", 32), ("gpt2", 2)];

/// Warm-up steps, in which kernels are compiled and tuned, and tensors that are kept between steps are created.
const WARM_UP: usize = 3;

fn main() {
    log_warnings();
    // The time limit counts from here.
    time_left();
    for (model, batch) in MODELS {
        if !is_selected(&format!("{model}/{batch}")) {
            continue;
        }
        match time_left() {
            Some(Duration::ZERO) => println!("- {model}, batch {batch}: no time is left\n"),
            _ => compare(model, batch),
        }
    }
}

/// Prints the kernels of a step, in each precision.
fn compare(model: &str, batch: usize) {
    let ways = Precision::ALL.map(|precision| {
        let mut training = model_training(model, batch, precision, Device::cuda(0));
        (0..WARM_UP).for_each(|_| training.step());
        let launches = Launches::of(|| training.step());
        if let Err(why) = training.check() {
            println!("- {model}, batch {batch}, {precision}: no training: {why}\n");
        }
        launches
    });
    println!("Which kernels does a training step launch? {model}, batch {batch}\n");
    print!("| kernel |");
    for precision in Precision::ALL {
        print!(" {precision} |");
    }
    println!("\n|---|{}", "---|".repeat(ways.len()));
    let names: BTreeSet<&String> = ways.iter().flat_map(|way| way.0.keys()).collect();
    let row = |name| {
        ways.each_ref()
            .map(|way| way.0.get(name).copied().unwrap_or_default())
    };
    let mut rows: Vec<_> = names
        .into_iter()
        .map(|name| (name.as_str(), row(name)))
        .collect();
    // The kernels that take longest in the first precision come first.
    rows.sort_by_key(|(_, row)| Reverse((row[0].time, row[0].count)));
    rows.insert(0, ("all", ways.each_ref().map(Launches::total)));
    for (name, row) in rows {
        print!("| {name} |");
        for kernel in row {
            print!(" {}, {:.2?} |", kernel.count, kernel.time);
        }
        println!();
    }
    println!();
}
