//! What is given up and computed again, beside the plain device.

use super::devices::{Leased, devices};
use burn::tensor::{DType, Device, Distribution, FloatDType, Tensor, activation};
use burn_layer::{Inputs, Layer, Layers, Op, Plan, ops_come_whole};
use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex},
    thread,
};

/// Has everything computed again that may be, and writes down what was.
#[derive(Clone, Debug, Default)]
struct Recompute(Arc<Mutex<Vec<Op>>>);

impl Layer for Recompute {
    fn plan(&self, _op: Op, inputs: &Inputs) -> Option<Plan> {
        Some(Plan {
            recompute: true,
            ..inputs.promote()
        })
    }

    fn recomputed(&self, op: Op) {
        self.0.lock().unwrap().push(op);
    }
}

impl Recompute {
    fn device(&self, plain: &Device) -> Device {
        let layers = Layers::on(plain.clone()).layer(self.clone());
        layers.leased()
    }

    /// What `tensor` holds, and what had to be computed again to read it.
    fn read<const D: usize>(&self, tensor: &Tensor<D>) -> (Vec<f32>, Vec<Op>) {
        tensor.device().sync().unwrap();
        self.0.lock().unwrap().clear();
        let values = values(tensor.clone());
        (values, core::mem::take(&mut *self.0.lock().unwrap()))
    }
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().convert::<f32>().try_to_vec().unwrap()
}

/// An activation: it comes of a product. Positive, so that roots and logarithms are numbers; the factors have so few bits
/// that the product is exact on tensor cores too.
fn activation(device: &Device, size: usize) -> Tensor<2> {
    let row = Tensor::<1, burn::tensor::Int>::arange(0..size as i64, device);
    let row = ((row.float() * 0.7).sin().abs() + 0.1) * 128.0;
    let row = row.round() / 128.0;
    let column = row.clone().flip([0]).reshape([size, 1]);
    column.matmul(row.reshape([1, size]))
}

/// Makes as many others as it takes for earlier ones to be given up.
fn give_up_earlier(device: &Device) {
    let other = activation(device, 64);
    (0..4).for_each(|_| drop(other.clone().cos()));
}

/// To the bit on Flex. CubeCL fuses what is computed again with other ops than before, and may round products and sums together.
fn agree(plain: &Device, found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len());
    let tolerance = match *plain == Device::flex() {
        true => 0.0,
        false => 1e-5,
    };
    for (found, expected) in found.iter().zip(expected) {
        let error = (found - expected).abs();
        assert!(
            error <= tolerance * expected.abs().max(1.0),
            "{found} for {expected} on {plain:?}"
        );
    }
}

type Apply = fn(Tensor<2>) -> Tensor<2>;

/// Another row than those of the activation.
fn row(like: &Tensor<2>) -> Tensor<2> {
    let row = like.clone().slice([1..2, 0..64]);
    row.exp()
}

const CHEAP: [(Op, Apply); 28] = [
    (Op::float_mul, |x| x.clone() * row(&x)),
    (Op::float_div, |x| x.clone() / row(&x)),
    (Op::float_add, |x| x.clone() + row(&x)),
    (Op::float_sub, |x| x.clone() - row(&x)),
    (Op::float_recip, Tensor::recip),
    (Op::float_exp, Tensor::exp),
    (Op::float_log, Tensor::log),
    (Op::float_log1p, Tensor::log1p),
    (Op::float_powf_scalar, |x| x.powf_scalar(2.5)),
    (Op::float_sqrt, Tensor::sqrt),
    (Op::float_abs, Tensor::abs),
    (Op::float_cos, Tensor::cos),
    (Op::float_sin, Tensor::sin),
    (Op::float_tanh, Tensor::tanh),
    (Op::float_erf, Tensor::erf),
    (Op::relu, activation::relu),
    (Op::gelu, activation::gelu),
    (Op::sigmoid, activation::sigmoid),
    (Op::float_add_scalar, |x| x + 0.3),
    (Op::float_sub_scalar, |x| x - 0.3),
    (Op::float_mul_scalar, |x| x * 0.3),
    (Op::float_div_scalar, |x| x / 0.3),
    (Op::float_neg, Tensor::neg),
    (Op::float_clamp, |x| x.clamp(1.1, 1.4)),
    (Op::float_clamp_min, |x| x.clamp_min(1.1)),
    (Op::float_clamp_max, |x| x.clamp_max(1.4)),
    (Op::float_mask_fill, |x| {
        let mask = x.clone().greater_elem(1.3);
        x.mask_fill(mask, 0.5)
    }),
    (Op::float_cast, |x| x.cast(FloatDType::F16)),
];

