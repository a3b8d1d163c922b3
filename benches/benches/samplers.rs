//! What does it cost to compute an epoch's order? The indices of one of eight ranks are computed. Items are those of the data
//! set.

use burn_ddp::DistributedSampler;
use divan::{Bencher, counter::ItemsCount};

fn main() {
    divan::main();
}

/// The numbers of images in the training sets of CIFAR-10 and ImageNet.
const SIZES: [usize; 2] = [50_000, 1_281_167];

#[divan::bench(args = SIZES)]
fn shuffled(bencher: Bencher, items: usize) {
    let sampler = DistributedSampler::new(items, 0, 8).shuffle(true).seed(1);
    let bencher = bencher.counter(ItemsCount::new(items));
    bencher.bench_local(|| sampler.indices());
}

#[divan::bench(args = SIZES)]
fn in_order(bencher: Bencher, items: usize) {
    let sampler = DistributedSampler::new(items, 0, 8);
    let bencher = bencher.counter(ItemsCount::new(items));
    bencher.bench_local(|| sampler.indices());
}

#[divan::bench(args = SIZES)]
fn weighted(bencher: Bencher, items: usize) {
    let weights: Vec<f64> = (0..items).map(|item| 1.0 + (item % 10) as f64).collect();
    let sampler = DistributedSampler::weighted(&weights, items, 0, 8).seed(1);
    let bencher = bencher.counter(ItemsCount::new(items));
    bencher.bench_local(|| sampler.indices());
}
