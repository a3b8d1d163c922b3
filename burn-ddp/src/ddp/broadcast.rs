//! Copies the tensors of rank 0's model to all ranks, through the host, one chunk at a time.

pub(super) mod on_device;
pub(super) mod optimizer;
pub(super) mod quantized;

use std::ops::Range;

use burn::{
    module::{Module, ModuleMapper, ModuleVisitor, Param},
    tensor::{Bool, DType, Int, Tensor, TensorData, kind::Basic},
};
use burn_std::{ExecutionError, Reader};

use super::parameters::Signature;
use crate::{DdpError, ProcessGroup};

/// The size of a chunk in bytes, as in PyTorch. A larger tensor travels alone.
pub(super) const CHUNK: usize = 250 << 20;

/// Which tensors of a model are copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    All,
    /// Only tensors that no optimizer keeps equal, such as running statistics.
    Untrained,
}

impl Part {
    /// The number of bytes of a tensor that travel in chunks. [Quantized](quantized) tensors travel separately.
    fn bytes(self, signature: &Signature) -> usize {
        match signature.dtype {
            DType::QFloat(_) => 0,
            _ if self == Self::Untrained && signature.trained => 0,
            dtype => signature.shape.num_elements() * dtype.size(),
        }
    }
}

/// Replaces the tensors of a model by those of rank 0. The model must have been found to
/// [fit](super::parameters::check_fits) on all ranks.
pub(super) fn broadcast<M: Module>(
    group: &ProcessGroup,
    model: M,
    signatures: &[Signature],
    part: Part,
) -> Result<M, DdpError> {
    in_chunks(group, model, signatures, part, CHUNK)
}

fn in_chunks<M: Module>(
    group: &ProcessGroup,
    mut model: M,
    signatures: &[Signature],
    part: Part,
    limit: usize,
) -> Result<M, DdpError> {
    let sizes: Vec<usize> = signatures.iter().map(|it| part.bytes(it)).collect();
    for chunk in chunks(&sizes, limit) {
        // Wait for other ranks only here, not inside `visit` or `map`: a module may hold a lock during these,
        // and ranks that are threads may share this lock.
        let mut travel = Travel::new(&sizes, chunk);
        if group.is_main() {
            model.visit(&mut travel);
            travel.error.take().map_or(Ok(()), Err)?;
        }
        group.broadcast(&mut travel.bytes, 0)?;
        if !group.is_main() {
            model = model.map(&mut travel);
        }
    }
    Ok(model)
}

/// The ranges of tensors that travel together: as many as fit into `limit`, but at least one.
pub(super) fn chunks(sizes: &[usize], limit: usize) -> Vec<Range<usize>> {
    let mut chunks: Vec<Range<usize>> = Vec::new();
    let mut filled = 0;
    for (place, size) in sizes.iter().enumerate().filter(|(_, size)| **size > 0) {
        match chunks.last_mut() {
            Some(chunk) if filled + size <= limit => chunk.end = place + 1,
            _ => {
                chunks.push(place..place + 1);
                filled = 0;
            }
        }
        filled += size;
    }
    chunks
}

/// Tells which tensors of a model travel in a chunk.
struct Places<'a> {
    sizes: &'a [usize],
    chunk: Range<usize>,
    /// The position of the next tensor.
    place: usize,
}

impl<'a> Places<'a> {
    fn new(sizes: &'a [usize], chunk: Range<usize>) -> Self {
        let place = 0;
        Self {
            sizes,
            chunk,
            place,
        }
    }

    /// The size of the next tensor in bytes, if it travels in this chunk.
    fn next(&mut self) -> Option<usize> {
        let place = self.place;
        self.place += 1;
        let size = self.chunk.contains(&place).then(|| self.sizes[place])?;
        (size > 0).then_some(size)
    }
}

/// Reads the tensors of a chunk from a model that it visits, or replaces those of a model that it maps.
struct Travel<'a> {
    places: Places<'a>,
    bytes: Vec<u8>,
    /// The number of bytes that have been filled or used so far.
    done: usize,
    error: Option<DdpError>,
}

