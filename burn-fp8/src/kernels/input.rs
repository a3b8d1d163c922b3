//! How kernels read floats: four at a time, with one load if the layout allows it.

use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::{blocks::Blocks, buffer, codec::Four};
use crate::{Fp8Error, Granularity};

/// The elements of the longest row or column that is divided into blocks: `FastDivmod` wraps around for larger numbers of 32 bits.
const LONGEST: usize = 1 << 31;

/// Refuses to cast a tensor that has more elements than the kernels can count.
///
/// # Errors
/// [`Fp8Error::TooLarge`].
pub(crate) fn check_cast(
    shape: &Shape,
    dtype: DType,
    granularity: Granularity,
) -> Result<(), Fp8Error> {
    let elements = shape.num_elements();
    let refused = |what, elements, most| Fp8Error::TooLarge {
        what,
        shape: shape.to_vec(),
        elements,
        most,
    };
    // A tensor with one scale is treated as one row. If blocks share groups of four elements, elements are read one by one.
    let columns = match granularity {
        Granularity::Tensor => elements,
        _ => {
            let blocks = Blocks::of(shape, granularity);
            let longest = blocks.matrix[0].max(blocks.matrix[1]);
            if longest > LONGEST {
                let what = "a row or column of the tensor to be cast with several scales";
                return Err(refused(what, longest, LONGEST));
            }
            match blocks.by_fours() {
                true => blocks.matrix[1],
                false => 1,
            }
        }
    };
    let most = fours(columns, dtype) * buffer::MOST;
    match elements <= most {
        true => Ok(()),
        false => Err(refused("the tensor to be cast", elements, most)),
    }
}

/// The number of elements in each load of a kernel, for a contiguous tensor with rows of `columns` elements: 4, or 1 if a load of
/// 4 would span two rows or not be aligned.
pub(in crate::kernels) fn vector(tensor: &CubeTensor, columns: usize) -> usize {
    let size = 4 * tensor.dtype.size();
    let offset = tensor.handle.offset_start.unwrap_or(0);
    match offset.is_multiple_of(size as u64) {
        true => fours(columns, tensor.dtype),
        false => 1,
    }
}

/// [`vector`] for aligned tensors.
fn fours(columns: usize, dtype: DType) -> usize {
    // PTX, and so CUDA, has no loads of more than 16 bytes.
    match columns.is_multiple_of(4) && 4 * dtype.size() <= 16 {
        true => 4,
        false => 1,
    }
}

/// A tensor as an array of vectors of `vector` elements, gaps between its rows included.
pub(in crate::kernels) fn by(tensor: &CubeTensor, vector: usize) -> BufferArg {
    buffer::array(
        tensor.handle.clone(),
        buffer::extent(tensor) / vector,
        vector * tensor.dtype.size(),
    )
}

/// The four elements of a slice from number `first` on, which is a multiple of 4 if loads have 4 elements. Elements from `end` on
/// are 0.
#[cube]
pub(in crate::kernels) fn four<F: Numeric, N: Size>(
    input: &[Vector<F, N>],
    first: usize,
    end: usize,
) -> Four {
    let size = N::value();
    let mut values = Four::new(0.0f32);
    if comptime!(size == 4) {
        if first < end {
            values = Four::cast_from(input[first / 4]);
        }
    } else {
        #[unroll]
        for lane in 0..4usize {
            if first + lane < end {
                values.insert(lane, f32::cast_from(input[first + lane].extract(0usize)));
            }
        }
    }
    values
}

#[cfg(test)]
mod tests {
    use super::*;

    /// If rows are whole loads of four elements, four times as many elements can be counted.
    #[test]
    fn casts_are_as_large_as_their_loads_count() {
        let (one, four) = (buffer::MOST, 4 * buffer::MOST);
        let block = |rows, columns| Granularity::Block { rows, columns };
        for (columns, dtype, granularity, most) in [
            (1 << 10, DType::F32, Granularity::Tensor, four),
            (1 << 10, DType::BF16, Granularity::Row, four),
            (1 << 10, DType::BF16, Granularity::Column, one),
            (1 << 10, DType::BF16, block(128, 128), four),
            (1 << 10, DType::BF16, block(6, 6), one),
            (1 << 10, DType::F64, Granularity::Tensor, one),
            (1023, DType::BF16, Granularity::Row, one),
        ] {
            let check = |rows| check_cast(&Shape::new([rows, columns]), dtype, granularity);
            let rows = most / columns;
            assert_eq!(check(rows), Ok(()), "{columns} {granularity:?}");
            let refused = check(rows + 1);
            let found = match &refused {
                Err(Fp8Error::TooLarge { elements, most, .. }) => [*elements, *most],
                other => panic!("{other:?}"),
            };
            assert_eq!(
                found,
                [(rows + 1) * columns, most],
                "{columns} {granularity:?}"
            );
        }
        // In 32 bits, block 65,536 of 32,772 columns would be block 0.
        let wide = |columns| check_cast(&Shape::new([columns]), DType::U8, block(1, 32_772));
        assert_eq!(wide(LONGEST), Ok(()));
        assert!(wide(LONGEST + 4).is_err());
        let tall = Shape::new([LONGEST + 4, 1]);
        assert!(check_cast(&tall, DType::BF16, Granularity::Row).is_err());
        assert_eq!(check_cast(&tall, DType::BF16, Granularity::Tensor), Ok(()));
        // With one scale per tensor, rows do not matter.
        let pairs = Shape::new([2 * (one / 2), 2]);
        assert_eq!(check_cast(&pairs, DType::F16, Granularity::Tensor), Ok(()));
        let odd = Shape::new([2 * (one / 2) + 1, 1]);
        assert_eq!(check_cast(&odd, DType::F16, Granularity::Tensor), Ok(()));
        assert!(check_cast(&pairs, DType::F16, Granularity::Row).is_err());
    }
}
