//! The linear layer with a scale per row, column or block.

use burn::backend::{Backend, tensor::FloatTensor};
use burn::tensor::FloatDType;
use burn_autodiff::{
    Autodiff,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};

use super::add_bias;
use crate::{Bias, BlockLinearSpec, Fp8Ops, Operand, ops::output_dtype};

pub(super) fn forward<B: Backend + Fp8Ops, C: CheckpointStrategy>(
    input: FloatTensor<Autodiff<B, C>>,
    weight: FloatTensor<Autodiff<B, C>>,
    bias: Bias<Autodiff<B, C>>,
    spec: BlockLinearSpec,
) -> FloatTensor<Autodiff<B, C>> {
    let (input, input_node) = input.into_parts();
    let (weight, weight_node) = weight.into_parts();
    let dtypes = [output_dtype(&input), output_dtype(&weight)];
    let [row_granularity, column_granularity] = spec.casts.output;
    let rows = Operand::<B>::cast(input.clone(), spec.forward_cast(row_granularity));
    let columns = Operand::<B>::cast(weight.clone(), spec.forward_cast(column_granularity));
    let product = rows.matmul(columns.clone(), Bias::None, dtypes[0]);
    let prepared = LinearBlocks.prepare::<C>([input_node, weight_node]);
    let product = match prepared.compute_bound().stateful() {
        OpsKind::Tracked(prep) => {
            // Cast again, for the other products sum along other dimensions; square blocks are the same along both.
            let [_, weight_granularity] = spec.casts.input_gradient;
            let [input_granularity, _] = spec.casts.weight_gradient;
            let state = State::<B> {
                dtypes,
                input: Operand::cast(input, spec.forward_cast(input_granularity)),
                weight: match weight_granularity == column_granularity {
                    true => columns,
                    false => Operand::cast(weight, spec.forward_cast(weight_granularity)),
                },
                spec,
            };
            prep.finish(state, product)
        }
        OpsKind::UnTracked(prep) => prep.finish(product),
    };
    add_bias::<B, C>(product, bias)
}

#[derive(Debug)]
struct LinearBlocks;

#[derive(Clone, Debug)]
struct State<B: Backend> {
    /// Of input and weight as they came.
    dtypes: [FloatDType; 2],
    input: Operand<B>,
    weight: Operand<B>,
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
        if let Some(node) = input_node {
            let grad = cast(spec.casts.input_gradient[0]);
            let grad = grad.matmul(weight.transpose(), Bias::None, input_dtype);
            grads.register::<B>(node.id, grad);
        }
        if let Some(node) = weight_node {
            let grad = cast(spec.casts.weight_gradient[1]);
            let grad = input.transpose().matmul(grad, Bias::None, weight_dtype);
            grads.register::<B>(node.id, grad);
        }
    }
}
