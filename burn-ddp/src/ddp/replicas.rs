//! Checks that all ranks begin with the same parameters, if nothing has made them equal.

use burn::{
    module::{Module, ModuleVisitor, Param},
    tensor::{FloatDType, Tensor},
};

use super::parameters::Signature;
use crate::{DdpError, ProcessGroup};

/// The largest accepted difference between sums, relative to the sum of magnitudes: different kinds of devices
/// add in different orders.
const TOLERANCE: f32 = 1e-3;

/// Compares the trained parameters of all ranks with those of rank 0, by their sums.
pub(super) fn check_same<M: Module>(
    group: &ProcessGroup,
    model: &M,
    parameters: &[Signature],
) -> Result<(), DdpError> {
    let mut sums = Sums::default();
    model.visit(&mut sums);
    if sums.0.is_empty() {
        return Ok(());
    }
    let device = sums.0[0].device();
    let sums = sums.0.into_iter().map(|sum| sum.to_device(&device));
    let read = Tensor::cat(sums.collect(), 0).try_into_data();
    let own = read.map_err(|error| group.give_up(error.into()))?;
    let own: Vec<f32> = own.iter().collect();
    let all = group.all_gather(&own)?;
    for (rank, theirs) in all.chunks_exact(own.len()).enumerate() {
        let pairs = theirs.chunks_exact(2).zip(all.chunks_exact(2));
        let other = pairs.zip(parameters.iter().filter(|it| it.trained));
        let mut other = other.filter(|((theirs, first), _)| !is_close(theirs, first));
        if let Some(((theirs, first), Signature { path, .. })) = other.next() {
            return Err(DdpError::ModelMismatch {
                rank,
                problem: format!(
                    "`{path}` begins with other numbers (their sum is {}, expected {}); pass the model through \
                     Ddp::broadcast_parameters before the first step",
                    theirs[0], first[0]
                ),
            });
        }
    }
    Ok(())
}

/// Whether a parameter's sum and its sum of magnitudes are close to those of another.
fn is_close(ours: &[f32], other: &[f32]) -> bool {
    let bound = TOLERANCE * other[1];
    let close = |(ours, other): (&f32, &f32)| (ours - other).abs() <= bound;
    let finite = |sums: &[f32]| sums.iter().all(|it| it.is_finite());
    match finite(ours) && finite(other) {
        true => ours.iter().zip(other).all(close),
        false => finite(ours) == finite(other),
    }
}

/// For each trained parameter, its sum and its sum of magnitudes.
#[derive(Default)]
struct Sums(Vec<Tensor<1>>);

impl ModuleVisitor for Sums {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let value = param.base();
        let quantized = matches!(value.dtype(), burn::tensor::DType::QFloat(_));
        if param.is_require_grad() && !quantized {
            let value = value.without_autodiff().cast(FloatDType::F32);
            self.0.push(value.clone().sum());
            self.0.push(value.abs().sum());
        }
    }
}
