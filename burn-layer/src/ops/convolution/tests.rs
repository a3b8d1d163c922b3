//! Against Flex's own convolutions, which are never products of all pixels. All numbers and sums are whole, and small.

use super::*;
use crate::layer_set::Stack;
use burn_backend::{
    DType, TensorData,
    ops::{FloatTensorOps, ModuleOps},
};
use burn_flex::{Flex, FlexDevice};

/// A set of no layers, on a backend that cannot compute tall products.
fn layers() -> LayerSet {
    let (layers, custom_ops) = (Vec::new(), None);
    let set = LayerSet::new(0, Stack { layers, custom_ops });
    set.set_on_cuda();
    set
}

fn tensor(shape: &[usize], step: usize) -> FloatTensor<Flex> {
    on::<Flex>(shape, step, &FlexDevice)
}

fn on<B: Backend>(shape: &[usize], step: usize, device: &B::Device) -> FloatTensor<B> {
    let count = shape.iter().product();
    let values: Vec<f32> = (0..count)
        .map(|i| match (i * step + i / 7) % 11 {
            0 | 4 => 1.0,
            5 | 9 => -1.0,
            _ => 0.0,
        })
        .collect();
    let data = TensorData::new(values, shape.to_vec()).convert_dtype(DType::BF16);
    B::float_from_data(data, device)
}

fn data(tensor: FloatTensor<Flex>) -> TensorData {
    data_of::<Flex>(tensor)
}

fn data_of<B: Backend>(tensor: FloatTensor<B>) -> TensorData {
    burn_std::future::block_on(B::float_into_data(tensor)).unwrap()
}

fn options<const N: usize>(
    stride: usize,
    padding: (usize, usize),
    dilation: usize,
) -> ConvOptions<N> {
    ConvOptions::new_with_padding([stride; N], [padding; N], [dilation; N], 1)
}

/// In place of a convolution that has to be computed in another shape.
fn not_forward<const N: usize>(
    _: FloatTensor<Flex>,
    _: FloatTensor<Flex>,
    _: Option<FloatTensor<Flex>>,
    _: ConvOptions<N>,
) -> FloatTensor<Flex> {
    panic!("this is a tall product")
}

/// In place of a gradient that has to be computed in another shape.
fn not_backward<const N: usize>(
    _: FloatTensor<Flex>,
    _: FloatTensor<Flex>,
    _: FloatTensor<Flex>,
    _: ConvOptions<N>,
) -> FloatTensor<Flex> {
    panic!("this is a tall product")
}

macro_rules! agrees {
    ($n:literal, $conv:ident, $x_backward:ident, $weight_backward:ident) => {
        /// The output, if `pointwise`, and the gradient of the input, are those of Flex.
        fn $conv(x: &[usize], weight: &[usize], options: ConvOptions<$n>, pointwise: bool) {
            let layers = layers();
            let [x, weight] = [tensor(x, 3), tensor(weight, 5)];
            let bias = tensor(&[weight.shape()[0]], 4);
            let convolved = |convolve: Convolve<Flex, $n>| {
                let (x, weight, bias) = (x.clone(), weight.clone(), Some(bias.clone()));
                data(forward::<Flex, $n>(
                    &layers,
                    x,
                    weight,
                    bias,
                    options.clone(),
                    convolve,
                ))
            };
            let (x_, weight_) = (x.clone(), weight.clone());
            let expected = Flex::$conv(x_, weight_, Some(bias.clone()), options.clone());
            let grad = tensor(&expected.shape(), 2);
            let expected = data(expected);
            match pointwise {
                true => assert_eq!(convolved(not_forward), expected, "{options:?}"),
                false => assert_eq!(convolved(Flex::$conv), expected, "{options:?}"),
            }
            let arguments = || (x.clone(), weight.clone(), grad.clone(), options.clone());
            let (x_, weight_, grad_, options_) = arguments();
            let found = x_backward::<Flex, $n>(
                &layers,
                x_,
                weight_,
                grad_,
                options_,
                not_backward,
                Flex::$conv,
            );
            let (x_, weight_, grad_, options_) = arguments();
            let expected = data(Flex::$x_backward(x_, weight_, grad_, options_));
            assert_eq!(data(found), expected, "{options:?}");
            let (x_, weight_, grad_, options_) = arguments();
            let backward: Backward<Flex, $n> =
                match pointwise && is_tall(weight.shape()[0], weight.shape()[1]) {
                    true => not_backward,
                    false => Flex::$weight_backward,
                };
            let found =
                weight_backward::<Flex, $n>(&layers, x_, weight_, grad_, options_, backward);
            let (x_, weight_, grad_, options_) = arguments();
            let expected = data(Flex::$weight_backward(x_, weight_, grad_, options_));
            assert_eq!(data(found), expected, "{options:?}");
        }
    };
}
agrees!(1, conv1d, conv1d_x_backward, conv1d_weight_backward);
agrees!(2, conv2d, conv2d_x_backward, conv2d_weight_backward);
agrees!(3, conv3d, conv3d_x_backward, conv3d_weight_backward);

