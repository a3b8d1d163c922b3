//! The factors by which cuBLASLt multiplies codes.

use std::{
    collections::HashMap,
    hash::{BuildHasherDefault, DefaultHasher},
};

use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;
use cubecl::{dry_run::launch_mode, prelude::*};
use parking_lot::Mutex;

use crate::kernels::buffer;

/// The inverses of two scales, computed by one kernel, unless both are still known. A training step asks for the factor of an
/// input or a weight again in backward, and for that of a weight in each micro-batch, where a product would otherwise launch two
/// kernels instead of one.
pub(super) fn factors(lhs_scale: &CubeTensor, rhs_scale: &CubeTensor) -> [CubeTensor; 2] {
    let scales = [lhs_scale, rhs_scale];
    if !is_computed_now(lhs_scale) {
        return inverses(scales);
    }
    let known = {
        let mut known = KNOWN.lock();
        scales.map(|scale| known.of(scale))
    };
    if let [Some(lhs), Some(rhs)] = known {
        return [lhs, rhs];
    }
    let factors = inverses(scales);
    let mut known = KNOWN.lock();
    for (scale, factor) in scales.into_iter().zip(&factors) {
        known.keep(scale, factor);
    }
    factors
}

/// The factor of a scale, which what computed the scale has computed, too.
pub(super) fn know(scale: &CubeTensor, factor: &CubeTensor) {
    if is_computed_now(scale) {
        KNOWN.lock().keep(scale, factor);
    }
}

/// What a graph records is computed when the graph runs, with the scales that are there then; and in a dry run nothing is.
fn is_computed_now(scale: &CubeTensor) -> bool {
    !scale.client.is_capturing() && !launch_mode().is_skipped()
}

/// Has no factor be known from now on. A graph that is recorded now may write scales each time it runs, in the same memory.
pub(in crate::kernels) fn forget() {
    KNOWN.lock().forget();
}

/// The number of factors that are known at most: those of the inputs, weights and gradients of 680 layers, of two steps. A factor
/// holds two small allocations.
const MOST: usize = 4096;

static KNOWN: Mutex<Factors> = Mutex::new(Factors::new());

/// The factors that were used last.
struct Factors {
    by_scale: HashMap<Place, Factor, BuildHasherDefault<DefaultHasher>>,
    uses: u64,
    forgets: bool,
}

/// The id of a scale's memory, and where it lies there. No other memory ever has this id.
type Place = (usize, Option<u64>);

struct Factor {
    factor: CubeTensor,
    used: u64,
    /// CubeCL computes in place if memory has two handles or fewer: one is the caller's, and one the pool's, from when the pool
    /// has made it. So with these a scale keeps its value for as long as its factor is known.
    _holds: [CubeTensor; 2],
}

impl Factors {
    const fn new() -> Self {
        Self {
            by_scale: HashMap::with_hasher(BuildHasherDefault::new()),
            uses: 0,
            forgets: false,
        }
    }

    fn forget(&mut self) {
        self.forgets = true;
        self.by_scale.clear();
    }

    fn of(&mut self, scale: &CubeTensor) -> Option<CubeTensor> {
        self.uses += 1;
        let known = self.by_scale.get_mut(&place(scale))?;
        known.used = self.uses;
        Some(known.factor.clone())
    }

    fn keep(&mut self, scale: &CubeTensor, factor: &CubeTensor) {
        if self.forgets {
            return;
        }
        self.uses += 1;
        let place = place(scale);
        if self.by_scale.len() >= MOST && !self.by_scale.contains_key(&place) {
            self.forget_half();
        }
        let known = Factor {
            factor: factor.clone(),
            used: self.uses,
            _holds: [scale.clone(), scale.clone()],
        };
        self.by_scale.insert(place, known);
    }

    /// Forgets those that were not used for the longest time. Half of them at once, so that a full table costs next to nothing.
    fn forget_half(&mut self) {
        let mut uses: Vec<_> = self.by_scale.values().map(|known| known.used).collect();
        let half = uses.len() / 2;
        let (_, oldest, _) = uses.select_nth_unstable(half);
        let oldest = *oldest;
        self.by_scale.retain(|_, known| known.used >= oldest);
    }
}

fn place(scale: &CubeTensor) -> Place {
    let handle = &scale.handle;
    (handle.memory.descriptor().id.value, handle.offset_start)
}

