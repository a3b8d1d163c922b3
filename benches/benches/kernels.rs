//! Which kernels does a training step launch, how many, and how long do they take on a GPU? In f32, through the layer alone
//! (`O0`), with autocast, and with bf16 casts written by hand. For CubeCL's devices: features `cpu` or `cuda`.
//!
//! What autocast adds to the casts by hand is seen here without a clock. Arguments choose models by name.

#[cfg(any(feature = "cpu", feature = "cuda"))]
fn main() {
    use benches::{Launches, Precision, is_selected, model_step};
    use burn::tensor::Device;
    use std::collections::BTreeSet;

    /// Steps before, in which kernels are compiled and tuned, and what is kept from step to step is made.
    const WARM_UP: usize = 3;

    #[cfg(feature = "cuda")]
    let (device, models) = (
        Device::cuda(0),
        [("resnet50", 64), ("vit_b_16", 32), ("gpt2", 2)],
    );
    #[cfg(not(feature = "cuda"))]
    let (device, models) = (Device::cpu(), [("vit_tiny", 2), ("gpt_tiny", 2)]);
    for (model, batch) in models {
        let case = format!("{model}/{batch}");
        if !is_selected(&case) {
            continue;
        }
        let ways = Precision::ALL.map(|precision| {
            let mut step = model_step(model, batch, precision, device.clone());
            (0..WARM_UP).for_each(|_| step());
            Launches::of(step)
        });
        println!("Which kernels does a training step launch? {model}, batch {batch}\n");
        print!("| kernel |");
        Precision::ALL
            .iter()
            .for_each(|precision| print!(" {precision} |"));
        println!("\n|---|{}", "---|".repeat(ways.len()));
        let names: BTreeSet<&String> = ways.iter().flat_map(|way| way.0.keys()).collect();
        let mut rows: Vec<_> = names
            .into_iter()
            .map(|name| {
                let row = ways.each_ref().map(|way| way.0.get(name).copied());
                (name.as_str(), row.map(Option::unwrap_or_default))
            })
            .collect();
        // Those of the first way that take longest, or else are the most, come first.
        rows.sort_by_key(|(_, row)| core::cmp::Reverse((row[0].time, row[0].count)));
        rows.insert(0, ("all", ways.each_ref().map(Launches::total)));
        for (name, row) in rows {
            print!("| {name} |");
            for kernel in row {
                match kernel.time.is_zero() {
                    true => print!(" {} |", kernel.count),
                    false => print!(" {}, {:.2?} |", kernel.count, kernel.time),
                }
            }
            println!();
        }
        println!();
    }
}

#[cfg(not(any(feature = "cpu", feature = "cuda")))]
fn main() {
    println!("Kernels are launched on CubeCL's devices: --features cpu, or --features cuda");
}
