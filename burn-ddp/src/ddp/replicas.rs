//! Checks that the replicas of a model are equal, by the sums of tensors and some of their elements: in the first step, and when asked.

use burn::{
    module::{Module, ModuleVisitor, Param},
    tensor::{Bool, DType, FloatDType, Int, Slice, Tensor},
};

use super::parameters::Signature;
use crate::{DdpError, ProcessGroup};

/// The largest accepted difference between sums, relative to the sum of magnitudes, and between elements, relative to their mean
/// magnitude: different kinds of devices add in different orders.
const TOLERANCE: f32 = 1e-3;

/// The most elements of a parameter that are compared one by one. The sums of large matrices are alike by chance.
const SAMPLES: usize = 8;

/// Which tensors are compared.
#[derive(Clone, Copy)]
enum Of {
    All,
    Trained,
    Untrained,
}

impl Of {
    fn has(self, parameter: &Signature) -> bool {
        let wanted = match self {
            Self::All => true,
            Self::Trained => parameter.trained,
            Self::Untrained => !parameter.trained,
        };
        // Those are costly to read.
        wanted && !is_quantized(parameter.dtype)
    }

    fn among(self, parameters: &[Signature]) -> impl Iterator<Item = &Signature> {
        parameters
            .iter()
            .filter(move |parameter| self.has(parameter))
    }
}

/// The tensors that are compared, and the digests of each.
type Own<'a> = Vec<(&'a Signature, Vec<&'a Vec<f32>>)>;

/// The digests of the tensors that are not trained, before forward passes change running statistics.
pub(super) fn untrained<M: Module>(
    group: &ProcessGroup,
    model: &M,
    parameters: &[Signature],
) -> Result<Vec<Vec<f32>>, DdpError> {
    match group.world_size() {
        1 => Ok(Vec::new()),
        _ => digests(group, model, parameters, Of::Untrained),
    }
}

/// Compares the tensors with which all ranks begin with those of rank 0. One that is not trained may have been equal
/// [before](untrained), and gone apart in forward passes, or the ranks may have loaded the same record since. Where the ranks have
/// received rank 0's, only trained parameters are compared: a rank may train another model than it got.
pub(super) fn check_start<M: Module>(
    group: &ProcessGroup,
    model: &M,
    parameters: &[Signature],
    before: &[Vec<f32>],
    received: bool,
) -> Result<(), DdpError> {
    let of = if received { Of::Trained } else { Of::All };
    let now = digests(group, model, parameters, of)?;
    let mut before = before.iter();
    // One digest of a trained parameter, two of another tensor.
    let own = of.among(parameters).zip(&now).map(|(parameter, now)| {
        let before = if parameter.trained {
            None
        } else {
            before.next()
        };
        let digests: Vec<&Vec<f32>> = before.into_iter().chain([now]).collect();
        (parameter, digests)
    });
    let own: Own<'_> = own.collect();
    compare(group, &own, |path, how| {
        format!(
            "`{path}` begins with other numbers ({how}); pass the model through Ddp::broadcast_parameters before the \
             first step, and train the one that this returns"
        )
    })
}

/// Compares the trained parameters of all ranks with those of rank 0.
pub(super) fn check_trained<M: Module>(
    group: &ProcessGroup,
    model: &M,
    parameters: &[Signature],
) -> Result<(), DdpError> {
    let now = digests(group, model, parameters, Of::Trained)?;
    let own = Of::Trained.among(parameters).zip(&now);
    let own: Own<'_> = own.map(|(parameter, now)| (parameter, vec![now])).collect();
    compare(group, &own, |path, how| {
        format!(
            "`{path}` has other numbers ({how}), so that the replicas have gone apart; pass the model through \
             Ddp::broadcast_parameters to make them equal again"
        )
    })
}

