//! The same for quantized tensors, with a separate call for each: only its device knows how many bytes a tensor
//! has including its scales. The calls wait for other ranks while the model is mapped, one tensor at a time: modules hold locks
//! for running statistics alone, which are not quantized.

use burn::{
    module::{Module, ModuleMapper, Param},
    tensor::{DType, Tensor, TensorData},
};
use burn_std::Reader;

use crate::{DdpError, ProcessGroup};

/// Replaces the quantized tensors of a model by those of rank 0.
pub(in crate::ddp) fn broadcast<M: Module>(group: &ProcessGroup, model: M) -> Result<M, DdpError> {
    let mut travel = Travel { group, error: None };
    let model = model.map(&mut travel);
    travel.error.map_or(Ok(model), Err)
}

struct Travel<'a> {
    group: &'a ProcessGroup,
    error: Option<DdpError>,
}

impl Travel<'_> {
    /// Returns the tensor of rank 0.
    fn exchange<const D: usize>(&self, own: Tensor<D>) -> Result<Tensor<D>, DdpError> {
        if self.group.is_main() {
            let data = own.clone().try_into_data()?;
            let bytes = data.bytes().read(Reader::new())?;
            self.group.broadcast_bytes(bytes, 0)?;
            return Ok(own);
        }
        let bytes = self.group.broadcast_bytes(&[], 0)?;
        let data = TensorData::from_bytes_vec(bytes, own.shape(), own.dtype());
        Ok(Tensor::from_data(data, &own.device()))
    }
}

impl ModuleMapper for Travel<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let own = param.base();
        if self.error.is_some() || !matches!(own.dtype(), DType::QFloat(_)) {
            return param;
        }
        match self.exchange(own) {
            Ok(new) => param.map(|_| new),
            Err(error) => {
                self.error = Some(error);
                param
            }
        }
    }
}
