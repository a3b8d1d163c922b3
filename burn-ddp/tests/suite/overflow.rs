//! Loss scaling over ranks: all skip the step that one of them has to.

use burn::{
    module::Module,
    nn::LinearConfig,
    optim::{GradientsParams, SgdConfig},
    tensor::{Device, Tensor},
};
use burn_amp::LossScalerConfig;
use burn_ddp::{Ddp, DdpConfig};

use crate::suite::{net::contents, ranks::locally};

#[test]
fn ranks_agree_that_one_of_them_overflowed() {
    // Two steps in a row double the scale, one that overflowed halves it: PyTorch's GradScaler.
    let expected = [
        (1024.0, true),
        (512.0, false),
        (512.0, true),
        (1024.0, true),
        (512.0, false),
    ];
    let ranks = locally(2, |group| {
        let device = Device::flex().autodiff();
        let mut model = LinearConfig::new(2, 1).init(&device);
        let mut ddp = Ddp::new(&group, DdpConfig::new(), &model).unwrap();
        model = ddp.broadcast_parameters(model).unwrap();
        let mut optimizer = SgdConfig::new().init();
        let config = LossScalerConfig::new().with_init_scale(1024.0);
        let mut scaler = config.with_growth_interval(2).init().unwrap();
        let mut seen = Vec::new();
        for step in 0..expected.len() {
            // At step 1 rank 1 overflows alone, at step 4 rank 0 does.
            let overflows = [(1, 1), (4, 0)].contains(&(step, group.rank()));
            let value = if overflows {
                f32::INFINITY
            } else {
                1.0 + group.rank() as f32
            };
            let input = Tensor::<2>::full([1, 2], value, &device);
            let loss = scaler.scale(model.forward(input).sum());
            // Unscaled before they are averaged, so that the overflow is one rank's own.
            let local = GradientsParams::from_grads(loss.backward(), &model);
            let unscaled = scaler.unscale(local, &model);
            assert_eq!(unscaled.overflow().is_some(), overflows);
            let any = ddp.all_reduce_any(unscaled.overflow().is_some()).unwrap();
            let unscaled = unscaled.agree(any);
            let mut averaged = None;
            let unscaled = unscaled.map(|gradients| {
                let gradients = ddp.reduce_gradients(gradients, &model).unwrap();
                averaged = gradients.get::<2>(model.weight.id);
                gradients
            });
            if !any {
                let averaged = averaged.unwrap().into_data().try_to_vec::<f32>();
                assert_eq!(averaged.unwrap(), [1.5; 2]);
            }
            let before = contents(&model);
            let (next, scaled) = unscaled.step(&mut optimizer, 0.1, model.clone());
            scaler.update_after([&scaled]).unwrap();
            model = next;
            let after = contents(&model);
            assert!(after.iter().all(|value| value.is_finite()));
            seen.push((scaler.state().scale, before != after));
        }
        assert!(model.weight.is_require_grad() && model.num_params() == 3);
        (seen, contents(&model))
    });
    assert_eq!(ranks[0].0, expected);
    assert_eq!(ranks[0], ranks[1]);
}
