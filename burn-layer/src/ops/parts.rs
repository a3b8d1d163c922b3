//! Which part of something that Burn computes by several ops a result may be.

use super::call::Call;
use crate::{Inputs, Op, float::Part};
use burn_backend::Shape;
use burn_ir::BackendIr;

/// How Burn computes a sigmoid where its client does not send it whole, which it does without Burn's feature `fusion`:
/// `exp(-ln(1 + exp(-x)))`, op by op, each with its number.
const SIGMOID: [(Op, Option<f64>); 6] = [
    (Op::float_mul_scalar, Some(-1.0)),
    (Op::float_exp, None),
    (Op::float_add_scalar, Some(1.0)),
    (Op::float_log, None),
    (Op::float_mul_scalar, Some(-1.0)),
    (Op::float_exp, None),
];

/// Ops of backward that make zeros of zeros, their first input. Not `reshape`, which tells a [row](Part::Row) that is made of zeros.
const KEEP_ZEROS: [Op; 11] = [
    Op::float_slice,
    Op::float_neg,
    Op::float_cast,
    Op::float_mul,
    Op::float_mul_scalar,
    Op::float_div,
    Op::float_div_scalar,
    Op::float_expand,
    Op::float_permute,
    Op::float_swap_dims,
    Op::float_sum_dim,
];

impl<B: BackendIr> Call<B> {
    /// Which part a result of that shape may be.
    pub(super) fn makes_part(&self, shape: &Shape) -> Option<Part> {
        if self.draws_mask || self.op == Op::bool_into_float {
            return Some(Part::Mask);
        }
        if self.op == Op::float_ones {
            return (shape.num_elements() == 1).then_some(Part::One);
        }
        if self.op == Op::float_zeros {
            return self.layer().is_in_backward().then_some(Part::Zeros);
        }
        let inputs = self.inputs.as_ref()?;
        if self.layer().is_in_backward()
            && let Some(part) = self.makes_part_of_gate(inputs)
        {
            return Some(part);
        }
        match self.op {
            Op::float_reshape | Op::float_mul_scalar if inputs.first_part == Some(Part::One) => {
                inputs.first_part
            }
            op if inputs.first_part == Some(Part::Zeros) && KEEP_ZEROS.contains(&op) => {
                inputs.first_part
            }
            Op::float_matmul => Some(Part::Product),
            Op::sigmoid => Some(Part::Gate),
            Op::float_tanh => Some(Part::Tanh),
            Op::float_add_scalar
                if inputs.first_part == Some(Part::Tanh) && self.constants.first() == Some(1.0) =>
            {
                Some(Part::Gate)
            }
            Op::float_mul if inputs.gated.is_some() && !self.layer().is_in_backward() => {
                Some(Part::Gated)
            }
            Op::float_reshape | Op::float_expand | Op::float_cast
                if inputs.first_part == Some(Part::Gate) =>
            {
                inputs.first_part
            }
            Op::float_reshape if inputs.shapes[0].num_dims() == 1 => {
                (shape.last() == inputs.shapes[0].last()).then_some(Part::Row)
            }
            op => {
                let weighted = op == Op::float_mul_scalar && shape.num_dims() == 1;
                let of_sigmoid = continues_sigmoid(op, self.constants.first(), inputs.first_part);
                of_sigmoid.or(weighted.then_some(Part::Weighted))
            }
        }
    }

    /// Which part of the gradient of a gate, or of what is multiplied by one, a result of backward may be. Burn's client sends the
    /// backward of a sigmoid whole, or op by op.
    fn makes_part_of_gate(&self, inputs: &Inputs) -> Option<Part> {
        let parts = (inputs.first_part, inputs.last_part);
        match (self.as_negation(), parts) {
            (Op::float_neg, (Some(Part::Gate), _)) => Some(Part::OfGateSlope(1)),
            (Op::float_add_scalar, (Some(Part::OfGateSlope(1)), _)) => {
                (self.constants.first() == Some(1.0)).then_some(Part::OfGateSlope(2))
            }
            (Op::float_mul, (Some(Part::Gate), Some(Part::OfGateSlope(2)))) => {
                Some(Part::OfGateSlope(3))
            }
            (Op::float_mul, (Some(Part::OfGateSlope(3)), _))
            | (Op::sigmoid_backward, (Some(Part::Gate), _))
                if inputs.last_is_gradient =>
            {
                Some(Part::OfGate)
            }
            (Op::float_mul, (_, Some(Part::Gate))) if inputs.first_is_gradient => {
                Some(Part::OfGated)
            }
            _ => None,
        }
    }
}

/// What an op makes of a part of a [`SIGMOID`], or of the tensor that it begins with.
fn continues_sigmoid(op: Op, number: Option<f64>, input: Option<Part>) -> Option<Part> {
    let done = match input {
        Some(Part::OfSigmoid(done)) => done,
        _ => 0,
    };
    let is_next = |&done: &usize| SIGMOID[done] == (op, number);
    let done = [done, 0].into_iter().find(is_next)? + 1;
    Some(match done == SIGMOID.len() {
        true => Part::Gate,
        false => Part::OfSigmoid(done),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What ops on each other's results make of a tensor.
    fn made(ops: &[(Op, Option<f64>)]) -> Option<Part> {
        let next = |input, &(op, number): &_| continues_sigmoid(op, number, input);
        ops.iter().fold(None, next)
    }

    #[test]
    fn a_sigmoid_is_told_by_its_ops() {
        assert_eq!(made(&SIGMOID), Some(Part::Gate));
        // It may begin anywhere, with what looks like its beginning, and after another one.
        assert_eq!(made(&[&SIGMOID[..3], &SIGMOID].concat()), Some(Part::Gate));
        assert_eq!(made(&[&SIGMOID[..1], &SIGMOID].concat()), Some(Part::Gate));
        assert_eq!(made(&[SIGMOID, SIGMOID].concat()), Some(Part::Gate));
        assert_eq!(made(&[]), None);
        for of_it in 1..SIGMOID.len() {
            assert_eq!(made(&SIGMOID[..of_it]), Some(Part::OfSigmoid(of_it)));
            assert_ne!(made(&SIGMOID[of_it..]), Some(Part::Gate));
            let mut other = SIGMOID;
            other[of_it] = (Op::float_add_scalar, Some(2.0));
            assert_ne!(made(&other), Some(Part::Gate));
        }
    }
}
