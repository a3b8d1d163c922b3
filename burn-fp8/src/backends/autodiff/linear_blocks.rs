//! The linear layer with a scale per row, column or block.

use burn::backend::{Backend, tensor::FloatTensor};
use burn::tensor::FloatDType;
use burn_autodiff::{
    Autodiff,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};

use crate::{Bias, BlockLinearSpec, Fp8Ops, Operand, ops::output_dtype};

pub(super) fn forward<B: Backend + Fp8Ops, C: CheckpointStrategy>(
    input: FloatTensor<Autodiff<B, C>>,
    weight: FloatTensor<Autodiff<B, C>>,
    [output_weight, gradient_weight]: [Operand<Autodiff<B, C>>; 2],
    bias: Bias<B>,
    spec: BlockLinearSpec,
) -> FloatTensor<Autodiff<B, C>> {
    let [input_wanted, weight_wanted] = [input.is_tracked(), weight.is_tracked()];
    let (input, input_node) = input.into_parts();
    let (weight, weight_node) = weight.into_parts();
    let dtypes = [output_dtype(&input), output_dtype(&weight)];
    let rows = Operand::<B>::cast(input.clone(), spec.forward_cast(spec.casts.output[0]));
    let product = rows.matmul(inner(output_weight), bias, dtypes[0]);
    let prepared = LinearBlocks.prepare::<C>([input_node, weight_node]);
    match prepared.compute_bound().stateful() {
        OpsKind::Tracked(prep) => {
            // The input is cast again, because the weight's gradient sums along another dimension.
            let cast = spec.forward_cast(spec.casts.weight_gradient[0]);
            let state = State::<B> {
                dtypes,
                input: weight_wanted.then(|| Operand::cast(input, cast)),
                weight: input_wanted.then(|| inner(gradient_weight)),
                spec,
            };
            prep.finish(state, product)
        }
        OpsKind::UnTracked(prep) => prep.finish(product),
    }
}

/// The operand for the backend below. Casts carry no gradient.
fn inner<B: Backend, C: CheckpointStrategy>(operand: Operand<Autodiff<B, C>>) -> Operand<B> {
    Operand {
        codes: operand.codes,
        transposed: operand.transposed,
        scale: operand.scale.into_primitive(),
        granularity: operand.granularity,
        format: operand.format,
    }
}

#[derive(Debug)]
struct LinearBlocks;

#[derive(Clone, Debug)]
struct State<B: Backend> {
    /// The dtypes of the original input and weight.
    dtypes: [FloatDType; 2],
    /// Present if the weight has a gradient.
    input: Option<Operand<B>>,
    /// Present if the input has a gradient.
    weight: Option<Operand<B>>,
    spec: BlockLinearSpec,
}

impl<B: Backend + Fp8Ops> Backward<B, 2> for LinearBlocks {
    type State = State<B>;

    fn backward(
        self,
        ops: Ops<Self::State, 2>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let [input_node, weight_node] = ops.parents;
        let State {
            dtypes: [input_dtype, weight_dtype],
            input,
            weight,
            spec,
        } = ops.state;
        let grad = grads.consume::<B>(&ops.node);
        let cast = |granularity| Operand::cast(grad.clone(), spec.gradient_cast(granularity));
        if let (Some(node), Some(weight)) = (input_node, weight) {
            let grad = cast(spec.casts.input_gradient[0]);
            let grad = grad.matmul(weight.transpose(), Bias::None, input_dtype);
            grads.register::<B>(node.id, grad);
        }
        if let (Some(node), Some(input)) = (weight_node, input) {
            let grad = cast(spec.casts.weight_gradient[1]);
            let grad = input.transpose().matmul(grad, Bias::None, weight_dtype);
            grads.register::<B>(node.id, grad);
        }
    }
}
