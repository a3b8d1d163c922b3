//! Inputs that are read where they are, although there are gaps between their rows.
//!
//! CUDA's allocations have gaps if rows do not fill whole units of alignment, and slices of columns have them everywhere.

use burn::backend::TensorMetadata;
use burn_cubecl::{kernel::into_contiguous, tensor::CubeTensor};
use cubecl::{prelude::*, std::FastDivmod};

use super::{buffer, codec::Four, input};

/// A tensor whose rows are the same distance apart, over all matrices of a batch.
pub(in crate::kernels) struct Rows {
    pub(in crate::kernels) tensor: CubeTensor,
    /// Elements of a row.
    pub(in crate::kernels) columns: usize,
    /// Elements from a row to the next.
    pub(in crate::kernels) pitch: usize,
}

impl Rows {
    /// The tensor itself, if it has such rows; otherwise a contiguous copy.
    pub(in crate::kernels) fn of(tensor: CubeTensor) -> Self {
        let columns = tensor.shape().last().copied().unwrap_or(1);
        match pitch_of(&tensor) {
            Some(pitch) => Self {
                tensor,
                columns,
                pitch,
            },
            None => Self {
                tensor: into_contiguous(tensor),
                columns,
                pitch: columns,
            },
        }
    }

    pub(in crate::kernels) fn have_gaps(&self) -> bool {
        self.pitch != self.columns
    }

    /// The number of elements in each load of a kernel that reads row by row: 4, or 1 if a load of 4 would go beyond a row or not be
    /// aligned.
    pub(in crate::kernels) fn vector(&self) -> usize {
        let vector = input::vector(&self.tensor, self.columns);
        match self.pitch.is_multiple_of(vector) {
            true => vector,
            false => 1,
        }
    }

    /// [`vector`](Self::vector) of a kernel that reads across rows where they are adjacent.
    pub(in crate::kernels) fn vector_across(&self) -> usize {
        match self.have_gaps() {
            true => self.vector(),
            false => input::vector(&self.tensor, self.tensor.shape().num_elements()),
        }
    }

    /// A kernel's argument.
    pub(in crate::kernels) fn launch(&self) -> LinesLaunch {
        // Without gaps the kernel has no use for the columns, which may be more than `FastDivmod` can take.
        let columns = if self.have_gaps() { self.columns } else { 1 };
        LinesLaunch::new(columns.max(1), self.pitch)
    }
}

/// The distance between rows, if it is the same for all.
pub(in crate::kernels) fn pitch_of(tensor: &CubeTensor) -> Option<usize> {
    let (shape, strides) = (tensor.meta.shape(), tensor.meta.strides());
    let columns = *shape.last()?;
    if tensor.is_contiguous() {
        return Some(columns);
    }
    let mut outer = (0..shape.num_dims() - 1)
        .rev()
        .filter(|&dim| shape[dim] > 1);
    let row = outer.next()?;
    let pitch = strides[row];
    let mut next = pitch * shape[row];
    let regular = outer.all(|dim| {
        let is_next = strides[dim] == next;
        next *= shape[dim];
        is_next
    });
    let inside = strides[shape.num_dims() - 1] == 1 && pitch > columns;
    // Gaps count when kernels count elements.
    (inside && regular && buffer::extent(tensor) <= buffer::MOST).then_some(pitch)
}

/// Where elements are that are counted row by row.
#[derive(CubeType, CubeLaunch)]
pub(in crate::kernels) struct Lines {
    columns: FastDivmod<usize>,
    pitch: usize,
}

/// [`input::four`] of a tensor whose rows may have `gaps`. Elements are counted without the gaps.
#[cube]
pub(in crate::kernels) fn four<F: Numeric, N: Size>(
    input: &[Vector<F, N>],
    first: usize,
    end: usize,
    lines: &Lines,
    #[comptime] gaps: bool,
) -> Four {
    let size = N::value();
    let mut values = Four::new(0.0f32);
    if comptime!(!gaps) {
        values = input::four(input, first, end);
    } else if comptime!(size == 4) {
        if first < end {
            values = Four::cast_from(input[place(first, lines) / 4]);
        }
    } else {
        #[unroll]
        for lane in 0..4usize {
            if first + lane < end {
                let value = input[place(first + lane, lines)];
                values.insert(lane, f32::cast_from(value.extract(0usize)));
            }
        }
    }
    values
}

#[cube]
fn place(element: usize, lines: &Lines) -> usize {
    let (line, column) = lines.columns.div_mod(element);
    line * lines.pitch + column
}

#[cfg(all(test, feature = "cpu"))]
mod tests {
    use burn::tensor::DType;
    use burn_cubecl::CubeDevice;
    use burn_std::Metadata;

    use super::*;

    #[test]
    fn rows_are_the_same_distance_apart() {
        let device = CubeDevice::Cpu(Default::default());
        let client = device.client();
        let pitch = |shape: &[usize], strides: &[usize]| {
            let layout = Metadata::new(shape.to_vec(), strides.to_vec());
            let (client, device) = (client.clone(), device.clone());
            let memory = client.empty(4);
            pitch_of(&CubeTensor::new(client, memory, layout, device, DType::F32))
        };
        assert_eq!(pitch(&[5], &[1]), Some(5));
        assert_eq!(pitch(&[2, 3, 5], &[15, 5, 1]), Some(5));
        assert_eq!(pitch(&[2, 3, 5], &[24, 8, 1]), Some(8));
        assert_eq!(pitch(&[4, 1, 3, 5], &[24, 7, 8, 1]), Some(8));
        assert_eq!(pitch(&[2, 1, 5], &[8, 5, 1]), Some(8));
        // Gaps between matrices, transposed and broadcast ones, elements that are apart, and more than kernels count.
        assert_eq!(pitch(&[2, 3, 5], &[32, 8, 1]), None);
        assert_eq!(pitch(&[3, 5], &[1, 3]), None);
        assert_eq!(pitch(&[3, 5], &[0, 1]), None);
        assert_eq!(pitch(&[5], &[2]), None);
        assert_eq!(pitch(&[3, 5], &[16, 2]), None);
        assert_eq!(pitch(&[3, 5], &[buffer::MOST, 1]), None);
    }
}
