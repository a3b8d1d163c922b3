//! The tensors of rank 0's model to all ranks, through the host, a chunk at a time.

pub(super) mod on_device;
pub(super) mod quantized;

use std::{fmt::Display, slice, vec};

use burn::{
    module::{Module, ModuleMapper, ModuleVisitor, Param},
    tensor::{Bool, DType, Int, Shape, Tensor, TensorData},
};

use super::parameters::Signature;
use crate::{DdpError, ProcessGroup};

/// Bytes of a chunk, as in PyTorch. A tensor that has more travels alone.
const CHUNK: usize = 250 << 20;

/// Which tensors of a model travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    All,
    /// Those that no optimizer keeps equal: running statistics, for instance.
    #[cfg(feature = "train")]
    Untrained,
}

impl Part {
    /// The bytes of a tensor that travel. [Quantized](quantized) ones have a way of their own.
    fn bytes(self, signature: &Signature) -> usize {
        match signature.dtype {
            DType::QFloat(_) => 0,
            _ if self != Self::All && signature.trained => 0,
            dtype => signature.shape.num_elements() * dtype.size(),
        }
    }
}

/// The model with the contents of rank 0's, for one that has been found to
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
    let mut travel = Travel {
        group,
        sizes: sizes.iter(),
        chunks: chunks(&sizes, limit).into_iter(),
        bytes: Vec::new(),
        done: 0,
        error: None,
    };
    match group.is_main() {
        true => model.visit(&mut travel),
        false => model = model.map(&mut travel),
    }
    travel.error.map_or(Ok(model), Err)
}

/// The bytes of each chunk: of as many tensors as fit, one at least.
fn chunks(sizes: &[usize], limit: usize) -> Vec<usize> {
    let mut chunks: Vec<usize> = Vec::new();
    for size in sizes.iter().filter(|size| **size > 0) {
        match chunks.last_mut() {
            Some(chunk) if *chunk + size <= limit => *chunk += size,
            _ => chunks.push(*size),
        }
    }
    chunks
}

/// Sends the tensors of a model that it visits, or puts others in the place of those that it maps.
struct Travel<'a> {
    group: &'a ProcessGroup,
    /// Bytes of the tensors to come; those of 0 stay as they are.
    sizes: slice::Iter<'a, usize>,
    chunks: vec::IntoIter<usize>,
    /// A chunk.
    bytes: Vec<u8>,
    /// Bytes of it that were filled, or used up.
    done: usize,
    error: Option<DdpError>,
}

impl Travel<'_> {
    /// The size of the next tensor, if it travels, with room for it in the chunk.
    fn next(&mut self) -> Option<usize> {
        let size = *self.sizes.next()?;
        if size == 0 || self.error.is_some() {
            return None;
        }
        if self.done == self.bytes.len() {
            self.bytes.resize(self.chunks.next()?, 0);
            self.done = 0;
            if !self.group.is_main() {
                self.move_chunk()?;
            }
        }
        self.done += size;
        Some(size)
    }

    fn move_chunk(&mut self) -> Option<()> {
        let moved = self.group.broadcast(&mut self.bytes, 0);
        moved.map_err(|error| self.error = Some(error)).ok()
    }

    fn send<E: Display>(&mut self, read: impl FnOnce() -> Result<TensorData, E>) {
        let Some(size) = self.next() else { return };
        match read() {
            Ok(data) => self.bytes[self.done - size..self.done].copy_from_slice(data.as_bytes()),
            Err(error) => self.error = Some(DdpError::Device(error.to_string())),
        }
        if self.error.is_none() && self.done == self.bytes.len() {
            self.move_chunk();
        }
    }

    fn receive(&mut self) -> Option<Vec<u8>> {
        let size = self.next()?;
        Some(self.bytes[self.done - size..self.done].to_vec())
    }
}

fn data(bytes: Vec<u8>, shape: Shape, dtype: DType) -> TensorData {
    TensorData::from_bytes_vec(bytes, shape, dtype)
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
            let data = data(bytes, old.shape(), old.dtype());
            let new = Tensor::from_data(data, (&old.device(), old.dtype()));
            match old.is_require_grad() {
                true => new.require_grad(),
                false => new,
            }
        })
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        let Some(bytes) = self.receive() else {
            return param;
        };
        param.map(|old| {
            let data = data(bytes, old.shape(), old.dtype());
            Tensor::from_data(data, (&old.device(), old.dtype()))
        })
    }

    fn map_bool<const D: usize>(
        &mut self,
        param: Param<Tensor<D, Bool>>,
    ) -> Param<Tensor<D, Bool>> {
        let Some(bytes) = self.receive() else {
            return param;
        };
        param.map(|old| {
            let data = data(bytes, old.shape(), old.dtype());
            Tensor::from_data(data, (&old.device(), old.dtype()))
        })
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use burn::{
        module::ParamId,
        nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig},
        tensor::Device,
    };

    use super::*;
    use crate::{LocalGroup, ddp::parameters::signatures};

    #[derive(Module, Debug)]
    struct Model {
        linear: Linear,
        norm: BatchNorm,
        count: Param<Tensor<1, Int>>,
        mask: Param<Tensor<1, Bool>>,
        empty: Param<Tensor<1>>,
        last: Linear,
    }

    /// All numbers are `value`, and `mask` says whether that is 0.
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

    /// Of trained parameters, running statistics, and the others.
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
        assert_eq!(chunks(&[4, 0, 4, 9, 1, 8], 8), [8, 9, 1, 8]);
        assert_eq!(chunks(&[4, 4, 9, 1], 1 << 20), [18]);
        assert_eq!(chunks(&[0, 0], 8), [0; 0]);
    }

    /// A model with its rank's number, sent in chunks of a size, or tensor by tensor as on a device (on one
    /// that has no NCCL, which changes nothing else).
    fn sent(group: &ProcessGroup, part: Part, limit: Option<usize>) -> Model {
        let model = model(group.rank() as f32);
        let signatures = signatures(&model);
        let calls = group.stats().calls;
        let Some(limit) = limit else {
            return on_device::broadcast(group, model, &signatures, part).unwrap();
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
                thread::scope(|scope| {
                    for group in LocalGroup::new(3) {
                        scope.spawn(move || {
                            let model = sent(&group, part, limit);
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
                });
            }
        }
    }
}
