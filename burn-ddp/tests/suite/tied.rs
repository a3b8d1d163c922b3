//! A parameter in two places of a model.

use burn::{
    module::{Module, Param},
    tensor::{Device, Tensor},
};
use burn_ddp::{Ddp, DdpConfig};

use crate::suite::ranks::locally;

#[derive(Module, Debug)]
struct Tied {
    first: Param<Tensor<1>>,
    other: Param<Tensor<1>>,
}

fn full(value: f32) -> Param<Tensor<1>> {
    let device = Device::flex().autodiff();
    Param::from_tensor(Tensor::full([2], value, &device))
}

#[test]
fn what_differs_stays_apart() {
    locally(2, |group| {
        let first = full(group.rank() as f32);
        let model = Tied {
            other: first.clone().map(|it| (it + 5.0).detach()),
            first,
        };
        let ddp = Ddp::new(&group, DdpConfig::new(), &model).unwrap();
        let model = ddp.broadcast_parameters(model).unwrap();
        for (place, expected) in [(&model.first, 0.0f32), (&model.other, 5.0)] {
            let values: Vec<f32> = place.val().into_data().try_to_vec().unwrap();
            assert_eq!(values, [expected; 2]);
        }
    });
}
