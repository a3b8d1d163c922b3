//! Averages gradients while backward still runs, on a layered device.
//!
//! As soon as the gradient of a parameter that is marked as distributed is final, Burn's autodiff submits it as
//! an all-reduce operation of the device. On a layered device, the layers get such operations in the order of
//! submission. This order follows from the graph alone (the tape is run by depth, and within a depth in the
//! order of a traversal; no hash map decides), so it is the same on all ranks as long as their graphs are.
//! Buckets can therefore be filled as gradients arrive, without a layout made in advance.

use std::sync::{Arc, Weak};

use burn::{
    backend::DispatchDevice,
    module::{Module, ModuleMapper, Param},
    tensor::{DType, Device, Tensor},
};
use burn_backend::{DeviceId, distributed::ReduceOperation};
use burn_layer::{FloatView, Layer, LayerError, Layers, Reduced};

use super::{
    DdpConfig,
    gradient::{Gradient, location, unreadable},
    reducer::{Reducer, Taken},
};
use crate::{DdpError, ProcessGroup, with_custom_ops};

/// Averages gradients while backward still runs.
///
/// Train on the device that it [serves](Self::serve), and give it to [`Ddp::overlapped`](super::Ddp::overlapped).
///
/// In each step, all ranks must use the same parameters in the same order. For other models use
/// [`Ddp::new`](super::Ddp::new).
///
/// - A parameter that only some ranks use ends the job. If the ranks' buckets then differ in length, the error
///   is [`DdpError::Diverged`], and the log (`error`) says which parameters a rank has no gradients of;
///   otherwise the error names the parameter.
/// - The ranks' gradients are matched by the order in which backward reaches them. This order may differ if the ranks'
///   graphs differ: with layers whose order depends on the data, or recurrent layers beside other branches on sequences
///   of different lengths. The step then ends in an error on all ranks that names the first parameter out of place.
/// - Each rank needs its own process: Burn has one gradient server for all layered devices of a process, which
///   waits for one backward pass at a time. So a process can have one overlapped `Ddp` of several ranks at a
///   time (another is refused), and no other thread of it may run backward on a layered device meanwhile.
/// - Backward of another model on the device (a GAN's discriminator, an attacked network) costs nothing if it runs before that of
///   this one in each step. Between the latter and [`reduce_gradients`](super::Ddp::reduce_gradients), it cannot be told from a
///   second pass over the same parameters, and gradients are averaged again after backward.
/// - A parameter that is added to a tensor without broadcasting shares its gradient with that tensor. Burn
///   (0.22.1) may free the gradient before backward has used it, which ends the job (`Should have handle for
///   tensor`). Add `parameter.val().mul_scalar(1.0)` instead.
///
/// The layer gets gradients on the device under all layers, so if that is a CUDA device, they travel by NCCL. This includes
/// gradients that are averaged after backward: those accumulated inside [`no_sync`](super::Ddp::no_sync); those of a step in
/// which a rank has [no batch](super::Ddp::join); and those of a second backward pass since the parameters were last updated
/// (several losses, or a step that a loss scaler skipped), because Burn submits gradients only in the first.
///
/// ```
/// use burn::{nn::LinearConfig, optim::GradientsParams, tensor::{Device, Tensor}};
/// use burn_ddp::{Ddp, DdpConfig, Overlap, ProcessGroup};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let group = ProcessGroup::single(); // in a job: ProcessGroup::init()?
/// let overlap = Overlap::new(&group, DdpConfig::new())?;
/// let device = overlap.serve(Device::flex())?.autodiff(); // in bf16: overlap.serve(Autocast::bf16().layers(Device::flex())?)
/// let model = LinearConfig::new(4, 2).init(&device);
/// let mut ddp = Ddp::overlapped(&group, overlap, &model)?;
/// let model = ddp.broadcast_parameters(model)?;
///
/// let loss = model.forward(Tensor::<2>::ones([8, 4], &device)).mean();
/// let gradients = GradientsParams::from_grads(loss.backward(), &model);
/// let gradients = ddp.reduce_gradients(gradients, &model)?;
/// # let _ = gradients;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Overlap {
    pub(super) reducer: Arc<Reducer>,
}

impl Overlap {
    /// Prepares for a group, with separate connections for gradients. All ranks call this.
    ///
    /// # Errors
    ///
    /// A fault of the group.
    pub fn new(group: &ProcessGroup, config: DdpConfig) -> Result<Self, DdpError> {
        let reducer = Reducer::new(group.duplicate()?, config);
        Ok(Self {
            reducer: Arc::new(reducer),
        })
    }

