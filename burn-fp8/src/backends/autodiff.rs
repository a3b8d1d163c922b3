//! Autodiff: casts carry no gradient; the linear layer has a backward pass of its own, in fp8.

use burn::backend::{
    AutodiffBackend, Backend, TensorMetadata,
    ops::FloatTensorOps,
    tensor::{FloatTensor, IntTensor},
};
use burn::tensor::{FloatDType, Shape};
use burn_autodiff::{
    Autodiff,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};

use crate::{
    Bias, Fp8Format, Fp8Ops, LinearSpec, MatmulSpec, linear::GradAmaxSlot, ops::output_dtype,
    recipe::ScaleUpdate,
};

impl<B: Backend + Fp8Ops, C: CheckpointStrategy> Fp8Ops for Autodiff<B, C> {
    fn fp8_amax(input: FloatTensor<Self>) -> FloatTensor<Self> {
        Self::from_inner(B::fp8_amax(input.into_primitive()))
    }

    fn fp8_quantize(
        input: FloatTensor<Self>,
        scale: FloatTensor<Self>,
        format: Fp8Format,
    ) -> (IntTensor<Self>, FloatTensor<Self>) {
        let (codes, amax) = B::fp8_quantize(input.into_primitive(), scale.into_primitive(), format);
        (codes, Self::from_inner(amax))
    }

    fn fp8_dequantize(
        codes: IntTensor<Self>,
        scale: FloatTensor<Self>,
        format: Fp8Format,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        Self::from_inner(B::fp8_dequantize(
            codes,
            scale.into_primitive(),
            format,
            dtype,
        ))
    }

    fn fp8_matmul(
        lhs: IntTensor<Self>,
        rhs: IntTensor<Self>,
        lhs_scale: FloatTensor<Self>,
        rhs_scale: FloatTensor<Self>,
        bias: Bias<Self>,
        spec: MatmulSpec,
    ) -> FloatTensor<Self> {
        let scales = [lhs_scale.into_primitive(), rhs_scale.into_primitive()];
        let [lhs_scale, rhs_scale] = scales;
        let product = B::fp8_matmul(lhs, rhs, lhs_scale, rhs_scale, Bias::None, spec);
        add_bias::<B, C>(Self::from_inner(product), bias)
    }

    fn fp8_update_scale(
        history: FloatTensor<Self>,
        scale: FloatTensor<Self>,
        amax: FloatTensor<Self>,
        update: ScaleUpdate,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let (history, scale) = B::fp8_update_scale(
            history.into_primitive(),
            scale.into_primitive(),
            amax.into_primitive(),
            update,
        );
        (Self::from_inner(history), Self::from_inner(scale))
    }

    fn fp8_linear(
        input: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        input_scale: FloatTensor<Self>,
        weight_scale: FloatTensor<Self>,
        gradient_scale: FloatTensor<Self>,
        bias: Bias<Self>,
        spec: LinearSpec,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let (input, input_node) = input.into_parts();
        let (weight, weight_node) = weight.into_parts();
        let input_scale = input_scale.into_primitive();
        let weight_scale = weight_scale.into_primitive();
        let [input_dtype, weight_dtype] = [output_dtype(&input), output_dtype(&weight)];

        let (input, input_amax) = B::fp8_quantize(input, input_scale.clone(), spec.forward);
        let (weight, weight_amax) = B::fp8_quantize(weight, weight_scale.clone(), spec.forward);
        let product = B::fp8_matmul(
            input.clone(),
            weight.clone(),
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
                codes: weight,
                scale: weight_scale,
                dtype: weight_dtype,
            },
            gradient_scale: gradient_scale.into_primitive(),
            spec,
        };
        let prepared = Fp8Linear.prepare::<C>([input_node, weight_node]);
        let product = match prepared.compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(state, product),
            OpsKind::UnTracked(prep) => prep.finish(product),
        };
        (
            add_bias::<B, C>(product, bias),
            Self::from_inner(input_amax),
            Self::from_inner(weight_amax),
        )
    }

    fn fp8_gradient_amax(
        like: FloatTensor<Self>,
        slot: GradAmaxSlot,
        take: bool,
    ) -> FloatTensor<Self> {
        Self::from_inner(B::fp8_gradient_amax(like.into_primitive(), slot, take))
    }
}

/// Add a bias by Burn's own addition, whose gradient is the sum over the rows, in high precision.
fn add_bias<B: Backend, C: CheckpointStrategy>(
    product: FloatTensor<Autodiff<B, C>>,
    bias: Bias<Autodiff<B, C>>,
) -> FloatTensor<Autodiff<B, C>> {
    let Bias::Row(bias) = bias else {
        return product;
    };
    let shape = product.shape();
    let mut row = vec![1; shape.num_dims()];
    row[shape.num_dims() - 1] = bias.shape().num_elements();
    let bias = Autodiff::<B, C>::float_reshape(bias, Shape::from(row));
    let bias = match bias.dtype() == product.dtype() {
        true => bias,
        false => Autodiff::<B, C>::float_cast(bias, product.dtype().into()),
    };
    Autodiff::<B, C>::float_add(product, bias)
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
            true => current_scale::<B>(grad.clone(), spec.gradient),
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

/// The scale of a tensor from its own amax.
fn current_scale<B: Backend + Fp8Ops>(tensor: FloatTensor<B>, format: Fp8Format) -> FloatTensor<B> {
    let device = tensor.device();
    let history = B::float_zeros(Shape::new([1]), &device, FloatDType::F32);
    let scale = B::float_ones(Shape::new([1]), &device, FloatDType::F32);
    let amax = B::fp8_amax(tensor);
    B::fp8_update_scale(history, scale, amax, ScaleUpdate::current(format)).1
}
