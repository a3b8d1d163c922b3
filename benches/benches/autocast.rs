//! What does autocast cost and save, op by op? The same program runs on the plain device, on the autocast device with
//! everything in f32 (`O0`: the cost of the layer), and in bf16. `steps` asks the same about whole training steps.
//!
//! Every job waits for its result, so that queued work counts. Arguments choose questions by a part of their text.

use benches::{Comparison, Precision, is_selected};
use burn::tensor::{Device, Distribution, Tensor, activation};

/// The number of elementwise ops in a row, and their number of elements. Short chains show the cost of a readback, long ones that
/// of an op. Small tensors show the cost of the layer, large ones that of its lost in-place reuse.
const CHAINS: [(usize, usize); 6] = [
    (1, 1),
    (10, 1),
    (100, 1),
    (1_000, 1),
    (100, 1_024),
    (100, 65_536),
];

/// The number of products in a row with the same matrix, which is used like a parameter.
const PRODUCTS: usize = 10;

fn main() {
    for (ops, elements) in CHAINS {
        let question = format!(
            "What do elementwise ops cost? {ops} in a row on {elements} elements, read back"
        );
        compare(&question, 50, |device| {
            let x = Tensor::<1>::random([elements], Distribution::Default, device);
            move || {
                let mut y = x.clone();
                for op in 0..ops {
                    y = if op % 2 == 0 {
                        y + 1.0
                    } else {
                        activation::relu(y)
                    };
                }
                y.into_data();
            }
        });
    }
    for size in [16, 64, 256, 512] {
        let question =
            format!("What do matrix products cost? {PRODUCTS} in a row by [{size}, {size}]");
        compare(&question, 20, |device| {
            let random = || Tensor::<2>::random([size, size], Distribution::Default, device);
            let (x, weight) = (random(), random() / size as f32);
            move || {
                let mut y = x.clone();
                for _ in 0..PRODUCTS {
                    y = y.matmul(weight.clone());
                }
                y.into_data();
            }
        });
    }
}

/// Times the job that `make` returns, on each device.
fn compare<W: FnMut()>(question: &str, rounds: usize, make: impl Fn(&Device) -> W) {
    if !is_selected(question) {
        return;
    }
    let on = |precision: Precision| make(&precision.device(Device::flex()));
    let mut table = Comparison::new(question, "plain f32", on(Precision::Plain));
    for precision in [Precision::O0, Precision::Bf16] {
        table = table.with(&precision.to_string(), on(precision));
    }
    println!("{}", table.run(rounds));
}
