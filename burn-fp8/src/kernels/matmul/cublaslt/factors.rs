//! The factors by which cuBLASLt multiplies codes.

use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use crate::kernels::buffer;

/// The inverses of two scales, computed by one kernel.
pub(super) fn factors(lhs_scale: &CubeTensor, rhs_scale: &CubeTensor) -> [CubeTensor; 2] {
    let factors = [lhs_scale, rhs_scale]
        .map(|scale| buffer::empty_floats(scale, Shape::new([1]), DType::F32));
    let [lhs, rhs] = factors.each_ref().map(|factor| factor.handle.clone());
    factors_kernel::launch(
        &lhs_scale.client,
        CubeCount::new_single(),
        CubeDim::new_single(),
        buffer::elements(lhs_scale.clone()),
        buffer::elements(rhs_scale.clone()),
        buffer::raw(lhs, 1),
        buffer::raw(rhs, 1),
    );
    factors
}

#[cube(launch)]
fn factors_kernel(
    lhs_scale: &[f32],
    rhs_scale: &[f32],
    lhs_factor: &mut [f32],
    rhs_factor: &mut [f32],
) {
    lhs_factor[0] = 1.0f32 / lhs_scale[0];
    rhs_factor[0] = 1.0f32 / rhs_scale[0];
}

#[cfg(all(test, feature = "cpu"))]
mod tests {
    use burn::backend::ops::FloatTensorOps;
    use burn::tensor::TensorData;
    use burn_cubecl::{CubeBackend, CubeDevice};
    use burn_std::reader::try_read_sync;
    use cubecl::cpu::CpuDevice;

    use super::*;

    #[test]
    fn a_factor_is_one_by_a_scale() {
        let device = CubeDevice::Cpu(CpuDevice);
        let scale = |scale: f32| CubeBackend::float_from_data(TensorData::from([scale]), &device);
        for (lhs, rhs) in [(40.0, 0.125), (3.0e38, 7.0)] {
            let found = factors(&scale(lhs), &scale(rhs)).map(|factor| {
                let data = try_read_sync(CubeBackend::float_into_data(factor));
                data.unwrap().unwrap().try_to_vec::<f32>().unwrap()
            });
            assert_eq!(found, [vec![1.0 / lhs], vec![1.0 / rhs]]);
        }
    }
}
