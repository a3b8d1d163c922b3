//! Tensors as kernel arguments.

use std::cmp::Reverse;

use burn::backend::TensorMetadata;
use burn::tensor::{DType, Shape};
use burn_cubecl::{
    CubeBackend, CubeDevice,
    kernel::{cast, into_contiguous},
    ops::{
        numeric::{empty_device_contiguous_dtype, zeros_client},
        permute,
    },
    tensor::CubeTensor,
};
use burn_std::Metadata;
use cubecl::{client::Client, prelude::*, server::Handle};

use super::{matmul::forget_factors, rows::pitch_of};
use crate::Bias;

/// The maximum numbers of cubes, and of units in a cube, of a [`grid`].
const MAX_CUBES: usize = 8192;
const MAX_UNITS: usize = 1024;

/// The maximum number of elements of a kernel's array. An element may be four codes or floats, which kernels count in 32 bits,
/// and their loops run ahead of the end by up to two elements for each unit of a grid.
pub(in crate::kernels) const MOST: usize = u32::MAX as usize / 4 - 2 * MAX_CUBES * MAX_UNITS;

/// The number of words that hold `codes` codes.
pub(in crate::kernels) fn words(codes: usize) -> usize {
    codes.div_ceil(4)
}

/// A new tensor of codes. The allocation is whole words, of which the tensor shows only the bytes that are codes.
pub(in crate::kernels) fn empty_codes(
    client: &Client,
    device: &CubeDevice,
    shape: Shape,
) -> CubeTensor {
    let codes = shape.num_elements();
    let rest = 4 * words(codes) - codes;
    let handle = empty(client, 4 * words(codes)).offset_end(rest as u64);
    CubeTensor::new_contiguous(client.clone(), device.clone(), shape, handle, DType::U8)
}

/// New memory for a result.
fn empty(client: &Client, bytes: usize) -> Handle {
    watch_graphs(client);
    client.empty(bytes)
}

/// What a graph records writes the same memory each time it runs, and no handle of that tells.
fn watch_graphs(client: &Client) {
    if client.is_capturing() {
        forget_factors();
    }
}

/// The distance, in codes, between the rows of [`empty_code_rows`]: whole chunks, in which operands of tensor cores are copied.
pub(in crate::kernels) fn pitch(columns: usize) -> usize {
    columns.next_multiple_of(16)
}

/// A new tensor of codes whose rows begin at multiples of 16 bytes. It ends with the last code.
pub(in crate::kernels) fn empty_code_rows(like: &CubeTensor, shape: Shape) -> CubeTensor {
    let rank = shape.num_dims();
    let mut strides = vec![1; rank];
    let mut size = pitch(shape[rank - 1]);
    for dim in (0..rank - 1).rev() {
        strides[dim] = size;
        size *= shape[dim];
    }
    let rest = match size {
        0 => 0,
        _ => pitch(shape[rank - 1]) - shape[rank - 1],
    };
    let handle = empty(&like.client, size).offset_end(rest as u64);
    let layout = Metadata::new(shape, strides);
    CubeTensor::new(
        like.client.clone(),
        handle,
        layout,
        like.device.clone(),
        DType::U8,
    )
}

/// A new tensor of codes whose columns begin at multiples of 16 bytes.
pub(in crate::kernels) fn empty_code_columns(like: &CubeTensor, shape: &Shape) -> CubeTensor {
    let rank = shape.num_dims();
    let mut columns = shape.clone();
    columns[rank - 2] = shape[rank - 1];
    columns[rank - 1] = shape[rank - 2];
    swapped(empty_code_rows(like, columns))
}

/// The number of elements from the first to the last one of a tensor, gaps included.
pub(in crate::kernels) fn extent(tensor: &CubeTensor) -> usize {
    let (shape, strides) = (tensor.meta.shape(), tensor.meta.strides());
    if shape.num_elements() == 0 {
        return 0;
    }
    let last: usize = shape
        .iter()
        .zip(strides.iter())
        .map(|(size, stride)| (size - 1) * stride)
        .sum();
    last + 1
}

/// A new float tensor, row by row without gaps.
pub(in crate::kernels) fn empty_floats(
    like: &CubeTensor,
    shape: Shape,
    dtype: DType,
) -> CubeTensor {
    watch_graphs(&like.client);
    empty_device_contiguous_dtype(like.client.clone(), like.device.clone(), shape, dtype)
}

