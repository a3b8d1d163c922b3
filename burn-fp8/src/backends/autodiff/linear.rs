//! The linear layer with one scale per tensor.

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

use crate::{Bias, Fp8Format, Fp8Ops, LinearSpec, MatmulSpec, Operand, ops::output_dtype};

type Float<B, C> = FloatTensor<Autodiff<B, C>>;

pub(super) fn forward<B: Backend + Fp8Ops, C: CheckpointStrategy>(
    input: Float<B, C>,
    weight: Float<B, C>,
    weight_codes: Operand<Autodiff<B, C>>,
    scales: [Float<B, C>; 2],
    bias: Bias<B>,
    spec: LinearSpec,
) -> (Float<B, C>, Float<B, C>) {
    let weight_wanted = weight.is_tracked();
    let (input, input_node) = input.into_parts();
    let (weight, weight_node) = weight.into_parts();
    let [input_scale, gradient_scale] = scales.map(|scale| scale.into_primitive());
    let weight_scale = weight_codes.scale.into_primitive();
    let [input_dtype, weight_dtype] = [output_dtype(&input), output_dtype(&weight)];

    let (input, transposed, input_amax) =
        quantize::<B>(input, input_scale.clone(), spec.forward, weight_wanted);
    let product = B::fp8_matmul(
        input,
        B::int_swap_dims(weight_codes.transposed, 0, 1),
        input_scale.clone(),
        weight_scale.clone(),
        bias,
        MatmulSpec::new(spec.forward, spec.forward, input_dtype).with_fast_accumulation(true),
    );
    let state = LinearState::<B> {
        input_transposed: transposed,
        input_scale,
        input_dtype,
        weight_codes: weight_codes.codes,
        weight_scale,
        weight_dtype,
        gradient_scale,
        spec,
    };
    let prepared = Fp8Linear.prepare::<C>([input_node, weight_node]);
    let product = match prepared.compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish(state, product),
        OpsKind::UnTracked(prep) => prep.finish(product),
    };
    (product, Autodiff::<B, C>::from_inner(input_amax))
}

#[derive(Debug)]
struct Fp8Linear;

/// Kept for backward. It takes a quarter of the memory of f32 operands.
#[derive(Clone, Debug)]
struct LinearState<B: Backend> {
    /// Present if the weight has a gradient.
    input_transposed: Option<IntTensor<B>>,
    input_scale: FloatTensor<B>,
    /// The dtype of the original input, which its gradient will have.
    input_dtype: FloatDType,
    weight_codes: IntTensor<B>,
    weight_scale: FloatTensor<B>,
    /// The dtype of the original weight, which its gradient will have.
    weight_dtype: FloatDType,
    gradient_scale: FloatTensor<B>,
    spec: LinearSpec,
}

/// The codes, the codes of the transpose if `transposed` is true, and the amax.
///
/// Tensor cores read both operands along the inner dimension. For the weight's gradient, this is the rows of input and gradient.
/// The transposed codes have this layout, so that product copies nothing.
fn quantize<B: Backend + Fp8Ops>(
    tensor: FloatTensor<B>,
    scale: FloatTensor<B>,
    format: Fp8Format,
    transposed: bool,
) -> (IntTensor<B>, Option<IntTensor<B>>, FloatTensor<B>) {
    if transposed {
        let (codes, transposed, amax) = B::fp8_quantize_transposed(tensor, scale, format);
        (codes, Some(transposed), amax)
    } else {
        let (codes, amax) = B::fp8_quantize(tensor, scale, format);
        (codes, None, amax)
    }
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
            input_transposed,
            input_scale,
            input_dtype,
            weight_codes,
            weight_scale,
            weight_dtype,
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
        let (grad, grad_transposed, amax) =
            quantize::<B>(grad, scale.clone(), spec.gradient, weight_node.is_some());
        spec.gradient_amax.put::<B>(amax);

        if let Some(node) = input_node {
            let weight = B::int_swap_dims(weight_codes, 0, 1);
            let matmul = MatmulSpec::new(spec.gradient, spec.forward, input_dtype);
            let grad = B::fp8_matmul(
                grad,
                weight,
                scale.clone(),
                weight_scale,
                Bias::None,
                matmul,
            );
            grads.register::<B>(node.id, grad);
        }
        if let (Some(node), Some(input), Some(grad)) =
            (weight_node, input_transposed, grad_transposed)
        {
            let grad = B::int_swap_dims(grad, 0, 1);
            let matmul = MatmulSpec::new(spec.forward, spec.gradient, weight_dtype);
            let grad = B::fp8_matmul(input, grad, input_scale, scale, Bias::None, matmul);
            grads.register::<B>(node.id, grad);
        }
    }
}
