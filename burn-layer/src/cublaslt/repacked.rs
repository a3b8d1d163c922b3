//! Copies of matrices with other distances between their rows or columns.

use burn_backend::{DType, Shape, TensorMetadata, cubecl::dtype_to_storage_type};
use burn_cubecl::{CubeDevice, ops::numeric::empty_device_contiguous_dtype, tensor::CubeTensor};
use burn_cublaslt::{Matrices, Order};
use cubecl::{client::Client, prelude::*, server::Handle};

use crate::rowwise::address;

/// Rows, or columns where elements of a column lie next to each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Lines {
    pub(super) lines: usize,
    /// The elements of a line.
    pub(super) length: usize,
    /// From one line to the next.
    pub(super) leading: usize,
}

impl Lines {
    pub(super) fn of(matrix: &Matrices) -> Self {
        let (lines, length) = match matrix.order {
            Order::Rows => (matrix.rows, matrix.columns),
            Order::Columns => (matrix.columns, matrix.rows),
        };
        Self {
            lines,
            length,
            leading: matrix.leading,
        }
    }

    /// The elements from the first to the last.
    fn extent(&self) -> usize {
        (self.lines - 1) * self.leading + self.length
    }
}

/// Where matrices are.
pub(super) struct Place {
    pub(super) client: Client,
    pub(super) device: CubeDevice,
    pub(super) dtype: DType,
}

/// A copy of `from`, which lies at the beginning of memory, as `to`, with zeros where `from` has nothing. `to` may be smaller.
pub(super) fn repacked(place: &Place, memory: Handle, from: Lines, to: Lines) -> CubeTensor {
    let (client, device) = (place.client.clone(), place.device.clone());
    let shape = Shape::new([from.extent()]);
    let from_all =
        CubeTensor::new_contiguous(client.clone(), device.clone(), shape, memory, place.dtype);
    let all = to.lines * to.leading;
    let output = empty_device_contiguous_dtype(client, device, Shape::new([all]), place.dtype);
    let fits = |vector: &usize| all.is_multiple_of(*vector) && *vector <= to.leading;
    let vector = [8, 4, 2, 1].into_iter().find(fits).unwrap_or(1);
    let vectors = all / vector;
    let dim = CubeDim::new(&place.client, vectors);
    let cubes = vectors.div_ceil(dim.num_elems() as usize).min(CUBES);
    repacked_kernel::launch(
        &place.client,
        CubeCount::new_1d(cubes as u32),
        dim,
        address(from.extent().max(all)),
        vector,
        from_all.into_buffer_arg(),
        output.clone().into_buffer_arg(),
        vectors,
        from.lines.min(to.lines),
        from.length.min(to.length),
        from.leading,
        to.leading,
        dtype_to_storage_type(output.dtype()),
    );
    output
}

/// The most cubes. With fewer, each unit takes several loads.
const CUBES: usize = 1 << 15;

#[cube(launch, address_type = "dynamic")]
fn repacked_kernel<F: Numeric, N: Size>(
    from: &[F],
    output: &mut [Vector<F, N>],
    vectors: usize,
    lines: usize,
    length: usize,
    leading: usize,
    new_leading: usize,
    #[define(F)] _dtype: ElemType,
) {
    let mut at = ABSOLUTE_POS;
    while at < vectors {
        let first_line = at * N::value() / new_leading;
        let mut result = Vector::<F, N>::new(F::from_int(0));
        // A vector reaches into the next line at most.
        #[unroll]
        for lane in 0..N::value() {
            let element = at * N::value() + lane;
            let next = first_line + 1;
            let line = select(element >= next * new_leading, next, first_line);
            let place = element - line * new_leading;
            if line < lines && place < length {
                result.insert(lane, from[line * leading + place]);
            }
        }
        output[at] = result;
        at += CUBE_COUNT * CUBE_DIM as usize;
    }
}

#[cfg(all(test, any(feature = "cpu", feature = "cuda")))]
mod tests {
    use super::*;
    use crate::rowwise::tests::on_devices;
    use burn_backend::{TensorData, ops::FloatTensorOps};
    use burn_cubecl::CubeBackend;
    use burn_std::reader::try_read_sync;

    #[test]
    fn lines_are_where_they_belong() {
        let lines = |lines, length, leading| Lines {
            lines,
            length,
            leading,
        };
        for (from, to) in [
            (lines(3, 5, 5), lines(3, 8, 8)),
            (lines(3, 5, 7), lines(4, 16, 16)),
            (lines(4, 16, 16), lines(3, 13, 13)),
            (lines(2, 8, 8), lines(2, 3, 3)),
            (lines(5, 2, 2), lines(5, 1, 1)),
        ] {
            let count = from.extent();
            let numbers: Vec<f32> = (1..=count).map(|number| number as f32).collect();
            let expected = (0..to.lines * to.leading).map(|at| {
                let (line, place) = (at / to.leading, at % to.leading);
                let there = line < from.lines && place < from.length.min(to.length);
                match there {
                    true => numbers[line * from.leading + place],
                    false => 0.0,
                }
            });
            let expected: Vec<f32> = expected.collect();
            on_devices(|device| {
                let data = TensorData::new(numbers.clone(), [count]);
                let tensor = CubeBackend::float_from_data(data, device);
                let place = Place {
                    client: tensor.client.clone(),
                    device: device.clone(),
                    dtype: DType::F32,
                };
                let copy = repacked(&place, tensor.handle, from, to);
                let found = try_read_sync(CubeBackend::float_into_data(copy));
                let found = found.unwrap().unwrap().try_to_vec::<f32>().unwrap();
                assert_eq!(found, expected, "{from:?}, {to:?}");
            });
        }
    }
}
