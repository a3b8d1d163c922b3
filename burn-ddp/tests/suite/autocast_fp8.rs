//! Fp8 layers of unmodified models, on ranks whose devices share amaxes by a group.

use burn::{
    nn::LinearConfig,
    tensor::{Device, Tensor, TensorData},
};
use burn_amp::{Autocast, Fp8State, recipe::DelayedScaling};
use burn_ddp::ProcessGroup;

use crate::suite::ranks::over_tcp;

const RANKS: usize = 3;

const STEPS: usize = 4;

/// The amaxes of inputs and of gradients, by step and rank. Each rank has the largest in some step.
const AMAXES: [[[f32; RANKS]; STEPS]; 2] = [
    [
        [1.0, 96.0, 3.0],
        [5.0, 2.0, 0.5],
        [0.25, 6.0, 20.0],
        [12.0, 1.5, 7.0],
    ],
    [
        [2.0, 1.0, 40.0],
        [0.5, 0.75, 0.125],
        [3.0, 10.0, 1.0],
        [0.375, 5.0, 0.25],
    ],
];

const WEIGHT_AMAX: f32 = 3.0;

/// Numbers that bf16 holds, with this amax.
fn numbers(shape: [usize; 2], amax: f32, device: &Device) -> Tensor<2> {
    let number = |place: usize| amax * [-1.0, 0.5, 0.25, -0.125, 0.75][place % 5];
    let numbers: Vec<f32> = (0..shape[0] * shape[1]).map(number).collect();
    Tensor::from_data(TensorData::new(numbers, shape), device)
}

/// The state of a device after all steps of a rank.
fn train(autocast: Autocast, rank: usize) -> Fp8State {
    let lease = autocast.lease(Device::flex()).unwrap();
    let device = lease.device().autodiff();
    let mut linear = LinearConfig::new(32, 16).init(&device);
    let weight = numbers([32, 16], WEIGHT_AMAX, &device).require_grad();
    linear.weight = linear.weight.map(|_| weight);
    let [inputs, gradients] = AMAXES;
    for (input, gradient) in inputs.into_iter().zip(gradients) {
        let output = linear.forward(numbers([4, 32], input[rank], &device));
        let loss = (output * numbers([4, 16], gradient[rank], &device)).sum();
        let gradient = linear.weight.grad(&loss.backward()).unwrap();
        gradient.into_data();
    }
    lease.fp8_state().unwrap()
}

/// Amaxes and scale of input, weight and gradient, in a device's state.
fn scaling(state: &Fp8State) -> [(Vec<f32>, f32); 3] {
    let state = serde_json::to_value(state).unwrap();
    let tensors = state["layers"][0]["tensors"].as_array().unwrap();
    ["Input", "Weight", "Gradient"].map(|role| {
        let mut tensors = tensors.iter();
        let tensor = tensors.find(|tensor| tensor["role"] == role).unwrap();
        let float = |bits: &serde_json::Value| f32::from_bits(bits.as_u64().unwrap() as u32);
        let amaxes = tensor["amaxes"].as_array().unwrap();
        (amaxes.iter().map(float).collect(), float(&tensor["scale"]))
    })
}

/// The same of amaxes that were taken over some of the ranks. A weight that stays is cast once.
fn expected(ranks: core::ops::Range<usize>) -> [(Vec<f32>, f32); 3] {
    let [inputs, gradients] = AMAXES.map(|steps| {
        let largest = |step: [f32; RANKS]| step[ranks.clone()].iter().copied().fold(0.0, f32::max);
        steps.map(largest)
    });
    let weight = [0.0, 0.0, 0.0, WEIGHT_AMAX];
    [(inputs, 448.0), (weight, 448.0), (gradients, 57344.0)].map(|(amaxes, end)| {
        // The first slot of three is free.
        let history = vec![0.0, amaxes[STEPS - 2], amaxes[STEPS - 1]];
        // A scale is that of the three amaxes before the first slot is freed.
        let largest = amaxes[STEPS - 3..].iter().copied().fold(0.0, f32::max);
        (history, end / largest)
    })
}

#[test]
fn scales_are_of_the_largest_amaxes_of_all_ranks() {
    let autocast = || Autocast::fp8(DelayedScaling::new().with_amax_history_len(3)).unwrap();
    let shared = over_tcp(RANKS, 1, |group: ProcessGroup| {
        let reducer = group.amax_reducer().unwrap();
        train(autocast().amax_reducer(reducer), group.rank())
    });
    for state in &shared {
        assert_eq!(state, &shared[0]);
        assert_eq!(scaling(state), expected(0..RANKS));
    }
    for rank in 0..RANKS {
        let alone = train(autocast(), rank);
        assert_ne!(alone, shared[0]);
        assert_eq!(scaling(&alone), expected(rank..rank + 1));
    }
}