impl<'a> Travel<'a> {
    fn new(sizes: &'a [usize], chunk: Range<usize>) -> Self {
        Self {
            bytes: vec![0; sizes[chunk.clone()].iter().sum()],
            places: Places::new(sizes, chunk),
            done: 0,
            error: None,
        }
    }

    /// The bytes of the next tensor, if it travels in this chunk.
    fn next(&mut self) -> Option<&mut [u8]> {
        let size = self.places.next()?;
        let start = self.done;
        self.done += size;
        Some(&mut self.bytes[start..self.done])
    }

    fn send(&mut self, read: impl FnOnce() -> Result<TensorData, ExecutionError>) {
        let Some(bytes) = self.next() else { return };
        let copied = read().map_err(DdpError::from).and_then(|data| {
            bytes.copy_from_slice(data.bytes().read(Reader::new())?);
            Ok(())
        });
        if let Err(error) = copied {
            self.error = Some(error);
        }
    }

    fn receive(&mut self) -> Option<Vec<u8>> {
        self.next().map(|bytes| bytes.to_vec())
    }
}

/// A tensor like another, but for its bytes.
fn like<const D: usize, K: Basic>(old: &Tensor<D, K>, bytes: Vec<u8>) -> Tensor<D, K> {
    let data = TensorData::from_bytes_vec(bytes, old.shape(), old.dtype());
    Tensor::from_data(data, (&old.device(), old.dtype()))
}

impl ModuleVisitor for Travel<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.send(|| param.base().try_into_data());
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.send(|| param.base().try_into_data());
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.send(|| param.base().try_into_data());
    }
}