/// Compares the digests of all ranks with those of rank 0. `describe` gets the path of the first tensor that differs, and how it
/// does.
fn compare(
    group: &ProcessGroup,
    own: &Own<'_>,
    describe: impl Fn(&str, &str) -> String,
) -> Result<(), DdpError> {
    let sent = own.iter().flat_map(|(_, digests)| digests);
    let sent: Vec<f32> = sent.flat_map(|digest| digest.iter().copied()).collect();
    if sent.is_empty() {
        return Ok(());
    }
    let all = group.all_gather(&sent)?;
    for (rank, theirs) in all.chunks_exact(sent.len()).enumerate() {
        let mut at = 0;
        for (parameter, digests) in own {
            let length = digests[0].len();
            let place = at..at + digests.len() * length;
            at = place.end;
            let [theirs, first] =
                [&theirs[place.clone()], &all[place]].map(|digests| digests.chunks_exact(length));
            let differences: Option<Vec<_>> = theirs
                .zip(first)
                .map(|(theirs, first)| {
                    let differs = difference(theirs, first, parameter.shape.num_elements())?;
                    Some((differs, theirs[differs], first[differs]))
                })
                .collect();
            let Some((differs, found, expected)) = differences.and_then(|it| it.first().copied())
            else {
                continue;
            };
            let what = match differs {
                0 => "their sum is",
                1 => "the sum of their magnitudes is",
                _ => "one of them is",
            };
            let how = format!("{what} {found}, expected {expected}");
            return Err(DdpError::ModelMismatch {
                rank: group.number(rank),
                problem: describe(&parameter.path, &how),
            });
        }
    }
    Ok(())
}

/// The digests of some of a model's tensors, which has these `parameters`.
fn digests<M: Module>(
    group: &ProcessGroup,
    model: &M,
    parameters: &[Signature],
    of: Of,
) -> Result<Vec<Vec<f32>>, DdpError> {
    let wanted: Vec<bool> = parameters.iter().map(|it| of.has(it)).collect();
    let mut digests = Digests {
        wanted: wanted.into_iter(),
        found: Vec::new(),
    };
    model.visit(&mut digests);
    let Some(first) = digests.found.first() else {
        return Ok(Vec::new());
    };
    let device = first.device();
    let lengths: Vec<usize> = digests.found.iter().map(|it| it.dims()[0]).collect();
    let found = digests.found.into_iter().map(|it| it.to_device(&device));
    let read = Tensor::cat(found.collect(), 0).try_into_vec_as::<f32>();
    let read = read.map_err(|error| group.give_up(DdpError::Device(error.to_string())))?;
    let mut values = read.into_iter();
    let digests = lengths
        .iter()
        .map(|length| values.by_ref().take(*length).collect());
    Ok(digests.collect())
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

/// For each tensor, its sum, its sum of magnitudes, and [some](SAMPLES) of its elements, evenly spaced.
struct Digests {
    /// Whether the next tensors have a digest.
    wanted: std::vec::IntoIter<bool>,
    found: Vec<Tensor<1>>,
}

impl Digests {
    fn is_next_wanted(&mut self) -> bool {
        self.wanted.next() == Some(true)
    }

    fn add<const D: usize>(&mut self, value: Tensor<D>) {
        let elements = value.shape().num_elements();
        let value = value.without_autodiff().reshape([elements]);
        let step = elements.div_ceil(SAMPLES).max(1) as isize;
        let samples = value.clone().slice(Slice::new(0, None, step));
        let value = value.cast(FloatDType::F32);
        let sums = [value.clone().sum(), value.abs().sum()];
        let digest = sums.into_iter().chain([samples.cast(FloatDType::F32)]);
        self.found.push(Tensor::cat(digest.collect(), 0));
    }
}

impl ModuleVisitor for Digests {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let value = param.base();
        if self.is_next_wanted() && !is_quantized(value.dtype()) {
            self.add(value);
        }
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        if self.is_next_wanted() {
            self.add(param.base().cast(FloatDType::F32));
        }
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        if self.is_next_wanted() {
            self.add(param.base().cast(FloatDType::F32));
        }
    }
}

fn is_quantized(dtype: DType) -> bool {
    matches!(dtype, DType::QFloat(_))
}