    /// A device on which gradients are averaged while backward runs: the given one, or layers such as burn-amp's
    /// `Autocast::bf16().layers(device)?`, with [`layer`](Self::layer) over them and the ops of
    /// [`SyncBatchNorm`](crate::SyncBatchNorm).
    ///
    /// # Errors
    ///
    /// Those of [`Layers::serve`].
    pub fn serve(&self, layers: impl Into<Layers>) -> Result<Device, LayerError> {
        with_custom_ops(layers.into().layer(self.layer())).serve()
    }

    /// The layer by itself, to stack in an order of your own. If there are several layers, make it the outermost, so that gradients are averaged in the
    /// type that the program sees. It works as long as this `Overlap`, or the `Ddp` that took it, exists.
    pub fn layer(&self) -> OverlapLayer {
        OverlapLayer {
            reducer: Arc::downgrade(&self.reducer),
        }
    }

    /// Waits until the device has run backward. Returns the counts of what backward submitted since the last call.
    pub(super) fn taken(&self, device: &Device) -> Result<Taken, DdpError> {
        let read = device.sync();
        read.map_err(|error| DdpError::Device(error.to_string()))?;
        Ok(self.reducer.taken())
    }
}

/// The layer that averages gradients over the ranks. See [`Overlap`].
#[derive(Clone, Debug)]
pub struct OverlapLayer {
    /// Weak, because a served device may live as long as the process, and the group must not: a rank says
    /// goodbye when its last handle is dropped.
    reducer: Weak<Reducer>,
}

impl Layer for OverlapLayer {
    fn all_reduce(
        &self,
        tensor: FloatView<'_>,
        op: ReduceOperation,
        _devices: &[DeviceId],
    ) -> Option<Reduced> {
        let reducer = self.reducer.upgrade();
        let take_in = || take_in(reducer.as_ref(), tensor, op);
        Some(match &reducer {
            Some(reducer) => reducer.on_stream(take_in),
            None => take_in(),
        })
    }

    fn sync_collective(&self) -> bool {
        if let Some(reducer) = self.reducer.upgrade() {
            reducer.on_stream(|| reducer.end());
        }
        true
    }
}

/// Takes a gradient that backward submits. Returns a placeholder for its average.
fn take_in(reducer: Option<&Arc<Reducer>>, tensor: FloatView<'_>, op: ReduceOperation) -> Reduced {
    let (shape, dtype) = (tensor.shape(), tensor.dtype());
    let gradient = match take(reducer.map(Arc::as_ref), tensor) {
        Ok(gradient) => gradient,
        Err(error) => {
            // The other ranks must not wait for this gradient; `Ddp` reports the error.
            reducer.inspect(|it| drop(it.group().abort(error.to_string())));
            return unreadable(shape, dtype);
        }
    };
    // `Ddp` asks for means, if there is something to average; other all-reduces are not from it.
    let ours = |it: &&Arc<Reducer>| it.averages() && op == ReduceOperation::Mean;
    let Some(reducer) = reducer.filter(ours) else {
        return gradient.unchanged(shape, dtype);
    };
    let (zeros, on_device) = (gradient.zeros(), gradient.is_on_device());
    let place = reducer.add(gradient, shape.clone());
    // The gradient may outlive the reducer, but the reducer has then waited for the average.
    let reducer = Arc::downgrade(reducer);
    let average = move || {
        if let Some(reducer) = reducer.upgrade() {
            reducer.hurry(&place);
        }
        // `finish` reports faults, before anyone uses the zeros returned here.
        place.average().unwrap_or_else(|_| zeros())
    };
    Gradient::deferred(on_device, shape, dtype, average)
}

/// Takes a gradient for a bucket. It stays on its device if the group uses NCCL and NCCL can replace the hook.
fn take(reducer: Option<&Reducer>, tensor: FloatView<'_>) -> Result<Gradient, DdpError> {
    let stays = match reducer {
        Some(reducer) if reducer.group().world_size() > 1 => {
            let by_nccl = reducer.group().stays(&location(tensor))?;
            by_nccl && reducer.stays_on_device()
        }
        _ => false,
    };
    Gradient::of_view(tensor, stays)
}

/// Whether a device has layers.
pub(super) fn is_layered(device: &Device) -> bool {
    matches!(
        device.clone().without_autodiff().as_dispatch(),
        DispatchDevice::Remote(_)
    )
}

/// Marks the trained parameters, so that backward submits their gradients.
pub(super) fn mark<M: Module>(model: M) -> M {
    struct Marker;

    impl ModuleMapper for Marker {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            let id = param.id;
            // Burn does not mark quantized tensors, which have no gradients.
            let quantized = matches!(param.base().dtype(), DType::QFloat(_));
            match param.is_require_grad() && !quantized {
                true => param.map(|tensor| tensor.set_distributed(id)),
                false => param,
            }
        }
    }

    model.map(&mut Marker)
}