impl ModuleMapper for Travel<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(bytes) = self.receive() else {
            return param;
        };
        param.map(|old| {
            let new = like(&old, bytes);
            match old.is_require_grad() {
                true => new.require_grad(),
                false => new,
            }
        })
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        match self.receive() {
            Some(bytes) => param.map(|old| like(&old, bytes)),
            None => param,
        }
    }

    fn map_bool<const D: usize>(
        &mut self,
        param: Param<Tensor<D, Bool>>,
    ) -> Param<Tensor<D, Bool>> {
        match self.receive() {
            Some(bytes) => param.map(|old| like(&old, bytes)),
            None => param,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use burn::{
        module::ParamId,
        nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig},
        tensor::{Bytes, Device},
    };

    use super::*;
    use crate::{LocalGroup, ddp::parameters::signatures, local::tests::on_ranks};

    #[derive(Module, Debug)]
    struct Model {
        linear: Linear,
        norm: BatchNorm,
        count: Param<Tensor<1, Int>>,
        mask: Param<Tensor<1, Bool>>,
        empty: Param<Tensor<1>>,
        last: Linear,
    }

    /// A model whose numbers are all `value`; `mask` is `true` where this is 0.
    fn model(value: f32) -> Model {
        struct Fill(f32);
        impl ModuleMapper for Fill {
            fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
                param.map(|old| {
                    let new = old.clone().inner().zeros_like() + self.0;
                    match old.is_require_grad() {
                        true => Tensor::from_inner(new).require_grad(),
                        false => Tensor::from_inner(new),
                    }
                })
            }
        }
        let device = Device::flex().autodiff();
        let linear = || LinearConfig::new(3, 2).init(&device);
        let model = Model {
            linear: linear(),
            norm: BatchNormConfig::new(2).init(&device),
            count: Param::initialized(ParamId::new(), Tensor::full([3], value as i32, &device)),
            mask: Param::initialized(
                ParamId::new(),
                Tensor::<1>::zeros([5], &device).equal_elem(value),
            ),
            empty: Param::from_tensor(Tensor::zeros([0], &device)),
            last: linear(),
        };
        model.map(&mut Fill(value))
    }

    /// The numbers of trained parameters, of running statistics, and of all other tensors.
    fn numbers(model: &Model) -> [Vec<f32>; 3] {
        let floats = |tensors: Vec<Tensor<1>>| {
            let data = Tensor::cat(tensors, 0).into_data();
            data.try_to_vec::<f32>().unwrap()
        };
        let linear = |linear: &Linear| {
            let bias = linear.bias.as_ref().unwrap().val();
            [linear.weight.val().reshape([6]), bias]
        };
        let norm = &model.norm;
        let trained = [norm.gamma.val(), norm.beta.val()].into_iter();
        let trained = trained
            .chain(linear(&model.linear))
            .chain(linear(&model.last));
        [
            floats(trained.collect()),
            floats(vec![
                norm.running_mean.value_sync(),
                norm.running_var.value_sync(),
            ]),
            floats(vec![
                model.count.val().float(),
                model.mask.val().int().float(),
            ]),
        ]
    }

    #[test]
    fn chunks_are_of_whole_tensors() {
        assert_eq!(chunks(&[4, 0, 4, 9, 1, 8], 8), [0..3, 3..4, 4..5, 5..6]);
        assert_eq!(chunks(&[0, 4, 4, 9, 1, 0], 1 << 20), [1..5; 1]);
        assert!(chunks(&[0, 0], 8).is_empty());
    }

    /// Sends a model in chunks of at most `limit` bytes, or, if this is `None`, tensor by tensor as on a device
    /// (here one without NCCL, which makes no other difference).
    fn sent(group: &ProcessGroup, model: Model, part: Part, limit: Option<usize>) -> Model {
        let signatures = signatures(&model);
        let calls = group.stats().calls;
        let Some(limit) = limit else {
            return on_device::in_chunks(group, model, &signatures, part, 30).unwrap();
        };
        let model = in_chunks(group, model, &signatures, part, limit).unwrap();
        let calls = group.stats().calls - calls;
        assert_eq!(calls == 1, limit == 1 << 20);
        model
    }

    #[test]
    fn all_ranks_get_the_tensors_of_rank_0_whatever_the_way() {
        for part in [Part::All, Part::Untrained] {
            for limit in [Some(1), Some(20), Some(30), Some(1 << 20), None] {
                on_ranks(LocalGroup::new(3), |group| {
                    let model = sent(&group, model(group.rank() as f32), part, limit);
                    assert!(model.last.weight.is_require_grad());
                    assert!(model.last.weight.val().is_autodiff());
                    assert!(!model.norm.running_mean.value_sync().is_require_grad());
                    let own = match part {
                        Part::All => 0.0,
                        Part::Untrained => group.rank() as f32,
                    };
                    let [trained, statistics, others] = numbers(&model);
                    assert_eq!(trained, [own; 20]);
                    assert_eq!(statistics, [0.0; 4]);
                    assert_eq!(others, [0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0]);
                });
            }
        }
    }

    #[test]
    fn bytes_that_cannot_be_read_are_an_error() {
        let mut travel = Travel::new(&[12], 0..1);
        travel.send(|| {
            let bytes = Bytes::from_file("/nowhere/to/be/found", 12, 0);
            Ok(TensorData::from_bytes(bytes, [3], DType::F32))
        });
        let Some(DdpError::Device(problem)) = &travel.error else {
            panic!("{:?}", travel.error)
        };
        assert!(problem.contains("No such file"), "{problem}");
    }

    /// Clones share the locks of their running statistics.
    #[test]
    fn clones_of_one_model_do_not_wait_for_each_other() {
        for limit in [Some(1), None] {
            let one = model(3.0);
            on_ranks(LocalGroup::new(2), |group| {
                let group = group.with_timeout(Duration::from_secs(10));
                let model = sent(&group, one.clone(), Part::All, limit);
                let [trained, statistics, _] = numbers(&model);
                assert_eq!((trained, statistics), (vec![3.0; 20], vec![3.0; 4]));
            });
        }
    }
}
