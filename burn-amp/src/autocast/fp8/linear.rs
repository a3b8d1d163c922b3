//! The three products of a linear layer.

use super::{
    Fp8,
    history::Histories,
    product::{self, InputOf, Product},
};
use burn::{
    backend::{Backend, TensorMetadata, tensor::FloatTensor},
    tensor::Shape,
};
use burn_fp8::{Bias, Fp8Cast, Fp8Ops, Granularity, Operand, recipe::Fp8Recipe};
use burn_layer::{Descent, Op, Run, RunInput};

/// What a tensor is to a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    Input,
    Weight,
    Gradient,
}

/// The casts of a tensor, kept with it.
type Casts<B> = Vec<(Fp8Cast, Operand<B>)>;

impl Fp8 {
    /// One of the products, in the dtype that it is stored in.
    pub(super) fn compute<B: Backend + Fp8Ops>(
        &self,
        run: &Run<'_>,
        mut inputs: Vec<RunInput<'_, B>>,
    ) -> FloatTensor<B> {
        use Role::{Gradient, Input, Weight};
        let casts = self.settings.recipe.casts();
        let dtype = run.store().expect("the plan says what is stored").into();
        let bias = match inputs.len() {
            3 => Bias::Row(inputs.remove(2).tensor),
            _ => Bias::None,
        };
        let [first, second] = <[_; 2]>::try_from(inputs).expect("a product has two factors");
        let [left, right] = [&first, &second].map(|input| input.tensor.shape());
        let transposed = [&first, &second].map(|input| input.transposed.is_some());
        let shapes = [left, right];
        let (product, size) =
            product::of(run.op(), &shapes, transposed, |_| true).expect("fp8 takes products only");
        let [left, right] = shapes;
        // The product of two batches, that is.
        let batch = run.op() == Op::float_matmul && !product::is_matrix(&right);
        let (output, shape) = match product {
            Product::Output => {
                let [input, weight] = casts.output;
                let layer = Some(second.kept.descent());
                first.kept.with(|InputOf(layers)| {
                    if layers.iter().all(|(other, _)| *other != size) {
                        layers.extend(layer.clone().map(|layer| (size, layer)));
                    }
                });
                let input = self.cast(first, Input, input, &layer, false);
                let weight = self.cast(second, Weight, weight, &layer, false);
                (input.matmul(weight, bias, dtype), with_last(left, size[1]))
            }
            Product::InputGradient => {
                let (weight, gradient) = match run.op() {
                    Op::linear_x_backward => (first, second),
                    _ => (untransposed(second), first),
                };
                let shape = with_last(gradient.tensor.shape(), size[0]);
                let [left, right] = casts.input_gradient;
                let layer = Some(weight.kept.descent());
                let gradient = self.cast(gradient, Gradient, left, &layer, false);
                let weight = self.cast(weight, Weight, right, &layer, false);
                (gradient.matmul(weight.transpose(), bias, dtype), shape)
            }
            Product::WeightGradient => {
                let (input, shape) = match run.op() {
                    Op::linear_weight_backward => (first, Shape::new(size)),
                    _ => (untransposed(first), with_last(left, size[1])),
                };
                let [left, right] = casts.weight_gradient;
                let layer = input.kept.with(|InputOf(layers)| {
                    let layer = layers.iter().find(|(other, _)| *other == size);
                    layer.map(|(_, layer)| layer.clone())
                });
                let input = self.cast(input, Input, left, &layer, batch);
                let gradient = self.cast(second, Gradient, right, &layer, batch);
                (input.transpose().matmul(gradient, bias, dtype), shape)
            }
        };
        B::float_reshape(output, shape)
    }

    /// The tensor in fp8, from an earlier cast where there is one: as a matrix, or in a `batch` as it is. With delayed scaling
    /// its scale comes from the histories of the `layer`, where that is known.
    fn cast<B: Backend + Fp8Ops>(
        &self,
        input: RunInput<'_, B>,
        role: Role,
        granularity: Granularity,
        layer: &Option<Descent>,
        batch: bool,
    ) -> Operand<B> {
        let recipe = &self.settings.recipe;
        let format = match role {
            Role::Input | Role::Weight => recipe.format().forward(),
            Role::Gradient => recipe.format().gradient(),
        };
        let cast = Fp8Cast::new(granularity, format).with_power_of_two(recipe.power_of_two());
        if batch && granularity != Granularity::Tensor {
            return Operand::cast(input.tensor, cast);
        }
        let shape = input.tensor.shape();
        let operand = input.kept.with(|casts: &mut Casts<B>| {
            if let Some((_, operand)) = casts.iter().find(|(made, _)| *made == cast) {
                return operand.clone();
            }
            let matrix = as_matrix::<B>(input.tensor);
            let operand = match (recipe, layer) {
                (Fp8Recipe::Delayed(recipe), Some(layer)) => {
                    layer.with(|histories: &mut Histories<B>| {
                        histories.cast(matrix, format, recipe, role)
                    })
                }
                _ => Operand::cast(matrix, cast),
            };
            casts.push((cast, operand.clone()));
            operand
        });
        match batch {
            true => operand.reshape(shape),
            false => operand,
        }
    }
}

/// A transposed tensor as it was before, with what is kept with it.
fn untransposed<B: Backend>(input: RunInput<'_, B>) -> RunInput<'_, B> {
    let rank = input.tensor.shape().num_dims();
    RunInput {
        tensor: B::float_swap_dims(input.tensor, rank - 2, rank - 1),
        kept: input.transposed.expect("it is transposed"),
        transposed: None,
    }
}

/// The leading dimensions as rows.
fn as_matrix<B: Backend>(tensor: FloatTensor<B>) -> FloatTensor<B> {
    let shape = tensor.shape();
    let columns = shape[shape.num_dims() - 1];
    match shape.num_dims() {
        2 => tensor,
        _ => B::float_reshape(
            tensor,
            Shape::new([shape.num_elements() / columns, columns]),
        ),
    }
}

fn with_last(mut shape: Shape, last: usize) -> Shape {
    let rank = shape.num_dims();
    shape[rank - 1] = last;
    shape
}
