//! Against Flex, with whole numbers, whose sums are exact.

use super::*;
use crate::rowwise::tests::on_devices;
use burn_backend::{Shape, Slice, TensorData, ops::FloatTensorOps};
use burn_flex::{Flex, FlexDevice};
use burn_std::{bf16, reader::try_read_sync};

/// Numbers between -1 and 1.
fn numbers(shape: &[usize], step: usize) -> TensorData {
    let number = |at: usize| [1.0, 0.0, -1.0][(at * step + at / 7) % 3];
    let values: Vec<f32> = (0..shape.iter().product()).map(number).collect();
    TensorData::new(values, shape.to_vec())
}

fn read<B: Backend>(tensor: FloatTensor<B>) -> TensorData {
    let data = try_read_sync(B::float_into_data(tensor)).unwrap();
    data.unwrap().convert::<f32>()
}

/// The same elements in a view: whose channels are last in memory, or that begins 8 bytes into its memory.
fn laid(tensor: CubeTensor, how: usize) -> CubeTensor {
    match how {
        0 => tensor,
        1 => channels_second(channels_last(tensor)),
        _ => {
            let count = tensor.shape().num_elements();
            let (client, device) = (tensor.client.clone(), tensor.device.clone());
            let wide = client.empty(count * 2 + 8);
            let (shape, dtype) = (tensor.shape(), tensor.dtype);
            let flat = CubeTensor::new_contiguous(
                client,
                device,
                Shape::new([count + 4]),
                wide.clone(),
                dtype,
            );
            let row = CubeBackend::float_reshape(tensor, Shape::new([count]));
            let written = CubeBackend::float_slice_assign(flat, &[Slice::from(4..count + 4)], row);
            let handle = written.handle.offset_start(8);
            let (client, device) = (written.client, written.device);
            CubeTensor::new_contiguous(client, device, shape, handle, dtype)
        }
    }
}

type Sizes<'a> = (&'a [usize], &'a [usize], usize, (usize, usize), usize);

/// `x`, `w`, stride, padding and dilation, the same for all dimensions.
const KINDS: [Sizes; 6] = [
    (&[2, 3, 9], &[4, 3, 3], 2, (1, 1), 1),
    (&[2, 8, 6, 5], &[16, 8, 3, 3], 1, (1, 1), 1),
    (&[2, 3, 9, 8], &[5, 3, 3, 3], 2, (0, 0), 2),
    // In groups, and one for each channel.
    (&[1, 6, 5, 4], &[4, 3, 2, 2], 1, (1, 1), 1),
    (&[2, 4, 5, 5], &[4, 1, 3, 3], 2, (1, 1), 1),
    (&[1, 2, 4, 3, 5], &[3, 2, 2, 2, 2], 1, (1, 1), 1),
];

/// Convolutions of all kinds, with the shapes of the tensors they are computed from.
fn each_kind(mut body: impl FnMut(Convolution, [Shape; 2])) {
    for (x, weight, stride, padding, dilation) in KINDS {
        for wanted in [
            Wanted::Output,
            Wanted::InputGradient,
            Wanted::WeightGradient,
        ] {
            let dims = x.len() - 2;
            let of = Convolution {
                wanted,
                dtype: DType::BF16,
                x: Shape::from(x),
                weight: Shape::from(weight),
                stride: vec![stride; dims],
                padding: vec![padding; dims],
                dilation: vec![dilation; dims],
                groups: x[1] / weight[1],
            };
            let y = Convolution {
                wanted: Wanted::Output,
                ..of.clone()
            };
            let (x, weight, y) = (of.x.clone(), of.weight.clone(), y.shape());
            let inputs = match wanted {
                Wanted::Output => [x, weight],
                Wanted::InputGradient => [weight, y],
                Wanted::WeightGradient => [x, y],
            };
            body(of, inputs);
        }
    }
}

#[test]
fn kernels_convolve_however_tensors_lie() {
    on_devices(|device| {
        let Some(library) = library(device) else {
            println!("SKIPPED: {device:?} has no cuDNN");
            return;
        };
        each_kind(|of, shapes| {
            assert!(can(&of, device), "{of:?}");
            let data = [numbers(&shapes[0], 5), numbers(&shapes[1], 4)];
            let on_flex =
                |data: TensorData| Flex::float_from_data(data.convert::<bf16>(), &FlexDevice);
            let on_device =
                |data: TensorData| CubeBackend::float_from_data(data.convert::<bf16>(), device);
            let expected = of.clone().by_backend::<Flex>(data.clone().map(on_flex));
            let expected = read::<Flex>(expected);
            for how in 0..3 {
                let [a, b] = data.clone().map(on_device);
                let inputs = [laid(a, how), laid(b, 2 - how)];
                let output = by_library(&library, &inputs, &of).expect("it has a plan");
                assert_eq!(
                    read::<CubeBackend>(output),
                    expected,
                    "{of:?}, laid out as {how}"
                );
            }
        });
    });
}

/// Only 16 bits are its own.
#[test]
fn other_dtypes_are_left_to_kernels() {
    each_kind(|of, _| {
        let in_dtype = |dtype| Convolution {
            dtype,
            ..of.clone()
        };
        assert!(described(&in_dtype(DType::F32)).is_none());
        let (half, brain) = (in_dtype(DType::F16), in_dtype(DType::BF16));
        assert_eq!(described(&half).unwrap().element, Element::F16);
        assert_eq!(described(&brain).unwrap().shapes()[2], of.shape().to_vec());
    });
}
