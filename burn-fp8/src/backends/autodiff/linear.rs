//! The linear layer, whose products run in fp8: all three, or all but the one for the gradient of the weight.

use burn::backend::{AutodiffBackend, Backend, TensorMetadata, tensor::FloatTensor};
use burn::tensor::FloatDType;
use burn_autodiff::{
    Autodiff,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, NodeGuard, Ops, OpsKind},
};

use super::bias::into_dtype;
use crate::{Bias, BlockLinearSpec, Fp8Format, Fp8Ops, LinearSpec, Operand, ops::output_dtype};

type Float<B, C> = FloatTensor<Autodiff<B, C>>;

/// The layer with one scale per tensor. Returns the product and the amax of the input.
pub(super) fn with_one_scale<B: Backend + Fp8Ops, C: CheckpointStrategy>(
    input: Float<B, C>,
    weight: Float<B, C>,
    weight_codes: Operand<Autodiff<B, C>>,
    scales: [Float<B, C>; 2],
    bias: Bias<B>,
    spec: LinearSpec,
) -> (Float<B, C>, Float<B, C>) {
    let [input_wanted, weight_wanted] = [input.is_tracked(), weight.is_tracked()];
    let (input, input_node) = input.into_parts();
    let (weight, weight_node) = weight.into_parts();
    let dtypes = [output_dtype(&input), output_dtype(&weight)];
    let [input_scale, gradient_scale] = scales.map(|scale| scale.into_primitive());

    let original = (weight_wanted && spec.high_precision_weight_gradient).then(|| input.clone());
    let both_ways = weight_wanted && original.is_none();
    let (input, amax) = cast::<B>(input, input_scale, spec.forward, both_ways);
    let weight = inner(weight_codes);
    let product = input.clone().matmul_fast(weight.clone(), bias, dtypes[0]);
    // Of both copies of the codes, only the one that backward reads is kept.
    let state = || State {
        dtypes,
        input: match original {
            Some(input) => Some(Kept::AsItIs(input)),
            None => weight_wanted.then(|| Kept::Cast(input.transpose().stored_once())),
        },
        weight: input_wanted.then(|| weight.stored_once()),
        gradient: GradientCast::Once(spec, gradient_scale),
    };
    let product = finish::<B, C>([input_node, weight_node], product, state);
    (product, Autodiff::<B, C>::from_inner(amax))
}

/// The layer with a scale per row, column or block.
pub(super) fn with_scales<B: Backend + Fp8Ops, C: CheckpointStrategy>(
    input: Float<B, C>,
    weight: Float<B, C>,
    [output_weight, gradient_weight]: [Operand<Autodiff<B, C>>; 2],
    bias: Bias<B>,
    spec: BlockLinearSpec,
) -> Float<B, C> {
    let [input_wanted, weight_wanted] = [input.is_tracked(), weight.is_tracked()];
    let (input, input_node) = input.into_parts();
    let (weight, weight_node) = weight.into_parts();
    let dtypes = [output_dtype(&input), output_dtype(&weight)];

    let rows = Operand::<B>::cast(input.clone(), spec.forward_cast(spec.casts.output[0]));
    let product = rows.matmul(inner(output_weight), bias, dtypes[0]);
    // The input is cast again, because the weight's gradient sums along another dimension.
    let cast = spec.forward_cast(spec.casts.weight_gradient[0]);
    let keep = |input| match spec.high_precision_weight_gradient {
        true => Kept::AsItIs(input),
        false => Kept::Cast(Operand::cast(input, cast).transpose()),
    };
    let state = || State {
        dtypes,
        input: weight_wanted.then(|| keep(input)),
        weight: input_wanted.then(|| inner(gradient_weight)),
        gradient: GradientCast::Twice(spec),
    };
    finish::<B, C>([input_node, weight_node], product, state)
}

