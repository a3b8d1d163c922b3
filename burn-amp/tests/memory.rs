//! What autocast keeps for backward, in a process of its own: its allocator counts. On Flex each tensor is an allocation.

use burn::{
    nn::{
        BatchNorm, BatchNormConfig, DropoutConfig, Linear, LinearConfig,
        conv::{Conv2d, Conv2dConfig},
    },
    tensor::{
        Device, Tensor,
        activation::{relu, silu, softmax},
    },
};
use burn_amp::Autocast;
use peak_alloc::PeakAlloc;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

/// Bytes in use once `forward` ran, and still could go backward, more than before.
fn kept(device: &Device, forward: impl Fn() -> Tensor<1>) -> f64 {
    // What a first run sets up stays.
    drop(forward());
    device.sync().unwrap();
    let before = ALLOCATOR.current_usage();
    let loss = forward();
    device.sync().unwrap();
    let bytes = ALLOCATOR.current_usage() as f64 - before as f64;
    drop(loss);
    device.sync().unwrap();
    bytes
}

fn plain_and_bf16() -> [Device; 2] {
    let plain = Device::flex();
    let bf16 = Autocast::bf16().device(plain.clone()).unwrap();
    [plain, bf16].map(Device::autodiff)
}

/// Bytes in use at most while `body` runs, more than before.
fn at_most<R>(device: &Device, body: impl FnOnce() -> R) -> f64 {
    device.sync().unwrap();
    ALLOCATOR.reset_peak_usage();
    let before = ALLOCATOR.current_usage();
    let result = body();
    device.sync().unwrap();
    drop(result);
    (ALLOCATOR.peak_usage() - before) as f64
}

/// One after the other: they share the allocator.
#[test]
fn what_backward_needs_takes_less_in_bf16() {
    // What nobody else holds is added up in place.
    for device in plain_and_bf16() {
        let device = device.inner();
        let square = Tensor::<2>::ones([256, 256], &device);
        let bytes = 256.0 * 256.0 * if device == Device::flex() { 4.0 } else { 2.0 };
        let products = || [(); 2].map(|()| square.clone().matmul(square.clone()));
        let [x, y] = products();
        let in_place = at_most(&device, || x + y) / bytes;
        let [x, y] = products();
        let held = at_most(&device, || x.clone() + y.clone()) / bytes;
        println!("a sum takes {in_place:.2} of its size, and {held:.2} if its terms are held");
        assert!(in_place < 0.5 && held > 0.99);
    }

    // Convolutions give bf16, which norms read in f32 and store in bf16, and what `relu` makes of that is computed again: four bytes
    // instead of twelve. Also where it is two ops, as Burn's client sends it with Burn's own fusion.
    let [plain, bf16] = plain_and_bf16().map(|device| {
        let convs: Vec<(Conv2d, BatchNorm)> = (0..8)
            .map(|_| {
                let conv = Conv2dConfig::new([16, 16], [1, 1]).init(&device);
                (conv, BatchNormConfig::new(16).init(&device))
            })
            .collect();
        let images = Tensor::<4>::ones([8, 16, 32, 32], &device);
        kept(&device, || {
            let layers = convs.iter();
            let last = layers.fold(images.clone(), |x, (conv, norm)| {
                relu(norm.forward(conv.forward(x)))
            });
            last.sum()
        })
    });
    let ratio = bf16 / plain;
    println!("convolutions: {ratio:.3} of f32");
    assert!((0.33..0.37).contains(&ratio));

    // Linear layers cast what comes in f32, and that is computed again from what they gave, so that two times two bytes stay instead
    // of eight.
    let [plain, bf16] = plain_and_bf16().map(|device| {
        let linears: Vec<Linear> = (0..16)
            .map(|_| LinearConfig::new(64, 64).init(&device))
            .collect();
        let tokens = Tensor::<2>::ones([1_024, 64], &device);
        kept(&device, || {
            let layers = linears.iter();
            let last = layers.fold(tokens.clone(), |x, linear| linear.forward(x).exp());
            last.sum()
        })
    });
    let ratio = bf16 / plain;
    println!("linear layers: {ratio:.3} of f32");
    assert!((0.5..0.55).contains(&ratio));

    // Dropout keeps its mask and the layer after it its input, two bytes each.
    let (dropout, linears) = (DropoutConfig::new(0.1).init(), 16);
    let between = |after: &dyn Fn(Tensor<2>) -> Tensor<2>| {
        let [plain, bf16] = plain_and_bf16().map(|device| {
            let linears: Vec<Linear> = (0..linears)
                .map(|_| LinearConfig::new(64, 64).init(&device))
                .collect();
            let tokens = Tensor::<2>::ones([1_024, 64], &device);
            kept(&device, || {
                let layers = linears.iter();
                let last = layers.fold(tokens.clone(), |x, linear| after(linear.forward(x)));
                last.sum()
            })
        });
        bf16 / plain
    };
    let ratio = between(&|x| dropout.forward(x));
    println!("linear layers with dropout: {ratio:.3} of f32");
    assert!((0.45..0.55).contains(&ratio));

    // What `silu` took, two bytes: the sigmoid, the product with it, and so what the layer after it takes, are computed again.
    let ratio = between(&silu);
    println!("linear layers with silu: {ratio:.3} of f32");
    assert!((0.15..0.2).contains(&ratio));

    // A softmax in training is a difference, an exponential and a quotient. What it was made of stays, and its result, both in bf16.
    let [plain, bf16] = plain_and_bf16().map(|device| {
        let queries = Tensor::<3>::ones([8, 128, 16], &device).require_grad();
        kept(&device, || {
            let scores = queries.clone().matmul(queries.clone().transpose());
            softmax(scores, 2).matmul(queries.clone()).sum()
        })
    });
    let ratio = bf16 / plain;
    println!("softmax: {ratio:.3} of f32");
    assert!((0.15..0.2).contains(&ratio));

    #[cfg(all(feature = "cpu", feature = "fusion"))]
    {
        what_a_program_collects_does_not_hold_what_it_is_of();
        to_synchronize_computes_what_waits();
    }
}

