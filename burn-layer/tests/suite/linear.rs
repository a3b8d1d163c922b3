//! Linear layers as Burn computes them: a view of the input, the product, a row of the bias, the sum, and a view of that.

use super::devices::{Leased, devices_and_cpu};
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_layer::{Inputs, Layer, Layers, Op, Plan};

/// Products in bf16, stored in that dtype or in f32, and biases in bf16. The rest is in f32.
#[derive(Clone, Debug)]
struct Low {
    store: DType,
}

impl Layer for Low {
    fn plan(&self, op: Op, inputs: &Inputs) -> Option<Plan> {
        Some(match op {
            Op::float_matmul => Plan::compute(DType::BF16).store(self.store),
            Op::float_add if inputs.biased => Plan::compute(DType::BF16),
            _ => inputs.promote(),
        })
    }
}

/// Every device as it is, and with each of the layers.
fn devices() -> impl Iterator<Item = (Device, Vec<Device>)> {
    let with_layers = |plain: Device| {
        let stores = match plain.supports_dtype(DType::BF16) {
            true => vec![DType::BF16, DType::F32],
            false => Vec::new(),
        };
        let layered = stores.into_iter().map(|store| {
            let layers = Layers::on(plain.clone());
            layers.layer(Low { store }).leased()
        });
        let none = Layers::on(plain.clone()).leased();
        let devices = layered.chain([none]).collect();
        (plain, devices)
    };
    devices_and_cpu().into_iter().map(with_layers)
}

/// Small integers, of which bf16 holds all products and sums below.
fn integers<const D: usize>(phase: usize, dims: [usize; D], device: &Device) -> Tensor<D> {
    let numbers = (0..dims.iter().product()).map(|it| ((it * 5 + phase * 3) % 5) as f32 - 2.0);
    Tensor::from_data(TensorData::new(numbers.collect(), dims), device)
}

fn read<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().convert::<f32>().try_into_vec().unwrap()
}

fn linear<const D: usize>(x: Tensor<D>, weight: &Tensor<2>, bias: Option<&Tensor<1>>) -> Tensor<D> {
    let mut dims = x.dims();
    let [inputs, outputs] = weight.dims();
    let rows = dims.iter().product::<usize>() / inputs;
    let product = x.reshape([rows, inputs]).matmul(weight.clone());
    dims[D - 1] = outputs;
    match bias {
        Some(bias) => product + bias.clone().reshape([1, outputs]),
        None => product,
    }
    .reshape(dims)
}

/// Runs `program` everywhere: what it returns is what it returns on the plain device.
fn is_the_same(program: impl Fn(&Device) -> Vec<Vec<f32>>) {
    for (plain, devices) in devices() {
        let expected = program(&plain);
        for device in devices {
            // Twice, because the second time weights are cast already.
            for _ in 0..2 {
                assert_eq!(program(&device), expected, "{plain:?}, {device:?}");
            }
        }
    }
}

#[test]
fn a_bias_is_added_to_its_product() {
    is_the_same(|device| {
        let x = integers(1, [2, 3, 4], device);
        let weights = [integers(2, [4, 5], device), integers(3, [5, 4], device)];
        let bias = integers(4, [5], device);
        let hidden = linear(x, &weights[0], Some(&bias));
        let output = linear(hidden.clone(), &weights[1], None);
        vec![read(hidden), read(output)]
    });
}

/// A product may be used without its bias as well, before or after, by several ops or by none.
#[test]
fn a_product_has_other_uses_than_its_bias() {
    is_the_same(|device| {
        let x = integers(1, [3, 4], device);
        let weight = integers(2, [4, 5], device);
        let row = integers(3, [5], device).reshape([1, 5]);
        let product = || x.clone().matmul(weight.clone());
        let (before, after, twice) = (product(), product(), product());
        drop(product());
        let negative = before.clone().neg();
        let sums = [before + row.clone(), after.clone() + row.clone()];
        let read_twice = [
            twice.clone() + row.clone(),
            twice.clone() + row.neg(),
            twice,
        ];
        let rest = [negative, after.neg()];
        let all = sums.into_iter().chain(read_twice).chain(rest);
        all.map(read).collect()
    });
}

/// The program may go on with a view in f32, with a product that takes it in bf16, or with both in any order, and view it again.
#[test]
fn a_view_may_be_needed_in_both_dtypes() {
    is_the_same(|device| {
        let weight = integers(1, [4, 4], device);
        let next = integers(2, [2, 3], device);
        let computed = || integers(3, [3, 4], device).matmul(weight.clone());
        let [first, second] = [computed(), computed()].map(|x| x.add_scalar(1.0));
        let first = first.reshape([6, 2]);
        let product = first.clone().matmul(next.clone());
        let second = second.reshape([6, 2]);
        let exponent = second.clone().mul_scalar(2.0);
        let other = second.clone().matmul(next.clone());
        let again = computed().reshape([2, 6]).reshape([6, 2]).matmul(next);
        let tensors = [product, first, exponent, other, second, again];
        tensors.into_iter().map(read).collect()
    });
}

#[test]
fn gradients_are_those_of_the_plain_device() {
    is_the_same(|device| {
        let device = device.clone().autodiff();
        let x = integers(1, [2, 3, 4], &device).require_grad();
        let sizes = [[4, 3], [3, 2]];
        let weights = sizes.map(|size| integers(size[0], size, &device).require_grad());
        let biases = sizes.map(|[_, size]| integers(size, [size], &device).require_grad());
        let hidden = linear(x.clone(), &weights[0], Some(&biases[0]));
        // A residual sum, whose gradient is needed in f32, too.
        let hidden = hidden.clone() + hidden.mul_scalar(2.0);
        let output = linear(hidden, &weights[1], Some(&biases[1]));
        let gradients = output.sum().backward();
        let of_weights = weights.iter().map(|it| read(it.grad(&gradients).unwrap()));
        let of_biases = biases.iter().map(|it| read(it.grad(&gradients).unwrap()));
        let of_input = read(x.grad(&gradients).unwrap());
        of_weights.chain(of_biases).chain([of_input]).collect()
    });
}
