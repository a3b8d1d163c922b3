//! Checks that all ranks begin with the same parameters, if nothing has made them equal.

use burn::{
    module::{Module, ModuleVisitor, Param},
    tensor::{FloatDType, Slice, Tensor},
};

use super::parameters::Signature;
use crate::{DdpError, ProcessGroup};

/// The largest accepted difference between sums, relative to the sum of magnitudes, and between elements, relative to their mean
/// magnitude: different kinds of devices add in different orders.
const TOLERANCE: f32 = 1e-3;

/// The most elements of a parameter that are compared one by one. The sums of large matrices are alike by chance.
const SAMPLES: usize = 8;

/// Compares the trained parameters of all ranks with those of rank 0, by their sums and some of their elements.
pub(super) fn check_same<M: Module>(
    group: &ProcessGroup,
    model: &M,
    parameters: &[Signature],
) -> Result<(), DdpError> {
    let mut digests = Digests::default();
    model.visit(&mut digests);
    if digests.0.is_empty() {
        return Ok(());
    }
    let device = digests.0[0].device();
    let lengths: Vec<usize> = digests.0.iter().map(|it| it.dims()[0]).collect();
    let digests = digests.0.into_iter().map(|it| it.to_device(&device));
    let read = Tensor::cat(digests.collect(), 0).try_into_data();
    let own = read.map_err(|error| group.give_up(error.into()))?;
    let own: Vec<f32> = own.iter().collect();
    let all = group.all_gather(&own)?;
    let trained = || parameters.iter().filter(|it| it.trained);
    for (rank, theirs) in all.chunks_exact(own.len()).enumerate() {
        let mut at = 0;
        for (&length, parameter) in lengths.iter().zip(trained()) {
            let place = at..at + length;
            at += length;
            let (theirs, first) = (&theirs[place.clone()], &all[place]);
            let Some(differs) = difference(theirs, first, parameter.shape.num_elements()) else {
                continue;
            };
            let what = match differs {
                0 => "their sum is",
                1 => "the sum of their magnitudes is",
                _ => "one of them is",
            };
            return Err(DdpError::ModelMismatch {
                rank: group.number(rank),
                problem: format!(
                    "`{}` begins with other numbers ({what} {}, expected {}); pass the model through \
                     Ddp::broadcast_parameters before the first step",
                    parameter.path, theirs[differs], first[differs]
                ),
            });
        }
    }
    Ok(())
}

/// The first place where the digest of a parameter of so many `elements` differs from another by more than rounding.
fn difference(ours: &[f32], other: &[f32], elements: usize) -> Option<usize> {
    let magnitude = TOLERANCE * other[1];
    let close = |place: usize| {
        let (ours, other) = (ours[place], other[place]);
        let bound = match place {
            0 | 1 => magnitude,
            _ => magnitude / elements as f32,
        };
        match ours.is_finite() && other.is_finite() {
            // The bound of a parameter with a NaN is one.
            true => bound.is_nan() || (ours - other).abs() <= bound,
            false => ours.is_finite() == other.is_finite(),
        }
    };
    (0..ours.len()).find(|&place| !close(place))
}

/// For each trained parameter, its sum, its sum of magnitudes, and [some](SAMPLES) of its elements, evenly spaced.
#[derive(Default)]
struct Digests(Vec<Tensor<1>>);

impl ModuleVisitor for Digests {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let value = param.base();
        let quantized = matches!(value.dtype(), burn::tensor::DType::QFloat(_));
        if param.is_require_grad() && !quantized {
            let elements = value.shape().num_elements();
            let value = value.without_autodiff().reshape([elements]);
            let step = elements.div_ceil(SAMPLES).max(1) as isize;
            let samples = value.clone().slice(Slice::new(0, None, step));
            let value = value.cast(FloatDType::F32);
            let sums = [value.clone().sum(), value.abs().sum()];
            let digest = sums.into_iter().chain([samples.cast(FloatDType::F32)]);
            self.0.push(Tensor::cat(digest.collect(), 0));
        }
    }
}