#[test]
fn pointwise_convolutions_are_products() {
    conv1d(&[2, 33, 70], &[34, 33, 1], options(1, (0, 0), 1), true);
    conv2d(&[3, 33, 8, 7], &[40, 33, 1, 1], options(1, (0, 0), 1), true);
    conv2d(
        &[3, 33, 15, 13],
        &[40, 33, 1, 1],
        options(2, (0, 0), 1),
        true,
    );
    conv3d(
        &[2, 34, 3, 4, 6],
        &[33, 34, 1, 1, 1],
        options(1, (0, 0), 1),
        true,
    );
    // More output channels than input channels: the gradient of the weight is tall.
    conv2d(
        &[4, 36, 13, 12],
        &[150, 36, 1, 1],
        options(1, (0, 0), 1),
        true,
    );
    conv2d(
        &[5, 36, 22, 24],
        &[150, 36, 1, 1],
        options(2, (0, 0), 1),
        true,
    );
}

/// However few pixels there are: the backend's own are not called.
#[test]
fn a_library_computes_pointwise_convolutions() {
    let layers = layers();
    layers.mechanisms.add(crate::ops::Multiply::<Flex> {
        product: Flex::float_matmul,
        over_rows: |x, y| {
            let product = Flex::float_matmul(Flex::float_swap_dims(x, 0, 1), y);
            let shape = product.shape();
            Flex::float_reshape(product, Shape::new([1, shape[0], shape[1]]))
        },
    });
    for (stride, [ins, outs]) in [(1, [8, 6]), (2, [8, 6]), (1, [3, 40])] {
        let (x, weight) = (tensor(&[2, ins, 5, 3], 3), tensor(&[outs, ins, 1, 1], 5));
        let (bias, options) = (Some(tensor(&[outs], 4)), options(stride, (0, 0), 1));
        let arguments = || (x.clone(), weight.clone(), bias.clone(), options.clone());
        let (x_, weight_, bias_, options_) = arguments();
        let expected = Flex::conv2d(x_, weight_, bias_, options_);
        let (x_, weight_, bias_, options_) = arguments();
        let found = forward::<Flex, 2>(&layers, x_, weight_, bias_, options_, not_forward);
        let grad = tensor(&found.shape(), 2);
        assert_eq!(data(found), data(expected));

        let arguments = || (x.clone(), weight.clone(), grad.clone(), options.clone());
        let (x_, weight_, grad_, options_) = arguments();
        let expected = data(Flex::conv2d_x_backward(x_, weight_, grad_, options_));
        let (x_, weight_, grad_, options_) = arguments();
        let found = x_backward::<Flex, 2>(
            &layers,
            x_,
            weight_,
            grad_,
            options_,
            not_backward,
            not_forward,
        );
        assert_eq!(data(found), expected);
        let (x_, weight_, grad_, options_) = arguments();
        let expected = data(Flex::conv2d_weight_backward(x_, weight_, grad_, options_));
        let (x_, weight_, grad_, options_) = arguments();
        let found = weight_backward::<Flex, 2>(&layers, x_, weight_, grad_, options_, not_backward);
        assert_eq!(data(found), expected);
    }
}

