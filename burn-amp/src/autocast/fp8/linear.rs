//! The three products of a linear layer.

use super::{
    Fp8,
    history::Place,
    product::{self, Product},
};
use burn::{
    backend::{Backend, TensorMetadata, tensor::FloatTensor},
    tensor::Shape,
};
use burn_fp8::{Bias, Fp8Cast, Fp8Ops, Granularity, Operand, recipe::Fp8Recipe};
use burn_layer::{Op, Run, RunInput};

/// What a tensor is to a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
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
        let shapes = [&first, &second].map(|input| input.tensor.shape());
        let transposed = [first.transposed, second.transposed];
        let (product, size) =
            product::of(run.op(), &shapes, transposed).expect("fp8 takes products only");
        let place = Place::new(run, size);
        let [left, right] = shapes;
        let last = |shape: &Shape| shape[shape.num_dims() - 1];
        let cast = |input, role, granularity| {
            let again = matches!(
                (product, role),
                (Product::InputGradient, Weight) | (Product::WeightGradient, Input)
            );
            self.cast(input, role, granularity, &place, again)
        };
        match run.op() {
            Op::linear_x_backward => {
                let [gradient, weight] = casts.input_gradient;
                let weight = cast(first, Weight, weight).transpose();
                let output = cast(second, Gradient, gradient).matmul(weight, bias, dtype);
                B::float_reshape(output, with_last(right, left[0]))
            }
            Op::linear_weight_backward => {
                let [input, gradient] = casts.weight_gradient;
                let input = cast(first, Input, input).transpose();
                input.matmul(cast(second, Gradient, gradient), bias, dtype)
            }
            _ => {
                // Factors that are transposed already.
                let [(a, left_granularity), (b, right_granularity)] = match product {
                    Product::Output => {
                        let [input, weight] = casts.output;
                        [(Input, input), (Weight, weight)]
                    }
                    Product::InputGradient => {
                        let [gradient, weight] = casts.input_gradient;
                        [(Gradient, gradient), (Weight, weight.transposed())]
                    }
                    Product::WeightGradient => {
                        let [input, gradient] = casts.weight_gradient;
                        [(Input, input.transposed()), (Gradient, gradient)]
                    }
                };
                let first = cast(first, a, left_granularity);
                let output = first.matmul(cast(second, b, right_granularity), bias, dtype);
                B::float_reshape(output, with_last(left, last(&right)))
            }
        }
    }

    /// The tensor as a matrix in fp8, from an earlier cast where there is one.
    fn cast<B: Backend + Fp8Ops>(
        &self,
        input: RunInput<'_, B>,
        role: Role,
        granularity: Granularity,
        place: &Place,
        again: bool,
    ) -> Operand<B> {
        let recipe = &self.settings.recipe;
        let format = match role {
            Role::Input | Role::Weight => recipe.format().forward(),
            Role::Gradient => recipe.format().gradient(),
        };
        let cast = Fp8Cast::new(granularity, format).with_power_of_two(recipe.power_of_two());
        input.kept.with(|casts: &mut Casts<B>| {
            if let Some((_, operand)) = casts.iter().find(|(made, _)| *made == cast) {
                return operand.clone();
            }
            let matrix = as_matrix::<B>(input.tensor);
            let operand = match recipe {
                Fp8Recipe::Delayed(recipe) if place.is_named() => {
                    let histories = &self.histories;
                    histories.cast(matrix, format, recipe, place, role, again)
                }
                _ => Operand::cast(matrix, cast),
            };
            casts.push((cast, operand.clone()));
            operand
        })
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
