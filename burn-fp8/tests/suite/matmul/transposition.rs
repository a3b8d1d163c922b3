//! The codes of a transpose.

use burn::backend::Flex;
use burn::tensor::Device;
use burn_fp8::{Fp8Cast, Fp8Format, Fp8Tensor, Granularity};

use super::super::device::Random;
use super::random;

/// Casts with one scale and with several, and their transposes.
fn turned(device: &Device) -> Vec<[Fp8Tensor<2>; 2]> {
    let x = random(&mut Random::new(19), [6, 11], device);
    let turned = [Granularity::Tensor, Granularity::Row].map(|granularity| {
        let cast = Fp8Cast::new(granularity, Fp8Format::E4M3);
        let tensor = Fp8Tensor::quantize_as(x.clone(), cast).unwrap();
        [tensor.clone(), tensor.transpose()]
    });
    turned.into()
}

/// A transpose has other strides over the same codes.
#[test]
fn a_transposition_copies_nothing() {
    for pair in turned(&Device::flex()) {
        let [before, after] = pair.map(|it| it.codes().try_into_primitive::<Flex>().unwrap());
        assert_eq!(after.layout().shape().as_slice(), [11, 6]);
        assert_eq!(after.layout().strides(), [1, 11]);
        assert_eq!(
            before.storage::<u8>().as_ptr(),
            after.storage::<u8>().as_ptr()
        );
    }
}

#[cfg(any(feature = "cpu", feature = "cuda", feature = "rocm", feature = "wgpu"))]
mod cube {
    use burn::backend::{Backend, tensor::IntTensor};
    use burn_cubecl::{Cube, CubeBackend, tensor::CubeTensor};
    use burn_dispatch::DispatchDevice;
    #[cfg(feature = "fusion")]
    use burn_fusion::Fusion;

    use super::{Fp8Tensor, turned};
    use crate::suite::device::devices;

    /// A backend whose tensors are CubeCL's, at once or after the ops that wait.
    trait Resolve: Backend {
        fn resolve(tensor: IntTensor<Self>) -> CubeTensor;
    }

    impl Resolve for CubeBackend {
        fn resolve(tensor: IntTensor<Self>) -> CubeTensor {
            tensor
        }
    }

    #[cfg(feature = "fusion")]
    impl Resolve for Fusion<CubeBackend> {
        fn resolve(tensor: IntTensor<Self>) -> CubeTensor {
            let client = tensor.client.clone();
            client.resolve_tensor_int::<CubeBackend>(tensor)
        }
    }

    #[test]
    fn a_transposition_copies_nothing() {
        let devices = devices().into_iter();
        for device in devices.filter(|it| matches!(it.as_dispatch(), DispatchDevice::Cube(_))) {
            for pair in turned(&device) {
                let codes = |it: Fp8Tensor<2>| it.codes().try_into_primitive::<Cube>();
                let [before, after] = pair.map(|it| Cube::resolve(codes(it).unwrap()));
                assert_eq!(after.meta.shape().as_slice(), [11, 6]);
                let [row, column] = [0, 1].map(|dim| before.meta.strides()[dim]);
                assert_eq!((row >= 11, column), (true, 1));
                assert_eq!(after.meta.strides()[..], [column, row]);
                assert_eq!(
                    before.handle.memory.descriptor(),
                    after.handle.memory.descriptor()
                );
                assert_eq!(before.handle.offset_start, after.handle.offset_start);
            }
        }
    }
}
