//! [`Feed`]: what a module is fed with.

use burn::{
    module::{ModuleMapper, Param},
    tensor::{Device, Gradients, Int, Tensor, TensorData},
};
use std::cell::{Cell, RefCell};

/// Scrambled bits, the same for the same tensor and place in it.
fn scrambled(tensor: usize, place: usize) -> u32 {
    let mixed = (place as u32 ^ (tensor as u32) << 20).wrapping_mul(0x9e37_79b9);
    (mixed ^ mixed >> 15).wrapping_mul(0x85eb_ca6b)
}

type Gradient = Box<dyn Fn(&Gradients) -> Option<Vec<f32>>>;

/// Makes the inputs of a module, the same ones on every device, and remembers them for their
/// gradients.
///
/// Every value has 8 significant bits, so that bf16 and fp16 hold it exactly, and an odd last one,
/// so that none is 0, 1 or a half, where activations have kinks.
pub(super) struct Feed {
    device: Device,
    made: Cell<usize>,
    tracked: RefCell<Vec<Gradient>>,
}

impl Feed {
    pub(super) fn new(device: Device) -> Self {
        Self {
            device,
            made: Cell::new(0),
            tracked: RefCell::default(),
        }
    }

    fn values<const D: usize>(&self, shape: [usize; D], value: impl Fn(f32) -> f32) -> Tensor<D> {
        self.made.set(self.made.get() + 1);
        let odd = |place| (scrambled(self.made.get(), place) >> 25) as f32 * 2.0 + 1.0;
        let values = (0..shape.iter().product::<usize>()).map(|place| value(odd(place)));
        Tensor::from_data(
            TensorData::new(values.collect::<Vec<_>>(), shape),
            &self.device,
        )
    }

    /// The tensor as a layer before would give it: out of a matrix product (by one), with a
    /// gradient.
    fn computed<const D: usize>(&self, leaf: Tensor<D>) -> Tensor<D> {
        let leaf = leaf.require_grad();
        let shape = leaf.dims();
        let one = Tensor::<2>::eye(shape[D - 1], &self.device);
        let rows: usize = shape[..D - 1].iter().product();
        let computed = leaf.clone().reshape([rows, shape[D - 1]]).matmul(one);
        let gradient = move |grads: &Gradients| {
            let data = leaf.grad(grads)?.into_data();
            Some(data.try_to_vec().expect("gradients are f32"))
        };
        self.tracked.borrow_mut().push(Box::new(gradient));
        computed.reshape(shape)
    }

    /// Between -2 and 2.
    pub(super) fn float<const D: usize>(&self, shape: [usize; D]) -> Tensor<D> {
        self.computed(self.values(shape, |odd| (odd - 128.0) / 64.0))
    }

    /// Between 0 and 1.
    pub(super) fn unit<const D: usize>(&self, shape: [usize; D]) -> Tensor<D> {
        self.computed(self.values(shape, |odd| odd / 256.0))
    }

    /// Between -2 and 2, in f32 and without gradient: what comes from a data set.
    pub(super) fn target<const D: usize>(&self, shape: [usize; D]) -> Tensor<D> {
        self.values(shape, |odd| (odd - 128.0) / 64.0)
    }

    /// As [`target`](Self::target) between 0 and 1.
    pub(super) fn unit_target<const D: usize>(&self, shape: [usize; D]) -> Tensor<D> {
        self.values(shape, |odd| odd / 256.0)
    }

    /// -1 or 1.
    pub(super) fn signs<const D: usize>(&self, shape: [usize; D]) -> Tensor<D> {
        self.values(shape, |odd| (odd - 128.0).signum())
    }

    /// Whole numbers from 0 on.
    pub(super) fn int<const D: usize>(&self, shape: [usize; D], below: usize) -> Tensor<D, Int> {
        let numbers = self.values(shape, |odd| (odd * below as f32 / 256.0).floor());
        numbers.int()
    }

    /// Whole numbers, as they are given.
    pub(super) fn lengths<const N: usize>(&self, lengths: [i32; N]) -> Tensor<1, Int> {
        Tensor::from_ints(lengths, &self.device)
    }

    /// The gradients of the tensors made so far, in order.
    pub(super) fn gradients(&self, grads: &Gradients) -> Vec<Option<Vec<f32>>> {
        let tracked = self.tracked.borrow();
        tracked.iter().map(|gradient| gradient(grads)).collect()
    }
}

/// Weights to compare with: any small values will do that are the same every time, around 1 for
/// what multiplies.
#[derive(Default)]
pub(super) struct Weights {
    seen: usize,
    name: String,
}

impl ModuleMapper for Weights {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.name = name.to_owned();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.seen += 1;
        let seen = self.seen;
        let centre = match self.name.as_str() {
            "gamma" | "running_var" => 1.0,
            _ => 0.0,
        };
        param.map(|tensor| {
            let shape = tensor.dims();
            let value = |place| centre + scrambled(seen, place) as f32 / u32::MAX as f32 - 0.5;
            let values: Vec<f32> = (0..shape.iter().product::<usize>()).map(value).collect();
            let new = Tensor::from_data(TensorData::new(values, shape), &tensor.device());
            new.set_require_grad(tensor.is_require_grad())
        })
    }
}