fn finish<B: Backend + Fp8Ops, C: CheckpointStrategy>(
    nodes: [NodeGuard; 2],
    product: FloatTensor<B>,
    state: impl FnOnce() -> State<B>,
) -> Float<B, C> {
    let prepared = Fp8Linear.prepare::<C>(nodes);
    match prepared.compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish(state(), product),
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

/// A tensor with a known scale, and its amax. With `both_ways`, it is also a side of the weight's gradient, which sums over rows.
fn cast<B: Backend + Fp8Ops>(
    tensor: FloatTensor<B>,
    scale: FloatTensor<B>,
    format: Fp8Format,
    both_ways: bool,
) -> (Operand<B>, FloatTensor<B>) {
    match both_ways {
        true => Operand::cast_with(tensor, scale, format),
        false => Operand::cast_left(tensor, scale, format),
    }
}

#[derive(Debug)]
struct Fp8Linear;

/// Kept for backward. In fp8, operands take a quarter of their memory in f32.
#[derive(Clone, Debug)]
struct State<B: Backend> {
    /// The dtypes of the original input and weight, which their gradients will have.
    dtypes: [FloatDType; 2],
    /// Present if the weight has a gradient.
    input: Option<Kept<B>>,
    /// Present if the input has a gradient.
    weight: Option<Operand<B>>,
    gradient: GradientCast<B>,
}

/// The input of a layer, for the gradient of its weight.
#[derive(Clone, Debug)]
enum Kept<B: Backend> {
    /// Transposed, in fp8.
    Cast(Operand<B>),
    AsItIs(FloatTensor<B>),
}

/// How the gradient of the output is cast.
#[derive(Clone, Debug)]
enum GradientCast<B: Backend> {
    /// With one scale, for both products: this one, unless it comes from the gradient's own amax.
    Once(LinearSpec, FloatTensor<B>),
    /// For each product in its own way.
    Twice(BlockLinearSpec),
}

impl<B: Backend + Fp8Ops> GradientCast<B> {
    /// The gradient for the gradient of the input, and for that of the weight, if they are wanted.
    fn cast(self, grad: FloatTensor<B>, wanted: [bool; 2]) -> [Option<Operand<B>>; 2] {
        match self {
            Self::Once(spec, scale) => {
                let scale = match spec.current_gradient_scale {
                    true => {
                        let amax = B::fp8_amax(grad.clone());
                        B::fp8_scales(amax, spec.gradient, spec.power_of_two)
                    }
                    false => scale,
                };
                let (grad, amax) = cast::<B>(grad, scale, spec.gradient, wanted[1]);
                spec.gradient_amax.put::<B>(amax);
                wanted.map(|wanted| wanted.then(|| grad.clone()))
            }
            Self::Twice(spec) => {
                let sides = [spec.casts.input_gradient[0], spec.casts.weight_gradient[1]];
                [0, 1].map(|side: usize| {
                    let cast = spec.gradient_cast(sides[side]);
                    wanted[side].then(|| Operand::cast(grad.clone(), cast))
                })
            }
        }
    }
}

impl<B: Backend + Fp8Ops> Backward<B, 2> for Fp8Linear {
    type State = State<B>;

    fn backward(
        self,
        ops: Ops<Self::State, 2>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let State {
            dtypes: [input_dtype, weight_dtype],
            input,
            weight,
            gradient,
        } = ops.state;
        let grad = grads.consume::<B>(&ops.node);
        let [input_node, weight_node] = ops.parents;
        let original = match &input {
            Some(Kept::AsItIs(_)) => Some(grad.clone()),
            _ => None,
        };
        let wanted = [
            input_node.is_some(),
            weight_node.is_some() && original.is_none(),
        ];
        let [for_input, for_weight] = match wanted {
            [false, false] => [None, None],
            _ => gradient.cast(grad, wanted),
        };
        if let (Some(node), Some(grad), Some(weight)) = (input_node, for_input, weight) {
            let grad = grad.matmul(weight.transpose(), Bias::None, input_dtype);
            grads.register::<B>(node.id, grad);
        }
        let grad = match (input, for_weight, original) {
            (Some(Kept::Cast(input)), Some(grad), _) => {
                input.matmul(grad, Bias::None, weight_dtype)
            }
            (Some(Kept::AsItIs(input)), _, Some(grad)) => {
                transposed_product::<B>(input, grad, weight_dtype)
            }
            _ => return,
        };
        if let Some(node) = weight_node {
            grads.register::<B>(node.id, grad);
        }
    }
}

/// The transposed input times the gradient, in the dtype of the input.
fn transposed_product<B: Backend>(
    input: FloatTensor<B>,
    grad: FloatTensor<B>,
    output: FloatDType,
) -> FloatTensor<B> {
    let grad = into_dtype::<B>(grad, input.dtype().into());
    let product = B::float_matmul(B::float_transpose(input), grad);
    into_dtype::<B>(product, output)
}
