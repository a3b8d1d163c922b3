//! Gradients of a factor that a batch of matrices shares.

use super::devices::Leased;
use burn::{
    backend::Flex,
    tensor::{DType, Device, Shape, Tensor, TensorData},
};
use burn_backend::ops::FloatTensorOps;
use burn_layer::{Inputs, Layer, Layers, Op, Plan, Ran, Run};
use std::sync::{Arc, Mutex};

/// Products in bf16, as autocast makes them; gradients of shared factors over their batch, and in f32. Writes down which are.
#[derive(Clone, Debug, Default)]
struct OverBatch(Arc<Mutex<Vec<bool>>>);

impl Layer for OverBatch {
    fn plan(&self, op: Op, inputs: &Inputs) -> Option<Plan> {
        if op != Op::float_matmul {
            return None;
        }
        self.0.lock().unwrap().push(inputs.of_shared);
        let plan = Plan::compute(DType::BF16);
        Some(match inputs.of_shared {
            true => plan.store(DType::F32).over_batch(),
            false => plan,
        })
    }
}

impl OverBatch {
    fn device(&self) -> Device {
        let layers = Layers::on(Device::flex()).layer(self.clone());
        layers.leased()
    }

    fn products(&self, device: &Device) -> Vec<bool> {
        device.sync().unwrap();
        core::mem::take(&mut self.0.lock().unwrap())
    }
}

/// Small integers, whose products bf16 and f32 hold.
fn numbers(shape: impl Into<Shape>, step: usize) -> TensorData {
    let shape = shape.into();
    let value = |index| ((index * step) % 7) as f32 - 3.0;
    let values: Vec<f32> = (0..shape.num_elements()).map(value).collect();
    TensorData::new(values, shape)
}

/// `sum(x^T dy)` over the batch, by the formula.
fn sum_of_products(x: &TensorData, dy: &TensorData, [b, m, k, n]: [usize; 4]) -> Vec<f32> {
    let (x, dy) = (
        x.try_to_vec::<f32>().unwrap(),
        dy.try_to_vec::<f32>().unwrap(),
    );
    let mut sum = vec![0.0; k * n];
    for row in 0..b * m {
        for (i, sum) in sum.chunks_mut(n).enumerate() {
            let x = x[row * k + i];
            sum.iter_mut()
                .zip(&dy[row * n..])
                .for_each(|(sum, dy)| *sum += x * dy);
        }
    }
    sum
}

/// In one product, in several parts, and in as many as there are matrices.
#[test]
fn they_are_summed_over_the_batch() {
    for size @ [b, m, k, n] in [[3, 5, 128, 16_384], [6, 4, 700, 1_000], [4, 3, 2, 5]] {
        let layer = OverBatch::default();
        let device = layer.device().autodiff();
        let (x, dy) = (numbers([b, m, k], 3), numbers([b, m, n], 5));
        let weight = Tensor::<3>::zeros([1, k, n], &device).require_grad();
        let input = Tensor::<3>::from_data(x.clone(), &device).require_grad();
        let output = input.clone().matmul(weight.clone());
        let weighted = output * Tensor::from_data(dy.clone(), &device);
        let gradients = weighted.sum().backward();
        let gradient = weight.grad(&gradients).unwrap();
        assert_eq!(gradient.dims(), [1, k, n]);
        let expected = TensorData::new(sum_of_products(&x, &dy, size), [1, k, n]);
        gradient.into_data().assert_eq(&expected, true);
        // The gradient of the input is that of each matrix.
        let gradient = input.grad(&gradients).unwrap();
        assert_eq!(gradient.dims(), [b, m, k]);
        let mut products = layer.products(&device);
        products.sort_unstable();
        assert_eq!(products, [false, false, true]);
    }
}

/// 256 + 1/2 + 1/2 is rounded to bf16 once, where a sum of products in bf16 would be 257.
#[test]
fn it_is_one_product() {
    let device = OverBatch::default().device().autodiff();
    let n = 128 * 128;
    let weight = Tensor::<3>::zeros([1, 1, n], &device).require_grad();
    let x = Tensor::<3>::from_data([[[1.0]], [[1.0]], [[1.0]]], &device);
    let dy = Tensor::<3>::from_data([[[256.0]], [[0.5]], [[0.5]]], &device);
    let output = x.matmul(weight.clone()) * dy;
    let gradient = weight.grad(&output.sum().backward()).unwrap();
    let expected = TensorData::new(vec![256f32; n], [1, 1, n]);
    gradient.into_data().assert_eq(&expected, true);
}

/// Runs the gradients of shared factors itself, in f32, or says that it does and leaves them after all. Writes down what it is asked for.
#[derive(Clone, Debug)]
struct Runs {
    runs: bool,
    summed: Arc<Mutex<Vec<bool>>>,
}

impl Layer for Runs {
    fn plan(&self, op: Op, inputs: &Inputs) -> Option<Plan> {
        let plan = Plan::compute(DType::BF16).store(DType::F32).over_batch();
        (op == Op::float_matmul && inputs.of_shared).then_some(Plan { own: true, ..plan })
    }

