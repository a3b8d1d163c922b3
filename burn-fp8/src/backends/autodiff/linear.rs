//! The linear layer with one scale a tensor.

use burn::backend::{
    AutodiffBackend, Backend,
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
use crate::{Bias, Fp8Ops, LinearSpec, MatmulSpec, ops::output_dtype};

type Float<B, C> = FloatTensor<Autodiff<B, C>>;

pub(super) fn forward<B: Backend + Fp8Ops, C: CheckpointStrategy>(
    input: Float<B, C>,
    weight: Float<B, C>,
    weight_codes: IntTensor<B>,
    scales: [Float<B, C>; 3],
    bias: Bias<Autodiff<B, C>>,
    spec: LinearSpec,
) -> (Float<B, C>, Float<B, C>) {
    let (input, input_node) = input.into_parts();
    let (weight, weight_node) = weight.into_parts();
    let [input_scale, weight_scale, gradient_scale] = scales.map(|scale| scale.into_primitive());
    let [input_dtype, weight_dtype] = [output_dtype(&input), output_dtype(&weight)];

    let (input, input_amax) = B::fp8_quantize(input, input_scale.clone(), spec.forward);
    let product = B::fp8_matmul(
        input.clone(),
        weight_codes.clone(),
        input_scale.clone(),
        weight_scale.clone(),
        Bias::None,
        MatmulSpec {
            lhs: spec.forward,
            rhs: spec.forward,
            output: input_dtype,
        },
    );
    let state = LinearState::<B> {
        input: Operand {
            codes: input,
            scale: input_scale,
            dtype: input_dtype,
        },
        weight: Operand {
            codes: weight_codes,
            scale: weight_scale,
            dtype: weight_dtype,
        },
        gradient_scale,
        spec,
    };
    let prepared = Fp8Linear.prepare::<C>([input_node, weight_node]);
    let product = match prepared.compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish(state, product),
        OpsKind::UnTracked(prep) => prep.finish(product),
    };
    (
        add_bias::<B, C>(product, bias),
        Autodiff::<B, C>::from_inner(input_amax),
    )
}

#[derive(Debug)]
struct Fp8Linear;

/// Kept for backward: a quarter of the bytes that the f32 operands would take.
#[derive(Clone, Debug)]
struct LinearState<B: Backend> {
    input: Operand<B>,
    weight: Operand<B>,
    gradient_scale: FloatTensor<B>,
    spec: LinearSpec,
}

#[derive(Clone, Debug)]
struct Operand<B: Backend> {
    codes: IntTensor<B>,
    scale: FloatTensor<B>,
    /// Of the tensor as it came, which its gradient will have.
    dtype: FloatDType,
}

impl<B: Backend + Fp8Ops> Backward<B, 2> for Fp8Linear {
    type State = LinearState<B>;

    fn backward(
        self,
        ops: Ops<Self::State, 2>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let [input_node, weight_node] = ops.parents;
        let LinearState {
            input,
            weight,
            gradient_scale,
            spec,
        } = ops.state;
        let grad = grads.consume::<B>(&ops.node);
        let scale = match spec.current_gradient_scale {
            true => {
                let amax = B::fp8_amax(grad.clone());
                B::fp8_scales(amax, spec.gradient, spec.power_of_two)
            }
            false => gradient_scale,
        };
        let (grad, amax) = B::fp8_quantize(grad, scale.clone(), spec.gradient);
        spec.gradient_amax.put::<B>(amax);

        if let Some(node) = input_node {
            let transposed = B::int_swap_dims(weight.codes, 0, 1);
            let matmul = MatmulSpec {
                lhs: spec.gradient,
                rhs: spec.forward,
                output: input.dtype,
            };
            let grad = B::fp8_matmul(
                grad.clone(),
                transposed,
                scale.clone(),
                weight.scale,
                Bias::None,
                matmul,
            );
            grads.register::<B>(node.id, grad);
        }
        if let Some(node) = weight_node {
            let transposed = B::int_swap_dims(input.codes, 0, 1);
            let matmul = MatmulSpec {
                lhs: spec.forward,
                rhs: spec.gradient,
                output: weight.dtype,
            };
            let grad = B::fp8_matmul(transposed, grad, input.scale, scale, Bias::None, matmul);
            grads.register::<B>(node.id, grad);
        }
    }
}
