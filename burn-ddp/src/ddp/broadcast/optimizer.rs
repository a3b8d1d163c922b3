//! Copies the state of rank 0's optimizer to all ranks. Burn stores it by parameter ids, which each process
//! draws for itself.

use std::collections::HashMap;

use burn::{module::Module, optim::ModuleOptimizer, tensor::Bytes};
use burn_pack::{Reader, Tensor, Writer};

use crate::{DdpError, ProcessGroup, ddp::parameters::parameters};

/// The optimizer with the state of rank 0's optimizer, for a model that is the same on all ranks.
pub(in crate::ddp) fn broadcast<M: Module>(
    group: &ProcessGroup,
    optimizer: ModuleOptimizer,
    model: &M,
) -> Result<ModuleOptimizer, DdpError> {
    let unusable = |error: &dyn ToString| {
        let problem = error.to_string();
        DdpError::InvalidArgument(format!("the optimizer's state on rank 0: {problem}"))
    };
    let ours: Vec<u64> = parameters(model).iter().map(|it| it.id.val()).collect();
    let ids: Vec<u8> = ours.iter().flat_map(|id| id.to_le_bytes()).collect();
    if group.is_main() {
        let state = optimizer.into_bytes().map_err(|error| unusable(&error))?;
        group.broadcast_bytes(&ids, 0)?;
        group.broadcast_bytes(&state, 0)?;
        return Ok(optimizer);
    }
    let theirs = group.broadcast_bytes(&[], 0)?;
    let state = group.broadcast_bytes(&[], 0)?;
    let (theirs, _) = theirs.as_chunks();
    let ids = theirs.iter().map(|id| u64::from_le_bytes(*id)).zip(ours);
    let ids: HashMap<String, u64> = ids
        .map(|(theirs, ours)| (theirs.to_string(), ours))
        .collect();
    let state = translated(state, &ids).map_err(|error| unusable(&error))?;
    optimizer
        .from_bytes(state)
        .map_err(|error| unusable(&error))
}

/// Translates the state to this rank's parameter ids, with which the names of its entries begin.
fn translated(state: Vec<u8>, ids: &HashMap<String, u64>) -> Result<Bytes, burn_pack::Error> {
    let name = |name: &str| {
        let (id, rest) = name.split_at(name.find('.').unwrap_or(name.len()));
        let ours = ids.get(id).map_or_else(|| id.to_string(), u64::to_string);
        format!("{ours}{rest}")
    };
    let reader = Reader::from_bytes(Bytes::from_bytes_vec(state))?;
    let (scalars, paths) = (reader.scalars().clone(), reader.metadata().clone());
    let tensors = reader.into_tensors()?.into_iter().map(|tensor| {
        let (theirs, dtype, shape, id, bytes) = tensor.into_parts()?;
        let id = id.map(|id| *ids.get(&id.to_string()).unwrap_or(&id));
        Ok(Tensor::new(name(&theirs), dtype, shape, id, bytes))
    });
    let mut writer = Writer::new(tensors.collect::<Result<_, burn_pack::Error>>()?);
    for (theirs, value) in scalars {
        writer = writer.with_scalar(&name(&theirs), value);
    }
    for (theirs, path) in paths {
        writer = writer.with_metadata(&name(&theirs), &path);
    }
    writer.into_bytes()
}