fn inverses(scales: [&CubeTensor; 2]) -> [CubeTensor; 2] {
    let factors = scales.map(|scale| buffer::empty_floats(scale, Shape::new([1]), DType::F32));
    let [lhs, rhs] = factors.each_ref().map(|factor| factor.handle.clone());
    let [lhs_scale, rhs_scale] = scales.map(CubeTensor::clone);
    factors_kernel::launch(
        &factors[0].client,
        CubeCount::new_single(),
        CubeDim::new_single(),
        buffer::scalar(lhs_scale),
        buffer::scalar(rhs_scale),
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
    use burn::tensor::{FloatDType, Scalar, TensorData};
    use burn_cubecl::{CubeBackend, CubeDevice};
    use burn_std::reader::try_read_sync;
    use cubecl::cpu::CpuDevice;

    use super::*;

    fn scale(scale: f32) -> CubeTensor {
        let device = CubeDevice::Cpu(CpuDevice);
        CubeBackend::float_from_data(TensorData::from([scale]), &device)
    }

    fn value(tensor: CubeTensor) -> f32 {
        let data = try_read_sync(CubeBackend::float_into_data(tensor));
        data.unwrap().unwrap().try_to_vec::<f32>().unwrap()[0]
    }

    #[test]
    fn a_factor_is_one_by_a_scale() {
        for (lhs, rhs) in [(40.0, 0.125), (3.0e38, 7.0)] {
            let scales = [scale(lhs), scale(rhs)];
            // Computed, known, and with the sides exchanged.
            for [first, second] in [[0, 1], [0, 1], [1, 0]] {
                let found = factors(&scales[first], &scales[second]).map(value);
                assert_eq!(found, [first, second].map(|side| 1.0 / [lhs, rhs][side]));
            }
        }
    }

    #[test]
    #[should_panic(expected = "scales and amaxes are f32")]
    fn a_scale_of_another_dtype_is_refused() {
        let narrow = CubeBackend::float_cast(scale(2.0), FloatDType::BF16);
        factors(&narrow, &scale(4.0));
    }

    #[test]
    fn a_known_factor_is_the_same_memory() {
        let place = |factor: &CubeTensor| place(factor);
        let [a, b, c] = [2.0, 4.0, 8.0].map(scale);
        let [first, second] = factors(&a, &b);
        let [third, _] = factors(&c, &a);
        let again = factors(&a, &c);
        assert_eq!(again.each_ref().map(place)[1], place(&third));
        assert_ne!(place(&first), place(&second));
        let both = factors(&b, &c);
        assert_eq!(both.each_ref().map(place), [place(&second), place(&third)]);
    }

    /// An op that takes the last tensor of a scale may compute in place, in the memory by which the factor is known.
    #[test]
    fn a_scale_that_changes_has_another_factor() {
        let (changes, stays) = (scale(4.0), scale(2.0));
        assert_eq!(factors(&changes, &stays).map(value), [0.25, 0.5]);
        assert!(!changes.can_mut() && !stays.can_mut());
        let changed = CubeBackend::float_mul_scalar(changes, Scalar::from(2.0f32));
        assert_eq!(factors(&changed, &stays).map(value), [0.125, 0.5]);
    }

    /// Words of one allocation are different scales.
    #[test]
    fn a_factor_is_that_of_its_place() {
        let device = CubeDevice::Cpu(CpuDevice);
        let all = CubeBackend::float_from_data(TensorData::from([1.0f32, 2.0, 4.0]), &device);
        let part = |index: u64| CubeTensor {
            handle: all
                .handle
                .clone()
                .offset_start(4 * index)
                .offset_end(8 - 4 * index),
            ..scale(0.0)
        };
        assert_eq!(factors(&part(1), &part(2)).map(value), [0.5, 0.25]);
        assert_eq!(factors(&part(2), &part(0)).map(value), [0.25, 1.0]);
    }

    /// Which a graph may write, whenever it runs again.
    #[test]
    fn nothing_is_known_of_scales_once_a_graph_was_recorded() {
        let mut known = Factors::new();
        let (scale, factor) = (scale(4.0), scale(0.25));
        known.keep(&scale, &factor);
        assert!(known.of(&scale).is_some());
        known.forget();
        assert!(known.of(&scale).is_none());
        known.keep(&scale, &factor);
        assert!(known.of(&scale).is_none());
    }

    #[test]
    fn the_least_recently_used_factors_are_forgotten() {
        let mut known = Factors::new();
        let scales: Vec<_> = (0..=MOST).map(|index| scale(index as f32)).collect();
        for scale in &scales[..MOST] {
            known.keep(scale, scale);
        }
        // In use again, unlike those after it.
        assert!(known.of(&scales[0]).is_some());
        known.keep(&scales[MOST], &scales[MOST]);
        let is_known = scales.iter().map(|scale| known.of(scale).is_some());
        let forgotten: Vec<_> = is_known.enumerate().filter(|(_, known)| !known).collect();
        let oldest: Vec<_> = (1..=MOST / 2).map(|index| (index, false)).collect();
        assert_eq!(forgotten, oldest);
    }

    /// Those of a step that updates scales, of which products ask next.
    #[test]
    fn a_factor_that_came_with_its_scale_is_not_computed() {
        let (a, b) = (scale(4.0), scale(2.0));
        let [own, other] = [0.75, 0.625].map(scale);
        know(&a, &own);
        know(&b, &other);
        assert_eq!(factors(&a, &b).map(value), [0.75, 0.625]);
    }
}