#[test]
fn every_cheap_op_is_computed_again_with_the_same_result() {
    let listed: BTreeSet<Op> = CHEAP.iter().map(|(op, _)| *op).collect();
    let cheap = Op::ALL.iter().copied().filter(|op| op.is_cheap());
    assert_eq!(listed, cheap.collect());

    for plain in devices() {
        let layer = Recompute::default();
        let device = layer.device(&plain);
        // What does not come whole: see `ops_come_whole`.
        let parted = |op| {
            matches!(op, Op::relu | Op::gelu | Op::sigmoid | Op::float_neg)
                || matches!(op, Op::float_clamp_min | Op::float_clamp_max)
        };
        let sent = |(op, _): &(Op, Apply)| ops_come_whole() || !parted(*op);
        for (op, apply) in CHEAP.into_iter().filter(sent) {
            // Of what is computed again itself, so that whatever is made of it costs no memory.
            let kept = activation(&device, 64);
            let made = apply(kept.clone().exp());
            give_up_earlier(&device);
            let (found, computed) = layer.read(&made);
            assert_eq!(computed, [op, Op::float_exp]);
            let expected = apply(activation(&plain, 64).exp());
            agree(&plain, &found, &values(expected));
            // It is there again.
            assert_eq!(layer.read(&made), (found, vec![]), "{op}");
            drop(kept);
        }
    }
}

/// Where Burn's client does not send `relu` whole, the mask is made again as well; other masks are not.
#[test]
fn what_is_filled_is_where_the_mask_was() {
    type Fill = fn(Tensor<2>) -> Tensor<2>;
    let fills: [Fill; 5] = [
        |x| x.clone().mask_fill(x.lower_equal_elem(0.0), 0.0),
        |x| x.clone().mask_fill(x.lower_equal_elem(0.0), 0.5),
        |x| x.clone().mask_fill(x.lower_equal_elem(0.1), 0.0),
        |x| {
            x.clone()
                .mask_fill(x.clone().flip([0]).lower_equal_elem(0.0), 0.0)
        },
        |x| x.clone().mask_fill(x.lower_elem(0.1), 0.0),
    ];
    for plain in devices() {
        let layer = Recompute::default();
        let device = layer.device(&plain);
        let signs = |x: Tensor<2>| x.exp().cos();
        for fill in fills {
            let kept = activation(&device, 64);
            let made = fill(signs(kept.clone()));
            give_up_earlier(&device);
            let (found, computed) = layer.read(&made);
            assert_eq!(computed[0], Op::float_mask_fill);
            let unfilled = signs(activation(&plain, 64));
            let expected = values(fill(unfilled.clone()));
            assert_ne!(expected, values(unfilled));
            agree(&plain, &found, &expected);
            drop(kept);
        }
    }
}

/// What is computed in one dtype and stored in another is so again.
#[test]
fn what_was_stored_in_another_dtype_is_cast_again() {
    #[derive(Clone, Debug)]
    struct Stores(Recompute);
    impl Layer for Stores {
        fn plan(&self, op: Op, inputs: &Inputs) -> Option<Plan> {
            let plan = self.0.plan(op, inputs)?;
            Some(match op {
                Op::float_exp => Plan {
                    compute: Some(DType::F32),
                    ..plan.store(DType::BF16)
                },
                _ => plan,
            })
        }

        fn recomputed(&self, op: Op) {
            self.0.recomputed(op);
        }
    }
    let layer = Recompute::default();
    let layers = Layers::on(Device::flex()).layer(Stores(layer.clone()));
    let device = layers.leased();
    let x = activation(&device, 64);
    let made = x.clone().exp();
    give_up_earlier(&device);
    let (found, computed) = layer.read(&made);
    assert_eq!(computed, [Op::float_exp]);
    let expected = activation(&Device::flex(), 64).exp();
    let rounded = expected.cast(FloatDType::BF16).cast(FloatDType::F32);
    assert_eq!(found, values(rounded));
    drop(x);
}

/// What it is made of stays as it was, whatever the program goes on to make of that.
#[test]
fn inputs_do_not_change() {
    let layer = Recompute::default();
    let device = layer.device(&Device::flex());
    let x = activation(&device, 64);
    let made = x.clone().exp();
    let mut next = x;
    for _ in 0..3 {
        next = next + 1.0;
    }
    give_up_earlier(&device);
    let plain = activation(&Device::flex(), 64);
    let (found, computed) = layer.read(&made);
    assert_eq!(computed, [Op::float_exp]);
    assert_eq!(found, values(plain.clone().exp()));
    assert_eq!(layer.read(&next).0, values(plain + 1.0 + 1.0 + 1.0));
}

