//! [`Layered`]: a backend with layers over it.

use crate::{LayeredDevice, LayeredFloat, LayeredTensor};
use burn_backend::{
    Backend, BackendTypes, DType, DTypeUsageSet, ExecutionError, GraphUnsupported, MemoryPoolUsage,
    ProfileDuration, ProfileOptions, ProfileToken, SlicedPoolReport, TensorData,
    tensor::{BoolTensor, FloatTensor, IntTensor, QuantizedTensor},
};
use burn_ir::{BackendIr, HandleKind, TensorHandle};
use core::{fmt, marker::PhantomData};

/// The backend `B` under the layers of its device. It is a backend itself, but has `B`'s kernels:
/// every op runs on `B`, in the dtypes of the layers' plan.
#[derive(Clone, Default)]
pub struct Layered<B>(PhantomData<fn() -> B>);

impl<B> fmt::Debug for Layered<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(core::any::type_name::<Self>())
    }
}

impl<B: BackendIr> BackendTypes for Layered<B> {
    type Device = LayeredDevice<B::Device>;
    type FloatTensorPrimitive = LayeredFloat<B>;
    type IntTensorPrimitive = LayeredTensor<IntTensor<B>>;
    type BoolTensorPrimitive = LayeredTensor<BoolTensor<B>>;
    type QuantizedTensorPrimitive = LayeredTensor<QuantizedTensor<B>>;
    // A captured graph would replay casts of tensors that have changed since the capture.
    type GraphPrimitive = GraphUnsupported;
}

impl<B: BackendIr> Backend for Layered<B> {
    fn memory_persistent_allocations<Output: Send, Input: Send, Func>(
        device: &Self::Device,
        input: Input,
        func: Func,
    ) -> Output
    where
        Func: Fn(Input) -> Output + Send,
    {
        B::memory_persistent_allocations(device.base(), input, func)
    }

    fn memory_cleanup(device: &Self::Device) {
        B::memory_cleanup(device.base());
    }

    fn memory_pool_report(device: &Self::Device) -> Option<Vec<SlicedPoolReport>> {
        B::memory_pool_report(device.base())
    }

    fn memory_pool_usage(device: &Self::Device) -> Option<MemoryPoolUsage> {
        B::memory_pool_usage(device.base())
    }

    fn name(device: &Self::Device) -> String {
        format!("layered<{}>", B::name(device.base()))
    }

    fn seed(device: &Self::Device, seed: u64) {
        B::seed(device.base(), seed);
    }

    fn sync(device: &Self::Device) -> Result<(), ExecutionError> {
        device.layer().compute_pending();
        B::sync(device.base())
    }

    fn profile<O: Send + 'static>(
        device: &Self::Device,
        options: ProfileOptions,
        func: impl FnOnce() -> O + Send,
    ) -> Result<(O, ProfileDuration), ExecutionError> {
        let layer = device.layer().clone();
        let func = move || {
            let output = func();
            layer.compute_pending();
            output
        };
        B::profile(device.base(), options, func)
    }

    fn profile_start(device: &Self::Device) -> Result<Option<ProfileToken>, ExecutionError> {
        B::profile_start(device.base())
    }

    fn profile_end(
        device: &Self::Device,
        token: ProfileToken,
        options: ProfileOptions,
    ) -> Result<ProfileDuration, ExecutionError> {
        device.layer().compute_pending();
        B::profile_end(device.base(), token, options)
    }

    fn profile_abandon(device: &Self::Device, token: ProfileToken) {
        B::profile_abandon(device.base(), token);
    }

    fn flush(device: &Self::Device) -> Result<(), ExecutionError> {
        B::flush(device.base())
    }

    fn staging<'a, Iter>(data: Iter, device: &Self::Device)
    where
        Iter: Iterator<Item = &'a mut TensorData>,
    {
        B::staging(data, device.base());
    }

    fn dtype_usage(device: &Self::Device, dtype: DType) -> DTypeUsageSet {
        B::dtype_usage(device.base(), dtype)
    }

    fn device_count(type_id: u16) -> usize {
        B::device_count(type_id)
    }
}

macro_rules! tensor_from_handle {
    ($name:ident, $kind:ident, $tensor:ident) => {
        fn $name(handle: TensorHandle<Self::Handle>) -> $tensor<Self> {
            match handle.handle {
                HandleKind::$kind(tensor) => tensor,
                other => panic!(
                    "expected the handle of a tensor of kind {}, found one of kind {}",
                    stringify!($kind),
                    other.name()
                ),
            }
        }
    };
}

impl<B: BackendIr> BackendIr for Layered<B> {
    type Handle = HandleKind<Self>;

    tensor_from_handle!(float_tensor, Float, FloatTensor);
    tensor_from_handle!(int_tensor, Int, IntTensor);
    tensor_from_handle!(bool_tensor, Bool, BoolTensor);
    tensor_from_handle!(quantized_tensor, Quantized, QuantizedTensor);

    fn float_tensor_handle(tensor: FloatTensor<Self>) -> Self::Handle {
        HandleKind::Float(tensor)
    }

    fn int_tensor_handle(tensor: IntTensor<Self>) -> Self::Handle {
        HandleKind::Int(tensor)
    }

    fn bool_tensor_handle(tensor: BoolTensor<Self>) -> Self::Handle {
        HandleKind::Bool(tensor)
    }

    fn quantized_tensor_handle(tensor: QuantizedTensor<Self>) -> Self::Handle {
        HandleKind::Quantized(tensor)
    }
}