#[test]
fn gradients_of_inputs_are_convolutions() {
    for (stride, padding, dilation) in [
        (1, (1, 1), 1),
        (1, (0, 0), 1),
        (1, (2, 2), 2),
        (1, (0, 2), 1),
        // More padding than the kernel reaches.
        (1, (3, 3), 1),
        (2, (1, 1), 1),
        (2, (0, 1), 1),
        (2, (3, 0), 1),
        (3, (1, 1), 1),
        // No pixel of the input is read twice, and some are not read.
        (4, (2, 2), 1),
    ] {
        let long = 4 * 12 * stride;
        conv1d(
            &[4, 12, long],
            &[5, 12, 3],
            options(stride, padding, dilation),
            false,
        );
        let [height, width] = [6 * stride, 6 * stride + 1];
        conv2d(
            &[9, 4, height, width],
            &[6, 4, 3, 3],
            options(stride, padding, dilation),
            false,
        );
    }
    // The kernel is as large as its stride: each phase is pointwise.
    conv2d(&[4, 3, 28, 28], &[5, 3, 4, 4], options(4, (0, 0), 1), false);
    conv3d(
        &[3, 2, 9, 9, 9],
        &[3, 2, 3, 3, 3],
        options(1, (1, 1), 1),
        false,
    );
    conv3d(
        &[3, 2, 13, 13, 13],
        &[3, 2, 3, 3, 3],
        options(2, (1, 1), 1),
        false,
    );
    // More padding is left out than there is output: a dilated convolution of a short sequence, and one of single pixels.
    conv1d(&[32, 12, 5], &[5, 12, 3], options(1, (8, 8), 8), false);
    conv2d(&[512, 4, 1, 1], &[6, 4, 5, 5], options(1, (2, 2), 1), false);
    // Wide: the backend would try the transposition.
    conv2d(&[4, 20, 3, 3], &[6, 20, 3, 3], options(1, (1, 1), 1), false);
}

/// As the backend multiplies them, there are tall products among these.
#[test]
fn gradients_of_weights_are_taken_of_fewer_channels() {
    let (x, weight) = (tensor(&[2, 9, 6, 6], 3), tensor(&[300, 9, 2, 2], 5));
    let options = options::<2>(1, (0, 0), 1);
    let grad = tensor(&[2, 300, 5, 5], 2);
    fn few(
        x: FloatTensor<Flex>,
        weight: FloatTensor<Flex>,
        grad: FloatTensor<Flex>,
        options: ConvOptions<2>,
    ) -> FloatTensor<Flex> {
        assert!(!is_tall(weight.shape()[0], 36) && grad.shape()[1] == weight.shape()[0]);
        Flex::conv2d_weight_backward(x, weight, grad, options)
    }
    let (x_, weight_, grad_) = (x.clone(), weight.clone(), grad.clone());
    let found = weight_backward::<Flex, 2>(&layers(), x_, weight_, grad_, options.clone(), few);
    let expected = Flex::conv2d_weight_backward(x, weight, grad, options);
    assert_eq!(data(found), data(expected));
}

/// A squeeze-and-excitation block's: images of one pixel.
#[test]
fn gradients_of_weights_of_one_pixel_are_products() {
    let (x, weight) = (tensor(&[6, 200, 1, 1], 3), tensor(&[40, 200, 1, 1], 5));
    let (options, grad) = (options::<2>(1, (0, 0), 1), tensor(&[6, 40, 1, 1], 2));
    let (x_, weight_, grad_) = (x.clone(), weight.clone(), grad.clone());
    let options_ = options.clone();
    let found = weight_backward::<Flex, 2>(&layers(), x_, weight_, grad_, options_, not_backward);
    let expected = Flex::conv2d_weight_backward(x, weight, grad, options);
    assert_eq!(data(found), data(expected));
}

