//! Amaxes over ranks.

use burn::tensor::{DType, Device, Tensor};
use burn_fp8::recipe::AmaxReducer;

use crate::suite::ranks::locally;

#[test]
fn amaxes_are_the_largest_of_all_ranks() {
    locally(3, |group| {
        let device = Device::flex();
        let own = [group.rank() as f32, 3.0 - group.rank() as f32, 0.5];
        for dtype in [DType::F32, DType::BF16] {
            let amaxes = Tensor::<1>::from_data(own, (&device, dtype));
            let all = group.max(amaxes).unwrap();
            assert_eq!(all.dtype(), dtype);
            let values: Vec<f32> = all.into_data().iter::<f32>().collect();
            assert_eq!(values, [2.0, 3.0, 0.5]);
        }
    });
}

#[test]
fn a_nan_of_any_rank_is_every_ranks() {
    let ranks = locally(3, |group| {
        let mut own = [1.0; 3];
        own[group.rank()] = [f32::NAN, f32::INFINITY, 7.0][group.rank()];
        let amaxes = Tensor::<1>::from_data(own, &Device::flex());
        group.max(amaxes).unwrap().into_data().try_to_vec::<f32>()
    });
    for rank in ranks {
        let values = rank.unwrap();
        assert!(values[0].is_nan());
        assert_eq!(values[1..], [f32::INFINITY, 7.0]);
    }
}

#[test]
fn a_fault_of_the_group_is_the_layers_error() {
    locally(2, |group| {
        if group.rank() == 1 {
            group.abort("on purpose");
        }
        let amaxes = Tensor::<1>::ones([1], &Device::flex());
        let error = group.max(amaxes).unwrap_err();
        assert!(error.to_string().contains("rank 1 aborted"), "{error}");
    });
}