    fn run(&self, run: &Run<'_>) -> Option<Ran> {
        self.summed.lock().unwrap().push(run.sums_batch());
        if !self.runs {
            return None;
        }
        run.on::<Flex>(|inputs| {
            let product = Flex::float_matmul(inputs[0].tensor(), inputs[1].tensor());
            match run.sums_batch() {
                true => Flex::float_sum_dim(product, 0),
                false => product,
            }
        })
    }
}

/// A layer that runs such products is asked for their sum, and for the products only where a program needs them.
#[test]
fn a_layer_sums_what_it_runs() {
    let size @ [b, m, k, n] = [3, 4, 2, 5];
    let (x, dy) = (numbers([b, m, k], 3), numbers([b, m, n], 5));
    let sum = TensorData::new(sum_of_products(&x, &dy, size), [1, k, n]);
    for runs in [true, false] {
        let summed = Arc::default();
        let layer = Runs { runs, summed };
        let device = Layers::on(Device::flex()).layer(layer.clone()).leased();
        let take = || {
            device.sync().unwrap();
            core::mem::take(&mut *layer.summed.lock().unwrap())
        };
        let training = device.clone().autodiff();
        let weight = Tensor::<3>::zeros([1, k, n], &training).require_grad();
        let output = Tensor::<3>::from_data(x.clone(), &training).matmul(weight.clone());
        let loss = (output * Tensor::from_data(dy.clone(), &training)).sum();
        let gradient = weight.grad(&loss.backward()).unwrap();
        gradient.into_data().assert_eq(&sum, true);
        assert_eq!(take(), [true], "{runs}");

        let input = Tensor::<3>::from_data(x.clone(), &device);
        drop(input.clone().matmul(Tensor::zeros([1, k, n], &device)));
        let gradient =
            Tensor::<3>::ones([1, 1, 1], &device) * Tensor::from_data(dy.clone(), &device);
        let product = input.swap_dims(1, 2).matmul(gradient);
        assert_eq!(product.dims(), [b, k, n]);
        let of_all = product.to_device(&Device::flex()).sum_dim(0);
        of_all.into_data().assert_eq(&sum, true);
        assert_eq!(take(), [false], "{runs}");
    }
}

/// Only one dimension can be that of the batch, which may be any.
#[test]
fn it_is_one_dimension() {
    for left in [[1, 6, 4, 3], [6, 1, 4, 3], [2, 3, 4, 3]] {
        let layer = OverBatch::default();
        let device = layer.device().autodiff();
        let (x, dy) = (numbers(left, 3), numbers([left[0], left[1], 4, 2], 5));
        let weight = Tensor::<4>::zeros([1, 1, 3, 2], &device).require_grad();
        let output = Tensor::<4>::from_data(x.clone(), &device).matmul(weight.clone());
        let gradients = (output * Tensor::from_data(dy.clone(), &device))
            .sum()
            .backward();
        let gradient = weight.grad(&gradients).unwrap();
        let expected = sum_of_products(&x, &dy, [6, 4, 3, 2]);
        let expected = TensorData::new(expected, [1, 1, 3, 2]);
        gradient.into_data().assert_eq(&expected, true);
        assert!(layer.products(&device).contains(&true), "{left:?}");
    }
}

/// A program may look at the product before it is summed, along whichever dimension.
#[test]
fn the_product_of_each_matrix_is_there_as_well() {
    let layer = OverBatch::default();
    let device = layer.device();
    let (b, m, k, n) = (3, 4, 2, 5);
    let (x, dy) = (numbers([b, m, k], 3), numbers([b, m, n], 5));
    let each: Vec<f32> = (0..b)
        .flat_map(|matrix| {
            let part = |data: &TensorData, width: usize| {
                let values = data.try_to_vec::<f32>().unwrap();
                let rows = &values[matrix * m * width..][..m * width];
                TensorData::new(rows.to_vec(), [1, m, width])
            };
            sum_of_products(&part(&x, k), &part(&dy, n), [1, m, k, n])
        })
        .collect();
    let each = TensorData::new(each, [b, k, n]);

    let input = Tensor::<3>::from_data(x, &device);
    let weight = Tensor::<3>::zeros([1, k, n], &device);
    drop(input.clone().matmul(weight));
    // As backward begins: a gradient comes of a single one.
    let gradient = Tensor::<3>::ones([1, 1, 1], &device) * Tensor::from_data(dy, &device);
    let product = input.swap_dims(1, 2).matmul(gradient);
    assert_eq!(product.dtype(), DType::F32);
    product.clone().into_data().assert_eq(&each, true);
    assert_eq!(layer.products(&device), [false, true]);
    let plain = Tensor::<3>::from_data(each, &Device::flex());
    for dim in 0..3 {
        let sum = product.clone().sum_dim(dim);
        let expected = plain.clone().sum_dim(dim).into_data();
        sum.into_data().assert_eq(&expected, true);
    }
    let turned = product.swap_dims(1, 2).into_data();
    turned.assert_eq(&plain.swap_dims(1, 2).into_data(), true);
}
