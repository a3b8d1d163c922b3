//! Static graphs: the ranks tell each other once which gradients they have.

use burn::{
    nn::LinearConfig,
    optim::{GradientsParams, SgdConfig},
    tensor::Tensor,
};
use burn_ddp::{Ddp, DdpConfig, DdpError, ProcessGroup, Values};

use crate::suite::{
    buckets::{Rounds, floats, sizes},
    overlapped::layered,
    ranks::{all_fail, all_succeed, locally},
};

const LENS: [usize; 4] = [3, 5, 2, 1];
/// Bytes of the gradients that any rank has, and of the flags that say which these are.
const BYTES: u64 = 4 * (3 + 2 + 1);
const FLAGS: u64 = 4;

fn rounds(group: &ProcessGroup, static_graph: bool) -> Rounds {
    let config = sizes(16, 32).static_graph(static_graph);
    Rounds::new(group, &floats(&LENS), config)
}

/// A round in which this rank has the gradients of some slots, all of value `rank + slot`.
fn round(rounds: &mut Rounds, rank: usize, slots: &[usize]) -> Result<Vec<Option<f32>>, DdpError> {
    let own = LENS.into_iter().enumerate().map(|(slot, len)| {
        let values = vec![(rank + slot) as f32; len];
        slots.contains(&slot).then_some(Values::F32(values))
    });
    let averages = rounds.average(own.collect())?.into_iter().map(|average| {
        let Values::F32(values) = average? else {
            panic!("another type")
        };
        Some(values[0])
    });
    Ok(averages.collect())
}

/// Slot 0 everywhere, 1 nowhere, 2 on rank 1 alone, 3 on ranks 0 and 2.
fn slots(rank: usize) -> &'static [usize] {
    [&[0, 3][..], &[0, 2], &[0, 3]][rank]
}

#[test]
fn averages_are_the_same_and_flags_travel_once() {
    let expected = [Some(1.0), None, Some(1.0), Some(8.0 / 3.0)];
    // Once, and whether the rank has a batch at all, or each time.
    for (static_graph, flags) in [(true, FLAGS + 1), (false, 5 * FLAGS)] {
        locally(3, |group| {
            let mut rounds = rounds(&group, static_graph);
            for _ in 0..5 {
                let averages = round(&mut rounds, group.rank(), slots(group.rank())).unwrap();
                assert_eq!(averages, expected);
            }
            assert_eq!(rounds.stats().bytes_reduced, 5 * BYTES + flags);
        });
    }
}

#[test]
fn a_broken_promise_ends_the_job() {
    let errors = locally(3, |group| {
        let rank = group.rank();
        let mut rounds = rounds(&group, true);
        round(&mut rounds, rank, slots(rank)).unwrap();
        let own = if rank == 1 { &[0] } else { slots(rank) };
        // Rank 1 can be through the barrier, and have found out, while others still wait there; and those that have their averages
        // already learn of it in the next round.
        let result = group.barrier();
        let result = result.and_then(|_| round(&mut rounds, rank, own));
        let result = result.and_then(|_| round(&mut rounds, rank, slots(rank)));
        result.unwrap_err().to_string()
    });
    for error in errors {
        assert!(error.starts_with("rank 1 aborted"), "{error}");
        assert!(error.contains("a static graph was promised"), "{error}");
    }
}

/// Played by processes, since each needs a layered device of its own.
pub(crate) fn when_overlapped(group: &ProcessGroup) -> Result<(), DdpError> {
    for (static_graph, expected) in [(true, 2), (false, 4)] {
        let config = DdpConfig::new().static_graph(static_graph);
        let (device, overlap) = layered(group, config)?;
        let model = LinearConfig::new(2, 1).init(&device);
        let mut ddp = Ddp::overlapped(group, overlap, &model)?;
        let mut model = ddp.broadcast_parameters(model)?;
        let mut optimizer = SgdConfig::new().init();
        let before = group.stats().calls;
        for step in 0..3 {
            let value = (group.rank() + step) as f32;
            let input = Tensor::<2>::full([1, 2], value, &device);
            let gradients =
                GradientsParams::from_grads(model.forward(input).sum().backward(), &model);
            let gradients = ddp.reduce_gradients(gradients, &model)?;
            let weight = gradients.get::<2>(model.weight.id).unwrap();
            let weight = weight.into_data().try_to_vec::<f32>().unwrap();
            assert_eq!(weight, [step as f32 + 0.5; 2]);
            model = optimizer.step(0.1, model, gradients);
        }
        // Gradients have connections of their own: these are the checks, and in the first step one of the model.
        assert_eq!(group.stats().calls - before, expected);
    }
    Ok(())
}

/// Rank 0 alone runs backward twice in a step, when nobody asks any more: its second average would be that of the next
/// step with the others.
pub(crate) fn alone_again_when_overlapped(group: &ProcessGroup) -> Result<(), DdpError> {
    let (device, overlap) = layered(group, DdpConfig::new().static_graph(true))?;
    let model = LinearConfig::new(2, 1).init(&device);
    let mut ddp = Ddp::overlapped(group, overlap, &model)?;
    let mut model = ddp.broadcast_parameters(model)?;
    let mut optimizer = SgdConfig::new().init();
    for step in 0..4 {
        let gradients = || {
            let loss = model.forward(Tensor::<2>::ones([1, 2], &device)).sum();
            GradientsParams::from_grads(loss.backward(), &model)
        };
        // First in a way in which they agree on which gradients there are.
        let gradients = match step {
            0 => ddp.no_sync(|_| gradients()),
            2 if group.rank() == 0 => {
                gradients();
                gradients()
            }
            _ => gradients(),
        };
        let gradients = ddp.reduce_gradients(gradients, &model)?;
        model = optimizer.step(0.1, model, gradients);
    }
    Ok(())
}

#[test]
fn a_rank_that_runs_backward_once_more_ends_the_job() {
    for output in all_fail("overlapped alone again", 2) {
        assert!(output.contains("ranks diverged"), "{output}");
    }
}

#[test]
fn overlapped_checks_are_made_once() {
    all_succeed("overlapped static graph", 2);
}