/// Convolutions in groups, in f32, and without tall products.
#[test]
fn others_are_left_to_the_backend() {
    fn never(
        _: FloatTensor<Flex>,
        _: FloatTensor<Flex>,
        _: Option<FloatTensor<Flex>>,
        _: ConvOptions<2>,
    ) -> FloatTensor<Flex> {
        panic!("left to the backend")
    }
    let wide = || tensor(&[3, 33, 8, 7], 3);
    let weight = || tensor(&[40, 33, 1, 1], 5);
    let single = |tensor| Flex::float_cast(tensor, burn_backend::FloatDType::F32);
    let pointwise = options::<2>(1, (0, 0), 1);
    let both = ConvOptions::new([2; 2], [1; 2], [2; 2], 1);
    let groups = ConvOptions::new([1; 2], [1; 2], [1; 2], 2);
    for (x, weight, options) in [
        (single(wide()), single(weight()), pointwise.clone()),
        (tensor(&[1, 33, 5, 4], 3), weight(), pointwise),
        (tensor(&[5, 4, 12, 12], 3), tensor(&[6, 4, 3, 3], 5), both),
        (tensor(&[5, 8, 9, 9], 3), tensor(&[6, 4, 3, 3], 5), groups),
    ] {
        let output = Flex::conv2d(x.clone(), weight.clone(), None, options.clone());
        let grad = Flex::float_zeros(output.shape(), &FlexDevice, x.dtype().into());
        let (x_, weight_) = (x.clone(), weight.clone());
        let arguments = (grad.clone(), options.clone());
        let backward = Flex::conv2d_x_backward;
        let found = x_backward::<Flex, 2>(
            &layers(),
            x_,
            weight_,
            arguments.0,
            arguments.1,
            backward,
            never,
        );
        let expected = Flex::conv2d_x_backward(x, weight, grad, options);
        assert_eq!(data(found), data(expected));
    }
}

/// On CubeCL's backend, whose kernels those of CUDA are, too: what a stride of two leaves out.
#[cfg(feature = "cpu")]
#[test]
fn cubecl_computes_the_same() {
    use burn_cubecl::{CubeBackend, CubeDevice};
    let device = CubeDevice::Cpu(Default::default());
    let layers = layers();
    for (x, weight, padding) in [
        ([2, 33, 17, 15], [33, 33, 1, 1], 0),
        ([4, 4, 13, 12], [3, 4, 3, 3], 1),
    ] {
        let options = || ConvOptions::<2>::new([2; 2], [padding; 2], [1; 2], 1);
        let output = Flex::conv2d(tensor(&x, 3), tensor(&weight, 5), None, options());
        let (grad, expected) = (output.shape(), data(output));
        let on = |shape: &[usize], step| on::<CubeBackend>(shape, step, &device);
        let convolve = CubeBackend::conv2d;
        if padding == 0 {
            let (x, weight) = (on(&x, 3), on(&weight, 5));
            let found = forward::<CubeBackend, 2>(&layers, x, weight, None, options(), convolve);
            assert_eq!(data_of::<CubeBackend>(found), expected);
        }
        let backward = CubeBackend::conv2d_x_backward;
        let (x_, weight_, grad_) = (on(&x, 3), on(&weight, 5), on(&grad, 2));
        let found = x_backward::<CubeBackend, 2>(
            &layers,
            x_,
            weight_,
            grad_,
            options(),
            backward,
            convolve,
        );
        let (x_, weight_, grad_) = (tensor(&x, 3), tensor(&weight, 5), tensor(&grad, 2));
        let expected = Flex::conv2d_x_backward(x_, weight_, grad_, options());
        assert_eq!(data_of::<CubeBackend>(found), data(expected));
    }
}

