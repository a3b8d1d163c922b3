//! Ranks compare the shapes of their tensors before sending any: the call itself only says how many elements there are.

use std::iter;

use burn::tensor::Shape;

use super::{TensorOp, row};
use crate::{
    Call, DdpError, ElementType, ProcessGroup, ReduceOp, call::ABOUT_SHAPES,
    collective::Collective, transport::Transport,
};

/// The length of the message that carries a tensor's shape: the number of dimensions, followed by the first of them.
const FRAME: usize = 16;

fn frame(shape: &Shape) -> [u64; FRAME] {
    let mut frame = [0; FRAME];
    let numbers = iter::once(shape.num_dims()).chain(shape.iter().copied());
    for (into, number) in frame.iter_mut().zip(numbers) {
        *into = number as u64;
    }
    frame
}

/// The shapes on which all ranks must agree for a call, as text.
fn describe(op: TensorOp, shapes: &[Shape]) -> String {
    let words = shapes.iter().map(|shape| {
        let dims = shape.iter().enumerate().map(|(at, dim)| match (op, at) {
            (TensorOp::AllGather, 0) => "_".into(),
            _ => dim.to_string(),
        });
        format!("[{}]", dims.collect::<Vec<_>>().join(", "))
    });
    words.collect::<Vec<_>>().join(" ")
}

fn differ(
    transport: &dyn Transport,
    call: Call,
    (rank, shapes): (usize, String),
    (other, other_shapes): (usize, String),
) -> DdpError {
    transport.fail(DdpError::Diverged {
        rank: transport.number(rank),
        call,
        other: transport.number(other),
        other_call: call,
        shapes: Some(Box::new([shapes, other_shapes])),
    })
}

impl Collective<'_> {
    /// Meets all ranks, and checks that their tensors have the same shapes.
    pub(super) fn check_shapes(&self, op: TensorOp, shapes: &[Shape]) -> Result<(), DdpError> {
        let own = describe(op, shapes);
        let hash = blake3::hash(own.as_bytes());
        let (digest, _) = hash.as_bytes().as_chunks();
        let [a, b] = [digest[0], digest[1]].map(u64::from_le_bytes);
        let about = self.about_shapes();
        // The maximum digest, and the complement of the minimum. The two match exactly if all digests are equal.
        let mut highest = [a, b, !a, !b];
        about.all_reduce(&mut highest, ReduceOp::Max)?;
        if highest[..2] == [!highest[2], !highest[3]] {
            return Ok(());
        }
        // All ranks have the same maxima, so all get here.
        let all = about.all_gather_uneven(own.as_bytes())?;
        let odd = all.iter().position(|it| *it != all[0]).unwrap_or(0);
        let of = |rank: usize| (rank, String::from_utf8_lossy(&all[rank]).into_owned());
        Err(differ(self.transport, self.call, of(0), of(odd)))
    }

    /// Sends the shape of a tensor to the rank that receives the tensor.
    pub(super) fn send_shape(&self, shape: &Shape, to: usize) -> Result<(), DdpError> {
        self.about_shapes().send(&frame(shape), to)
    }

    /// Checks that the tensor to be received has the expected shape.
    pub(super) fn receive_shape(&self, expected: &Shape, from: usize) -> Result<(), DdpError> {
        let mut theirs = [0u64; FRAME];
        self.about_shapes().receive(&mut theirs, from)?;
        if theirs == frame(expected) {
            return Ok(());
        }
        let dims = theirs[1..].iter().take(theirs[0] as usize);
        let dims: Vec<usize> = dims.map(|dim| *dim as usize).collect();
        let words = |shape| describe(TensorOp::AllToAll, &[shape]);
        let own = (self.rank, words(expected.clone()));
        let theirs = (from, words(Shape::from(dims)));
        Err(differ(self.transport, self.call, own, theirs))
    }

    /// The same call while shapes travel instead of elements, so that ranks do not confuse the two.
    fn about_shapes(&self) -> Self {
        Self {
            call: Call {
                root: self.call.root | ABOUT_SHAPES,
                ..self.call
            },
            ..*self
        }
    }
}

impl ProcessGroup {
    /// Checks the arguments of a call with tensors of one type.
    pub(super) fn check_tensors(
        &self,
        op: TensorOp,
        dtype: ElementType,
        shapes: &[Shape],
    ) -> Result<(), DdpError> {
        self.check_rank(op.root())?;
        if op.reduction() == Some(ReduceOp::Mean) && !dtype.is_float() {
            return Err(DdpError::InvalidArgument(format!(
                "the mean of {dtype} values; take their sum"
            )));
        }
        for shape in shapes {
            match op {
                TensorOp::ReduceScatter(_) | TensorOp::AllToAll => self.check_parts(shape[0])?,
                TensorOp::AllGather if row(shape) == 0 => {
                    return Err(DdpError::InvalidArgument(format!(
                        "an all-gather of rows without elements: shape {shape:?}"
                    )));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Refuses tensors after comparing shapes with all ranks. If another rank has other tensors, all get
    /// `DdpError::Diverged` instead.
    pub(super) fn refuse_shapes(
        &self,
        op: TensorOp,
        dtype: ElementType,
        shapes: &[Shape],
        error: DdpError,
    ) -> DdpError {
        let what = (
            op.kind(),
            op.reduction().unwrap_or(ReduceOp::Sum),
            op.len(shapes),
            op.root(),
        );
        let meet = |call: Collective<'_>| call.check_shapes(op, shapes);
        self.run(what, dtype, meet, || ()).err().unwrap_or(error)
    }
}