/// A new tensor of f32 zeros, row by row without gaps.
pub(in crate::kernels) fn zeros(like: &CubeTensor, shape: Shape) -> CubeTensor {
    let (client, device) = (like.client.clone(), like.device.clone());
    // Allocated as a single row, because on CUDA several rows have gaps between them.
    let row = Shape::new([shape.num_elements()]);
    let row = zeros_client(client.clone(), device.clone(), row, DType::F32);
    CubeTensor::new_contiguous(client, device, shape, row.handle, DType::F32)
}

/// A new tensor of a single f32, which is 0.
pub(in crate::kernels) fn zero_scalar(like: &CubeTensor) -> CubeTensor {
    let handle = like.client.create_from_slice(&[0; 4]);
    CubeTensor::new_contiguous(
        like.client.clone(),
        like.device.clone(),
        Shape::new([1]),
        handle,
        DType::F32,
    )
}

/// The buffer in which a kernel leaves an amax; an unused word if no amax is wanted.
pub(in crate::kernels) fn amax(client: &Client, amax: &Option<CubeTensor>) -> BufferArg {
    match amax {
        Some(amax) => raw(amax.handle.clone(), 1),
        None => word(client),
    }
}

/// A bias in f32; an unused word if there is none.
pub(in crate::kernels) fn bias(client: &Client, bias: &Bias<CubeBackend>) -> BufferArg {
    match bias {
        Bias::Row(bias) => elements(cast(bias.clone(), DType::F32)),
        Bias::None => word(client),
    }
}

/// All elements of a tensor, row by row, in its own dtype.
pub(in crate::kernels) fn elements(tensor: CubeTensor) -> BufferArg {
    whole(&into_contiguous(tensor))
}

/// All elements of an f32 tensor, row by row.
///
/// # Panics
/// If the tensor has another dtype, whose bits a kernel would read as f32.
pub(in crate::kernels) fn floats(tensor: CubeTensor) -> BufferArg {
    assert_f32(&tensor);
    elements(tensor)
}

/// The only element of an f32 tensor.
///
/// # Panics
/// If the tensor has another dtype, or not exactly one element.
pub(in crate::kernels) fn scalar(tensor: CubeTensor) -> BufferArg {
    let length = tensor.shape().num_elements();
    assert_eq!(length, 1, "a scale or an amax of {length} elements, not 1");
    floats(tensor)
}

/// Refuses a tensor that is not f32, as scales, amaxes and histories must be.
pub(in crate::kernels) fn assert_f32(tensor: &CubeTensor) {
    let dtype = tensor.dtype;
    assert_eq!(dtype, DType::F32, "scales and amaxes are f32; cast them");
}

/// All elements of a contiguous tensor, such as a new one.
pub(in crate::kernels) fn whole(tensor: &CubeTensor) -> BufferArg {
    let length = tensor.shape().num_elements();
    array(tensor.handle.clone(), length, tensor.dtype.size())
}

/// Swaps the last two dimensions, without a copy.
pub(crate) fn swapped(tensor: CubeTensor) -> CubeTensor {
    let rank = tensor.meta.num_dims();
    let mut axes: Vec<usize> = (0..rank).collect();
    axes.swap(rank - 2, rank - 1);
    permute(tensor, &axes)
}

/// For a tensor that is not contiguous: the same memory with its dimensions in an order in which it can be read
/// [by rows](super::rows), and the axes that permute it back. `None` if the tensor can be read so already, or if only a copy could.
pub(in crate::kernels) fn in_memory_order(tensor: &CubeTensor) -> Option<(CubeTensor, Vec<usize>)> {
    if pitch_of(tensor).is_some() {
        return None;
    }
    let strides = tensor.meta.strides();
    let mut axes: Vec<usize> = (0..tensor.meta.num_dims()).collect();
    axes.sort_by_key(|&axis| Reverse(strides[axis]));
    let mut back = vec![0; axes.len()];
    for (place, &axis) in axes.iter().enumerate() {
        back[axis] = place;
    }
    let turned = permute(tensor.clone(), &axes);
    pitch_of(&turned).is_some().then_some((turned, back))
}

