//! Random tensors, and views of them.

use burn::tensor::{Device, FloatDType, Slice, Tensor, TensorData};
use proptest::prelude::*;
use proptest::sample::select;

use crate::suite::device::Random;

/// How a tensor lies in memory.
#[derive(Clone, Copy, Debug)]
pub(super) enum View {
    Plain,
    /// The last two dimensions are swapped.
    Transposed,
    /// The first dimension is the last in memory.
    Permuted,
    /// A part of a larger tensor in every dimension.
    Sliced,
    /// Every second element of the last dimension.
    Stepped,
    /// All rows are the same in memory.
    Expanded,
    /// From the last element to the first.
    Flipped,
}

pub(super) fn views() -> impl Strategy<Value = View> {
    select(vec![
        View::Plain,
        View::Transposed,
        View::Permuted,
        View::Sliced,
        View::Stepped,
        View::Expanded,
        View::Flipped,
    ])
}

/// Which numbers a tensor has.
#[derive(Clone, Copy, Debug)]
pub(in crate::suite) enum Numbers {
    Normal,
    /// Of all magnitudes from 2^-40 to 2^40.
    Spread,
    /// Any bits: also infinities and NaN.
    Bits,
    /// Near the ends of ranges.
    Extreme,
    /// Normal ones, some infinities and NaN.
    Broken,
    /// Few numbers that are not 0.
    Sparse,
    Zeros,
    /// f32's least.
    Tiny,
}

pub(in crate::suite) fn kinds() -> impl Strategy<Value = Numbers> {
    select(vec![
        Numbers::Normal,
        Numbers::Spread,
        Numbers::Bits,
        Numbers::Extreme,
        Numbers::Broken,
        Numbers::Sparse,
        Numbers::Zeros,
        Numbers::Tiny,
    ])
}

const EXTREME: [f32; 16] = [
    0.0,
    -0.0,
    f32::from_bits(1),
    f32::MIN_POSITIVE,
    6e-8,
    1.0,
    448.0,
    464.0,
    464.000_03,
    57344.0,
    61440.0,
    65504.0,
    65520.0,
    f32::MAX,
    f32::INFINITY,
    f32::NAN,
];

impl Numbers {
    fn draw(self, random: &mut Random) -> f32 {
        let bits = random.bits();
        let sign = if bits & 1 == 0 { 1.0 } else { -1.0 };
        match self {
            Self::Normal => random.normal(),
            Self::Spread => random.normal() * 2f32.powi((bits % 81) as i32 - 40),
            Self::Bits => f32::from_bits(bits as u32),
            Self::Extreme => sign * EXTREME[(bits >> 8) as usize % EXTREME.len()],
            Self::Broken if (bits >> 8).is_multiple_of(29) => sign * f32::INFINITY,
            Self::Broken if (bits >> 8).is_multiple_of(31) => f32::NAN,
            Self::Broken => random.normal(),
            Self::Sparse if (bits >> 8).is_multiple_of(9) => random.normal(),
            Self::Sparse => 0.0,
            Self::Zeros => sign * 0.0,
            Self::Tiny => sign * f32::from_bits((bits >> 8) as u32 % 5),
        }
    }

    pub(in crate::suite) fn draw_all(self, random: &mut Random, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.draw(random)).collect()
    }
}

/// A random tensor.
#[derive(Clone, Debug)]
pub(super) struct Drawn {
    pub(super) shape: Vec<usize>,
    pub(super) view: View,
    pub(super) numbers: Numbers,
    pub(super) seed: u64,
}

impl Drawn {
    pub(super) fn tensor<const D: usize>(&self, dtype: FloatDType, device: &Device) -> Tensor<D> {
        let shape: [usize; D] = self.shape.clone().try_into().expect("the rank is D");
        let mut random = Random::new(self.seed);
        let mut make = |shape: [usize; D]| {
            let values = self.numbers.draw_all(&mut random, shape.iter().product());
            let data = TensorData::new(values, shape);
            Tensor::<D>::from_data(data, device).cast(dtype)
        };
        // Burn expands nothing, and some of its own ops panic for views without elements that begin beyond their memory.
        let is_own =
            matches!(self.view, View::Expanded | View::Flipped) || *device != Device::flex();
        let view = match self.shape.contains(&0) && is_own {
            true => View::Plain,
            false => self.view,
        };
        match view {
            View::Transposed if D > 1 => {
                let mut swapped = shape;
                swapped.swap(D - 2, D - 1);
                make(swapped).swap_dims(D - 2, D - 1)
            }
            View::Permuted => {
                let mut turned = shape;
                turned.rotate_left(1);
                // Dimension 0 is the last one in memory.
                let mut order: [isize; D] = core::array::from_fn(|dim| dim as isize);
                order.rotate_right(1);
                make(turned).permute(order)
            }
            View::Sliced => {
                let larger = shape.map(|size| size + 3);
                make(larger).slice(shape.map(|size| 1..1 + size))
            }
            View::Stepped => {
                let mut larger = shape;
                larger[D - 1] *= 2;
                let step = Slice::new(0, Some(larger[D - 1] as isize), 2);
                make(larger).slice_dim(D - 1, step)
            }
            View::Expanded if D > 1 => {
                let mut row = shape;
                row[D - 2] = 1;
                make(row).expand(shape)
            }
            View::Flipped => make(shape).flip([D as isize - 1]),
            View::Plain | View::Transposed | View::Expanded => make(shape),
        }
    }
}

/// Random tensors of the shapes.
pub(super) fn drawn(shapes: impl Strategy<Value = Vec<usize>>) -> impl Strategy<Value = Drawn> {
    (shapes, views(), kinds(), any::<u64>()).prop_map(|(shape, view, numbers, seed)| Drawn {
        shape,
        view,
        numbers,
        seed,
    })
}
