//! A parameter in two places of a model.

use burn::{
    module::{Module, Param},
    optim::GradientsParams,
    tensor::{Device, Tensor},
};
use burn_ddp::{Ddp, DdpConfig};

use crate::ranks::locally;

#[derive(Module, Debug)]
struct Tied {
    first: Param<Tensor<1>>,
    other: Param<Tensor<1>>,
    last: Param<Tensor<1>>,
}

fn full(value: f32) -> Param<Tensor<1>> {
    let device = Device::flex().autodiff();
    Param::from_tensor(Tensor::full([2], value, &device))
}

#[test]
fn it_is_one_on_all_ranks() {
    let ranks = locally(3, |group| {
        let rank = group.rank() as f32;
        let first = full(3.0 + rank);
        let model = Tied {
            other: first.clone(),
            first,
            last: full(rank),
        };
        let mut ddp = Ddp::new(&group, DdpConfig::new(), &model).unwrap();
        let model = ddp.broadcast_parameters(model).unwrap();
        // w ^ 2 + rank * w, with each w from another place: of w = 3, the gradient is 6 + rank.
        let square = model.first.val() * model.other.val();
        let loss = (square + model.other.val().mul_scalar(rank)).sum() + model.last.val().sum();
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        let own = gradients.get::<1>(model.first.id).unwrap();
        let own: Vec<f32> = own.into_data().try_to_vec().unwrap();
        assert_eq!(own, [6.0 + rank; 2]);
        let averages = ddp.reduce_gradients(gradients, &model).unwrap();
        let average = averages.get::<1>(model.first.id).unwrap().into_data();
        average.try_to_vec::<f32>().unwrap()
    });
    assert_eq!(ranks, [[7.0; 2]; 3]);
}

#[test]
fn what_differs_stays_apart() {
    locally(2, |group| {
        let first = full(group.rank() as f32);
        let model = Tied {
            other: first.clone().map(|it| (it + 5.0).detach()),
            first,
            last: full(1.0),
        };
        let ddp = Ddp::new(&group, DdpConfig::new(), &model).unwrap();
        let model = ddp.broadcast_parameters(model).unwrap();
        for (place, expected) in [(&model.first, 0.0f32), (&model.other, 5.0)] {
            let values: Vec<f32> = place.val().into_data().try_to_vec().unwrap();
            assert_eq!(values, [expected; 2]);
        }
    });
}