/// A tensor of one dimension as a row.
pub(in crate::kernels) fn into_row(tensor: CubeTensor) -> CubeTensor {
    let (length, stride) = (tensor.meta.shape()[0], tensor.meta.strides()[0]);
    let layout = Metadata::new([1, length], [length * stride, stride]);
    CubeTensor::new(
        tensor.client,
        tensor.handle,
        layout,
        tensor.device,
        tensor.dtype,
    )
}

/// A tensor in its own dtype and layout.
pub(in crate::kernels) fn as_it_lies(tensor: &CubeTensor) -> BufferArg {
    array(tensor.handle.clone(), extent(tensor), tensor.dtype.size())
}

/// A copy in memory of its own, in the same layout.
pub(in crate::kernels) fn copy_as_it_lies(tensor: &CubeTensor) -> CubeTensor {
    let memory = CubeTensor::new_contiguous(
        tensor.client.clone(),
        tensor.device.clone(),
        Shape::new([extent(tensor)]),
        tensor.handle.clone(),
        tensor.dtype,
    );
    CubeTensor {
        meta: tensor.meta.clone(),
        ..memory.copy()
    }
}

/// A tensor of codes in its own layout, as words.
pub(in crate::kernels) fn code_words(codes: &CubeTensor) -> BufferArg {
    raw(codes.handle.clone(), words(extent(codes)))
}

/// Codes in rows of whole chunks, such as those of [`empty_code_rows`], as pairs of words. The padding of the last row is
/// included.
pub(in crate::kernels) fn code_pairs(codes: &CubeTensor) -> BufferArg {
    let mut handle = codes.handle.clone();
    let bytes = handle.size_in_used();
    let whole = bytes.next_multiple_of(16);
    handle.offset_end = handle
        .offset_end
        .map(|end| end.saturating_sub(whole - bytes));
    array(handle, whole as usize / 8, 8)
}

/// A buffer that a kernel does not use.
pub(in crate::kernels) fn word(client: &Client) -> BufferArg {
    raw(client.empty(4), 1)
}

/// A handle as an array of `length` words of four bytes.
pub(in crate::kernels) fn raw(handle: Handle, length: usize) -> BufferArg {
    array(handle, length, 4)
}

/// A handle as an array of `length` elements of `size` bytes.
///
/// # Panics
/// If the elements do not lie in the allocation, or are more than a kernel can count.
pub(in crate::kernels) fn array(handle: Handle, length: usize, size: usize) -> BufferArg {
    let (used, wanted) = (handle.size_in_used(), (length * size) as u64);
    // The last word of codes may hold fewer than four codes; allocations are whole words.
    assert!(
        wanted <= used.next_multiple_of(4),
        "{length} elements of {size} bytes in {used}"
    );
    assert!(
        length <= MOST,
        "{length} elements of {size} bytes: the fp8 kernels count up to {MOST}; split the tensor, such as by rows"
    );
    // SAFETY: the elements lie in the allocation, which the runtimes align and pad to more than 4 bytes.
    unsafe { BufferArg::from_raw_parts(showing(handle, wanted), length) }
}

/// A handle that shows exactly `bytes` bytes from where it starts, because a kernel takes a slice's length from its handle. A
/// handle may show more: on CUDA, rows end in padding, even if there is only one. It may show less: the rest of the last word of
/// codes is hidden, and a handle to codes that another GPU sent does not include it at all.
fn showing(mut handle: Handle, bytes: u64) -> Handle {
    let there = handle.size_in_used() + handle.offset_end.unwrap_or(0);
    match there.checked_sub(bytes) {
        Some(hidden) => handle.offset_end = Some(hidden).filter(|&hidden| hidden > 0),
        None => {
            let start = handle.offset_start;
            let size = start.unwrap_or(0) + bytes;
            handle = Handle::from_memory(handle.memory, handle.service, handle.stream, size);
            handle.offset_start = start;
        }
    }
    handle
}

