//! Averages on a device that has no NCCL: tensors go through the host, everything else is the same.

use burn::{
    module::{Param, ParamId},
    nn::{Linear, LinearConfig},
    tensor::{DType, FloatDType, Int},
};

use super::*;
use crate::{Compression, LocalGroup, ddp::parameters, local::tests::on_ranks};

#[derive(Module, Debug)]
struct Model {
    first: Linear,
    second: Linear,
    never: Linear,
    count: Param<Tensor<1, Int>>,
}

fn model(device: &Device, start: f32) -> Model {
    let fill = |linear: Linear, value: f32| {
        let weight = linear.weight.map(|old| {
            let shape = old.shape();
            Tensor::full(shape, value, device).require_grad()
        });
        Linear { weight, ..linear }
    };
    Model {
        first: fill(LinearConfig::new(3, 2).init(device), start),
        second: fill(
            LinearConfig::new(2, 2).with_bias(false).init(device),
            start + 1.0,
        ),
        never: fill(LinearConfig::new(1, 1).init(device), start),
        count: Param::initialized(ParamId::new(), Tensor::full([2], start as i32, device)),
    }
}

fn read<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    let data = tensor.cast(FloatDType::F32).into_data();
    data.try_to_vec().unwrap()
}

fn trained(model: &Model) -> Vec<Signature> {
    let signatures = parameters::parameters(model).into_iter();
    let mut signatures: Vec<Signature> = signatures.map(|it| it.signature).collect();
    signatures.retain(|signature| signature.trained);
    signatures.reverse();
    signatures
}

/// The gradients of the weights of `first` are 1 or 2, depending on the rank. Only rank 1 uses `second`, and no
/// rank uses `never`.
fn gradients(model: &Model, rank: usize) -> GradientsParams {
    let device = model.first.weight.val().device();
    let input = Tensor::<2>::full([1, 3], 1.0 + rank as f32, &device);
    let mut loss = model.first.forward(input).sum();
    if rank == 1 {
        let input = Tensor::<2>::full([1, 2], 6.0, &device);
        loss = loss + model.second.forward(input).sum();
    }
    GradientsParams::from_grads(loss.backward(), model)
}

#[test]
fn averages_are_those_of_all_ranks_whatever_the_buckets() {
    for bytes in [1, 20, 1 << 20] {
        for (compression, tolerance) in [(None, 0.0), (Some(Compression::BF16), 0.02)] {
            let mut config = DdpConfig::new()
                .bucket_bytes(bytes)
                .first_bucket_bytes(bytes);
            if let Some(compression) = compression {
                config = config.compression(compression);
            }
            on_ranks(LocalGroup::new(2), |group| {
                let device = Device::flex().autodiff();
                let model = model(&device, 1.0);
                let trained = trained(&model);
                let device = device.without_autodiff();
                let mut after = After::on(Some(device), group.clone(), config.clone());
                let gradients = gradients(&model, group.rank());
                let step = Step::new(&model, &trained, 2.0).unwrap();
                let averages = after.average(&step, gradients).unwrap();
                let close = |average: Vec<f32>, expected: f32| {
                    let far = |value: &f32| (value - expected).abs() > tolerance * expected;
                    assert!(!average.iter().any(far), "{average:?}, expected {expected}");
                };
                let weight = averages.get::<2>(model.first.weight.id).unwrap();
                assert_eq!(weight.dims(), [3, 2]);
                assert!(!weight.device().is_autodiff());
                assert_eq!(weight.dtype(), DType::F32);
                close(read(weight), 3.0);
                let bias = model.first.bias.as_ref().unwrap();
                close(read(averages.get::<1>(bias.id).unwrap()), 2.0);
                close(
                    read(averages.get::<2>(model.second.weight.id).unwrap()),
                    6.0,
                );
                assert!(averages.get::<2>(model.never.weight.id).is_none());
                assert_eq!(after.stats().buckets == 1, bytes == 1 << 20);
                assert!(after.stats().bytes_reduced > 0);
            });
        }
    }
}

#[test]
fn without_nccl_gradients_go_through_the_host() {
    on_ranks(LocalGroup::new(2), |group| {
        let device = Device::flex().autodiff();
        let model = model(&device, 1.0);
        let trained = trained(&model);
        let after = After::new(group, DdpConfig::new(), &trained, &model).unwrap();
        assert!(after.on_device().is_none());
    });
}
