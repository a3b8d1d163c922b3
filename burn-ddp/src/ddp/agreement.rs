//! Checks that all ranks train the same model.

use burn::module::Module;

use super::parameters::{self, Signature};
use crate::{DdpError, ProcessGroup};

/// Compares the models of all ranks with that of rank 0. Returns this rank's parameters. If a description of a model
/// cannot be written or read, the job ends.
pub(super) fn check_equal<M: Module>(
    group: &ProcessGroup,
    model: &M,
) -> Result<Vec<Signature>, DdpError> {
    let invalid = |error: serde_json::Error| group.abort(format!("a model's description: {error}"));
    let ours = parameters::signatures(model);
    let text = serde_json::to_vec(&ours).map_err(invalid)?;
    let text = group.broadcast_bytes(&text, 0)?;
    let theirs: Vec<Signature> = serde_json::from_slice(&text).map_err(invalid)?;
    let problem = parameters::difference(&theirs, &ours).unwrap_or_default();
    let problems = group.all_gather_bytes(problem.as_bytes())?;
    if let Some(member) = problems.iter().position(|problem| !problem.is_empty()) {
        return Err(DdpError::ModelMismatch {
            rank: group.number(member),
            problem: String::from_utf8_lossy(&problems[member]).into_owned(),
        });
    }
    Ok(ours)
}

/// Returns `own` if it is `Ok` on all ranks. Otherwise it is an error on all: this rank's own problem, or that of
/// the first rank that has one. All ranks call this, also those with a problem, so that they continue together.
pub(super) fn on_all_ranks<T>(group: &ProcessGroup, own: Result<T, String>) -> Result<T, DdpError> {
    let problem = own.as_ref().err().map_or("", String::as_str);
    let problems = group.all_gather_bytes(problem.as_bytes())?;
    let lacking = problems.iter().position(|problem| !problem.is_empty());
    match (own, lacking) {
        (Ok(own), None) => Ok(own),
        (Ok(_), Some(member)) => {
            let problem = String::from_utf8_lossy(&problems[member]);
            let rank = group.number(member);
            Err(DdpError::InvalidArgument(format!("rank {rank}: {problem}")))
        }
        (Err(problem), _) => Err(DdpError::InvalidArgument(problem)),
    }
}

/// Whether backward has averaged all gradients on all ranks. If so, all ranks must have gradients of the same
/// parameters, which must have [arrived](super::step::Step::arrivals) in the same order; otherwise the job ends. So it does if the
/// ranks' backward has `submitted` different numbers of gradients.
pub(super) fn check_whole(
    group: &ProcessGroup,
    trained: &[Signature],
    arrivals: &[u32],
    own: bool,
    submitted: usize,
) -> Result<bool, DdpError> {
    let all = group.all_gather(&[arrivals, &[own.into(), submitted as u32]].concat())?;
    let slots = trained.len();
    let ranks = || all.chunks_exact(slots + 2).enumerate();
    if ranks().any(|(_, theirs)| theirs[slots] == 0) {
        let first = all[slots + 1];
        let other = ranks().find(|(_, theirs)| theirs[slots + 1] != first);
        return other.map_or(Ok(false), |(rank, theirs)| {
            Err(group.abort(format!(
                "{first} gradients were averaged during backward on rank {} and {} on rank {}: Burn submits that of a parameter in \
                 its first backward pass since it was updated, and ranks have run others (inside `Ddp::no_sync`, say) than the \
                 rest; run them on all ranks, or with a copy of the model",
                group.number(0),
                theirs[slots + 1],
                group.number(rank),
            )))
        });
    }
    let differs = |has: &dyn Fn(u32) -> u32| {
        ranks().find_map(|(rank, theirs)| {
            let slot = (0..slots).find(|slot| has(theirs[*slot]) != has(all[*slot]))?;
            let rank = group.number(rank);
            Some((rank, &trained[slot].path, all[slot], theirs[slot]))
        })
    };
    let zero = group.number(0);
    let problem = if let Some((rank, path, _, theirs)) = differs(&|place| place.min(1)) {
        let (has, lacks) = match theirs {
            0 => (zero, rank),
            _ => (rank, zero),
        };
        format!(
            "rank {has} has a gradient of `{path}` and rank {lacks} has none; parameters that only \
             some ranks use"
        )
    } else if let Some((rank, path, first, theirs)) = differs(&|place| place) {
        format!(
            "`{path}` is gradient {first} of backward on rank {zero} and {theirs} on rank {rank}, so that \
             gradients of different parameters were averaged; graphs that differ between the ranks"
        )
    } else {
        return Ok(true);
    };
    Err(group.abort(format!(
        "{problem} need `Ddp::new` instead of `Ddp::overlapped`"
    )))
}

#[cfg(test)]
mod tests {
    use burn::{nn::LinearConfig, tensor::Device};

    use super::*;
    use crate::{LocalGroup, local::tests::on_ranks};

    #[test]
    fn a_description_that_cannot_be_read_ends_the_job() {
        let rank = |group: ProcessGroup| match group.rank() {
            0 => {
                let sent = group.broadcast_bytes(b"no description", 0);
                sent.and_then(|_| group.all_gather_bytes(&[])).unwrap_err()
            }
            _ => {
                let model = LinearConfig::new(2, 2).init(&Device::flex());
                check_equal(&group, &model).unwrap_err()
            }
        };
        for fault in on_ranks(LocalGroup::new(2), rank) {
            let DdpError::Aborted { rank: 1, reason } = &fault else {
                panic!("{fault}");
            };
            assert!(reason.contains("a model's description"));
        }
    }
}