/// Strides that TMA does not take: in every dtype, with pixels that no patch has.
#[test]
fn convolutions_of_large_patches_are_products() {
    let layers = layers();
    for dtype in [DType::F32, DType::BF16] {
        for (x, kernel) in [([2, 3, 18, 18], [9, 9]), ([3, 2, 40, 21], [10, 9])] {
            let cast = |tensor| Flex::float_cast(tensor, dtype.into());
            let weight = [4, x[1], kernel[0], kernel[1]];
            let [x, weight] = [tensor(&x, 3), tensor(&weight, 5)].map(cast);
            let bias = cast(tensor(&[4], 4));
            let options = ConvOptions::<2>::new(kernel, [0; 2], [1; 2], 1);
            let (x_, weight_, bias_) = (x.clone(), weight.clone(), Some(bias.clone()));
            let found =
                forward::<Flex, 2>(&layers, x_, weight_, bias_, options.clone(), not_forward);
            let (x_, weight_) = (x.clone(), weight.clone());
            let expected = Flex::conv2d(x_, weight_, Some(bias), options.clone());
            let grad = cast(tensor(&expected.shape(), 2));
            assert_eq!(data(found), data(expected), "{dtype:?}");
            let arguments = || (x.clone(), weight.clone(), grad.clone(), options.clone());
            let (x_, weight_, grad_, options_) = arguments();
            let found = x_backward::<Flex, 2>(
                &layers,
                x_,
                weight_,
                grad_,
                options_,
                not_backward,
                not_forward,
            );
            let (x_, weight_, grad_, options_) = arguments();
            let expected = Flex::conv2d_x_backward(x_, weight_, grad_, options_);
            assert_eq!(data(found), data(expected), "{dtype:?}");
            let (x_, weight_, grad_, options_) = arguments();
            let found =
                weight_backward::<Flex, 2>(&layers, x_, weight_, grad_, options_, not_backward);
            let (x_, weight_, grad_, options_) = arguments();
            let expected = Flex::conv2d_weight_backward(x_, weight_, grad_, options_);
            assert_eq!(data(found), data(expected), "{dtype:?}");
        }
    }
}

/// What a library is asked for, and the backend's own are not, where it says that it can.
#[test]
fn a_library_computes_what_is_no_product() {
    fn is_small(of: &super::library::Convolution, _: &FlexDevice) -> bool {
        of.x[0] < 9
    }
    let layers = layers();
    layers.mechanisms.add(Convolutions::<Flex> {
        can: is_small,
        compute: |inputs, of| {
            let shape = of.shape();
            let computed = of.by_backend::<Flex>(inputs);
            assert_eq!(computed.shape(), shape);
            computed
        },
    });
    let three = options::<2>(2, (1, 1), 1);
    let skipping = options::<2>(2, (0, 0), 1);
    let depthwise = ConvOptions::new([1; 2], [1; 2], [1; 2], 6);
    for (images, weight, options) in [
        (4, [8, 6, 3, 3], three.clone()),
        (4, [6, 1, 3, 3], depthwise.clone()),
        (4, [8, 6, 1, 1], skipping),
        // More than it can.
        (9, [8, 6, 3, 3], three),
        (9, [6, 1, 3, 3], depthwise),
    ] {
        let can = images < 9;
        let (x, weight) = (tensor(&[images, 6, 7, 5], 3), tensor(&weight, 5));
        let bias = Some(tensor(&[weight.shape()[0]], 4));
        let arguments = || (x.clone(), weight.clone(), options.clone());
        let (x_, weight_, options_) = arguments();
        let expected = Flex::conv2d(x_, weight_, bias.clone(), options_);
        let grad = tensor(&expected.shape(), 2);
        let (x_, weight_, options_) = arguments();
        let convolve = if can { not_forward } else { Flex::conv2d };
        let found = forward::<Flex, 2>(&layers, x_, weight_, bias, options_, convolve);
        assert_eq!(data(found), data(expected));

        let (x_, weight_, options_) = arguments();
        let expected = Flex::conv2d_x_backward(x_, weight_, grad.clone(), options_);
        let (x_, weight_, options_) = arguments();
        let backward = if can {
            not_backward
        } else {
            Flex::conv2d_x_backward
        };
        let found = x_backward::<Flex, 2>(
            &layers,
            x_,
            weight_,
            grad.clone(),
            options_,
            backward,
            Flex::conv2d,
        );
        assert_eq!(data(found), data(expected));

        let (x_, weight_, options_) = arguments();
        let expected = Flex::conv2d_weight_backward(x_, weight_, grad.clone(), options_);
        let (x_, weight_, options_) = arguments();
        let backward = if can {
            not_backward
        } else {
            Flex::conv2d_weight_backward
        };
        let found = weight_backward::<Flex, 2>(&layers, x_, weight_, grad, options_, backward);
        assert_eq!(data(found), data(expected));
    }
}