/// A handle as a matrix of bytes, with rows `pitch` bytes apart.
///
/// # Panics
/// If the rows do not lie in the allocation.
pub(in crate::kernels) fn matrix(handle: Handle, shape: [usize; 2], pitch: usize) -> TensorArg {
    let [rows, columns] = shape;
    let end = rows.checked_sub(1).map_or(0, |last| last * pitch + columns);
    let allocated = handle.size_in_used() as usize;
    assert!(
        columns <= pitch && end <= allocated,
        "{rows} rows of {columns} bytes, {pitch} apart, in {allocated}"
    );
    // SAFETY: the rows lie in the allocation.
    unsafe { TensorArg::from_raw_parts(handle, [pitch, 1].into(), shape.into()) }
}

/// The grid for `tasks` independent tasks of a kernel that strides over them: enough units to fill a device, few enough for each
/// to have some work.
pub(in crate::kernels) fn grid(client: &Client, tasks: usize) -> (CubeCount, CubeDim) {
    let dim = CubeDim::new(client, tasks);
    (cubes(tasks.div_ceil(dim.num_elems() as usize)), dim)
}

/// The number of cubes for tasks that each take a whole cube.
pub(in crate::kernels) fn cubes(tasks: usize) -> CubeCount {
    CubeCount::new_1d(tasks.clamp(1, MAX_CUBES) as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// For the largest array of words of codes, a strided loop ends before its index exceeds 32 bits.
    #[test]
    fn kernels_count_in_32_bits() {
        let ahead = 2 * MAX_CUBES * MAX_UNITS;
        assert!(u32::try_from(4 * (MOST + ahead)).is_ok());
        assert!(u32::try_from(4 * (MOST + ahead + 1)).is_err());
        assert_eq!(MOST, 1_056_964_607, "as the README says");
    }

    #[cfg(feature = "cpu")]
    #[test]
    fn a_copy_has_the_same_codes_in_the_same_layout() {
        use burn::backend::ops::IntTensorOps;
        use burn_std::reader::try_read_sync;

        let device = CubeDevice::Cpu(Default::default());
        let client = device.client();
        let mut handle = client.create_from_slice(&(0..32).collect::<Vec<u8>>());
        handle.offset_start = Some(4);
        // Two rows of 3 of 8 codes, transposed.
        let layout = Metadata::new([3, 2], [1, 8]);
        let tensor = CubeTensor::new(client, handle, layout, device, DType::U8);
        let copy = copy_as_it_lies(&tensor);
        assert_eq!(copy.meta, tensor.meta);
        let data = try_read_sync(CubeBackend::int_into_data(copy)).unwrap();
        let codes: Vec<u8> = data.unwrap().iter().collect();
        assert_eq!(codes, [4, 12, 5, 13, 6, 14]);
    }

    /// NCCL writes codes from another GPU into a handle that has exactly as many bytes as the tensor.
    #[cfg(feature = "cpu")]
    #[test]
    fn the_last_word_of_codes_is_read_where_a_handle_ends_in_it() {
        use burn::backend::ops::FloatTensorOps;
        use burn::tensor::{FloatDType, TensorData};
        use burn_std::reader::try_read_sync;

        let device = CubeDevice::Cpu(Default::default());
        let client = device.client();
        let codes: Vec<u8> = (0x30..0x50).collect();
        let sent = client.create_from_slice(&codes);
        for (start, length) in [(0, 15), (0, 14), (0, 13), (0, 1), (8, 5), (0, 16)] {
            let size = (start + length) as u64;
            let mut handle =
                Handle::from_memory(sent.memory.clone(), sent.service, sent.stream, size);
            handle.offset_start = Some(start as u64).filter(|&start| start > 0);
            let shape = Shape::new([length]);
            let tensor = CubeTensor::new_contiguous(
                client.clone(),
                device.clone(),
                shape,
                handle,
                DType::U8,
            );
            let scale = CubeBackend::float_from_data(TensorData::from([1.0f32]), &device);
            let format = crate::Fp8Format::E4M3;
            let values = crate::kernels::dequantize(tensor, scale, format, FloatDType::F32);
            let values = try_read_sync(CubeBackend::float_into_data(values))
                .unwrap()
                .unwrap();
            let expected: Vec<f32> = codes[start..start + length]
                .iter()
                .map(|&code| cubecl_common::e4m3::from_bits(code).to_f32())
                .collect();
            assert_eq!(values.try_to_vec::<f32>().unwrap(), expected);
        }
    }
}
