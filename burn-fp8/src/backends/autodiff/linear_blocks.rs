//! The linear layer with a scale per row, column or block.

use burn::backend::{
    Backend,
    tensor::{FloatTensor, IntTensor},
};
use burn::tensor::FloatDType;
use burn_autodiff::{
    Autodiff,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};

use super::add_bias;
use crate::{Bias, BlockLinearSpec, Fp8Format, Fp8Ops, Granularity, MatmulSpec, ops::output_dtype};

pub(super) fn forward<B: Backend + Fp8Ops, C: CheckpointStrategy>(
    input: FloatTensor<Autodiff<B, C>>,
    weight: FloatTensor<Autodiff<B, C>>,
    bias: Bias<Autodiff<B, C>>,
    spec: BlockLinearSpec,
) -> FloatTensor<Autodiff<B, C>> {
    let (input, input_node) = input.into_parts();
    let (weight, weight_node) = weight.into_parts();
    let product = B::fp8_linear_blocks(input.clone(), weight.clone(), Bias::None, spec);
    let prepared = LinearBlocks.prepare::<C>([input_node, weight_node]);
    let product = match prepared.compute_bound().stateful() {
        OpsKind::Tracked(prep) => {
            // Cast again, for the other products sum along other dimensions.
            let [_, weight_granularity] = spec.casts.input_gradient;
            let [input_granularity, _] = spec.casts.weight_gradient;
            let state = State::<B> {
                input: Operand::cast(input, input_granularity, spec.forward),
                weight: Operand::cast(weight, weight_granularity, spec.forward),
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
    input: Operand<B>,
    weight: Operand<B>,
    spec: BlockLinearSpec,
}

#[derive(Clone, Debug)]
struct Operand<B: Backend> {
    codes: IntTensor<B>,
    scale: FloatTensor<B>,
    granularity: Granularity,
    format: Fp8Format,
    /// Of the tensor as it came.
    dtype: FloatDType,
}

impl<B: Backend + Fp8Ops> Operand<B> {
    fn cast(tensor: FloatTensor<B>, granularity: Granularity, format: Fp8Format) -> Self {
        let dtype = output_dtype(&tensor);
        let (codes, scale) = B::fp8_quantize_blocks(tensor, granularity, format);
        Self {
            codes,
            scale,
            granularity,
            format,
            dtype,
        }
    }

    fn transpose(self) -> Self {
        Self {
            codes: B::int_swap_dims(self.codes, 0, 1),
            scale: B::float_swap_dims(self.scale, 0, 1),
            granularity: self.granularity.transposed(),
            ..self
        }
    }

    fn matmul(self, rhs: Self, output: FloatDType) -> FloatTensor<B> {
        let spec = MatmulSpec {
            lhs: self.format,
            rhs: rhs.format,
            output,
        };
        let granularities = [self.granularity, rhs.granularity];
        B::fp8_matmul_blocks(
            self.codes,
            rhs.codes,
            self.scale,
            rhs.scale,
            Bias::None,
            granularities,
            spec,
        )
    }
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
            input,
            weight,
            spec,
        } = ops.state;
        let grad = grads.consume::<B>(&ops.node);
        let [input_dtype, weight_dtype] = [input.dtype, weight.dtype];
        let cast = |granularity| Operand::<B>::cast(grad.clone(), granularity, spec.gradient);
        if let Some(node) = input_node {
            let grad = cast(spec.casts.input_gradient[0]);
            grads.register::<B>(node.id, grad.matmul(weight.transpose(), input_dtype));
        }
        if let Some(node) = weight_node {
            let grad = cast(spec.casts.weight_gradient[1]);
            grads.register::<B>(node.id, input.transpose().matmul(grad, weight_dtype));
        }
    }
}
