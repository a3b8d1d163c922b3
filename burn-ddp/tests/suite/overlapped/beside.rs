//! Another model of the process, on the same device or overlapped too.

use burn::{
    nn::LinearConfig,
    optim::{GradientsParams, SgdConfig},
    tensor::Tensor,
};
use burn_ddp::{Ddp, DdpConfig, DdpError, ProcessGroup};

use super::layered;
use crate::suite::{
    accumulation::Sum,
    net::contents,
    ranks::{all_succeed, locally},
};

#[test]
fn threads_of_one_process_are_refused_and_go_on() {
    locally(2, |group| {
        for _ in 0..2 {
            let (device, overlap) = layered(&group, DdpConfig::new()).unwrap();
            let model = LinearConfig::new(2, 1).init(&device);
            let error = Ddp::overlapped(&group, overlap, &model).unwrap_err();
            assert!(matches!(error, DdpError::InvalidArgument(_)), "{error}");
            assert!(error.to_string().contains("one overlapped Ddp"), "{error}");
            // What the error says to do.
            let mut ddp = Ddp::new(&group, DdpConfig::new(), &model).unwrap();
            let model = ddp.broadcast_parameters(model).unwrap();
            let input = Tensor::<2>::full([1, 2], group.rank() as f32, &device);
            let loss = model.forward(input).sum();
            let gradients = GradientsParams::from_grads(loss.backward(), &model);
            let gradients = ddp.reduce_gradients(gradients, &model).unwrap();
            let weight = gradients.get::<2>(model.weight.id).unwrap();
            assert_eq!(weight.into_data().try_to_vec::<f32>().unwrap(), [0.5; 2]);
        }
    });
}

/// A second one at the same time is refused on all ranks, and may come when the first has gone.
pub(super) fn one_after_the_other(group: &ProcessGroup) -> Result<(), DdpError> {
    let (device, overlap) = layered(group, DdpConfig::new())?;
    let model = LinearConfig::new(2, 1).init(&device);
    let first = Ddp::overlapped(group, overlap.clone(), &model)?;
    assert!(Ddp::overlapped(group, overlap.clone(), &model).is_err());
    drop(first);
    Ddp::overlapped(group, overlap, &model).map(drop)
}

#[test]
fn one_overlaps_at_a_time() {
    all_succeed("overlapped twice", 2);
}

/// In each step, a critic runs backward before the generator does: on the same device, in whose layer only the generator's
/// gradients are averaged.
pub(super) fn beside_another_model(group: &ProcessGroup) -> Result<(), DdpError> {
    let run = |config: DdpConfig, critics_turns: usize| -> Result<_, DdpError> {
        let (device, overlap) = layered(group, config)?;
        let generator = LinearConfig::new(4, 4).init(&device);
        let critic = LinearConfig::new(4, 1).init(&device);
        let mut ddp = Ddp::overlapped(group, overlap, &generator)?;
        let mut critics = Ddp::new(group, DdpConfig::new(), &critic)?;
        let mut generator = ddp.broadcast_parameters(generator)?;
        let mut critic = critics.broadcast_parameters(critic)?;
        let mut optimizer = SgdConfig::new().init();
        for step in 0..3 {
            let noise = Tensor::<2>::full([2, 4], (1 + step + group.rank()) as f32, &device);
            for _ in 0..critics_turns {
                let fake = generator.forward(noise.clone()).detach();
                let loss = critic.forward(fake).powi_scalar(2).mean();
                let gradients = GradientsParams::from_grads(loss.backward(), &critic);
                let gradients = critics.reduce_gradients(gradients, &critic)?;
                critic = optimizer.step(0.01, critic, gradients);
            }
            let loss = critic.forward(generator.forward(noise)).mean();
            let gradients = GradientsParams::from_grads(loss.backward(), &generator);
            let gradients = ddp.reduce_gradients(gradients, &generator)?;
            generator = optimizer.step(0.01, generator, gradients);
        }
        let parameters = contents(&generator);
        for theirs in group.all_gather(&parameters)?.chunks(parameters.len()) {
            assert_eq!(theirs, parameters);
        }
        Ok(ddp.stats().bytes_reduced)
    };
    let alone = run(DdpConfig::new(), 0)?;
    assert_eq!(run(DdpConfig::new(), 1)?, alone);
    assert_eq!(run(DdpConfig::new(), 2)?, alone);
    // Sums are not to be summed up again, which would be an error.
    assert_eq!(run(DdpConfig::new().hook(Sum), 1)?, alone);
    Ok(())
}

#[test]
fn backward_of_another_model_on_the_device_changes_nothing() {
    all_succeed("overlapped beside", 2);
}
