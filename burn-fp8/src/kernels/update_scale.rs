use burn::backend::TensorMetadata;
use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::{
    amax::largest_of_cube, buffer, codec::magnitude_bits, matmul::know_factor, scale::bounded,
};
use crate::recipe::{AmaxCompute, ScaleUpdate};

/// See [`Fp8Ops::fp8_update_scale`](crate::Fp8Ops::fp8_update_scale).
pub(crate) fn update_scale(
    history: CubeTensor,
    scale: CubeTensor,
    amax: CubeTensor,
    update: ScaleUpdate,
) -> (CubeTensor, CubeTensor) {
    let length = history.shape().num_elements();
    let new_history = buffer::empty_floats(&history, history.shape(), DType::F32);
    let both = buffer::empty_floats(&history, Shape::new([2]), DType::F32);
    let client = history.client.clone();
    // On a CPU, a single unit is faster than units that wait for each other.
    let dim = match client.properties().hardware.num_cpu_cores {
        Some(_) => CubeDim::new_single(),
        None => CubeDim::new(&client, length),
    };
    update_kernel::launch(
        &client,
        CubeCount::new_single(),
        dim,
        buffer::floats(history),
        buffer::scalar(scale),
        buffer::scalar(amax),
        buffer::whole(&new_history),
        buffer::whole(&both),
        update.scaled_max(),
        dim.num_elems() as usize,
        update.algorithm == AmaxCompute::Max,
    );
    let one = |handle| {
        let (client, device) = (both.client.clone(), both.device.clone());
        CubeTensor::new_contiguous(client, device, Shape::new([1]), handle, DType::F32)
    };
    let word = size_of::<f32>() as u64;
    let new_scale = one(both.handle.clone().offset_end(word));
    know_factor(&new_scale, || one(both.handle.clone().offset_start(word)));
    (new_history, new_scale)
}

/// A single cube, whose units roll the history together. It computes the new scale, and its inverse.
#[cube(launch)]
#[allow(clippy::too_many_arguments)]
fn update_kernel(
    history: &[f32],
    scale: &[f32],
    amax: &[f32],
    new_history: &mut [f32],
    both: &mut [f32],
    scaled_max: f32,
    #[comptime] units: usize,
    #[comptime] max: bool,
) {
    let length = history.len();
    let amax = amax[0];
    let used = magnitude_bits(amax) != 0u32;

    let mut largest = 0u32;
    let mut slot = UNIT_POS as usize;
    while slot < length {
        let mut rolled = amax;
        if slot + 1 < length {
            rolled = history[slot + 1];
        }
        largest = u32::max(largest, amax_bits(rolled));
        if slot == 0 {
            rolled = 0.0f32;
        }
        if !used {
            rolled = history[slot];
        }
        new_history[slot] = rolled;
        slot += units;
    }

    if max {
        if comptime!(units > 1) {
            largest = largest_of_cube(largest, units);
        }
    } else {
        largest = amax_bits(amax);
    }
    if UNIT_POS == 0 {
        let mut new_scale = scale[0];
        if used && largest > 0u32 && largest < 0x7F80_0000u32 {
            new_scale = bounded(scaled_max / f32::reinterpret(largest));
        }
        both[0] = new_scale;
        both[1] = 1.0f32 / new_scale;
    }
}

/// The bits of an amax, which are ordered like amaxes, even under fast math. 0 for NaN and negative numbers, which are no amaxes.
#[cube]
fn amax_bits(amax: f32) -> u32 {
    let bits = u32::reinterpret(amax);
    select(bits <= 0x7F80_0000u32, bits, 0u32)
}

#[cfg(all(test, feature = "cpu"))]
mod tests {
    use super::*;
    use cubecl::Device;

    /// With fewer units than slots, as many, and more; of a number that is and is not a power of two.
    #[test]
    fn cubes_of_any_size_do_what_the_host_does() {
        let client = Device::Cpu(Default::default()).client();
        let buffer = |values: &[f32]| client.create_from_slice(f32::as_bytes(values));
        let read = |handle| f32::from_bytes(&client.read_one_unchecked(handle)).to_vec();
        let bits = |values: &[f32]| -> Vec<u32> { values.iter().map(|x| x.to_bits()).collect() };
        for units in [1, 2, 3, 4] {
            for length in [1, 2, 3, 4, 5, 9] {
                for algorithm in [AmaxCompute::Max, AmaxCompute::MostRecent] {
                    let update = ScaleUpdate {
                        fp8_max: 448.0,
                        margin: 1,
                        algorithm,
                    };
                    // The largest comes to lie in every slot.
                    for (step, amax) in [0.0, 3.0, f32::NAN, -7.0, f32::INFINITY, 1e-42]
                        .into_iter()
                        .enumerate()
                    {
                        let mut history: Vec<f32> = (0..length)
                            .map(|slot| ((slot * 5 + step) % 7) as f32)
                            .collect();
                        history[0] = 0.0;
                        let (new_history, both) = (client.empty(4 * length), client.empty(8));
                        update_kernel::launch(
                            &client,
                            CubeCount::new_single(),
                            CubeDim::new_1d(units),
                            buffer::raw(buffer(&history), length),
                            buffer::raw(buffer(&[2.0]), 1),
                            buffer::raw(buffer(&[amax]), 1),
                            buffer::raw(new_history.clone(), length),
                            buffer::raw(both.clone(), 2),
                            update.scaled_max(),
                            units as usize,
                            algorithm == AmaxCompute::Max,
                        );
                        let scale = update.apply_host(&mut history, 2.0, amax);
                        let case = (units, length, algorithm, amax);
                        assert_eq!(bits(&read(new_history)), bits(&history), "{case:?}");
                        assert_eq!(bits(&read(both)), bits(&[scale, 1.0 / scale]), "{case:?}");
                    }
                }
            }
        }
    }
}
