//! [`Float`]: a float tensor of any of the ranks that programs use.

use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};

/// A float tensor of rank 1 to 4.
#[derive(Clone, Debug)]
pub(super) enum Float {
    R1(Tensor<1>),
    R2(Tensor<2>),
    R3(Tensor<3>),
    R4(Tensor<4>),
}

/// Does the same to a tensor of whichever rank; the result may have another one.
macro_rules! each {
    ($x:expr, |$tensor:ident| $body:expr) => {
        match $x {
            Float::R1($tensor) => Float::from($body),
            Float::R2($tensor) => Float::from($body),
            Float::R3($tensor) => Float::from($body),
            Float::R4($tensor) => Float::from($body),
        }
    };
}
pub(super) use each;

/// Asks something of a tensor of whichever rank.
macro_rules! ask {
    ($x:expr, |$tensor:ident| $body:expr) => {
        match $x {
            Float::R1($tensor) => $body,
            Float::R2($tensor) => $body,
            Float::R3($tensor) => $body,
            Float::R4($tensor) => $body,
        }
    };
}
pub(super) use ask;

/// Does something to two tensors of the same rank.
macro_rules! both {
    ($x:expr, $y:expr, |$a:ident, $b:ident| $body:expr) => {
        match ($x, $y) {
            (Float::R1($a), Float::R1($b)) => Float::from($body),
            (Float::R2($a), Float::R2($b)) => Float::from($body),
            (Float::R3($a), Float::R3($b)) => Float::from($body),
            (Float::R4($a), Float::R4($b)) => Float::from($body),
            _ => unreachable!("both have the same rank"),
        }
    };
}
pub(super) use both;

macro_rules! from {
    ($($variant:ident: $rank:literal),*) => {$(
        impl From<Tensor<$rank>> for Float {
            fn from(tensor: Tensor<$rank>) -> Self {
                Self::$variant(tensor)
            }
        }
    )*};
}
from!(R1: 1, R2: 2, R3: 3, R4: 4);

impl Float {
    pub(super) fn dims(&self) -> Vec<usize> {
        ask!(self, |x| x.dims().to_vec())
    }

    pub(super) fn rank(&self) -> usize {
        self.dims().len()
    }

    pub(super) fn elements(&self) -> usize {
        self.dims().iter().product()
    }

    pub(super) fn dtype(&self) -> DType {
        ask!(self, |x| x.dtype())
    }

    pub(super) fn is_tracked(&self) -> bool {
        ask!(self, |x| x.is_tracked())
    }

    pub(super) fn is_autodiff(&self) -> bool {
        ask!(self, |x| x.is_autodiff())
    }

    /// The data as a tensor.
    pub(super) fn from_data(data: TensorData, device: &Device) -> Self {
        match data.shape().len() {
            1 => Tensor::<1>::from_data(data, device).into(),
            2 => Tensor::<2>::from_data(data, device).into(),
            3 => Tensor::<3>::from_data(data, device).into(),
            4 => Tensor::<4>::from_data(data, device).into(),
            _ => unreachable!("programs use ranks 1 to 4"),
        }
    }

    /// The tensor in a shape of `D` dimensions with as many elements.
    pub(super) fn into_rank<const D: usize>(self, dims: [usize; D]) -> Tensor<D> {
        ask!(self, |x| x.reshape(dims))
    }

    /// The tensor in a shape of 1 to 4 dimensions with as many elements.
    pub(super) fn in_shape(self, dims: &[usize]) -> Self {
        match *dims {
            [a] => self.into_rank([a]).into(),
            [a, b] => self.into_rank([a, b]).into(),
            [a, b, c] => self.into_rank([a, b, c]).into(),
            [a, b, c, d] => self.into_rank([a, b, c, d]).into(),
            _ => unreachable!("programs use ranks 1 to 4"),
        }
    }

    pub(super) fn read(self) -> TensorData {
        ask!(self, |x| x.into_data())
    }

    /// The tensor without what autodiff knows of it.
    pub(super) fn inner(self) -> Self {
        each!(self, |x| x.inner())
    }
}

/// The shape that two shapes of one rank broadcast to.
pub(super) fn broadcast(a: &[usize], b: &[usize]) -> Option<Vec<usize>> {
    let dims = a.iter().zip(b).map(|pair| match pair {
        (a, b) if a == b => Some(*a),
        (1, b) => Some(*b),
        (a, 1) => Some(*a),
        _ => None,
    });
    (a.len() == b.len()).then(|| dims.collect())?
}

/// The tensor as part of autodiff again, as `like` is.
pub(super) fn rejoin<const D: usize>(inner: Tensor<D>, like: &Tensor<D>) -> Tensor<D> {
    match like.gradient_checkpointing_strategy() {
        Some(strategy) => Tensor::from_inner(inner).with_gradient_checkpointing_strategy(strategy),
        None => inner,
    }
}

/// The tensor in the dtype of another one.
pub(super) fn like<const D: usize>(x: Tensor<D>, other: &Tensor<D>) -> Tensor<D> {
    x.cast(FloatDType::from(other.dtype()))
}
