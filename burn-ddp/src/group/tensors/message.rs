//! Messages between two ranks.

use burn::tensor::{
    Shape, Tensor, TensorData,
    kind::{Autodiff, Numeric},
};

use super::{element_type, host::with_elements, with_type};
use crate::{
    DdpError, Element, Flaw, ProcessGroup,
    group::{Pending, plane::Location},
};
#[cfg(feature = "nccl")]
use crate::{
    group::plane::Plane,
    nccl::{Source, tensor_from_cube, tensor_to_cube},
};

type Message<const D: usize, K> = Box<dyn FnOnce() -> Result<Tensor<D, K>, DdpError> + Send>;

impl ProcessGroup {
    /// Sends a tensor to one rank, which receives it with [`recv_tensor`](Self::recv_tensor).
    ///
    /// # Errors
    ///
    /// A fault of the group. [`DdpError::InvalidArgument`] if `to` is this rank or not a rank, for a type that
    /// is neither integers nor floats, and, for a tensor that may go by NCCL, if the ranks have not agreed yet
    /// on how tensors travel (see [`tensor_backend`](Self::tensor_backend)), which the two ranks of a message
    /// cannot do alone. The other rank gets [`DdpError::Diverged`], unless it has made the same mistake.
    pub fn send_tensor<const D: usize, K: Numeric + Autodiff + 'static>(
        &self,
        tensor: Tensor<D, K>,
        to: usize,
    ) -> Result<(), DdpError> {
        self.message(tensor, to, true)?().map(drop)
    }

    /// Starts to send a tensor and returns at once. Later calls wait until it is on its way.
    ///
    /// # Errors
    ///
    /// Those of [`send_tensor`](Self::send_tensor); [`Pending::wait`] returns the faults.
    pub fn send_tensor_async<const D: usize, K: Numeric + Autodiff + 'static>(
        &self,
        tensor: Tensor<D, K>,
        to: usize,
    ) -> Result<Pending<()>, DdpError> {
        // Until its elements were read: see `through_host`.
        let kept = tensor.clone();
        let message = self.message(tensor, to, true)?;
        Ok(self.submit_call(move |_| {
            let sent = message().map(drop);
            drop(kept);
            sent
        }))
    }

    /// Receives a tensor that rank `from` sends to this one. It has the shape, type and device of `like`, whose
    /// elements do not matter. A tensor of another shape or type is a fault.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_ddp::LocalGroup;
    ///
    /// std::thread::scope(|scope| {
    ///     for group in LocalGroup::new(2) {
    ///         scope.spawn(move || {
    ///             let device = Device::flex();
    ///             let tensor = Tensor::<1>::full([3], group.rank() as f32, &device);
    ///             match group.rank() {
    ///                 0 => group.send_tensor(tensor + 7.0, 1).unwrap(),
    ///                 _ => {
    ///                     let received = group.recv_tensor(tensor, 0).unwrap();
    ///                     assert_eq!(received.into_data().try_to_vec::<f32>().unwrap(), [7.0; 3]);
    ///                 }
    ///             }
    ///         });
    ///     }
    /// });
    /// ```
    ///
    /// # Errors
    ///
    /// As [`send_tensor`](Self::send_tensor).
    pub fn recv_tensor<const D: usize, K: Numeric + Autodiff + 'static>(
        &self,
        like: Tensor<D, K>,
        from: usize,
    ) -> Result<Tensor<D, K>, DdpError> {
        self.message(like, from, false)?()
    }

    /// Starts to receive a tensor and returns at once.
    ///
    /// # Errors
    ///
    /// Those of [`recv_tensor`](Self::recv_tensor); [`Pending::wait`] returns the faults.
    pub fn recv_tensor_async<const D: usize, K: Numeric + Autodiff + 'static>(
        &self,
        like: Tensor<D, K>,
        from: usize,
    ) -> Result<Pending<Tensor<D, K>>, DdpError> {
        let message = self.message(like, from, false)?;
        Ok(self.submit_call(|_| message()))
    }

    /// Checks the message and takes the tensor on the calling thread; returns the rest of the work.
    fn message<const D: usize, K: Numeric + Autodiff + 'static>(
        &self,
        tensor: Tensor<D, K>,
        peer: usize,
        sends: bool,
    ) -> Result<Message<D, K>, DdpError> {
        self.check_peer(peer)?;
        let refuse = |flaw, error| self.refuse_message(peer, sends, flaw, error);
        let dtype =
            element_type(tensor.dtype()).map_err(|error| refuse(Flaw::TypeUnsupported, error))?;
        let Some(plane) = self.plane_of_message(&Location::of_device(&tensor.device()))? else {
            let error = DdpError::InvalidArgument(
                "a message before the ranks have settled how tensors travel; call tensor_backend on \
                 all of them first"
                    .into(),
            );
            return Err(refuse(Flaw::Unsettled, error));
        };
        let group = self.for_a_call();
        #[cfg(feature = "nccl")]
        if let Plane::Nccl(link) = plane {
            let tensor = tensor_to_cube(tensor).expect("a tensor on a CUDA device is CubeCL's");
            let room = |shape: &Shape| (!sends).then(|| shape.clone());
            let source = Source::all(vec![tensor], room).map_err(|error| self.give_up(error))?;
            let source = source.into_iter().next().expect("one for one");
            return Ok(Box::new(move || {
                let result = group.message_by_nccl(source, dtype, peer, sends, &link)?;
                Ok(tensor_from_cube(result.into_tensor()))
            }));
        }
        let _ = (plane, dtype);
        Ok(Box::new(move || group.message_by_host(tensor, peer, sends)))
    }

    fn message_by_host<const D: usize, K: Numeric>(
        &self,
        tensor: Tensor<D, K>,
        peer: usize,
        sends: bool,
    ) -> Result<Tensor<D, K>, DdpError> {
        let (device, shape) = (tensor.device().without_autodiff(), tensor.shape());
        let dtype = tensor.dtype();
        let data = tensor.try_into_data();
        let data = data.map_err(|error| self.give_up(error.into()))?;
        with_elements!(self, vec![data], |elements| {
            let elements = self.elements_by_host(elements.concat(), &shape, peer, sends)?;
            let data = TensorData::new(elements, shape);
            Ok(Tensor::from_data(data, (&device, dtype)))
        })
    }

    fn elements_by_host<T: Element>(
        &self,
        mut elements: Vec<T>,
        shape: &Shape,
        peer: usize,
        sends: bool,
    ) -> Result<Vec<T>, DdpError> {
        let (_turn, call) = self.message_call(T::TYPE, elements.len(), peer, sends)?;
        match sends {
            true => {
                call.send_shape(shape, peer)?;
                call.send(&elements, peer)?;
            }
            false => {
                call.receive_shape(shape, peer)?;
                call.receive(&mut elements, peer)?;
            }
        }
        Ok(elements)
    }
}