#[test]
fn other_views_are_of_what_is_computed_again() {
    type View = fn(Tensor<2>) -> Tensor<3>;
    let views: [View; 4] = [
        |x| x.transpose().unsqueeze(),
        |x| x.reshape([4, 16, 64]).swap_dims(0, 2),
        |x| x.reshape([4, 16, 64]).permute([2, 0, 1]),
        |x| x.reshape([4, 16, 64]).permute([1, 0, 2]).swap_dims(1, 2),
    ];
    for plain in devices() {
        let layer = Recompute::default();
        let device = layer.device(&plain);
        for view in views {
            let expected = view(activation(&plain, 64).exp());
            let kept = activation(&device, 64);
            let made = view(kept.clone().exp());
            assert_eq!(made.shape(), expected.shape());
            give_up_earlier(&device);
            let (found, computed) = layer.read(&made);
            assert_eq!(computed, [Op::float_exp]);
            agree(&plain, &found, &values(expected));
            drop(kept);
        }
    }
}

#[test]
fn what_saves_nothing_is_kept() {
    let layer = Recompute::default();
    let device = layer.device(&Device::flex());
    let x = activation(&device, 64);
    let small = activation(&device, 16);
    let parameter = Tensor::<2>::random([64, 64], Distribution::Default, &device);
    let made = [
        // Of a parameter, as optimizers make others.
        parameter.clone().exp(),
        // Two inputs of its size, which it would take to compute it.
        x.clone() * x.clone().transpose(),
        // An input that nothing else needs.
        activation(&device, 64) + 1.0,
        // Not cheap.
        x.clone().sum_dim(0),
        // Too small to matter.
        small.clone().exp(),
    ];
    give_up_earlier(&device);
    for made in made {
        assert_eq!(layer.read(&made).1, []);
    }

    // Nobody asked for it.
    #[derive(Debug)]
    struct Panics;
    impl Layer for Panics {
        fn recomputed(&self, op: Op) {
            panic!("{op} is computed again");
        }
    }
    let device = Layers::on(Device::flex()).layer(Panics).serve().unwrap();
    let x = activation(&device, 64);
    let made = x.clone().exp();
    give_up_earlier(&device);
    values(made);
    drop(x);
}

/// An input that backward will need stays in any case.
#[test]
fn what_is_made_of_something_kept_is_computed_again() {
    let layer = Recompute::default();
    let device = layer.device(&Device::flex());
    let x = activation(&device, 64);
    let made = x.clone() + 1.0;
    give_up_earlier(&device);
    let (found, computed) = layer.read(&made);
    assert_eq!(computed, [Op::float_add_scalar]);
    assert_eq!(found, values(x + 1.0));
}

/// A chain is computed again from one of its links, not from its beginning.
#[test]
fn a_long_chain_costs_little() {
    let layer = Recompute::default();
    let device = layer.device(&Device::flex());
    let chain = |device: &Device, links: usize| -> Vec<Tensor<2>> {
        let first = activation(device, 64);
        let next = |x: &Tensor<2>| Some(x.clone() * 1.01);
        core::iter::successors(Some(first), next)
            .take(links)
            .collect()
    };
    let mut most = 0;
    for links in [2, 16, 17, 18, 40, 100] {
        let expected = chain(&Device::flex(), links).pop().unwrap();
        let made = chain(&device, links);
        give_up_earlier(&device);
        let (found, computed) = layer.read(&made[links - 1]);
        assert_eq!(found, values(expected), "to the bit");
        most = computed.len().max(most);
    }
    assert_eq!(most, 16);
}

#[test]
fn threads_share_it() {
    let layer = Recompute::default();
    let device = layer.device(&Device::flex());
    let expected = values(activation(&Device::flex(), 64).exp().log());
    for _ in 0..10 {
        let kept = activation(&device, 64);
        let made = kept.clone().exp().log();
        give_up_earlier(&device);
        device.sync().unwrap();
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| assert_eq!(values(made.clone()), expected));
            }
        });
        drop(kept);
    }
}

/// What one thread runs backward is no reason to keep what another computes forward.
#[test]
fn backward_is_of_its_thread() {
    for plain in devices() {
        let layer = Recompute::default();
        let device = layer.device(&plain);
        let x = activation(&device, 64);
        let autodiff = device.clone().autodiff();
        let backward = move || {
            let weight = Tensor::<2>::ones([2, 2], &autodiff).require_grad();
            drop(weight.clone().matmul(weight).sum().backward());
            autodiff.sync().unwrap();
        };
        thread::spawn(backward).join().unwrap();
        let exponentials = x.clone().exp();
        give_up_earlier(&device);
        assert_eq!(layer.read(&exponentials).1, [Op::float_exp], "{plain:?}");
        drop(x);
    }
}

/// The steps of an RNN each use a part of one input, and in between make more than is kept.
#[test]
fn a_value_that_is_used_in_a_loop_is_kept_in_the_end() {
    let layer = Recompute::default();
    let device = layer.device(&Device::flex());
    let x = activation(&device, 64);
    let expected = values(x.clone().exp());
    let made = x.clone().exp();
    let mut counts = Vec::new();
    for _ in 0..5 {
        give_up_earlier(&device);
        let (found, again) = layer.read(&made);
        assert_eq!(found, expected);
        counts.push(again.len());
    }
    assert_eq!(counts, [1, 1, 0, 0, 0]);
}