/// Numbers of rows and products wait for what follows in their kernels, but not long, and then do not hold what they are of.
#[cfg(all(feature = "cpu", feature = "fusion"))]
fn what_a_program_collects_does_not_hold_what_it_is_of() {
    let device = Autocast::bf16().device(Device::cpu()).unwrap();
    let [rows, columns, batches] = [64, 1_024, 32];
    let wide = Tensor::<2>::ones([8, columns], &device);
    let few = Tensor::<2>::ones([columns, 4], &device);
    let batch = || Tensor::<2>::ones([rows, 8], &device).matmul(wide.clone()) + 1.0;
    let collect = |of: &dyn Fn(Tensor<2>) -> Tensor<2>, batches: usize| -> Vec<Tensor<2>> {
        let one = |_| {
            let tensor = of(batch());
            // Waits for what was submitted, and needs none of it: to synchronize would compute it.
            Tensor::<1>::ones([1], &device).into_data();
            tensor
        };
        (0..batches).map(one).collect()
    };
    // A batch of activations in bf16.
    let bytes = (rows * columns * 2) as f64;
    let centered = |x: Tensor<2>| x.clone() - x.mean_dim(1);
    let exponents = |x: Tensor<2>| (x.clone() - x.max_dim(1)).exp();
    let new_weight = || Tensor::<2>::ones([columns, columns], &device);
    type Of<'a> = &'a dyn Fn(Tensor<2>) -> Tensor<2>;
    for (what, of, most) in [
        ("maxima", &|x| x.max_dim(1), 0.25),
        ("means of squares", &|x| x.square().mean_dim(1), 0.25),
        ("variances", &|x| centered(x).square().mean_dim(1), 0.25),
        ("sums of exponents", &|x| exponents(x).sum_dim(1), 0.25),
        ("products", &|x| x.matmul(few.clone()), 0.25),
        // As large as a 64th of a batch.
        (
            "products with new weights",
            &|x| x.slice(0..1).matmul(new_weight()),
            1.0,
        ),
    ] as [(_, Of, _); 6]
    {
        // What a first run sets up stays.
        drop(collect(of, 3));
        let held = at_most(&device, || collect(of, batches)) / bytes;
        println!("{what} of {batches} batches hold {held:.1} of them");
        assert!(held < most * batches as f64, "{what}");
    }
}

/// A product that waits is computed when the program synchronizes, as one that takes times does.
#[cfg(all(feature = "cpu", feature = "fusion"))]
fn to_synchronize_computes_what_waits() {
    let device = Autocast::bf16().device(Device::cpu()).unwrap();
    let run = |size: usize| {
        let [x, y] = [[size, 8], [8, size]].map(|shape| Tensor::<2>::ones(shape, &device));
        x.matmul(y)
    };
    // What a first run sets up stays.
    drop(run(64).into_data());
    device.sync().unwrap();
    let before = ALLOCATOR.current_usage();
    let product = run(4_096);
    device.sync().unwrap();
    let bytes = ALLOCATOR.current_usage() - before;
    drop(product);
    println!("{bytes} bytes more once it was computed");
    assert!(bytes >= 4_096 * 4_096 * 2);
}
